"""Every message that crosses the wire. `docs/protocol.md` gives the same table byte by byte.

Signed messages are bodies of `identity.Signed`; the others are protected by the authenticated link they arrive on and are
never evidence for anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from protocol.codec import Between, Count, Digest, Key, Length, SignatureBytes
from protocol.identity import Signed
from protocol.limits import (
    ADDRESSES_MAX,
    BLOB_BYTES_MAX,
    BLOB_CHUNK_BYTES,
    BLOCK_BYTES_MAX,
    DECISIONS_PER_REPLY_MAX,
    NAME_CHARACTERS_MAX,
    TRAINERS_MAX,
    TRANSACTION_BYTES_MAX,
    VOTERS_MAX,
)
from protocol.reasons import Verdict

NO_VIEW = -1  # the `high_view` of a Timeout whose sender holds no prepare certificate

Name = Annotated[str, Length(1, NAME_CHARACTERS_MAX)]
Address = Annotated[str, Length(3, 256)]  # "host:port"
View = Annotated[int, Between(NO_VIEW, 2**53 - 1)]


# Agreement: signed by voters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Propose:
    """The leader of (height, view) puts this block forward; the block's bytes travel beside it in `Proposed`."""

    TAG: ClassVar[str] = "propose"
    voters: Digest  # hash of the voter set that decides this height
    height: Count
    view: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class Prepare:
    TAG: ClassVar[str] = "prepare"
    voters: Digest
    height: Count
    view: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class Commit:
    TAG: ClassVar[str] = "commit"
    voters: Digest
    height: Count
    view: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class Timeout:
    """I give up on `view`; the highest prepare certificate I hold is for (`high_view`, `high_block`)."""

    TAG: ClassVar[str] = "timeout"
    voters: Digest
    height: Count
    view: Count
    high_view: View
    high_block: Digest | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """`q` voters signed the same `vote`: the encoded Prepare or Commit, as it was signed."""

    vote: Annotated[bytes, Length(1, 256)]
    signatures: Annotated[dict[Key, SignatureBytes], Length(1, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class TimeoutCertificate:
    """`q` signed Timeouts of one (height, view) and the highest prepare certificate any of them names."""

    timeouts: Annotated[tuple[Signed, ...], Length(1, VOTERS_MAX)]
    high: Certificate | None


# Agreement: envelopes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposed:
    TAG: ClassVar[str] = "proposed"
    propose: Signed
    block: Annotated[bytes, Length(1, BLOCK_BYTES_MAX)]
    justification: TimeoutCertificate | None


@dataclass(frozen=True, slots=True)
class Vote:
    """A signed Prepare or Commit."""

    TAG: ClassVar[str] = "vote"
    vote: Signed


@dataclass(frozen=True, slots=True)
class TimedOut:
    TAG: ClassVar[str] = "timed-out"
    timeout: Signed
    high: Certificate | None


@dataclass(frozen=True, slots=True)
class Decision:
    TAG: ClassVar[str] = "decision"
    block: Annotated[bytes, Length(1, BLOCK_BYTES_MAX)]
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepare certificate on its own: lets a peer that lags behind in views catch up."""

    TAG: ClassVar[str] = "prepared"
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ViewEnded:
    """A timeout certificate on its own: takes a peer that missed some of its timeouts to the next view."""

    TAG: ClassVar[str] = "view-ended"
    certificate: TimeoutCertificate


@dataclass(frozen=True, slots=True)
class Status:
    """Where I am: the next height I want decided, and the view in it. Never trusted, only answered."""

    TAG: ClassVar[str] = "status"
    height: Count
    view: Count


@dataclass(frozen=True, slots=True)
class GetDecisions:
    TAG: ClassVar[str] = "get-decisions"
    first: Count
    count: Annotated[int, Between(1, DECISIONS_PER_REPLY_MAX)]


@dataclass(frozen=True, slots=True)
class GetBlock:
    """The bytes of an undecided block that a certificate names."""

    TAG: ClassVar[str] = "get-block"
    height: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class BlockBytes:
    TAG: ClassVar[str] = "block-bytes"
    height: Count
    block: Annotated[bytes, Length(1, BLOCK_BYTES_MAX)]


# Rounds: signed by trainers and voters -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trainer's claim: `payload` is my update for this round, computed on this model root."""

    TAG: ClassVar[str] = "proposal"
    job: Digest
    round: Count
    model_root: Digest
    payload: Digest
    payload_bytes: Annotated[int, Between(0, BLOB_BYTES_MAX)]
    buffer: Digest  # of m = decay·e + Δ, float32 little-endian
    feedback: Digest | None  # the `buffer` of my last accepted proposal, from which e comes; None: e is zero


@dataclass(frozen=True, slots=True)
class Judgement:
    trainer: Key
    proposal: Digest  # SHA-256 of the encoded, signed Proposal body
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Ballot:
    """A voter's one statement on a round: its verdict on every proposal it saw."""

    TAG: ClassVar[str] = "ballot"
    job: Digest
    round: Count
    model_root: Digest
    judgements: Annotated[tuple[Judgement, ...], Length(0, TRAINERS_MAX)]  # ascending by trainer, each once


@dataclass(frozen=True, slots=True)
class CutOff:
    """Close the round without waiting longer: these are the ballots I hold (SHA-256 of their signed bodies)."""

    TAG: ClassVar[str] = "cut-off"
    job: Digest
    round: Count
    ballots: Annotated[tuple[Digest, ...], Length(0, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class Transaction:
    """Anything a member asks the network to decide. `kind` names the ledger module's transaction type."""

    TAG: ClassVar[str] = "transaction"
    nonce: Count  # the author's previous nonce plus one
    expires: Count  # the last height at which it may be decided
    kind: Name
    content: Annotated[bytes, Length(0, TRANSACTION_BYTES_MAX)]


# Rounds and transactions: envelopes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Relay:
    """A signed Proposal, Ballot, CutOff or Transaction, from its author or passed on by anybody."""

    TAG: ClassVar[str] = "relay"
    signed: Signed


@dataclass(frozen=True, slots=True)
class GetRound:
    """Send me the proposals, ballots and cut-offs you hold for this round."""

    TAG: ClassVar[str] = "get-round"
    job: Digest
    round: Count


# Links: blobs and addresses ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetBlob:
    TAG: ClassVar[str] = "get-blob"
    digest: Digest
    offset: Count


@dataclass(frozen=True, slots=True)
class BlobChunk:
    TAG: ClassVar[str] = "blob-chunk"
    digest: Digest
    offset: Count
    total: Annotated[int, Between(0, BLOB_BYTES_MAX)]
    chunk: Annotated[bytes, Length(0, BLOB_CHUNK_BYTES)]


@dataclass(frozen=True, slots=True)
class NoBlob:
    TAG: ClassVar[str] = "no-blob"
    digest: Digest


@dataclass(frozen=True, slots=True)
class PeerAddress:
    peer: Key
    address: Address


@dataclass(frozen=True, slots=True)
class Addresses:
    """Peers I know how to reach; sent after the handshake and when the list grows."""

    TAG: ClassVar[str] = "addresses"
    known: Annotated[tuple[PeerAddress, ...], Length(0, ADDRESSES_MAX)]


@dataclass(frozen=True, slots=True)
class Ping:
    TAG: ClassVar[str] = "ping"
    number: Count


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to the Ping of that number, at once."""

    TAG: ClassVar[str] = "pong"
    number: Count


AGREEMENT = (Proposed, Vote, TimedOut, Decision, Prepared, ViewEnded, Status, GetDecisions, GetBlock, BlockBytes)
ROUNDS = (Relay, GetRound)
LINKS = (GetBlob, BlobChunk, NoBlob, Addresses, Ping, Pong)
