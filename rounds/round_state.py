"""One round of a job: the trainers that are awaited, the time when a voter speaks, and the outcome of the ballots.

Sans-IO: proposals, verdicts, vouches, ballots and the time come in. Our own vouches, at most one ballot and one cut-off go out.
The vote gives agreement, not truth: nothing here looks into a payload.

Timers count from the application of the opening block:
proposals T1 < re-executors' ballots T2 < other voters' ballots T3 < cut-off T4.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, short_id
from protocol.limits import CLOSING_VOUCHES_MAX, TRAINERS_MAX, VOTERS_MAX
from protocol.messages import Ballot, CutOff, Judgement, Proposal, Vouch
from protocol.units import display_round_number
from protocol.verdicts import DIVERGING, Verdict, verdict_label
from rounds.round_terms import RoundTerms, signed_body_digest
from rounds.vouch_set import VouchSet, VouchState, check_judgements, check_vouch

PROPOSALS_SECONDS_MIN = 2.0  # shortest T1: a machine that swaps or a Python that starts must not lose a round for it
PROPOSALS_FACTOR = 3.0  # stragglers get three times what the majority of the awaited trainers took
MINORITY_FACTOR = 6.0  # where most are missing: twice the stragglers' patience, by the upper quartile of the rounds before
MINORITY_SECONDS_MIN = 10.0  # it is rather the network, or this machine, that stopped for a moment
VOUCH_SECONDS_MIN = 1.0  # shortest usual time of a vouch: an idle machine needs none for a small model, a busy one does
VOUCH_FACTOR = 2.0  # later than that many times the usual time other re-executors begin
WITHHELD_TIMEOUT_SHARE = 0.25  # of T2 − T1, which grows with patience: so long a re-executor waits for what the trainer shows
LIGHT_VOTER_SECONDS = 2.0  # T3 − T2: one message delay and a busy machine
CUT_OFF_SECONDS = 2.0  # T4 − T3: the same


@dataclass(frozen=True, slots=True)
class RoundTimeouts:
    """Seconds; what a peer measured and the job allows. They may differ between peers: votes may be fuzzy, their sum is exact."""

    proposals_max_seconds: float  # T1 at most
    replay_seconds: float  # T2 − T1: re-executing every trainer's proposal
    # By then a majority of the awaited was here in the last rounds; 0: not measured by this peer, None: by nobody yet.
    proposals_usual_seconds: float | None = None
    usual_trainers: frozenset[bytes] = frozenset()  # that were awaited in them
    returning: frozenset[bytes] = frozenset()  # not awaited by the ledger, but alive: T1 is for them too, this time
    vouch_usual_seconds: float = VOUCH_SECONDS_MIN  # what vouches took in the last rounds, from the delivery of a proposal on

    def __post_init__(self) -> None:
        assert self.proposals_max_seconds > 0
        assert self.replay_seconds > 0


@dataclass(frozen=True, slots=True)
class RoundCertificate:
    """A block carries this to close a round. `proposals` are exactly the accepted ones. All arrays ascend by signer."""

    job: Digest
    round: Count
    ballots: Annotated[tuple[Signed, ...], Length(1, VOTERS_MAX)]
    cut_offs: Annotated[tuple[Signed, ...], Length(0, VOTERS_MAX)]
    proposals: Annotated[tuple[Signed, ...], Length(0, TRAINERS_MAX)]
    vouches: Annotated[tuple[Signed, ...], Length(0, CLOSING_VOUCHES_MAX)]  # ascending by signer and body: of one signer several


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What the ballots of one closed round decided, a pure function of them."""

    # Trainer -> proposal digest. Of several keys of one member with q accepts the last one; the others are nowhere here.
    accepted: dict[bytes, bytes]
    rejected: dict[bytes, Verdict]  # trainer -> the reason that most give, UNJUDGED if no more than f give the same
    absent: frozenset[bytes]  # trainers that no more than f ballots of the block name
    unjudged: frozenset[bytes]  # trainers that more than f ballots could not judge
    vouchers: dict[bytes, tuple[bytes, ...]]  # accepted trainer -> the voters that vouch for its proposal in the block
    wrong_vouchers: frozenset[bytes]  # voters whose vouch says the opposite of what was decided
    # voters that were called for an accepted proposal, without a vouch of theirs in the block
    silent_reexecutors: frozenset[bytes]
    # trainers whose update re-execution found false (`VouchSet.trainers_with_invalid_updates`)
    trainers_with_invalid_updates: frozenset[bytes] = frozenset()
    diverging: frozenset[bytes] = frozenset()  # trainers rejected for NORM, if these are more than may lie
    refuses_honest: bool = False  # nothing is accepted, and more trainers are rejected than may lie, `UNJUDGED` not counted

    def rejection_reason(self, trainer: bytes, own: Sequence[str] = ()) -> str:
        """The name of a rejected trainer's verdict, with `own` as for `verdict_label`; or DIVERGING."""
        return DIVERGING if trainer in self.diverging else verdict_label(self.rejected[trainer], own)


VerdictCounts = dict[tuple[bytes, bytes], Counter[Verdict]]  # (trainer, proposal) -> verdicts


def tally_ballots(ballots: Iterable[Ballot]) -> VerdictCounts:
    votes: defaultdict[tuple[bytes, bytes], Counter[Verdict]] = defaultdict(Counter)
    for ballot in ballots:
        for judgement in ballot.judgements:
            votes[judgement.trainer, judgement.proposal][judgement.verdict] += 1
    return votes


def is_round_settled(terms: RoundTerms, ballots: Mapping[bytes, Ballot], vouches: VouchSet) -> bool:
    """No further message could change what is accepted.

    Every named proposal has q accepts and its vouches, or n−q+1 ballots without accept.
    """
    without_accept_min = len(terms.voters) - terms.quorum + 1
    return all(
        (verdicts[Verdict.ACCEPT] >= terms.quorum and vouches.has_enough_vouches(*named))
        or len(ballots) - verdicts[Verdict.ACCEPT] >= without_accept_min
        for named, verdicts in tally_ballots(ballots.values()).items()
    )


def _sure(terms: RoundTerms, votes: VerdictCounts, vouches: VouchSet) -> dict[bytes, bytes]:
    """By trainer: the proposal that has q accepts and its vouches. That of a later key of the same member may take its place."""
    return {
        trainer: digest
        for (trainer, digest), verdicts in votes.items()
        if verdicts[Verdict.ACCEPT] >= terms.quorum and vouches.has_enough_vouches(trainer, digest)
    }


def compute_round_result(terms: RoundTerms, ballots: Mapping[bytes, Ballot], vouches: VouchSet) -> RoundResult:
    votes = tally_ballots(ballots.values())
    enough = _sure(terms, votes, vouches)
    accepted = {trainer: digest for trainer, digest in sorted(enough.items()) if not enough.keys() & _later_keys(terms, trainer)}
    reasons: dict[bytes, Counter[Verdict]] = {}
    for (trainer, _), verdicts in votes.items():
        if trainer not in enough:
            reasons.setdefault(trainer, Counter()).update(verdicts)
    # A proposal that at most f ballots name may be invented by liars: such a trainer counts as absent.
    reasons = {trainer: verdicts for trainer, verdicts in reasons.items() if verdicts.total() > terms.faults}
    unjudged = {trainer for trainer, verdicts in reasons.items() if verdicts[Verdict.UNJUDGED] > terms.faults}
    rejected = {trainer: _reason(verdicts, terms.faults) for trainer, verdicts in sorted(reasons.items())}
    refused = [trainer for trainer, verdict in rejected.items() if verdict is not Verdict.UNJUDGED]
    too_large = frozenset(trainer for trainer, verdict in rejected.items() if verdict is Verdict.NORM)
    return RoundResult(
        accepted=accepted,
        rejected=rejected,
        absent=terms.trainers - enough.keys() - reasons.keys(),
        unjudged=frozenset(unjudged),
        vouchers={trainer: tuple(vouches.accepting_voters(trainer, proposal)) for trainer, proposal in accepted.items()},
        wrong_vouchers=vouches.wrong_vouchers(enough),
        silent_reexecutors=vouches.silent_reexecutors(accepted),
        trainers_with_invalid_updates=vouches.trainers_with_invalid_updates(enough),
        diverging=too_large if terms.outnumber_faulty_voters(too_large) else frozenset(),
        refuses_honest=not accepted and terms.outnumber_faulty_voters(refused),
    )


def _later_keys(terms: RoundTerms, trainer: bytes) -> set[bytes]:
    """The keys with which the same member trained in this round after this one. A member has one update in a round."""
    successors, found, key = dict(terms.successors), set[bytes](), trainer
    while key in successors:
        key = successors[key]
        found.add(key)
    return found


def _reason(verdicts: Counter[Verdict], faults: int) -> Verdict:
    """The reason most ballots give, if more than f do: fewer may have invented it. Ties go to the lower code."""
    reasons = [verdict for verdict in verdicts if verdict is not Verdict.ACCEPT and verdicts[verdict] > faults]
    return max(reasons, key=lambda v: (v is not Verdict.UNJUDGED, verdicts[v], -v), default=Verdict.UNJUDGED)


def check_ballot(terms: RoundTerms, voter: bytes, ballot: Ballot) -> None:
    """Raises `RemoteProtocolError` unless this ballot may be counted in this round."""
    if voter not in terms.voters:
        raise RemoteProtocolError("not-a-voter", f"ballot of {short_id(voter)}")
    if (ballot.job, ballot.round, ballot.model_root) != terms.signed_fields:
        raise RemoteProtocolError("wrong-round", f"ballot of {short_id(voter)} for round {display_round_number(ballot.round)}")
    check_judgements(terms.trainers, ballot.judgements, f"ballot of {short_id(voter)}")


@dataclass(slots=True)
class OpenRoundState:
    """Everything one peer holds about one open round. `me` is None for a peer that does not vote in it."""

    terms: RoundTerms
    me: bytes | None
    opened_at: float
    timers: RoundTimeouts
    proposals: dict[bytes, Signed] = field(default_factory=dict)  # trainer -> the first proposal seen
    equivocators: set[bytes] = field(default_factory=set)
    double_voters: set[bytes] = field(default_factory=set)
    is_contradicted: bool = False  # a ballot or vouch has named another proposal of a trainer than the one that is here
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)  # trainer -> our own judgement, after the cheap checks at least
    ballots: dict[bytes, Ballot] = field(default_factory=dict)
    signed_ballots: dict[bytes, Signed] = field(default_factory=dict)
    cut_offs: dict[bytes, CutOff] = field(default_factory=dict)
    signed_cut_offs: dict[bytes, Signed] = field(default_factory=dict)
    delivered: dict[bytes, float] = field(default_factory=dict)  # trainer -> the moment when its payload was here
    arrivals: list[float] = field(default_factory=list)  # when those of awaited trainers were, seconds after opening
    latest_arrival: float | None = None  # when the last of these, or of the usual trainers, was
    # the last answer of `closing`, and what it was made of
    _closed: tuple[tuple[int, ...], RoundCertificate | None] | None = None
    vouching: VouchState = field(init=False)

    def __post_init__(self) -> None:
        self.vouching = VouchState(self.terms, self.me, VouchSet(self.terms))

    # What comes in

    def has_seen_statement(self, signer: bytes, message: Proposal | Ballot | Vouch | CutOff) -> bool:
        """Whether this peer has said something of this kind in this round before; of vouches, all that it says."""
        if isinstance(message, Vouch):
            return not self.vouching.new_judgements(signer, message)
        tables: Mapping[type, Mapping[bytes, object]] = {Proposal: self.proposals, Ballot: self.ballots, CutOff: self.cut_offs}
        return signer in tables[type(message)]

    def statements_signed_by(self, signer: bytes) -> list[Signed]:
        """All that this peer has signed in the round, as far as it is here."""
        tables = (self.proposals, self.signed_ballots, self.signed_cut_offs)
        vouches = [signed for signed in self.vouching.signed.values() if signed.signer == signer]
        return [*(table[signer] for table in tables if signer in table), *vouches]

    def add_proposal(self, signed: Signed, proposal: Proposal) -> tuple[Signed, Signed] | None:
        """Keeps the first proposal of each trainer; a second, different one is evidence and counts for neither."""
        if signed.signer not in self.terms.trainers:
            raise RemoteProtocolError("not-a-trainer", f"proposal of {short_id(signed.signer)}")
        if (proposal.job, proposal.round) != (self.terms.job, self.terms.round):
            raise RemoteProtocolError(
                "wrong-round", f"proposal of {short_id(signed.signer)} for round {display_round_number(proposal.round)}"
            )
        first = self.proposals.setdefault(signed.signer, signed)
        if first is signed:
            said = (judgement for ballot in self.ballots.values() for judgement in ballot.judgements)
            named = {judgement.proposal for judgement in said if judgement.trainer == signed.signer}
            vouched = {proposal for trainer, proposal in self.vouching.vouches.verdicts if trainer == signed.signer}
            self._compare(signed, named | vouched)
        if first.body == signed.body or signed.signer in self.equivocators:
            return None
        self.equivocators.add(signed.signer)
        self.verdicts[signed.signer] = Verdict.EQUIVOCATION
        return first, signed

    def record_payload(self, trainer: bytes, now: float) -> None:
        """The payload of this trainer's proposal is here."""
        if trainer not in self.delivered and trainer in self.terms.awaited:
            self.arrivals.append(now - self.opened_at)
        if trainer not in self.delivered and trainer in self.terms.awaited | self.timers.usual_trainers:
            self.latest_arrival = now - self.opened_at
        self.delivered.setdefault(trainer, now)

    def record_verdict(self, trainer: bytes, verdict: Verdict, now: float) -> None:
        """Takes the result of the cheap checks, or of our own re-execution."""
        self.record_payload(trainer, now)
        if trainer not in self.equivocators:
            self.verdicts[trainer] = verdict

    def record_replay_verdict(self, trainer: bytes, verdict: Verdict, now: float) -> None:
        """Takes the result of our own re-execution. It counts for nothing if we do not re-execute in this round any more."""
        if self.me not in self.terms.reexecutors or trainer not in self.proposals:
            return
        self.vouching.record_own_judgement(Judgement(trainer, signed_body_digest(self.proposals[trainer]), verdict))
        if verdict is not Verdict.UNJUDGED:
            self.record_verdict(trainer, verdict, now)

    def add_ballot(self, signed: Signed, ballot: Ballot, now: float) -> tuple[Signed, Signed] | None:
        """Keeps each voter's first ballot; a second, different one is evidence."""
        check_ballot(self.terms, signed.signer, ballot)
        first = self.signed_ballots.setdefault(signed.signer, signed)
        self.ballots.setdefault(signed.signer, ballot)
        self._compare_all(ballot.judgements)
        if first.body == signed.body or signed.signer in self.double_voters:
            return None
        self.double_voters.add(signed.signer)
        return first, signed

    def _compare_all(self, said: Iterable[Judgement]) -> None:
        for judgement in said:
            if judgement.trainer in self.proposals and judgement.trainer not in self.equivocators:
                self._compare(self.proposals[judgement.trainer], {judgement.proposal})

    def _compare(self, here: Signed, named: Set[bytes]) -> None:
        """If a voter names another proposal of this trainer, the trainer has signed two, or the voter lies."""
        self.is_contradicted |= bool(named - {signed_body_digest(here)})

    def add_vouch(self, signed: Signed, vouch: Vouch, now: float) -> tuple[Signed, Signed] | None:
        """Keeps each voter's first verdict on each trainer; a second, different one is evidence."""
        new = self.vouching.new_judgements(signed.signer, vouch)
        pair = self.vouching.add_vouch(signed, vouch)
        self._compare_all(vouch.judgements)
        for judgement in new if pair is None else ():
            # An unsure voter may have waited in vain. If that were measured, all would wait longer in each round.
            if judgement.trainer in self.delivered and judgement.verdict is not Verdict.UNJUDGED:
                self.vouching.record_vouch_seconds(signed.signer, judgement.trainer, now - self.delivered[judgement.trainer])
        return pair

    def add_cut_off(self, signed: Signed, cut_off: CutOff) -> None:
        if signed.signer not in self.terms.voters:
            raise RemoteProtocolError("not-a-voter", f"cut-off of {short_id(signed.signer)}")
        self.signed_cut_offs.setdefault(signed.signer, signed)
        self.cut_offs.setdefault(signed.signer, cut_off)

    def import_from(self, other: OpenRoundState) -> None:
        """Takes from another book of this round, which had other voters and trainers, the messages that count here."""
        self.proposals = {trainer: signed for trainer, signed in other.proposals.items() if trainer in self.terms.trainers}
        self.equivocators, self.double_voters = set(other.equivocators), set(other.double_voters)
        self.verdicts, self.delivered = dict(other.verdicts), dict(other.delivered)
        self.arrivals, self.latest_arrival = list(other.arrivals), other.latest_arrival
        for voter, signed in other.signed_ballots.items():
            if voter in self.terms.voters:
                self.add_ballot(signed, other.ballots[voter], self.opened_at)
        for voter, signed in other.signed_cut_offs.items():
            if voter in self.terms.voters:
                self.add_cut_off(signed, other.cut_offs[voter])
        self.vouching.import_from(other.vouching)

    # What goes out

    @property
    def majority_arrival_seconds(self) -> float | None:
        """Seconds by which a majority of the awaited trainers was here, so that neither the slowest nor a liar sets it."""
        majority = len(self.terms.awaited) // 2 + 1
        return self.arrivals[majority - 1] if len(self.arrivals) >= majority else None

    @property
    def proposal_timeout_seconds(self) -> float:
        """T1. If all trainers are slower than before, the first one must not be accepted alone: so a minority that is here sets a
        time, too.

        A trainer that was awaited in former rounds counts for that minority: if the last round accepted only a few, only those
        few are awaited now. A peer that trains and has measured nothing waits for its own worker, which may only be starting.
        """
        usual, pace = self.timers.proposals_usual_seconds, self.majority_arrival_seconds
        is_behind = self.me in self.terms.trainers and self.me not in self.delivered
        if pace is not None:
            seconds = max(PROPOSALS_SECONDS_MIN, PROPOSALS_FACTOR * pace)
        elif self.latest_arrival is not None and usual is not None and (usual or not is_behind):
            seconds = max(MINORITY_SECONDS_MIN, MINORITY_FACTOR * usual, PROPOSALS_FACTOR * self.latest_arrival)
        else:
            seconds = self.timers.proposals_max_seconds
        return min(self.timers.proposals_max_seconds, seconds)

    @property
    def _times(self) -> tuple[float, float, float, float]:
        """T1 to T4 as moments. Everything compares with these very floats, so that no deadline expires a rounding too early."""
        opened, proposals = self.opened_at, self.proposal_timeout_seconds
        auditors = proposals + self.timers.replay_seconds
        light = auditors + LIGHT_VOTER_SECONDS
        return opened + proposals, opened + auditors, opened + light, opened + (light + CUT_OFF_SECONDS)

    @property
    def proposals_due_at(self) -> float:
        """T1 as a moment."""
        return self._times[0]

    @property
    def cut_off_due_at(self) -> float:
        """T4 as a moment: nobody waits for anything any more."""
        return self._times[-1]

    @property
    def awaited_trainers(self) -> frozenset[bytes]:
        """The trainers whose proposals this peer waits for until T1."""
        return self.terms.awaited | self.timers.returning & self.terms.trainers

    @property
    def is_reexecutor(self) -> bool:
        return not self.terms.trainers_to_vouch_for or self.me in self.terms.reexecutors

    @property
    def trainers_in_ballot(self) -> set[bytes]:
        """The trainers that a ballot of ours names.

        A proposal whose payload does not come is none. A ballot names a proposal that re-executors cannot judge only if there is
        no other: more time would not help, so the next round needs none.
        """
        named = {trainer for trainer in self.proposals if trainer in self.delivered or trainer in self.equivocators}
        return {trainer for trainer in named if not self._is_hopeless(trainer)} or named

    def _is_hopeless(self, trainer: bytes) -> bool:
        """Whether vouches give no verdict, and further ones would give none, or too late.

        If more than f voters are unsure, an honest one is. Each further one could wait as long for the same file.
        """
        if self.verdicts.get(trainer) is not Verdict.ACCEPT or self.current_verdict(trainer) is not None:
            return False
        if trainer in self.vouching.started - self.vouching.own_judgements.keys():
            return False  # our own re-execution goes on
        return not self.vouching.vouches.can_get_enough_vouches(trainer, signed_body_digest(self.proposals[trainer]))

    # Our own re-executions

    def assign_reexecutions(self, now: float) -> None:
        """Notes the proposals that we re-execute from now on, and vouches for what takes no re-execution.

        A proposal that a cheap check refuses is not re-executed. If something does not arrive in time, we are unsure.
        """
        if self.me not in self.terms.reexecutors:
            return
        for trainer in self.terms.trainers_to_vouch_for & self.delivered.keys() & self.verdicts.keys() - self.equivocators:
            digest, verdict = signed_body_digest(self.proposals[trainer]), self.verdicts[trainer]
            if trainer not in self.vouching.assigned_at and self.vouching.is_assigned(
                trainer, digest, now >= self._late_at(trainer)
            ):
                self.vouching.assigned_at[trainer] = now
                if verdict is not Verdict.ACCEPT:
                    self.vouching.record_own_judgement(Judgement(trainer, digest, verdict))
        for trainer in self.vouching.assigned_at.keys() - self.vouching.started:
            if now >= self._given_up_at(trainer):
                self.vouching.record_own_judgement(
                    Judgement(trainer, signed_body_digest(self.proposals[trainer]), Verdict.UNJUDGED)
                )

    def _late_at(self, trainer: bytes) -> float:
        """When vouches for this trainer's proposal are late, as a moment."""
        return self.delivered[trainer] + VOUCH_FACTOR * self.timers.vouch_usual_seconds

    def _given_up_at(self, trainer: bytes) -> float:
        """When we wait no longer for what the re-execution of this trainer's proposal needs, as a moment."""
        return max(
            self.proposals_due_at, self.vouching.assigned_at[trainer] + WITHHELD_TIMEOUT_SHARE * self.timers.replay_seconds
        )

    def _call_times(self) -> Iterable[float]:
        """The moments at which `assign_reexecutions` may do something without any input."""
        if self.me in self.terms.reexecutors:
            uncalled = self.terms.trainers_to_vouch_for & self.delivered.keys() - self.vouching.assigned_at.keys()
            yield from map(self._late_at, uncalled)
            waiting = self.vouching.assigned_at.keys() - self.vouching.started - self.vouching.own_judgements.keys()
            yield from map(self._given_up_at, waiting)

    # Ballot and cut-off

    def make_ballot_if_due(self, now: float) -> Ballot | None:
        """Our ballot, once: when all that is waited for is judged, or when our timer says so."""
        if self.me not in self.terms.voters or self.me in self.ballots or not self.trainers_in_ballot:
            return None
        return self._ballot() if self._ready(now) else None

    def _ready(self, now: float) -> bool:
        proposals_due, auditors_due, light_due, _ = self._times
        if now >= (auditors_due if self.is_reexecutor else light_due):
            return True
        # A proposal that came although nobody waits for it is judged too.
        waited = self.trainers_in_ballot if now >= proposals_due else self.awaited_trainers | self.trainers_in_ballot
        return all(self.current_verdict(trainer) is not None or self._is_hopeless(trainer) for trainer in waited)

    def current_verdict(self, trainer: bytes) -> Verdict | None:
        """Our verdict on this trainer's proposal so far; None: not judged yet.

        Our own rejection stands. We accept what we have made or re-executed ourselves, and what passed our cheap checks and has
        its vouches. We reject what more than f voters reject.
        """
        own = self.verdicts.get(trainer)
        if own is not Verdict.ACCEPT or trainer not in self.terms.trainers_to_vouch_for or trainer == self.me:
            return own
        digest = signed_body_digest(self.proposals[trainer])
        is_ours = self.vouching.own_judgements.get(trainer) == Judgement(trainer, digest, Verdict.ACCEPT)
        if is_ours or self.vouching.vouches.has_enough_vouches(trainer, digest):
            return Verdict.ACCEPT
        return self.vouching.vouches.rejection_reason(trainer, digest)

    def _ballot(self) -> Ballot:
        verdicts = {trainer: self.current_verdict(trainer) for trainer in sorted(self.trainers_in_ballot)}
        judgements = tuple(
            Judgement(trainer, signed_body_digest(self.proposals[trainer]), Verdict.UNJUDGED if verdict is None else verdict)
            for trainer, verdict in verdicts.items()
        )
        return Ballot(self.terms.job, self.terms.round, self.terms.model_root, judgements)

    def make_cut_off_if_due(self, now: float) -> CutOff | None:
        """Our cut-off, once: enough ballots are there, time is up, and they do not settle the round."""
        if now < self.cut_off_due_at or self.me not in self.terms.voters or self.me in self.cut_offs:
            return None
        if len(self.ballots) < self.terms.quorum or is_round_settled(self.terms, self.ballots, self.vouching.vouches):
            return None
        digests = sorted(signed_body_digest(signed) for signed in self.signed_ballots.values())
        return CutOff(self.terms.job, self.terms.round, tuple(digests))

    def next_deadline(self, now: float) -> float | None:
        """When `assign_reexecutions`, `make_ballot_if_due` or `make_cut_off_if_due` may change without any input."""
        return min((time for time in (*self._times, *self._call_times()) if time > now), default=None)

    # Closing

    def certificate(self) -> RoundCertificate | None:
        """A closing of this round, if the messages here make one. Asked all the time; the tables only grow."""
        parts: tuple[Sized, ...] = (self.signed_ballots, self.proposals, self.signed_cut_offs, self.vouching.signed)
        progress = tuple(map(len, parts))
        if self._closed is not None and self._closed[1] is not None and not self._closed[1].cut_offs:
            progress = (*progress[:-1], self._closed[0][-1])  # it is settled: further vouches change nothing
        if self._closed is None or self._closed[0] != progress:
            self._closed = (progress, self._closing())
        return self._closed[1]

    def _closing(self) -> RoundCertificate | None:
        if len(self.ballots) < self.terms.quorum:
            return None
        accepted = compute_round_result(self.terms, self.ballots, self.vouching.vouches).accepted
        held = {trainer: self.proposals.get(trainer) for trainer in accepted}
        proposals = [signed for trainer, signed in held.items() if signed and signed_body_digest(signed) == accepted[trainer]]
        # No more cut-offs than a closing needs: each names every ballot, and blocks are bounded.
        needed = 0 if is_round_settled(self.terms, self.ballots, self.vouching.vouches) else self.terms.faults + 1
        cut_offs = list(self.signed_cut_offs.values())[:needed]
        if len(proposals) < len(accepted) or len(cut_offs) < needed:
            return None
        votes = tally_ballots(self.ballots.values())
        vouches = self.vouching.vouches_for_certificate(_sure(self.terms, votes, self.vouching.vouches), votes)
        ballots = _ascending(self.signed_ballots.values())
        return RoundCertificate(self.terms.job, self.terms.round, ballots, _ascending(cut_offs), _ascending(proposals), vouches)

    def why_certificate_refused(self, closing: RoundCertificate) -> str | None:
        """Why we do not prepare a fresh block with this closing: a leader must not veto by leaving ballots or vouches out."""
        if not closing.cut_offs:
            return None
        # Voters that contradicted themselves do not count. Such a voter could give each of us another message, so that we would
        # refuse each other's blocks for ever.
        ballots = {voter: ballot for voter, ballot in self.ballots.items() if voter not in self.double_voters}
        held = compute_round_result(self.terms, ballots, self.vouching.without_double_vouchers()).accepted
        carried = {(signed.signer, signed_body_digest(signed)) for signed in closing.proposals}
        if left_out := held.items() - carried:
            return f"leaves out {len(left_out)} proposals that have their accepts and vouches"
        own = self.cut_offs.get(self.me) if self.me else None
        if own is None:
            return None
        # By voter, not by ballot: one that gives each of us another ballot must not make us refuse each other's blocks for ever.
        named = {voter for voter, signed in self.signed_ballots.items() if signed_body_digest(signed) in own.ballots}
        missing = named - {signed.signer for signed in closing.ballots}
        return f"leaves out {len(missing)} ballots of our cut-off" if missing else None


def _ascending(signed: Iterable[Signed]) -> tuple[Signed, ...]:
    return tuple(sorted(signed, key=lambda item: item.signer))


def why_round_certificate_invalid(
    terms: RoundTerms,
    closing: RoundCertificate,
    ballots: Mapping[bytes, Ballot],
    cut_offs: Mapping[bytes, CutOff],
    proposals: Mapping[bytes, Proposal],
    said: Sequence[tuple[bytes, Vouch]],
) -> str | None:
    """Why a closing, whose signatures and forms were verified, is invalid; None if it is valid. Every peer says the same.

    `said` are its vouches, each with its signer.
    """
    for parts in (closing.ballots, closing.cut_offs, closing.proposals):
        if any(left.signer >= right.signer for left, right in pairwise(parts)):
            return "signers must ascend, each once"
    if any((left.signer, left.body) >= (right.signer, right.body) for left, right in pairwise(closing.vouches)):
        return "vouches must ascend by signer and body, each once"
    for voter, ballot in ballots.items():
        check_ballot(terms, voter, ballot)
    for voter, vouch in said:
        check_vouch(terms, voter, vouch)
    vouches = VouchSet.from_vouches(terms, said)
    if len(ballots) < terms.quorum:
        return f"{len(ballots)} ballots, {terms.quorum} are needed"
    if not terms.voters.issuperset(cut_offs):
        return "cut-off of a peer that does not vote"
    is_settled = is_round_settled(terms, ballots, vouches)
    if not is_settled and len(cut_offs) <= terms.faults:
        return "a named proposal is not settled and there are not f+1 cut-offs"
    if is_settled and cut_offs:
        return "cut-offs on a settled round"
    if any((c.job, c.round) != (terms.job, terms.round) for c in cut_offs.values()):
        return "cut-off of another round"
    accepted = compute_round_result(terms, ballots, vouches).accepted
    if {signed.signer: signed_body_digest(signed) for signed in closing.proposals} != accepted:
        return "the proposals are not exactly the accepted ones"
    if any((p.job, p.round) != (terms.job, terms.round) for p in proposals.values()):
        return "proposal of another round"
    return None
