"""Demands of liveness, with bounds, after a network has healed. Safety alone allows peers that do nothing.

Written apart from the code it checks, as the invariants are: it reads decided blocks, and the messages of honest peers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol import codec
from protocol.identity import Signed, Verifier, short_id, signing_preimage
from protocol.messages import (
    Ballot,
    Commit,
    EvidenceMessage,
    GossipEnvelope,
    Prepare,
    Proposal,
    Propose,
    ProposeEnvelope,
    Timeout,
    TimeoutEnvelope,
    Vote,
)
from tests.sim.invariants import Keys, Slot, Violation, quorum, set_hash

# Each bound counts from the event or from the recovery, whichever is later.
ROUND_SECONDS_MAX = 60.0  # from one round of a job to the next: 4 s for proposals, more for judging, doubled where one is away
BALLOT_ROUNDS_MAX = 12  # closed rounds of a job without a ballot of a voter that runs: q others may settle one before it speaks
ACCEPTED_ROUNDS_MAX = 12  # closed rounds of a job that accept nothing, while an honest trainer runs
VOTE_HEIGHTS_MAX = 24  # without a vote of a voter that runs: q others may decide one before it speaks
EXPULSION_HEIGHTS_MAX = 12  # from evidence to the block with it: the next leader that is honest, and hears of it
CHANGE_HEIGHTS_MAX = 10  # from the block with a change of the voters to the set without or with that key: two, and those in front
LEFT_HEIGHTS_MAX = CHANGE_HEIGHTS_MAX  # from the loss of a job's only trainer to its end: until its vote is gone, too
NEWCOMER_SECONDS_MAX = 60.0  # of an invited peer that runs, to its first vote: four transactions, and q approvals
CONTRADICTIONS_MIN = 3  # that one peer heard: a single one may come in the moment in which its height or round is over
VIEWS_SEEN = 4  # of a height: contradictions of later views may be too far from the view in which it was decided

_hash_of = functools.cache(set_hash)


@dataclass
class JobSeen:
    """One job, as derived from the decided blocks."""

    author: bytes
    rounds: int
    is_alone: bool  # only its author trains
    since: float  # time of its last closed round
    closed: int = 0
    round: int = 0  # the number of the open one
    taken: int = 0  # rounds in the model
    has_accepted: bool = False  # since the recovery
    accepted_at: int = 0  # number of closed rounds when one last accepted an update
    ballots: dict[bytes, int] = field(default_factory=dict)  # voter -> number of closed rounds at its last ballot
    waiting: dict[bytes, int] = field(default_factory=dict)  # voter -> number of closed rounds when its ballot was first expected
    stops: set[bytes] = field(default_factory=set)
    may_end: bool = False  # before its last round: a voter wanted its only trainer retired
    left_at: int | None = None  # height at which its only trainer was retired or expelled; None after its return


@dataclass(frozen=True, slots=True)
class Demand:
    """An event that must happen before `age` exceeds `most`."""

    rule: str
    what: str
    age: float
    most: float
    never: bool  # it has not happened since the recovery: the history cannot end yet


@dataclass
class Newcomer:
    inviter: bytes
    is_admitted: bool = False


@dataclass
class Progress:
    founders: Keys
    chain_id: bytes
    verifier: Verifier
    honest: Collection[bytes]
    sets: Mapping[int, Keys]  # voters by height, as the peers apply them
    began: float | None = None  # everybody has recovered
    began_at: int = 0  # height then
    height: int = 0
    jobs: dict[bytes, JobSeen] = field(default_factory=dict)
    runs: set[bytes] = field(default_factory=set)  # jobs of client runs, whose rounds `tests.sim.client_runs` demands
    trained: dict[bytes, JobSeen] = field(default_factory=dict)  # all rounds are taken, and audits may undo some
    newcomers: dict[bytes, Newcomer] = field(default_factory=dict)
    expelled: dict[bytes, int] = field(default_factory=dict)  # key -> height of the block with the evidence
    accused: dict[bytes, int] = field(default_factory=dict)  # with evidence against them -> height then
    going: dict[bytes, int] = field(default_factory=dict)  # keys that must leave the voters -> height of the decision
    coming: dict[bytes, int] = field(default_factory=dict)  # keys that must join them
    counts: dict[str, int] = field(default_factory=dict)  # events after the recovery
    _successors: dict[bytes, bytes] = field(default_factory=dict)
    _voted: dict[bytes, int] = field(default_factory=dict)  # the last height at which each honest peer voted
    _votes_since: dict[bytes, int] = field(default_factory=dict)  # key -> first height of its vote
    _approved: dict[bytes, set[bytes]] = field(default_factory=dict)  # candidate -> approving voters
    _wishes: dict[bytes, tuple[bytes, bool]] = field(default_factory=dict)  # voter -> (member to retire, whether f may fall)
    _heard: dict[bytes, dict[bytes, dict[Slot, Signed]]] = field(default_factory=dict)  # receiver -> signer -> said
    _contradicted: dict[tuple[bytes, bytes], set[Slot]] = field(default_factory=dict)  # (receiver, signer)

    def begin(self, now: float, height: int) -> None:
        self.began, self.began_at, self.height = now, height, height
        for job in self.jobs.values():
            job.accepted_at, job.has_accepted = job.closed, False
            job.ballots, job.waiting = {}, {}

    # Decided blocks --------------------------------------------------------------------------------------------------

    def on_block(self, height: int, body: bytes, now: float) -> None:
        """Process each decided block once, in order."""
        self.height = height
        closings, evidence, transactions = codec.unpack(body, len(body))
        for key, _, ballots, _, proposals, _ in closings:
            self._on_closing(key, ballots, proposals, now)
        for first, _ in evidence:
            self._on_expelled(first[1], height)
        for data, signer, _ in transactions:
            self._on_transaction(height, data, signer, now)
        self._count_approvals(height)
        self._count_wishes(height)
        for key in [key for key, job in self.jobs.items() if job.taken >= job.rounds]:
            self.trained[key] = self.jobs.pop(key)
        before: Collection[bytes] = self.sets.get(height, ())
        for key in self.sets.get(height + 1, ()):
            if key not in before or key not in self._votes_since:  # it may vote again after a while
                self._votes_since[key] = height + 1
        if self.began is not None:
            self._count("blocks")

    def _on_closing(self, key: bytes, ballots: list[Any], proposals: list[Any], now: float) -> None:
        if key in self.runs:
            return
        job = self.jobs[key]
        job.closed, job.round, job.taken, job.since = job.closed + 1, job.round + 1, job.taken + 1, now
        if proposals:
            job.accepted_at, job.has_accepted = job.closed, True
        if self.began is not None:
            self._count("rounds closed")
            self._count("ballots decided", len(ballots))
            self._count("updates accepted", len(proposals))

    def on_rolled_back(self, key: bytes, number: int, taken: int, now: float) -> None:
        """Continue the job with round `number`, after `taken` rounds."""
        if key in self.runs:
            return
        job = self.jobs.get(key) or self.trained.pop(key)
        job.round, job.taken, job.since = number, taken, now
        self.jobs[key] = job
        if self.began is not None:
            self._count("rollbacks")

    def _on_expelled(self, culprit: bytes, height: int) -> None:
        """Note an expulsion, which includes the key's successor and predecessors."""
        for key in {culprit, self._current(culprit), *(old for old in self._successors if self._current(old) == culprit)}:
            self.expelled.setdefault(key, height)
            self._forget_wishes(key)
            self._forget_approvals(key)
            self.going.setdefault(key, height)
            self.coming.pop(key, None)
            self._on_trainer_lost(key, height)
        self._count("liars expelled")

    def _current(self, key: bytes) -> bytes:
        while key in self._successors:
            key = self._successors[key]
        return key

    def _on_transaction(self, height: int, data: bytes, signer: bytes, now: float) -> None:
        _, _, _, kind, content = codec.unpack(data, len(data))
        fields = codec.unpack(content, len(content)) if content else []
        match kind:
            case "job/start":
                _, rounds, *who = fields[0].decode().split(":")
                key = hashlib.sha256(b"folkmoot/job\x00" + signer + data).digest()
                self.jobs[key] = JobSeen(signer, int(rounds), bool(who), now)
            case "client/open":
                self.runs.add(hashlib.sha256(b"folkmoot/job\x00" + signer + data).digest())
            case "job/stop" if fields[0] in self.jobs:
                job, voters = self.jobs[fields[0]], self.sets[height]
                job.stops.add(signer)
                if signer == self._current(job.author) or len(job.stops.intersection(voters)) >= quorum(len(voters)):
                    del self.jobs[fields[0]]
            case "member/admit" if signer in self.newcomers:
                self.newcomers[signer].is_admitted = True
            case "member/approve":
                self._approved.setdefault(fields[0], set()).add(signer)
            case "member/resign":
                self._approved.pop(signer, None)
                self.coming.pop(signer, None)
                self.going.setdefault(signer, height)
            case "member/retire":
                self._wishes[signer] = (fields[0], fields[1])
                for job in self._trained_by(fields[0]):
                    job.may_end = True
            case "member/register" | "member/stand":
                for job in self._trained_by(signer):
                    job.left_at = None
            case "member/rotate":
                self._on_rotated(signer, fields[0], height)

    def _count_approvals(self, height: int) -> None:
        """Count the approvals again with each block's own voters, which may have changed."""
        voters = self.sets[height]
        for candidate, approved in self._approved.items():
            if len(approved.intersection(voters)) >= quorum(len(voters)):
                self.coming.setdefault(candidate, height)
                self.going.pop(candidate, None)  # it left, and comes back
            elif candidate not in self.sets[max(self.sets)]:
                self.coming.pop(candidate, None)  # it was in the queue, and an approving voter has left

    def _count_wishes(self, height: int) -> None:
        """Count wishes as approvals are counted. A wish ends with its author's vote, and does not expire here."""
        voters = self.sets[height]
        self._wishes = {voter: wish for voter, wish in self._wishes.items() if voter in voters}
        for subject in sorted({subject for subject, _ in self._wishes.values()}):
            said = [lowers for other, lowers in self._wishes.values() if other == subject]
            if len(said) < quorum(len(voters)):
                continue
            is_voter = subject in voters
            if is_voter and not (len(voters) > 1 and all(said)):
                continue  # f would fall, and not all voters allow that
            self._approved.pop(subject, None)  # a retired member applies and is approved anew
            self.coming.pop(subject, None)
            self._forget_wishes(subject)
            if is_voter:
                self.going.setdefault(subject, height)
                self._on_trainer_lost(subject, height)

    def _trained_by(self, trainer: bytes) -> list[JobSeen]:
        """Return the jobs that only this member trains."""
        return [job for job in self.jobs.values() if job.is_alone and self._current(job.author) == trainer]

    def _on_trainer_lost(self, trainer: bytes, height: int) -> None:
        for job in self._trained_by(trainer):
            job.may_end = True
            if job.left_at is None:
                job.left_at = height

    def on_finished(self, jobs: Collection[bytes]) -> None:
        """Forget finished jobs that may end early. Any other job that ends early is noticed when it closes no more rounds."""
        for key in jobs:
            if key in self.jobs and self.jobs[key].may_end:
                del self.jobs[key]
                self._count("jobs ended without a trainer")

    def _forget_wishes(self, key: bytes) -> None:
        """Forget the wishes of this member and those about it."""
        self._wishes = {voter: wish for voter, wish in self._wishes.items() if key not in (voter, wish[0])}

    def _forget_approvals(self, key: bytes) -> None:
        self._approved.pop(key, None)
        for approved in self._approved.values():
            approved.discard(key)

    def _on_rotated(self, old: bytes, new: bytes, height: int) -> None:
        self._successors[old] = new
        self._forget_wishes(old)
        self._forget_approvals(old)
        self.coming.pop(old, None)
        if old in self.sets[max(self.sets)]:
            self.going.setdefault(old, height)
            self.coming[new] = height

    def _count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    # Messages of honest peers ----------------------------------------------------------------------------------------

    def on_sent(self, peer: bytes, message: object) -> None:
        if isinstance(message, Vote) and message.vote.signer == peer:
            self._voted[peer] = max(codec.unpack(message.vote.body, len(message.vote.body))[2], self._voted.get(peer, 0))
        elif isinstance(message, GossipEnvelope) and message.signed.signer == peer:
            tag, key, *_ = codec.unpack(message.signed.body, len(message.signed.body))
            if tag == Ballot.TAG and key in self.jobs:
                self.jobs[key].ballots[peer] = self.jobs[key].closed

    def on_evidence(self, culprit: bytes) -> None:
        """Note that an honest peer has recorded the proof of a lie."""
        if culprit in self._members() and self._current(culprit) not in self.expelled and culprit not in self.expelled:
            self.accused.setdefault(culprit, self.height)

    def _members(self) -> set[bytes]:
        """Return the keys that can be expelled: the voters of this height and of the next two."""
        return {key for height in (self.height, self.height + 1, self.height + 2) for key in self.sets.get(height, ())}

    def on_heard(self, receiver: bytes, decided: int, message: object) -> None:
        """Note a message. `decided`: the last height that the receiver has decided."""
        match message:
            case Vote(signed) | GossipEnvelope(signed) | TimeoutEnvelope(signed, _) | ProposeEnvelope(signed):
                self._hear(receiver, decided, signed)
            case EvidenceMessage(first, second):
                self._hear_proof(receiver, first, second)

    def _hear(self, receiver: bytes, decided: int, signed: Signed) -> None:
        if signed.signer in self.honest:
            return
        said = self._heard.setdefault(receiver, {}).setdefault(signed.signer, {})
        slot = self._slot(decided, signed)
        if slot is None or not self._is_genuine(slot[0], signed):
            return
        if said.setdefault(slot, signed).body != signed.body:
            slots = self._contradicted.setdefault((receiver, signed.signer), set())
            slots.add(slot)
            if len(slots) >= CONTRADICTIONS_MIN:
                self.on_evidence(signed.signer)

    def _slot(self, decided: int, signed: Signed) -> Slot | None:
        """Return the statement's slot, if the peer must now notice a contradiction in it."""
        tag, *fields = codec.unpack(signed.body, len(signed.body))
        if tag in (Propose.TAG, Prepare.TAG, Commit.TAG, Timeout.TAG):
            voters = self.sets.get(fields[1], ())
            if tag == Timeout.TAG and fields[3] >= 0:
                return None  # it counts only with its certificate, which may be invalid
            is_open = fields[1] in (decided, decided + 1) and fields[2] < VIEWS_SEEN and signed.signer in voters
            return (tag, fields[1], fields[2]) if is_open and fields[0] == _hash_of(voters) else None
        if tag in (Proposal.TAG, Ballot.TAG):
            job = self.jobs.get(fields[0])
            return (tag, fields[0], fields[1]) if job is not None and fields[1] == job.round else None
        return None

    def _is_genuine(self, tag: str, signed: Signed) -> bool:
        return self.verifier.verify(signed.signer, signing_preimage(tag, self.chain_id, signed.body), signed.signature)

    def _hear_proof(self, receiver: bytes, first: Signed, second: Signed) -> None:
        """Note two statements in one slot. Other proofs of lies are noted when a peer records them."""
        if first.signer == second.signer and first.signer not in self.honest and first.body != second.body:
            slots = [codec.unpack(signed.body, len(signed.body))[:4] for signed in (first, second)]
            of_agreement = slots[0][0] in (Propose.TAG, Prepare.TAG, Commit.TAG, Timeout.TAG)
            is_one = slots[0] == slots[1] and of_agreement
            if is_one and all(self._is_genuine(slots[0][0], signed) for signed in (first, second)):
                self.on_evidence(first.signer)

    def on_forgotten(self, receiver: bytes) -> None:
        """Forget the messages that a stopped peer heard."""
        self._heard.pop(receiver, None)
        for key in [key for key in self._contradicted if key[0] == receiver]:
            del self._contradicted[key]

    # Open demands ----------------------------------------------------------------------------------------------------

    def demands(self, now: float, running: Collection[bytes]) -> Iterator[Demand]:
        """Yield the open demands. `running`: the honest running peers with an accepted clock."""
        assert self.began is not None
        voters = self.sets[max(self.sets)]
        yield from self._of_jobs(now, running, voters)
        for peer in sorted(set(running).intersection(voters)):
            if self.height + 1 in self.sets and peer in self.sets[self.height + 1]:
                since = max(self._votes_since.get(peer, 0) - 1, self.began_at)
                voted = self._voted.get(peer, 0)
                what = f"{short_id(peer)} runs and has not voted"
                yield Demand("votes", what, self.height - max(since, voted), VOTE_HEIGHTS_MAX, voted <= since)
        for culprit, height in sorted(self.accused.items()):
            if culprit not in self.expelled and self._current(culprit) not in self.expelled:
                age = self.height - max(height, self.began_at)
                yield Demand("liars gone", f"{short_id(culprit)} is not expelled", age, EXPULSION_HEIGHTS_MAX, True)
        for key, height in sorted(self.going.items()):
            if key in voters and len(voters) > 1:
                age = self.height - max(height, self.began_at)
                yield Demand("changes", f"{short_id(key)} still votes", age, CHANGE_HEIGHTS_MAX, True)
        for key, height in sorted(self.coming.items()):
            if key not in voters and self._votes_since.get(key, self.height + 3) > self.height + 2:
                age = self.height - max(height, self.began_at)
                yield Demand("changes", f"{short_id(key)} does not vote yet", age, CHANGE_HEIGHTS_MAX, True)
        yield from self._of_newcomers(now, running, voters)

    def _of_jobs(self, now: float, running: Collection[bytes], voters: Keys) -> Iterator[Demand]:
        assert self.began is not None
        training = next((key for key, job in self.jobs.items() if not job.is_alone), None)
        for key, job in sorted(self.jobs.items()):
            if job.left_at is not None:
                age, what = self.height - max(job.left_at, self.began_at), f"job {key.hex()[:6]} does not end without its trainer"
                yield Demand("jobs left", what, age, LEFT_HEIGHTS_MAX, True)
                continue
            if job.is_alone and self._current(job.author) not in running:
                continue  # a round without an eligible trainer stays open until its trainer is back
            if not job.is_alone and key != training:
                job.since = now
                continue  # it waits in the queue
            seen = f"job {key.hex()[:6]} (round {job.closed})"
            age = now - max(job.since, self.began)
            yield Demand("rounds", f"{seen} closes no round", age, ROUND_SECONDS_MAX, job.since <= self.began)
            idle = job.closed - job.accepted_at
            yield Demand("accepted", f"{seen} accepts no update", idle, ACCEPTED_ROUNDS_MAX, not job.has_accepted)
            for peer in job.waiting.keys() - set(voters):  # if it votes again, its rounds are counted from then
                del job.waiting[peer]
            # A liar that hides its updates from one voter makes that one wait, while the others settle each round.
            for peer in sorted(set(running).intersection(voters)) if set(voters) <= set(self.honest) else ():
                first = job.waiting.setdefault(peer, job.closed)
                idle = job.closed - max(first, job.ballots.get(peer, first))
                yield Demand(
                    "ballots", f"{short_id(peer)} casts none in {seen}", idle, BALLOT_ROUNDS_MAX, peer not in job.ballots
                )

    def _of_newcomers(self, now: float, running: Collection[bytes], voters: Keys) -> Iterator[Demand]:
        assert self.began is not None
        for key, newcomer in sorted(self.newcomers.items()):
            may_come = newcomer.is_admitted or (newcomer.inviter in voters and newcomer.inviter not in self.expelled)
            if key in running and may_come and key not in self._voted:
                yield Demand(
                    "newcomers", f"{short_id(key)} has come and does not vote", now - self.began, NEWCOMER_SECONDS_MAX, True
                )

    def came_about(self) -> dict[str, int]:
        """Return counts for the figures of a campaign: newcomers of the whole history, other events since the recovery."""
        voted = sum(key in self._voted for key in self.newcomers)
        return {**self.counts, **({"newcomers voted": voted} if voted else {})}

    def check(self, now: float, running: Collection[bytes], others: Iterable[Demand] = ()) -> bool:
        """Return True if every demand was met at least once. Raises Violation if one is overdue."""
        complete = True
        for demand in (*self.demands(now, running), *others):
            if demand.age > demand.most:
                raise Violation(demand.rule, f"{demand.what} for {demand.age:.0f}, {demand.most:.0f} are the most")
            complete = complete and not demand.never
        return complete
