"""Consensus, one replica among voters that the test drives. The bench makes messages and gives them one by one."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from consensus.block import block_digest, decode_block, encode_header, make_header
from consensus.effects import DecidedBlock, RestartState, SendMessage, StepEffects, persist_effects
from consensus.inputs import AgreementMessage, AppliedInput, ConnectedInput, MessageInput, ReplicaInput, WorkChangedInput
from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, sign_message
from protocol.messages import (
    NO_VIEW,
    Certificate,
    Commit,
    GetBlock,
    Prepare,
    Propose,
    ProposeEnvelope,
    RememberedStatements,
    Timeout,
    TimeoutCertificate,
    TimeoutEnvelope,
    Vote,
)
from tests.consensus.certificates import certificate_of
from tests.consensus.counter import Counter
from tests.consensus.journal import MemoryJournal
from tests.sim.keys import FastSigner, FastVerifier

CHAIN_ID = bytes(range(32))
START = 1_000.0


@dataclass
class Bench:
    """A bench with `n` voters. The voter at `place` in ascending order of keys is the replica under test."""

    n: int = 4
    place: int = 0
    now: float = START
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    application: ClassVar[type[Counter]] = Counter

    def __post_init__(self) -> None:
        self.signers = sorted((FastSigner(f"voter {i}") for i in range(self.n)), key=lambda signer: signer.public)
        self.voters = VoterSet.from_keys(signer.public for signer in self.signers)
        self.counter = self.application(self.voters)
        self.turn = StepEffects()
        self.replica = self._replica(RestartState())
        self.tell_that_nothing_was_heard()

    def _replica(self, restart: RestartState) -> Replica:
        return Replica(self.signers[self.place], CHAIN_ID, FastVerifier(), self.counter, self.counter.applied(), restart)

    def restart(self) -> None:
        self.replica = self._replica(self.journal.read_restart_state())
        self.tell_that_nothing_was_heard()

    def tell_that_nothing_was_heard(self) -> None:
        """Answer the first question of a voter by a quorum of the others."""
        for other in [i for i in range(self.n) if i != self.place][: self.voters.quorum - 1]:
            self.give(other, RememberedStatements(self.replica.height, ()))

    # Giving ----------------------------------------------------------------------------------------------------------

    def step(self, event: ReplicaInput, wait: float = 0.0) -> StepEffects:
        self.now += wait
        self.turn = self.replica.step(event, self.now)
        persist_effects(self.turn, self.journal)
        return self.turn

    def give(self, sender: int, message: AgreementMessage) -> StepEffects:
        return self.give_from(self.signers[sender].public, message)

    def give_from(self, peer: bytes, message: AgreementMessage) -> StepEffects:
        return self.step(MessageInput(peer, message))

    def give_prepares(self, block: bytes) -> None:
        """Give prepares of two voters, which form a quorum of four together with the replica under test."""
        for voter in others(self)[:2]:
            self.give(voter, self.prepare(voter, block))

    def add_work(self, item: int) -> StepEffects:
        self.counter.add(item)
        return self.step(WorkChangedInput())

    def connect(self, *others: int) -> None:
        for other in others:
            self.step(ConnectedInput(self.signers[other].public))

    def apply(self, decided: DecidedBlock) -> AppliedInput:
        applied = self.counter.apply(decided)
        self.step(applied)
        return applied

    # Making ----------------------------------------------------------------------------------------------------------

    def block(self, leader: int, body: bytes = b"\x91\x01") -> bytes:
        """Return a valid block of the height to be decided, made by this leader now."""
        return self.replica._chain.build_block(body, self.signers[leader].public, int(self.now * 1_000))

    def leader(self, view: int = 0) -> int:
        schedule = self.replica._chain.leader_schedule(self.replica.height)
        assert schedule is not None
        return self.voters.keys.index(schedule.leader_of_view(view))

    def sign(self, voter: int, statement: object) -> Signed:
        return sign_message(self.signers[voter], CHAIN_ID, statement)

    def propose(self, block: bytes, view: int = 0, justification: TimeoutCertificate | None = None) -> ProposeEnvelope:
        propose = Propose(self.voters.hash, self.replica.height, view, block_digest(block))
        header, body = encode_header(make_header(decode_block(block))), decode_block(block).body
        return ProposeEnvelope(self.sign(self.leader(view), propose), header, body, justification)

    def prepare(self, voter: int, block: bytes, view: int = 0) -> Vote:
        return Vote(self.sign(voter, Prepare(self.voters.hash, self._height(block), view, block_digest(block))))

    def commit(self, voter: int, block: bytes, view: int = 0) -> Vote:
        return Vote(self.sign(voter, Commit(self.voters.hash, self._height(block), view, block_digest(block))))

    def timed_out(
        self, voter: int, view: int = 0, high: Certificate | None = None, of: tuple[int, bytes] | None = None
    ) -> TimeoutEnvelope:
        high_view, block = of or (NO_VIEW, None)
        timeout = Timeout(self.voters.hash, self.replica.height, view, high_view, block_digest(block) if block else None)
        return TimeoutEnvelope(self.sign(voter, timeout), high)

    def certificate(self, kind: type[Prepare] | type[Commit], block: bytes, view: int, signers: tuple[int, ...]) -> Certificate:
        statement = kind(self.voters.hash, self._height(block), view, block_digest(block))
        return certificate_of(CHAIN_ID, statement, (self.signers[i] for i in signers))

    def timeout_certificate(
        self, view: int, signers: tuple[int, ...], high: Certificate | None = None, of: tuple[int, bytes] | None = None
    ) -> TimeoutCertificate:
        return TimeoutCertificate(tuple(self.timed_out(i, view, high, of).timeout for i in signers), high)

    def _height(self, block: bytes) -> int:
        return decode_block(block).height

    # Observations ----------------------------------------------------------------------------------------------------

    def sent(self, kind: type) -> list[AgreementMessage]:
        return [send.message for send in self.turn.sends if isinstance(send, SendMessage) and isinstance(send.message, kind)]

    def sent_votes(self, kind: type) -> list[Signed]:
        votes = [message.vote for message in self.sent(Vote) if isinstance(message, Vote)]
        return [vote for vote in votes if vote.body[1:].startswith(_tag(kind))]

    @property
    def faults(self) -> list[str]:
        return [fault.error.reason for fault in self.turn.faults]


B = TypeVar("B", bound=Bench)


def follower(kind: type[B] = Bench, n: int = 4, views: tuple[int, ...] = (0, 1)) -> B:  # type: ignore[assignment]
    """Return a replica that leads none of these views of the first height."""
    leaders = {kind(n).leader(view) for view in views}
    return kind(n, next(i for i in range(n) if i not in leaders))


def others(bench: Bench) -> tuple[int, ...]:
    return tuple(i for i in range(bench.n) if i != bench.place)


def _tag(kind: type) -> bytes:
    tag: str = getattr(kind, "TAG")  # noqa: B009 - every statement has one
    return bytes([0xA0 + len(tag)]) + tag.encode()


# Compact proposals without the whole body -----------------------------------------------------------------------------

BODY = b"\x91\x07"


@dataclass
class Digests(Counter):
    """An application whose short form is the digest of the body, which must be known."""

    known: dict[bytes, bytes] = field(default_factory=dict)

    def make_compact_body(self, body: bytes) -> bytes:
        return hashlib.sha256(body).digest()

    def expand_body(self, short: bytes) -> bytes | None:
        if len(short) != 32:
            raise RemoteProtocolError("mistyped", "no digest")
        return self.known.get(short)


class ShortBench(Bench):
    counter: Digests
    application = Digests

    def learn(self, body: bytes = BODY) -> None:
        self.counter.known[hashlib.sha256(body).digest()] = body
        self.step(WorkChangedInput())

    def short(self, block: bytes) -> ProposeEnvelope:
        message = self.propose(block)
        return dataclasses.replace(message, compact_body=self.counter.make_compact_body(message.compact_body))

    def asked(self) -> list[tuple[bytes, ...] | None]:
        sends = [send for send in self.turn.sends if isinstance(send, SendMessage)]
        return [send.to for send in sends if isinstance(send.message, GetBlock)]


def short_others(bench: Bench) -> list[int]:
    """Return the voters that are neither the leader nor the replica under test."""
    return [i for i in range(bench.n) if i not in (bench.place, bench.leader())]
