"""Events and traffic figures of a network, for the rest of a peer."""

from __future__ import annotations

from dataclasses import dataclass

from transport.wire.framing import ByPriority, Priority

__all__ = [
    "DataReceived",
    "DuplicateIdentity",
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
    """The event that another process has proven that it has this peer's key."""

    address: str  # address at which the process answers, or from which it connected


NetworkEvent = PeerConnected | PeerDisconnected | DataReceived | DuplicateIdentity


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes over all links since the peer's start, including closed links."""

    sent: ByPriority
    received: ByPriority
    blobs_sent: int  # bytes of blobs, a part of `sent[BULK]`
    blobs_received: int
    audit_bytes_sent: int  # bytes of blobs that only auditors need, included in `blobs_sent`
    audit_bytes_received: int
