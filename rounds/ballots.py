"""One round of a job: the trainers that are awaited, the time when a voter speaks, and the outcome of the ballots.

Sans-IO: proposals, verdicts, ballots and the time come in; at most one ballot and one cut-off of our own go out. The vote gives
agreement, not truth: nothing here looks into a payload.

Timers count from the application of the opening block:
proposals T1 < re-executors' ballots T2 < light voters' ballots T3 < cut-off T4.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from consensus.quorum import faults_tolerated, quorum
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, short_id
from protocol.limits import TRAINERS_MAX, VOTERS_MAX
from protocol.messages import Ballot, CutOff, Judgement, Proposal
from protocol.reasons import Verdict
from protocol.units import nth_round


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The terms of a round, fixed by the block that opened it, or by a later one that renewed it."""

    job: bytes
    round: int
    model_root: bytes
    voters: frozenset[bytes]
    auditors: frozenset[bytes]  # voters with a worker; empty when nobody re-executes
    trainers: frozenset[bytes]
    awaited: frozenset[bytes]
    audited: bool  # re-executed before the ballot: then a voter that is no auditor accepts nothing by itself
    successors: frozenset[tuple[bytes, bytes]] = frozenset()  # trainers that rotated in the round: former key, next key

    @property
    def signed(self) -> tuple[bytes, int, bytes]:
        """What every ballot of the round binds to."""
        return self.job, self.round, self.model_root

    @property
    def quorum(self) -> int:
        return quorum(len(self.voters))

    @property
    def faults(self) -> int:
        return faults_tolerated(len(self.voters))


PROPOSALS_SECONDS_MIN = 2.0  # shortest T1: a machine that swaps or a Python that starts must not lose a round for it
PROPOSALS_FACTOR = 3.0  # stragglers get three times what the majority of the awaited trainers took
MINORITY_FACTOR = 6.0  # where most are missing: twice the stragglers' patience, by the upper quartile of the rounds before
MINORITY_SECONDS_MIN = 10.0  # it is rather the network, or this machine, that stopped for a moment
LIGHT_SECONDS = 2.0  # T3 − T2: one message delay and a busy machine
CUT_OFF_SECONDS = 2.0  # T4 − T3: the same


@dataclass(frozen=True, slots=True)
class RoundTimers:
    """Seconds; what a peer measured and the job allows. They may differ between peers: votes may be fuzzy, their sum is exact."""

    proposals_max: float  # T1 at most
    replays: float  # T2 − T1: re-executing every trainer's proposal
    # By then a majority of the awaited was here in the last rounds; 0: not measured by this peer, None: by nobody yet.
    proposals_usual: float | None = None
    usual_trainers: frozenset[bytes] = frozenset()  # that were awaited in them
    returning: frozenset[bytes] = frozenset()  # not awaited by the ledger, but alive: T1 is for them too, this time

    def __post_init__(self) -> None:
        assert self.proposals_max > 0
        assert self.replays > 0


@dataclass(frozen=True, slots=True)
class Closing:
    """What a block carries to close a round; `proposals` are exactly the accepted ones, all ascending by signer."""

    job: Digest
    round: Count
    ballots: Annotated[tuple[Signed, ...], Length(1, VOTERS_MAX)]
    cut_offs: Annotated[tuple[Signed, ...], Length(0, VOTERS_MAX)]
    proposals: Annotated[tuple[Signed, ...], Length(0, TRAINERS_MAX)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ballots of one closed round decided, a pure function of them."""

    # Trainer -> proposal digest. Of several keys of one member with q accepts the last one; the others are nowhere here.
    accepted: dict[bytes, bytes]
    rejected: dict[bytes, Verdict]  # trainer -> the reason that most give, UNJUDGED if no more than f give the same
    absent: frozenset[bytes]  # trainers that no more than f ballots of the block name
    unjudged: frozenset[bytes]  # trainers that more than f ballots could not judge


def body_digest(signed: Signed) -> bytes:
    """How ballots name proposals and cut-offs name ballots."""
    return hashlib.sha256(signed.body).digest()


Votes = dict[tuple[bytes, bytes], Counter[Verdict]]  # (trainer, proposal) -> verdicts


def tally(ballots: Iterable[Ballot]) -> Votes:
    votes: defaultdict[tuple[bytes, bytes], Counter[Verdict]] = defaultdict(Counter)
    for ballot in ballots:
        for judgement in ballot.judgements:
            votes[judgement.trainer, judgement.proposal][judgement.verdict] += 1
    return votes


def settled(terms: RoundTerms, ballots: Mapping[bytes, Ballot]) -> bool:
    """No further ballot could change what is accepted: every named proposal has q accepts or n−q+1 ballots without accept."""
    without_accept_min = len(terms.voters) - terms.quorum + 1
    return all(
        verdicts[Verdict.ACCEPT] >= terms.quorum or len(ballots) - verdicts[Verdict.ACCEPT] >= without_accept_min
        for verdicts in tally(ballots.values()).values()
    )


def outcome(terms: RoundTerms, ballots: Mapping[bytes, Ballot]) -> Outcome:
    votes = tally(ballots.values())
    enough = {trainer: digest for (trainer, digest), verdicts in votes.items() if verdicts[Verdict.ACCEPT] >= terms.quorum}
    accepted = {trainer: digest for trainer, digest in enough.items() if not enough.keys() & _later_keys(terms, trainer)}
    reasons: dict[bytes, Counter[Verdict]] = {}
    for (trainer, _), verdicts in votes.items():
        if trainer not in enough:
            reasons.setdefault(trainer, Counter()).update(verdicts)
    # A proposal that at most f ballots name may be invented by liars: such a trainer counts as absent.
    reasons = {trainer: verdicts for trainer, verdicts in reasons.items() if verdicts.total() > terms.faults}
    unjudged = {trainer for trainer, verdicts in reasons.items() if verdicts[Verdict.UNJUDGED] > terms.faults}
    return Outcome(
        accepted=dict(sorted(accepted.items())),
        rejected={trainer: _reason(verdicts, terms.faults) for trainer, verdicts in sorted(reasons.items())},
        absent=terms.trainers - enough.keys() - reasons.keys(),
        unjudged=frozenset(unjudged),
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
    if (ballot.job, ballot.round, ballot.model_root) != terms.signed:
        raise RemoteProtocolError("wrong-round", f"ballot of {short_id(voter)} for round {nth_round(ballot.round)}")
    names = [judgement.trainer for judgement in ballot.judgements]
    if any(left >= right for left, right in pairwise(names)):
        raise RemoteProtocolError("non-canonical", "judgements must ascend by trainer, each once")
    if not terms.trainers.issuperset(names):
        raise RemoteProtocolError("not-a-trainer", f"ballot of {short_id(voter)}")


def _commonest(verdicts: Counter[Verdict]) -> Verdict:
    """The verdict of most voters that do not accept. In a tie UNJUDGED: any other reason may come from one liar."""
    reasons = [verdict for verdict in verdicts if verdict is not Verdict.ACCEPT]
    return max(reasons, key=lambda v: (verdicts[v], v is Verdict.UNJUDGED, -v), default=Verdict.UNJUDGED)


@dataclass(slots=True)
class RoundBook:
    """Everything one peer holds about one open round. `me` is None for a peer that does not vote in it."""

    terms: RoundTerms
    me: bytes | None
    opened: float
    timers: RoundTimers
    proposals: dict[bytes, Signed] = field(default_factory=dict)  # trainer -> the first proposal seen
    equivocators: set[bytes] = field(default_factory=set)
    double_voters: set[bytes] = field(default_factory=set)
    is_contradicted: bool = False  # a ballot has named another proposal of a trainer than the one that is here
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)  # trainer -> our own judgement
    ballots: dict[bytes, Ballot] = field(default_factory=dict)
    signed_ballots: dict[bytes, Signed] = field(default_factory=dict)
    cut_offs: dict[bytes, CutOff] = field(default_factory=dict)
    signed_cut_offs: dict[bytes, Signed] = field(default_factory=dict)
    delivered: set[bytes] = field(default_factory=set)  # trainers whose payload is here, with all that judging it needs
    arrivals: list[float] = field(default_factory=list)  # when those of awaited trainers were, seconds after opening
    latest: float | None = None  # when the last of these, or of the usual trainers, was
    _closed: tuple[tuple[int, int, int], Closing | None] | None = None  # the last answer of `closing`, and what it was made of
    audited: float | None = None  # when more than w/2 re-executors had judged what they saw, seconds after opening

    # What comes in

    def has_heard(self, signer: bytes, message: Proposal | Ballot | CutOff) -> bool:
        """Whether this peer has said something of this kind in this round before."""
        tables: dict[type, Container[bytes]] = {Proposal: self.proposals, Ballot: self.ballots, CutOff: self.cut_offs}
        return signer in tables[type(message)]

    def add_proposal(self, signed: Signed, proposal: Proposal) -> tuple[Signed, Signed] | None:
        """Keeps the first proposal of each trainer; a second, different one is evidence and counts for neither."""
        if signed.signer not in self.terms.trainers:
            raise RemoteProtocolError("not-a-trainer", f"proposal of {short_id(signed.signer)}")
        if (proposal.job, proposal.round) != (self.terms.job, self.terms.round):
            raise RemoteProtocolError(
                "wrong-round", f"proposal of {short_id(signed.signer)} for round {nth_round(proposal.round)}"
            )
        first = self.proposals.setdefault(signed.signer, signed)
        if first is signed:
            said = (judgement for ballot in self.ballots.values() for judgement in ballot.judgements)
            self._compare(signed, (judgement for judgement in said if judgement.trainer == signed.signer))
        if first.body == signed.body or signed.signer in self.equivocators:
            return None
        self.equivocators.add(signed.signer)
        self.verdicts[signed.signer] = Verdict.EQUIVOCATION
        return first, signed

    def deliver(self, trainer: bytes, now: float) -> None:
        """Everything that judging this trainer's proposal needs is here."""
        if trainer not in self.delivered and trainer in self.terms.awaited:
            self.arrivals.append(now - self.opened)
        if trainer not in self.delivered and trainer in self.terms.awaited | self.timers.usual_trainers:
            self.latest = now - self.opened
        self.delivered.add(trainer)

    def judge(self, trainer: bytes, verdict: Verdict, now: float) -> None:
        self.deliver(trainer, now)
        if trainer not in self.equivocators:
            self.verdicts[trainer] = verdict

    def add_ballot(self, signed: Signed, ballot: Ballot, now: float) -> tuple[Signed, Signed] | None:
        """Keeps each voter's first ballot; a second, different one is evidence."""
        check_ballot(self.terms, signed.signer, ballot)
        first = self.signed_ballots.setdefault(signed.signer, signed)
        self.ballots.setdefault(signed.signer, ballot)
        for judgement in ballot.judgements:
            if judgement.trainer in self.proposals and judgement.trainer not in self.equivocators:
                self._compare(self.proposals[judgement.trainer], (judgement,))
        if self.audited is None and 2 * sum(map(self._has_judged, self.terms.auditors)) > len(self.terms.auditors):
            self.audited = now - self.opened
        if first.body == signed.body or signed.signer in self.double_voters:
            return None
        self.double_voters.add(signed.signer)
        return first, signed

    def _compare(self, here: Signed, said: Iterable[Judgement]) -> None:
        """If a ballot names another proposal of this trainer, the trainer has signed two, or the voter lies."""
        digest = body_digest(here)
        self.is_contradicted |= any(judgement.proposal != digest for judgement in said)

    def _has_judged(self, voter: bytes) -> bool:
        """Not if its time ran out: that would make one round's timer the measure of the next one's."""
        ballot = self.ballots.get(voter)
        return ballot is not None and all(judgement.verdict is not Verdict.UNJUDGED for judgement in ballot.judgements)

    def add_cut_off(self, signed: Signed, cut_off: CutOff) -> None:
        if signed.signer not in self.terms.voters:
            raise RemoteProtocolError("not-a-voter", f"cut-off of {short_id(signed.signer)}")
        self.signed_cut_offs.setdefault(signed.signer, signed)
        self.cut_offs.setdefault(signed.signer, cut_off)

    def take_over(self, other: RoundBook) -> None:
        """Takes from another book of this round, which had other voters and trainers, the messages that count here."""
        self.proposals = {trainer: signed for trainer, signed in other.proposals.items() if trainer in self.terms.trainers}
        self.equivocators, self.double_voters = set(other.equivocators), set(other.double_voters)
        self.verdicts, self.delivered = dict(other.verdicts), set(other.delivered)
        self.arrivals, self.latest = list(other.arrivals), other.latest
        for voter, signed in other.signed_ballots.items():
            if voter in self.terms.voters:
                self.add_ballot(signed, other.ballots[voter], self.opened)
        for voter, signed in other.signed_cut_offs.items():
            if voter in self.terms.voters:
                self.add_cut_off(signed, other.cut_offs[voter])

    # What goes out

    @property
    def pace(self) -> float | None:
        """Seconds by which a majority of the awaited trainers was here, so that neither the slowest nor a liar sets it."""
        majority = len(self.terms.awaited) // 2 + 1
        return self.arrivals[majority - 1] if len(self.arrivals) >= majority else None

    @property
    def proposals_seconds(self) -> float:
        """T1. If all trainers are slower than before, the first one must not be accepted alone: so a minority that is here sets a
        time, too.

        A trainer that was awaited in former rounds counts for that minority: if the last round accepted only a few, only those
        few are awaited now. A peer that trains and has measured nothing waits for its own worker, which may only be starting.
        """
        usual, pace = self.timers.proposals_usual, self.pace
        if pace is not None:
            seconds = max(PROPOSALS_SECONDS_MIN, PROPOSALS_FACTOR * pace)
        elif self.latest is not None and usual is not None and (usual or not self._is_behind):
            seconds = max(MINORITY_SECONDS_MIN, MINORITY_FACTOR * usual, PROPOSALS_FACTOR * self.latest)
        else:
            seconds = self.timers.proposals_max
        return min(self.timers.proposals_max, seconds)

    @property
    def _is_behind(self) -> bool:
        return self.me in self.terms.trainers and self.me not in self.delivered

    @property
    def _times(self) -> tuple[float, float, float, float]:
        """T1 to T4 as moments. Everything compares with these very floats, so that no deadline expires a rounding too early."""
        opened, proposals = self.opened, self.proposals_seconds
        auditors = proposals + self.timers.replays
        light = auditors + LIGHT_SECONDS
        return opened + proposals, opened + auditors, opened + light, opened + (light + CUT_OFF_SECONDS)

    @property
    def proposals_due(self) -> float:
        """T1 as a moment."""
        return self._times[0]

    @property
    def times_up(self) -> float:
        """T4 as a moment: nobody waits for anything any more."""
        return self._times[-1]

    @property
    def awaited(self) -> frozenset[bytes]:
        """The trainers whose proposals this peer waits for until T1."""
        return self.terms.awaited | self.timers.returning & self.terms.trainers

    @property
    def is_auditor(self) -> bool:
        return not self.terms.audited or self.me in self.terms.auditors

    @property
    def spoken(self) -> set[bytes]:
        """The trainers that a ballot of ours names. A proposal whose payload does not come is none: it costs T1, not T2."""
        return {trainer for trainer in self.proposals if trainer in self.delivered or trainer in self.equivocators}

    def ballot_due(self, now: float) -> Ballot | None:
        """Our ballot, once: when all that is waited for is judged, or when our timer says so."""
        if self.me not in self.terms.voters or self.me in self.ballots or not self.spoken:
            return None
        return self._ballot() if self._ready(now) else None

    def _ready(self, now: float) -> bool:
        proposals_due, auditors_due, light_due, _ = self._times
        if now >= (auditors_due if self.is_auditor else light_due):
            return True
        # A proposal that came although nobody waits for it is judged too.
        waited = self.spoken if now >= proposals_due else self.awaited | self.spoken
        return all(self.verdict(trainer) is not None for trainer in waited)

    def verdict(self, trainer: bytes) -> Verdict | None:
        """Our verdict on this trainer's proposal so far; None: not judged yet."""
        own = self.verdicts.get(trainer)
        if own is not Verdict.ACCEPT or self.is_auditor:
            return own
        return self._majority(trainer)

    def _majority(self, trainer: bytes) -> Verdict | None:
        """A light voter, whose own cheap checks passed, accepts what more than w/2 re-executors accept.

        Fewer than 2f+1 of them (members left, voters joined) may have a lying majority: then only they themselves accept.
        """
        if len(self.terms.auditors) <= 2 * self.terms.faults:
            return Verdict.UNJUDGED
        digest = body_digest(self.proposals[trainer])
        ballots = [ballot for voter, ballot in self.ballots.items() if voter in self.terms.auditors]
        verdicts = tally(ballots).get((trainer, digest), Counter())
        accepts, needed = verdicts[Verdict.ACCEPT], len(self.terms.auditors) // 2 + 1
        if accepts >= needed:
            return Verdict.ACCEPT
        still_out = len(self.terms.auditors) - len(ballots)
        return _commonest(verdicts) if accepts + still_out < needed else None

    def _ballot(self) -> Ballot:
        judgements = tuple(
            Judgement(trainer, body_digest(self.proposals[trainer]), self._final_verdict(trainer))
            for trainer in sorted(self.spoken)
        )
        return Ballot(self.terms.job, self.terms.round, self.terms.model_root, judgements)

    def _final_verdict(self, trainer: bytes) -> Verdict:
        verdict = self.verdict(trainer)
        return Verdict.UNJUDGED if verdict is None else verdict

    def cut_off_due(self, now: float) -> CutOff | None:
        """Our cut-off, once: enough ballots are there, time is up, and they do not settle the round."""
        if now < self.times_up or self.me not in self.terms.voters or self.me in self.cut_offs:
            return None
        if len(self.ballots) < self.terms.quorum or settled(self.terms, self.ballots):
            return None
        digests = sorted(body_digest(signed) for signed in self.signed_ballots.values())
        return CutOff(self.terms.job, self.terms.round, tuple(digests))

    def deadline(self, now: float) -> float | None:
        """When `ballot_due` or `cut_off_due` may change without any input."""
        return next((time for time in self._times if time > now), None)  # they ascend

    # Closing

    def closing(self) -> Closing | None:
        """A closing of this round, if the messages here make one. Asked all the time; the tables only grow."""
        progress = (len(self.signed_ballots), len(self.proposals), len(self.signed_cut_offs))
        if self._closed is None or self._closed[0] != progress:
            self._closed = (progress, self._closing())
        return self._closed[1]

    def _closing(self) -> Closing | None:
        if len(self.ballots) < self.terms.quorum:
            return None
        accepted = outcome(self.terms, self.ballots).accepted
        held = {trainer: self.proposals.get(trainer) for trainer in accepted}
        proposals = [signed for trainer, signed in held.items() if signed and body_digest(signed) == accepted[trainer]]
        # No more cut-offs than a closing needs: each names every ballot, and blocks are bounded.
        needed = 0 if settled(self.terms, self.ballots) else self.terms.faults + 1
        cut_offs = list(self.signed_cut_offs.values())[:needed]
        if len(proposals) < len(accepted) or len(cut_offs) < needed:
            return None
        return Closing(self.terms.job, self.terms.round, *map(_ascending, (self.signed_ballots.values(), cut_offs, proposals)))

    def refuses(self, closing: Closing) -> str | None:
        """Why we do not prepare a fresh block with this closing: a leader must not veto by leaving ballots out."""
        own = self.cut_offs.get(self.me) if self.me else None
        if own is None or not closing.cut_offs:
            return None
        # By voter, not by ballot: one that gives each of us another ballot must not make us refuse each other's blocks for ever.
        held = {voter for voter, signed in self.signed_ballots.items() if body_digest(signed) in own.ballots}
        missing = held - {signed.signer for signed in closing.ballots}
        return f"leaves out {len(missing)} ballots of our cut-off" if missing else None


def _ascending(signed: Iterable[Signed]) -> tuple[Signed, ...]:
    return tuple(sorted(signed, key=lambda item: item.signer))


def check_closing(
    terms: RoundTerms,
    closing: Closing,
    ballots: Mapping[bytes, Ballot],
    cut_offs: Mapping[bytes, CutOff],
    proposals: Mapping[bytes, Proposal],
) -> str | None:
    """Why a closing, whose signatures and forms were verified, is invalid; None if it is valid. Every peer says the same."""
    for parts in (closing.ballots, closing.cut_offs, closing.proposals):
        if any(left.signer >= right.signer for left, right in pairwise(parts)):
            return "signers must ascend, each once"
    for voter, ballot in ballots.items():
        check_ballot(terms, voter, ballot)
    if len(ballots) < terms.quorum:
        return f"{len(ballots)} ballots, {terms.quorum} are needed"
    if not terms.voters.issuperset(cut_offs):
        return "cut-off of a peer that does not vote"
    if not settled(terms, ballots) and len(cut_offs) <= terms.faults:
        return "a named proposal is not settled and there are not f+1 cut-offs"
    if settled(terms, ballots) and cut_offs:
        return "cut-offs on a settled round"
    if any((c.job, c.round) != (terms.job, terms.round) for c in cut_offs.values()):
        return "cut-off of another round"
    accepted = outcome(terms, ballots).accepted
    if {signed.signer: body_digest(signed) for signed in closing.proposals} != accepted:
        return "the proposals are not exactly the accepted ones"
    if any((p.job, p.round) != (terms.job, terms.round) for p in proposals.values()):
        return "proposal of another round"
    return None
