"""One round of a job: the trainers that voters wait for, the times of a voter's statements, and the result of the ballots.

This module does no I/O. Its inputs are proposals, verdicts, vouches, ballots and the time. Its outputs are our own vouches, and
at most one ballot and one cut-off. The vote gives agreement, not truth: no code in this module reads a payload.

Timeouts count from the time at which this peer applied the block that opened the round: proposals T1 < re-executors' ballots T2 <
other voters' ballots T3 < cut-off T4.
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

# Least T1 in seconds: a trainer on a machine that swaps, or with a starting Python, must not lose a round.
PROPOSALS_SECONDS_MIN = 2.0
PROPOSALS_FACTOR = 3.0  # T1 as a multiple of the delay of a majority of the awaited trainers: stragglers need longer
MINORITY_FACTOR = 6.0  # T1 as a multiple of the usual delay if most proposals are missing: twice `PROPOSALS_FACTOR`
# Least T1 in seconds if most proposals are missing: the network or this machine probably stopped for a moment.
MINORITY_SECONDS_MIN = 10.0
VOUCH_SECONDS_MIN = 1.0  # least expected seconds of a vouch: a small model needs almost no time, but a busy machine does
VOUCH_FACTOR = 2.0  # more re-executors are called after this multiple of the usual time of a vouch
WITHHELD_TIMEOUT_SHARE = 0.25  # fraction of T2 − T1 for which a re-executor waits for the trainer's buffers
LIGHT_VOTER_SECONDS = 2.0  # T3 − T2 in seconds: one message delay, also to a busy machine
CUT_OFF_SECONDS = 2.0  # T4 − T3 in seconds: one message delay, also to a busy machine


@dataclass(frozen=True, slots=True)
class RoundTimeouts:
    """The values from which a peer computes T1 to T4: its own measurements, and the job's limits."""

    proposals_max_seconds: float  # largest T1 in seconds
    replay_seconds: float  # T2 − T1 in seconds: time to re-execute all proposals
    # Usual delay in seconds of a majority of the awaited trainers, from the last rounds. 0: this peer has not measured it. None:
    # no peer has measured it.
    proposals_usual_seconds: float | None = None
    usual_trainers: frozenset[bytes] = frozenset()  # trainers that were awaited in the measured rounds
    # Trainers that the ledger does not await, but that are alive: this peer awaits them, too.
    returning: frozenset[bytes] = frozenset()
    vouch_usual_seconds: float = VOUCH_SECONDS_MIN  # usual seconds from the delivery of a payload to a vouch, in the last rounds

    def __post_init__(self) -> None:
        assert self.proposals_max_seconds > 0
        assert self.replay_seconds > 0


@dataclass(frozen=True, slots=True)
class RoundCertificate:
    """The messages that close a round in a block. `proposals` are exactly the accepted proposals. All arrays ascend by signer."""

    job: Digest
    round: Count
    ballots: Annotated[tuple[Signed, ...], Length(1, VOTERS_MAX)]
    cut_offs: Annotated[tuple[Signed, ...], Length(0, VOTERS_MAX)]
    proposals: Annotated[tuple[Signed, ...], Length(0, TRAINERS_MAX)]
    # Vouches in ascending order of signer, then body: a signer may send several.
    vouches: Annotated[tuple[Signed, ...], Length(0, CLOSING_VOUCHES_MAX)]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a closed round. It is a pure function of the ballots and vouches in the block."""

    # Digests of the accepted proposals by trainer. If proposals of several keys of one member have enough accepting ballots, only
    # the last key's proposal is accepted.
    accepted: dict[bytes, bytes]
    rejected: dict[bytes, Verdict]  # most frequent reason by rejected trainer; UNJUDGED if no reason has f + 1 ballots
    absent: frozenset[bytes]  # trainers whose proposals at most f ballots of the block name
    unjudged: frozenset[bytes]  # trainers whose proposals f + 1 ballots could not judge
    vouchers: dict[bytes, tuple[bytes, ...]]  # by accepted trainer, the voters whose vouches in the block accept its proposal
    wrong_vouchers: frozenset[bytes]  # voters with a vouch that contradicts the decision
    # Voters that were called to re-execute an accepted proposal and have no vouch for it in the block.
    silent_reexecutors: frozenset[bytes]
    # Trainers whose updates were found false by re-execution (`VouchSet.trainers_with_invalid_updates`).
    trainers_with_invalid_updates: frozenset[bytes] = frozenset()
    diverging: frozenset[bytes] = frozenset()  # trainers rejected for NORM, if they are more than can be faulty; else empty
    # True if no proposal is accepted, and more trainers are rejected (not UNJUDGED) than can be faulty.
    refuses_honest: bool = False

    def rejection_reason(self, trainer: bytes, own: Sequence[str] = ()) -> str:
        """Return the label of a rejected trainer's verdict, or DIVERGING. `own` are the labels of the objective's own reasons."""
        return DIVERGING if trainer in self.diverging else verdict_label(self.rejected[trainer], own)


VerdictCounts = dict[tuple[bytes, bytes], Counter[Verdict]]  # number of ballots with each verdict, by (trainer, proposal digest)


def tally_ballots(ballots: Iterable[Ballot]) -> VerdictCounts:
    votes: defaultdict[tuple[bytes, bytes], Counter[Verdict]] = defaultdict(Counter)
    for ballot in ballots:
        for judgement in ballot.judgements:
            votes[judgement.trainer, judgement.proposal][judgement.verdict] += 1
    return votes


def is_round_settled(terms: RoundTerms, ballots: Mapping[bytes, Ballot], vouches: VouchSet) -> bool:
    """Return whether no further message can change the accepted proposals.

    In a settled round, every named proposal is in one of two cases: a quorum of ballots accepts it and it has its vouches, or too
    many ballots do not accept it for a quorum to be possible.
    """
    without_accept_min = len(terms.voters) - terms.quorum + 1
    return all(
        (verdicts[Verdict.ACCEPT] >= terms.quorum and vouches.has_enough_vouches(*named))
        or len(ballots) - verdicts[Verdict.ACCEPT] >= without_accept_min
        for named, verdicts in tally_ballots(ballots.values()).items()
    )


def _sure(terms: RoundTerms, votes: VerdictCounts, vouches: VouchSet) -> dict[bytes, bytes]:
    """Return, by trainer, the digests of proposals with a quorum of accepting ballots and enough vouches.

    If a member has several keys, only its last key's proposal is accepted in the end.
    """
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
    # A trainer counts as absent if at most f ballots name its proposal, since faulty voters may have invented the proposal.
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
    """Return the keys to which this trainer's member rotated later in the round.

    Only one update of a member is accepted in a round.
    """
    successors, found, key = dict(terms.successors), set[bytes](), trainer
    while key in successors:
        key = successors[key]
        found.add(key)
    return found


def _reason(verdicts: Counter[Verdict], faults: int) -> Verdict:
    """Return the most frequent reason that at least f + 1 ballots give: f voters may have invented one.

    In a tie the lower code wins.
    """
    reasons = [verdict for verdict in verdicts if verdict is not Verdict.ACCEPT and verdicts[verdict] > faults]
    return max(reasons, key=lambda v: (v is not Verdict.UNJUDGED, verdicts[v], -v), default=Verdict.UNJUDGED)


def check_ballot(terms: RoundTerms, voter: bytes, ballot: Ballot) -> None:
    """Raise `RemoteProtocolError` if a ballot does not count in a round with these terms."""
    if voter not in terms.voters:
        raise RemoteProtocolError("not-a-voter", f"ballot of {short_id(voter)}")
    if (ballot.job, ballot.round, ballot.model_root) != terms.signed_fields:
        raise RemoteProtocolError("wrong-round", f"ballot of {short_id(voter)} for round {display_round_number(ballot.round)}")
    check_judgements(terms.trainers, ballot.judgements, f"ballot of {short_id(voter)}")


@dataclass(slots=True)
class OpenRoundState:
    """The state of one open round at one peer. `me` is the peer's key; None for a peer that does not vote in the round."""

    terms: RoundTerms
    me: bytes | None
    opened_at: float
    timers: RoundTimeouts
    proposals: dict[bytes, Signed] = field(default_factory=dict)  # first proposal by trainer
    equivocators: set[bytes] = field(default_factory=set)
    double_voters: set[bytes] = field(default_factory=set)
    # True if a ballot or vouch names a proposal of a trainer that differs from the proposal in `proposals`.
    is_contradicted: bool = False
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)  # our own verdict by trainer, at least after the cheap checks
    ballots: dict[bytes, Ballot] = field(default_factory=dict)
    signed_ballots: dict[bytes, Signed] = field(default_factory=dict)
    cut_offs: dict[bytes, CutOff] = field(default_factory=dict)
    signed_cut_offs: dict[bytes, Signed] = field(default_factory=dict)
    delivered: dict[bytes, float] = field(default_factory=dict)  # time at which the payload arrived, by trainer
    # Seconds from the opening of the round to the arrival of each payload of an awaited trainer.
    arrivals: list[float] = field(default_factory=list)
    # Seconds from the opening of the round to the last payload of an awaited or usual trainer.
    latest_arrival: float | None = None
    # The last result of `certificate`, after the sizes of its inputs.
    _closed: tuple[tuple[int, ...], RoundCertificate | None] | None = None
    vouching: VouchState = field(init=False)

    def __post_init__(self) -> None:
        self.vouching = VouchState(self.terms, self.me, VouchSet(self.terms))

    # Input
    def has_seen_statement(self, signer: bytes, message: Proposal | Ballot | Vouch | CutOff) -> bool:
        """Return whether a message of this kind by the signer is known. For a vouch: whether all its verdicts are known."""
        if isinstance(message, Vouch):
            return not self.vouching.new_judgements(signer, message)
        tables: Mapping[type, Mapping[bytes, object]] = {Proposal: self.proposals, Ballot: self.ballots, CutOff: self.cut_offs}
        return signer in tables[type(message)]

    def statements_signed_by(self, signer: bytes) -> list[Signed]:
        """Return all known messages of this signer in the round."""
        tables = (self.proposals, self.signed_ballots, self.signed_cut_offs)
        vouches = [signed for signed in self.vouching.signed.values() if signed.signer == signer]
        return [*(table[signer] for table in tables if signer in table), *vouches]

    def add_proposal(self, signed: Signed, proposal: Proposal) -> tuple[Signed, Signed] | None:
        """Keep the first proposal of each trainer.

        Return a second, different one with the first as evidence: this voter accepts neither. Raises `RemoteProtocolError` if the
        signer does not train in this round, or the proposal is for another round.
        """
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
        """Record that the payload of this trainer's proposal has arrived."""
        if trainer not in self.delivered and trainer in self.terms.awaited:
            self.arrivals.append(now - self.opened_at)
        if trainer not in self.delivered and trainer in self.terms.awaited | self.timers.usual_trainers:
            self.latest_arrival = now - self.opened_at
        self.delivered.setdefault(trainer, now)

    def record_verdict(self, trainer: bytes, verdict: Verdict, now: float) -> None:
        """Record the result of the cheap checks, or of our own re-execution."""
        self.record_payload(trainer, now)
        if trainer not in self.equivocators:
            self.verdicts[trainer] = verdict

    def record_replay_verdict(self, trainer: bytes, verdict: Verdict, now: float) -> None:
        """Record the result of our own re-execution. The result is ignored if we do not re-execute in this round any more."""
        if self.me not in self.terms.reexecutors or trainer not in self.proposals:
            return
        self.vouching.record_own_judgement(Judgement(trainer, signed_body_digest(self.proposals[trainer]), verdict))
        if verdict is not Verdict.UNJUDGED:
            self.record_verdict(trainer, verdict, now)

    def add_ballot(self, signed: Signed, ballot: Ballot, now: float) -> tuple[Signed, Signed] | None:
        """Keep each voter's first ballot. Return a second, different ballot with the first one as evidence."""
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
        """Record a contradiction if `named` has another digest than our proposal `here`.

        The trainer has then signed two proposals, or a voter is faulty.
        """
        self.is_contradicted |= bool(named - {signed_body_digest(here)})

    def add_vouch(self, signed: Signed, vouch: Vouch, now: float) -> tuple[Signed, Signed] | None:
        """Keep each voter's first verdict on each trainer. Return a contradictory vouch with the first one as evidence."""
        new = self.vouching.new_judgements(signed.signer, vouch)
        pair = self.vouching.add_vouch(signed, vouch)
        self._compare_all(vouch.judgements)
        for judgement in new if pair is None else ():
            # The time of an unsure voter does not count: it may have waited for buffers in vain, and all voters would wait longer
            # in later rounds.
            if judgement.trainer in self.delivered and judgement.verdict is not Verdict.UNJUDGED:
                self.vouching.record_vouch_seconds(signed.signer, judgement.trainer, now - self.delivered[judgement.trainer])
        return pair

    def add_cut_off(self, signed: Signed, cut_off: CutOff) -> None:
        if signed.signer not in self.terms.voters:
            raise RemoteProtocolError("not-a-voter", f"cut-off of {short_id(signed.signer)}")
        self.signed_cut_offs.setdefault(signed.signer, signed)
        self.cut_offs.setdefault(signed.signer, cut_off)

    def import_from(self, other: OpenRoundState) -> None:
        """Import the messages of `other`, the state of this round under former terms, that count under the current terms."""
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

    # Output
    @property
    def majority_arrival_seconds(self) -> float | None:
        """Seconds after which a majority of the awaited trainers had delivered.

        Neither the slowest trainer nor one liar determines it.
        """
        majority = len(self.terms.awaited) // 2 + 1
        return self.arrivals[majority - 1] if len(self.arrivals) >= majority else None

    @property
    def proposal_timeout_seconds(self) -> float:
        """T1 in seconds, from the delay of a majority of trainers.

        If only a minority has delivered, T1 follows from former rounds. So the first proposal is not accepted alone if all
        trainers are slower than before. Trainers that were awaited in former rounds count for the minority, since only few are
        awaited after a round that accepted few. A trainer without measurements waits for its own worker, which may still be
        starting.
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
        """T1 to T4 as points in time. All comparisons use these floats, so that rounding lets no deadline expire too early."""
        opened, proposals = self.opened_at, self.proposal_timeout_seconds
        auditors = proposals + self.timers.replay_seconds
        light = auditors + LIGHT_VOTER_SECONDS
        return opened + proposals, opened + auditors, opened + light, opened + (light + CUT_OFF_SECONDS)

    @property
    def proposals_due_at(self) -> float:
        """T1 as a point in time."""
        return self._times[0]

    @property
    def cut_off_due_at(self) -> float:
        """T4 as a point in time, after which no voter waits for ballots any more."""
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
        """The trainers that our ballot names.

        The ballot does not name a proposal whose payload has not arrived. It names proposals that re-executors cannot judge only
        if there are no other proposals: more time would not help these.
        """
        named = {trainer for trainer in self.proposals if trainer in self.delivered or trainer in self.equivocators}
        return {trainer for trainer in named if not self._is_hopeless(trainer)} or named

    def _is_hopeless(self, trainer: bytes) -> bool:
        """Return whether the vouches give no verdict on this trainer's proposal, and further vouches would give none in time.

        If f + 1 voters are unsure, at least one of them is honest. Each further voter could wait as long for the same buffers.
        """
        if self.verdicts.get(trainer) is not Verdict.ACCEPT or self.current_verdict(trainer) is not None:
            return False
        if trainer in self.vouching.started - self.vouching.own_judgements.keys():
            return False  # Our own re-execution is running.
        return not self.vouching.vouches.can_get_enough_vouches(trainer, signed_body_digest(self.proposals[trainer]))

    # Our own re-executions

    def assign_reexecutions(self, now: float) -> None:
        """Record the proposals that we must re-execute now, and our verdicts without re-execution.

        A proposal that fails a cheap check is not re-executed. If a proposal's buffers do not arrive in time, our verdict is
        UNJUDGED.
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
        """Return the time after which more re-executors are called for this trainer's proposal."""
        return self.delivered[trainer] + VOUCH_FACTOR * self.timers.vouch_usual_seconds

    def _given_up_at(self, trainer: bytes) -> float:
        """Return the time until which we wait for the trainer's buffers, without which we cannot re-execute its proposal."""
        return max(
            self.proposals_due_at, self.vouching.assigned_at[trainer] + WITHHELD_TIMEOUT_SHARE * self.timers.replay_seconds
        )

    def _call_times(self) -> Iterable[float]:
        """Yield the times at which `assign_reexecutions` may act without new input."""
        if self.me in self.terms.reexecutors:
            uncalled = self.terms.trainers_to_vouch_for & self.delivered.keys() - self.vouching.assigned_at.keys()
            yield from map(self._late_at, uncalled)
            waiting = self.vouching.assigned_at.keys() - self.vouching.started - self.vouching.own_judgements.keys()
            yield from map(self._given_up_at, waiting)

    # Ballot and cut-off

    def make_ballot_if_due(self, now: float) -> Ballot | None:
        """Return our ballot, once, when all awaited proposals are judged, or after our timeout (T2 or T3)."""
        if self.me not in self.terms.voters or self.me in self.ballots:
            return None
        if not self.trainers_in_ballot and not (self.terms.may_be_empty and now >= self.proposals_due_at):
            return None
        return self._ballot() if self._ready(now) else None

    def _ready(self, now: float) -> bool:
        proposals_due, auditors_due, light_due, _ = self._times
        if now >= (auditors_due if self.is_reexecutor else light_due):
            return True
        # A proposal that arrived before T1 is judged, too, if it was not awaited.
        waited = self.trainers_in_ballot if now >= proposals_due else self.awaited_trainers | self.trainers_in_ballot
        return all(self.current_verdict(trainer) is not None or self._is_hopeless(trainer) for trainer in waited)

    def current_verdict(self, trainer: bytes) -> Verdict | None:
        """Return our verdict on this trainer's proposal; None: not judged yet.

        The first of these cases applies:

        | proposal                                                          | verdict      |
        | we rejected it                                                    | our reason   |
        | it is our own, or we re-executed it                               | accept       |
        | it passed our cheap checks, and has its vouches or needs no vouch | accept       |
        | it passed our cheap checks, and f + 1 voters reject it            | their reason |
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
        """Return our cut-off, once, after T4, if a quorum of ballots has arrived and does not settle the round."""
        if now < self.cut_off_due_at or self.me not in self.terms.voters or self.me in self.cut_offs:
            return None
        if len(self.ballots) < self.terms.quorum or is_round_settled(self.terms, self.ballots, self.vouching.vouches):
            return None
        digests = sorted(signed_body_digest(signed) for signed in self.signed_ballots.values())
        return CutOff(self.terms.job, self.terms.round, tuple(digests))

    def next_deadline(self, now: float) -> float | None:
        """Return the next time at which `assign_reexecutions` or our ballot or cut-off may change without new input."""
        return min((time for time in (*self._times, *self._call_times()) if time > now), default=None)

    # Closing

    def certificate(self) -> RoundCertificate | None:
        """Return a certificate that closes this round, or None.

        The result is cached by the sizes of the tables, which only grow.
        """
        parts: tuple[Sized, ...] = (self.signed_ballots, self.proposals, self.signed_cut_offs, self.vouching.signed)
        progress = tuple(map(len, parts))
        if self._closed is not None and self._closed[1] is not None and not self._closed[1].cut_offs:
            # The round is settled, so more vouches do not change the certificate.
            progress = (*progress[:-1], self._closed[0][-1])
        if self._closed is None or self._closed[0] != progress:
            self._closed = (progress, self._closing())
        return self._closed[1]

    def _closing(self) -> RoundCertificate | None:
        if len(self.ballots) < self.terms.quorum:
            return None
        accepted = compute_round_result(self.terms, self.ballots, self.vouching.vouches).accepted
        held = {trainer: self.proposals.get(trainer) for trainer in accepted}
        proposals = [signed for trainer, signed in held.items() if signed and signed_body_digest(signed) == accepted[trainer]]
        # The certificate has no more cut-offs than necessary: each names every ballot, and the size of blocks is bounded.
        needed = 0 if is_round_settled(self.terms, self.ballots, self.vouching.vouches) else self.terms.faults + 1
        cut_offs = list(self.signed_cut_offs.values())[:needed]
        if len(proposals) < len(accepted) or len(cut_offs) < needed:
            return None
        votes = tally_ballots(self.ballots.values())
        vouches = self.vouching.vouches_for_certificate(_sure(self.terms, votes, self.vouching.vouches), votes)
        ballots = _ascending(self.signed_ballots.values())
        return RoundCertificate(self.terms.job, self.terms.round, ballots, _ascending(cut_offs), _ascending(proposals), vouches)

    def why_certificate_refused(self, closing: RoundCertificate) -> str | None:
        """Return why this voter does not prepare a fresh block with this certificate, or None.

        The check prevents that a leader vetoes a proposal by omitting ballots or vouches.
        """
        if not closing.cut_offs:
            return None
        # Voters that contradicted themselves do not count. Such a voter could send each voter another message, so that all would
        # refuse each other's blocks for ever.
        ballots = {voter: ballot for voter, ballot in self.ballots.items() if voter not in self.double_voters}
        held = compute_round_result(self.terms, ballots, self.vouching.without_double_vouchers()).accepted
        carried = {(signed.signer, signed_body_digest(signed)) for signed in closing.proposals}
        if left_out := held.items() - carried:
            return f"its round certificate omits {len(left_out)} proposals with enough accepting ballots and vouches"
        own = self.cut_offs.get(self.me) if self.me else None
        if own is None:
            return None
        # Voters are compared, not ballots: a liar that sends each voter another ballot must not make all refuse each other's
        # blocks.
        named = {voter for voter, signed in self.signed_ballots.items() if signed_body_digest(signed) in own.ballots}
        missing = named - {signed.signer for signed in closing.ballots}
        return f"its round certificate omits {len(missing)} ballots of our cut-off" if missing else None


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
    """Return why a certificate with verified signatures is invalid, or None. All peers get the same result.

    `said` are the certificate's vouches as (signer, vouch) pairs. Raises `RemoteProtocolError` if a ballot or vouch does not
    count in this round.
    """
    for parts in (closing.ballots, closing.cut_offs, closing.proposals):
        if any(left.signer >= right.signer for left, right in pairwise(parts)):
            return "signers must ascend, without duplicates"
    if any((left.signer, left.body) >= (right.signer, right.body) for left, right in pairwise(closing.vouches)):
        return "vouches must ascend by signer and body, without duplicates"
    for voter, ballot in ballots.items():
        check_ballot(terms, voter, ballot)
    for voter, vouch in said:
        check_vouch(terms, voter, vouch)
    vouches = VouchSet.from_vouches(terms, said)
    if len(ballots) < terms.quorum:
        return f"{len(ballots)} ballots, quorum {terms.quorum}"
    if not terms.voters.issuperset(cut_offs):
        return "cut-off of a peer that is not a voter"
    is_settled = is_round_settled(terms, ballots, vouches)
    if not is_settled and len(cut_offs) <= terms.faults:
        return f"the round is not settled, and {len(cut_offs)} cut-offs are fewer than {terms.faults + 1}"
    if is_settled and cut_offs:
        return "a settled round needs no cut-offs"
    if any((c.job, c.round) != (terms.job, terms.round) for c in cut_offs.values()):
        return "cut-off of a different round"
    accepted = compute_round_result(terms, ballots, vouches).accepted
    if {signed.signer: signed_body_digest(signed) for signed in closing.proposals} != accepted:
        return "its proposals are not exactly the accepted ones"
    if any((p.job, p.round) != (terms.job, terms.round) for p in proposals.values()):
        return "proposal of a different round"
    return None
