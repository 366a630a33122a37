"""What a network reports to the rest of a peer: events, links, dials, traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.identity import short_id
from protocol.messages import LivenessReport
from transport.wire.framing import ByPriority, Priority
from transport.wire.link_measurements import LinkHistory

__all__ = [
    "DataReceived",
    "DialInfo",
    "DuplicateIdentity",
    "LinkInfo",
    "NetworkEvent",
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
