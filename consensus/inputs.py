"""Inputs of the replica."""

from __future__ import annotations

from dataclasses import dataclass

from consensus.voter_set import VoterSet
from protocol.messages import (
    BlockBytes,
    Decision,
    GetBlock,
    GetDecisions,
    GetRememberedStatements,
    Prepared,
    ProposeEnvelope,
    RememberedStatements,
    Status,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)

HeightMessage = ProposeEnvelope | Vote | TimeoutEnvelope | Prepared | ViewEnded  # means something only at its height
AgreementMessage = (
    HeightMessage | Decision | Status | GetDecisions | GetBlock | BlockBytes | GetRememberedStatements | RememberedStatements
)


@dataclass(frozen=True, slots=True)
class MessageInput:
    peer: bytes  # the authenticated key at the other end of the link
    message: AgreementMessage


@dataclass(frozen=True, slots=True)
class ConnectedInput:
    peer: bytes


@dataclass(frozen=True, slots=True)
class DisconnectedInput:
    peer: bytes


@dataclass(frozen=True, slots=True)
class DuplicateIdentityInput:
    """Another machine has proven that it has our key."""

    address: str


@dataclass(frozen=True, slots=True)
class AppliedInput:
    """The application has applied the decided block of `height` (0: the genesis)."""

    height: int
    state_root: bytes
    voters: tuple[VoterSet, VoterSet, VoterSet]  # of `height`, `height + 1`, `height + 2`; genesis: the founders thrice


@dataclass(frozen=True, slots=True)
class WorkChangedInput:
    """`propose`, `check` or `has_work` may answer differently now."""


@dataclass(frozen=True, slots=True)
class TickInput:
    """The deadline of the last turn has come."""


ReplicaInput = (
    MessageInput | ConnectedInput | DisconnectedInput | DuplicateIdentityInput | AppliedInput | WorkChangedInput | TickInput
)
