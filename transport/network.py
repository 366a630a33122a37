"""What a network reports to the rest of a peer: events and traffic."""

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
    """Another process has proven that it has our own key."""

    address: str  # where it answers, or called from


NetworkEvent = PeerConnected | PeerDisconnected | DataReceived | DuplicateIdentity


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes since the start, over all links, also those that are closed."""

    sent: ByPriority
    received: ByPriority
    blobs_sent: int  # payload bytes served by digest; part of `sent[BULK]`
    blobs_received: int
    audit_bytes_sent: int  # bytes of blobs that serve audits alone; part of the blobs'
    audit_bytes_received: int
