"""The inputs of a replica, and the interface of the application that the replica calls."""

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

HeightMessage = ProposeEnvelope | Vote | TimeoutEnvelope | Prepared | ViewEnded  # messages that concern one height
AgreementMessage = (
    HeightMessage | Decision | Status | GetDecisions | GetBlock | BlockBytes | GetRememberedStatements | RememberedStatements
)


@dataclass(frozen=True, slots=True)
class MessageInput:
    peer: bytes  # authenticated key of the peer at the other end of the link
    message: AgreementMessage


@dataclass(frozen=True, slots=True)
class ConnectedInput:
    peer: bytes


@dataclass(frozen=True, slots=True)
class DisconnectedInput:
    peer: bytes


@dataclass(frozen=True, slots=True)
class DuplicateIdentityInput:
    """An input: another machine has proven that it has this peer's key."""

    address: str


@dataclass(frozen=True, slots=True)
class AppliedInput:
    """An input: the application has applied the decided block of `height` (0: the genesis)."""

    height: int
    state_root: bytes
    # Voters of `height`, `height + 1` and `height + 2`; at the genesis, the founders three times.
    voters: tuple[VoterSet, VoterSet, VoterSet]


@dataclass(frozen=True, slots=True)
class WorkChangedInput:
    """An input: answers of the `Application` may have changed."""


@dataclass(frozen=True, slots=True)
class TickInput:
    """An input: the deadline of the last step has passed."""


ReplicaInput = (
    MessageInput | ConnectedInput | DisconnectedInput | DuplicateIdentityInput | AppliedInput | WorkChangedInput | TickInput
)


class Application(Protocol):
    """The interface of the ledger for a replica.

    Calls run inside a step and must be quick. They refer to the last `AppliedInput`.
    """

    def make_body(self, height: int, now_ms: int) -> bytes | None:
        """Make a body for a block at `height`, of at most `block.BODY_BYTES_MAX` bytes. None: no block is due."""

    def why_body_refused(self, height: int, body: bytes, proposer: bytes) -> str | None:
        """Return why a fresh body must not be prepared, or None. The replica repeats the call after `WorkChangedInput`."""

    def has_work(self) -> bool:
        """Return whether a block is due, so that `make_body` returns one. A view timer runs while a block is due."""

    def make_compact_body(self, body: bytes) -> bytes:
        """Return the compact form of a body, with digests in place of messages that other voters should already have.

        The result depends on the body alone.
        """

    def expand_body(self, short: bytes) -> bytes | None:
        """Restore the body from its compact form. Raises `RemoteProtocolError` if `short` is not a valid compact form.

        None: a message is missing. The replica repeats the call after `WorkChangedInput`. The caller checks the digest of the
        body.
        """

    def is_member(self, peer: bytes) -> bool:
        """Return whether a peer is a member. A leader sends decided blocks to members. Strangers must request them."""

    def last_supported_height(self) -> int | None:
        """Return the last height whose blocks this program can judge, or None. A voter signs nothing above it."""

    def statements_signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        """Return the peer's statements about rounds that are open or may open soon. The peer's own disk may have lost them."""
