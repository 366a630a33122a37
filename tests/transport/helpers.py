"""Shared helpers of the transport tests: a blob store in memory, keys, and a pair of connected sessions."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from protocol.errors import RemoteProtocolError
from protocol.identity import Identity
from protocol.messages import GuestInvitation
from transport.connections.connection_manager import ConnectionManager
from transport.network import NetworkEvent
from transport.peer_policy import EverybodyIsMember, PeerClass
from transport.wire.framing import Message
from transport.wire.noise_session import KeyPair, NoiseSession, PeerAuthenticated

CHAIN = hashlib.sha256(b"a chain").digest()
ALICE, BOB, CAROL, DAVE = sorted((Identity(bytes([n]) * 32) for n in range(1, 5)), key=lambda identity: identity.public)
ERIN = Identity(bytes([5]) * 32)  # in any order
DEADLINE_SECONDS = 35.0  # far longer than these tests take; a silent link ends later


STEP_SECONDS = 0.01


class UnhurriedClock(trio.abc.Clock):
    """Real time while this process waits, and at most STEP_SECONDS for each step between waits. A busy or stopped machine can
    therefore cause no timeouts."""

    def __init__(self) -> None:
        self._time, self._seen, self._waits = 0.0, time.perf_counter(), 0.0

    def start_clock(self) -> None:
        self._seen = time.perf_counter()

    def current_time(self) -> float:
        now = time.perf_counter()
        self._time += min(now - self._seen, self._waits + STEP_SECONDS)
        self._seen, self._waits = now, 0.0
        return self._time

    def deadline_to_sleep_time(self, deadline: float) -> float:
        self._waits = deadline - self.current_time()
        return self._waits


class MemoryBlobs:
    def __init__(self, *blobs: bytes) -> None:
        self.blobs = {digest(blob): blob for blob in blobs}
        self.aborted = self.finished = 0
        self.reveals: set[bytes] = set()

    def is_audit_data(self, digest: bytes) -> bool:
        return digest in self.reveals

    def size(self, digest: bytes) -> int | None:
        return len(self.blobs[digest]) if digest in self.blobs else None

    def piece_size(self, digest: bytes) -> int | None:
        return self.size(digest)

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
        return self.blobs[digest][offset : offset + length]

    def missing_parts(self, digest: bytes) -> None:
        """Return nothing, since objects have no parts here."""

    def wrote(self, digest: bytes) -> None:
        """Hook for each chunk that arrives."""

    def open_writer(self, digest: bytes, total: int, of: bytes | None = None) -> MemoryWriter:
        return MemoryWriter(self, digest, total)


class MemoryWriter:
    def __init__(self, store: MemoryBlobs, name: bytes, total: int) -> None:
        self._store, self._name, self._total, self._data = store, name, total, bytearray()

    def write(self, chunk: bytes) -> None:
        assert len(self._data) + len(chunk) <= self._total
        self._data += chunk
        self._store.wrote(self._name)

    def finish(self) -> None:
        self._store.finished += 1
        if digest(self._data) != self._name:
            raise RemoteProtocolError("bad-blob", "the bytes do not have the digest they were asked for by")
        self._store.blobs[self._name] = bytes(self._data)

    def abort(self) -> None:
        self._store.aborted += 1


class LyingBlobs(MemoryBlobs):
    """A store that claims to hold `digest` and serves other bytes."""

    def __init__(self, digest: bytes, lie: bytes) -> None:
        super().__init__()
        self.blobs[digest] = lie


def digest(data: bytes | bytearray) -> bytes:
    return hashlib.sha256(data).digest()


def make_session(
    me: Identity,
    initiator: bool,
    *,
    chain: bytes = CHAIN,
    expected: bytes | None = None,
    ephemeral: int = 0,
) -> NoiseSession:
    static = KeyPair.from_private(hashlib.sha256(me.seed + b"static").digest())
    fresh = KeyPair.from_private(hashlib.sha256(me.seed + bytes([initiator, ephemeral])).digest())
    return NoiseSession(me, chain, initiator=initiator, static=static, ephemeral=fresh, expected=expected)


def exchange_bytes(one: NoiseSession, other: NoiseSession) -> list[tuple[NoiseSession, PeerAuthenticated | Message]]:
    """Carry bytes both ways until none are left. Return the events with their sessions."""
    events: list[tuple[NoiseSession, PeerAuthenticated | Message]] = []
    while True:
        moved = False
        for sender, receiver in ((one, other), (other, one)):
            while data := sender.data_to_send():
                moved = True
                events += [(receiver, event) for event in receiver.receive(data)]
        if not moved:
            return events


def joined_sessions() -> tuple[NoiseSession, NoiseSession]:
    initiator, responder = make_session(ALICE, True), make_session(BOB, False)
    exchange_bytes(initiator, responder)
    return initiator, responder


async def until(condition: Callable[[], object]) -> None:
    """Return when `condition` holds. Use it where no event tells."""
    while not condition():  # noqa: ASYNC110 - there is no event for a counter
        await trio.sleep(0.001)


async def next_event(network: ConnectionManager, *kinds: type[NetworkEvent]) -> NetworkEvent:
    """Return the next event of one of these kinds. Other events are skipped."""
    async for event in network.events:
        if isinstance(event, kinds):
            return event
    raise AssertionError("events do not end")


async def linked(*networks: ConnectionManager) -> None:
    """Return when all of these networks are connected with each other."""
    await until(lambda: all(network.connected_peers() >= {other.me for other in networks} - {network.me} for network in networks))


@dataclass
class PolicyDouble(EverybodyIsMember):
    """A peer policy in which each answer comes from a function."""

    standing_of: Callable[[bytes], PeerClass] = lambda peer: PeerClass.MEMBER
    members: Callable[[bytes], bool] = lambda peer: True
    welcome: Callable[[bytes, GuestInvitation], None] = lambda peer, shown: None
    guest: Callable[[], GuestInvitation | None] = lambda: None

    @classmethod
    def take(cls, options: dict[str, Any]) -> PolicyDouble:
        """Remove the fields of this class from `options` and return a double with them."""
        return cls(**{field.name: options.pop(field.name) for field in dataclasses.fields(cls) if field.name in options})

    def classify(self, peer: bytes) -> PeerClass:
        return self.standing_of(peer)

    def is_member(self, peer: bytes) -> bool:
        return self.members(peer)

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        self.welcome(peer, shown)

    def own_invitation(self) -> GuestInvitation | None:
        return self.guest()
