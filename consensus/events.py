"""Inputs of the replica."""

from __future__ import annotations

from dataclasses import dataclass

from consensus.voters import VoterSet
from protocol.messages import (
    BlockBytes,
    Decision,
    GetBlock,
    GetDecisions,
    GetOwnStatements,
    OwnStatements,
    Prepared,
    ProposeEnvelope,
    Status,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)

OfHeight = ProposeEnvelope | Vote | TimeoutEnvelope | Prepared | ViewEnded  # means something only at its height
Message = OfHeight | Decision | Status | GetDecisions | GetBlock | BlockBytes | GetOwnStatements | OwnStatements


@dataclass(frozen=True, slots=True)
class Received:
    peer: bytes  # the authenticated key at the other end of the link
    message: Message


@dataclass(frozen=True, slots=True)
class Connected:
    peer: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    peer: bytes


@dataclass(frozen=True, slots=True)
class Copied:
    """Another machine has proven that it has our key."""

    address: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The application has applied the decided block of `height` (0: the genesis)."""

    height: int
    state_root: bytes
    voters: tuple[VoterSet, VoterSet, VoterSet]  # of `height`, `height + 1`, `height + 2`; genesis: the founders thrice


@dataclass(frozen=True, slots=True)
class WorkChanged:
    """`propose`, `check` or `has_work` may answer differently now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline of the last turn has come."""


Event = Received | Connected | Disconnected | Copied | Applied | WorkChanged | Tick
