"""What the rest of a peer sees of the network. `swarm.Swarm` (TCP) and `memory_network.MemoryNetwork` both are one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

import trio

from protocol.errors import RemoteProtocolError
from protocol.identity import short_id
from protocol.messages import LivenessReport
from transport.wire.failure_detector import KeepaliveConfig
from transport.wire.framing import ByPriority, Priority
from transport.wire.link_measurements import LinkHistory

__all__ = [
    "DataReceived",
    "DialInfo",
    "DuplicateIdentity",
    "LinkInfo",
    "Network",
    "NetworkEvent",
    "NetworkEventQueue",
    "PeerConnected",
    "PeerDisconnected",
    "Priority",
    "Traffic",
]


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: bytes


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    peer: bytes


@dataclass(frozen=True, slots=True)
class DataReceived:
    peer: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class DuplicateIdentity:
    """Another process has proven that it has our own key."""

    address: str  # where it answers, or called from


NetworkEvent = PeerConnected | PeerDisconnected | DataReceived | DuplicateIdentity


class NetworkEventQueue(Protocol):
    """The one queue of a network's events. For each peer: Connected, any number of Received, Disconnected.

    What a peer says comes in order within each priority; votes go before what was said earlier with another one.
    """

    async def receive(self) -> NetworkEvent: ...

    def __aiter__(self) -> NetworkEventQueue: ...

    async def __anext__(self) -> NetworkEvent: ...


@dataclass(frozen=True, slots=True)
class LinkInfo:
    peer: bytes
    address: str  # "host:port" as seen from here
    dialed: bool  # True: this peer opened the connection
    sent: ByPriority  # bytes of messages, before encryption
    received: ByPriority
    round_trip_seconds: float | None  # in the median of the last pings; None until the first one was answered
    connected_since: float  # seconds on the event loop's clock
    history: LinkHistory  # of all links to this peer, this one included
    kind: str = "direct"
    relay: bytes | None = None  # who forwards it, if it is not direct
    silent_seconds: float = 0.0  # since something came
    suspected: bool = False  # that is longer than this link is usually silent
    liveness_report: LivenessReport | None = None  # whom the peer said last that it hears


@dataclass(frozen=True, slots=True)
class DialInfo:
    """An address that could not be reached the last time it was dialed."""

    address: str
    peer: bytes | None  # who is expected there; None: whoever answers
    reason: str
    tries: int  # in a row
    next_seconds: float  # until it is dialed again

    def __str__(self) -> str:
        tries = "1 try" if self.tries == 1 else f"{self.tries} tries"
        expected = f"{short_id(self.peer)}, " if self.peer else ""
        return f"cannot reach {self.address}: {self.reason} ({expected}{tries}), next in {math.ceil(self.next_seconds)} s"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes since the start, over all links, also those that are closed."""

    sent: ByPriority
    received: ByPriority
    blobs_sent: int  # payload bytes served by digest; part of `sent[BULK]`
    blobs_received: int
    audit_bytes_sent: int  # bytes of blobs that serve audits alone; part of the blobs'
    audit_bytes_received: int


class Network(Protocol):
    @property
    def me(self) -> bytes: ...

    @property
    def keepalive(self) -> KeepaliveConfig: ...

    @property
    def events(self) -> NetworkEventQueue: ...

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started when connections can arrive. Raises `UserError` if that is impossible."""

    def send(self, peer: bytes, data: bytes, priority: Priority = Priority.CONTROL) -> bool:
        """Queue `data`; never blocks. False: not connected, or that queue is full (counted as `queue-full`)."""

    def broadcast(self, data: bytes, priority: Priority = Priority.CONTROL) -> int:
        """Queue `data` for every connected peer that is no stranger; the number of peers it was queued for."""

    def connected_peers(self) -> frozenset[bytes]: ...

    def live_peers(self) -> frozenset[bytes]:
        """Those connected that are not suspected: they were not silent for longer than their links usually are."""

    def send_liveness_report(self, hears: LivenessReport, to: Set[bytes]) -> None:
        """Tells those of `to` that are connected and were told something else last."""

    def ban_peer(self, peer: bytes, error: RemoteProtocolError) -> None:
        """The peer misbehaved: close its connection, count `error.reason`, refuse its key for a while that grows."""

    def worked(self, peer: bytes, seconds: float) -> None:
        """A `DataReceived` of this peer was dealt with, in so much processor time. A link that took too much is read more slowly.

        No more of strangers are handed out than `transport.connections.inbound_queue.STRANGER_MESSAGES_IN_PROGRESS_MAX` before
        that is said of one.
        """

    def charge_cpu(self, peer: bytes, seconds: float) -> None:
        """What else was done for a peer has taken so much processor time; its link pays."""

    def cpu_wait_seconds(self, peer: bytes) -> float:
        """Seconds until the link of this peer has paid back what was done for it; it has where that is not above 0."""

    def links(self) -> tuple[LinkInfo, ...]: ...

    def traffic(self) -> Traffic: ...

    def audit_bytes_sent_by_peer(self) -> Mapping[bytes, int]:
        """`Traffic.audit_bytes_sent` by peer."""

    def refusal_counts(self) -> Mapping[str, int]:
        """Everything refused so far, by reason: connections, handshakes, frames, messages and payloads."""

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] | None = None) -> None:
        """Return when the blob store holds `digest`. `sources` are asked first, then every connected peer.

        Never gives up by itself: put a deadline around it. Raises only what the local store raises (`StorageError`).
        """
