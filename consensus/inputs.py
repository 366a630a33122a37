"""What a replica is told, its inputs; and what it asks, the application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from consensus.voter_set import VoterSet
from protocol.identity import Signed
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


class Application(Protocol):
    """Answers must be quick (they run inside a step) and refer to the state after the last `CurrentState` event."""

    def make_body(self, height: int, now_ms: int) -> bytes | None:
        """The body of a block for `height`, at most `block.BODY_BYTES_MAX` long; None: nothing is worth a block now."""

    def why_body_refused(self, height: int, body: bytes, proposer: bytes) -> str | None:
        """Why a fresh body must not be prepared; None: nothing is wrong. Asked again after `WorkChangedInput`."""

    def has_work(self) -> bool:
        """Whether a block is due, which `make_body` would then make: view timers run only while it is."""

    def make_compact_body(self, body: bytes) -> bytes:
        """The body with whatever others should hold already replaced by its digest: a pure function of the body."""

    def expand_body(self, short: bytes) -> bytes | None:
        """The body that was condensed to `short`; None: some part is not here. Asked again after `WorkChangedInput`.

        Raises `RemoteProtocolError` if this is no valid short form. Whether it is the right body is checked by its digest.
        """

    def is_member(self, peer: bytes) -> bool:
        """Whether the leader sends decided blocks to this peer though it does not vote; strangers have to ask for them."""

    def last_supported_height(self) -> int | None:
        """The last height that this program can judge. Nothing is signed above it. None: there is no such height."""

    def statements_signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        """What this peer has signed in rounds that are open here, or may soon be: it may have forgotten that with its disk."""
