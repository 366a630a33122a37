"""All messages between peers. `docs/protocol/` describes the same tables byte by byte.

Signed messages are bodies of `identity.Signed`. The authenticated link protects all other messages, which are never evidence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, ClassVar

from protocol.addresses import AddressScope
from protocol.codec import COUNT_MAX, Between, Count, Digest, Key, Length, SignatureBytes
from protocol.identity import Signed
from protocol.limits import (
    ADDRESS_CHARACTERS_MAX,
    ADVERTISED_MAX,
    AUDIT_NONCE_BYTES,
    BLOB_BYTES_MAX,
    BLOB_CHUNK_BYTES,
    BLOB_HOLDERS_MAX,
    BLOB_PART_BYTES,
    BLOCK_BYTES_MAX,
    CIRCUIT_RECORD_BYTES_MAX,
    CIRCUIT_WINDOW_BYTES_MAX,
    CLOSE_REASON_CHARACTERS_MAX,
    DECISIONS_PER_REPLY_MAX,
    DECLARATION_BYTES_MAX,
    HEADER_BYTES_MAX,
    INCLUSION_LIST_MAX,
    LIGHT_BLOCKS_MAX,
    NAME_CHARACTERS_MAX,
    PEER_RECORD_AGE_SECONDS_MAX,
    PEER_RECORDS_MAX,
    RELAY_RESERVATIONS_MAX,
    RELAYS_MAX,
    REMEMBERED_STATEMENTS_MAX,
    SNAPSHOT_PART_BYTES_MAX,
    TRAINERS_MAX,
    TRANSACTION_BYTES_MAX,
    VOTERS_MAX,
)
from protocol.verdicts import Verdict

NO_VIEW = -1  # `high_view` of a Timeout whose sender has no prepare certificate

Name = Annotated[str, Length(1, NAME_CHARACTERS_MAX)]
Address = Annotated[str, Length(3, ADDRESS_CHARACTERS_MAX)]  # "host:port"
Port = Annotated[int, Between(1, 65535)]
AuditNonce = Annotated[bytes, Length(AUDIT_NONCE_BYTES, AUDIT_NONCE_BYTES)]  # nonce of a voter for the sortition of audits


# Agreement: signed by voters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BlockStatement:
    """The fields of Propose, Prepare and Commit: one block in one view."""

    voters: Digest  # hash of the voter set of this height
    height: Count
    view: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class Propose(_BlockStatement):
    """The block of a view, proposed by its leader. The block's header and compact body are in the `ProposeEnvelope`."""

    TAG: ClassVar[str] = "propose"


@dataclass(frozen=True, slots=True)
class Prepare(_BlockStatement):
    TAG: ClassVar[str] = "prepare"


@dataclass(frozen=True, slots=True)
class Commit(_BlockStatement):
    TAG: ClassVar[str] = "commit"


@dataclass(frozen=True, slots=True)
class Timeout:
    """A voter's statement that it gives up `view`. The voter's highest prepare certificate is for `high_block` in `high_view`."""

    TAG: ClassVar[str] = "timeout"
    voters: Digest
    height: Count
    view: Count
    high_view: Annotated[int, Between(NO_VIEW, COUNT_MAX)]
    high_block: Digest | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """Signatures of `q` or more voters on one vote, which is the encoded Prepare or Commit as they signed it."""

    vote: Annotated[bytes, Length(1, 256)]
    signatures: Annotated[dict[Key, SignatureBytes], Length(1, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class TimeoutCertificate:
    """Signed Timeouts of `q` or more voters for one (height, view), and a prepare certificate that covers all of them.

    `high` is that prepare certificate, or None if no timeout names one.
    """

    timeouts: Annotated[tuple[Signed, ...], Length(1, VOTERS_MAX)]
    high: Certificate | None


# Agreement: envelopes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposeEnvelope:
    """A leader's proposal.

    `compact_body` has digests in place of signed messages that other voters should already have. A voter that lacks some of
    these requests the whole block (`GetBlock`).
    """

    TAG: ClassVar[str] = "propose-envelope"
    propose: Signed
    header: Annotated[bytes, Length(1, HEADER_BYTES_MAX)]
    compact_body: Annotated[bytes, Length(0, BLOCK_BYTES_MAX)]
    justification: TimeoutCertificate | None


@dataclass(frozen=True, slots=True)
class Vote:
    """Envelope of one signed Prepare or Commit."""

    TAG: ClassVar[str] = "vote"
    vote: Signed


@dataclass(frozen=True, slots=True)
class TimeoutEnvelope:
    TAG: ClassVar[str] = "timeout-envelope"
    timeout: Signed
    high: Certificate | None


@dataclass(frozen=True, slots=True)
class Decision:
    TAG: ClassVar[str] = "decision"
    block: Annotated[bytes, Length(1, BLOCK_BYTES_MAX)]
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepare certificate for a voter in an earlier view, which then enters the certificate's view."""

    TAG: ClassVar[str] = "prepared"
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ViewEnded:
    """A timeout certificate for a voter that missed some of the timeouts, and then enters the next view."""

    TAG: ClassVar[str] = "view-ended"
    certificate: TimeoutCertificate


@dataclass(frozen=True, slots=True)
class Status:
    """The next height that the sender has not decided, and the sender's view at that height.

    Receivers may send what the sender lacks, but never trust the message.
    """

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
    """Request for the bytes of a block that the sender knows from a certificate or a proposal."""

    TAG: ClassVar[str] = "get-block"
    height: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class BlockBytes:
    TAG: ClassVar[str] = "block-bytes"
    height: Count
    block: Annotated[bytes, Length(1, BLOCK_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class GetRememberedStatements:
    """Request for the sender's own latest statements, sent before it signs: its disk may have been reset to an older state."""

    TAG: ClassVar[str] = "get-remembered-statements"


@dataclass(frozen=True, slots=True)
class RememberedStatements:
    """Answer with the receiver's own statements at the sender's next height, at the two heights before it, and in open rounds."""

    TAG: ClassVar[str] = "remembered-statements"
    height: Count
    signed: Annotated[tuple[Signed, ...], Length(0, REMEMBERED_STATEMENTS_MAX)]


# Rounds: signed by trainers and voters -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossCommitment:
    """A commitment to the loss of a trainer's last local step, which hides the loss until the auditors have reported.

    See `ledger.audits.loss_commitments`.
    """

    digest: Digest  # SHA-256 hash over a secret and the loss
    key: Key  # X25519 public key from the same secret, with which auditors encrypt their losses


@dataclass(frozen=True, slots=True)
class _RoundMessage:
    """The first fields of all messages of a round."""

    job: Digest
    round: Count


@dataclass(frozen=True, slots=True)
class Proposal(_RoundMessage):
    """A trainer's claim that `payload` is its update for this round, computed on the model with this root."""

    TAG: ClassVar[str] = "proposal"
    model_root: Digest
    payload: Digest
    payload_bytes: Annotated[int, Between(0, BLOB_BYTES_MAX)]
    buffer: Digest | None  # digest of the packed levels of m = decay·e + Δ; None: the job has no error feedback
    feedback: Digest | None  # `buffer` of the trainer's last accepted proposal, which gives e; None: e is zero
    inner: Digest | None = None  # digest of the inner optimizer's state after the last step; None: it is not kept
    # `inner` of the trainer's last accepted proposal, with which the first step starts; None: a fresh state.
    inner_from: Digest | None = None
    declaration: Annotated[bytes, Length(0, DECLARATION_BYTES_MAX)] = b""  # encoded record of the objective; empty: it has none
    loss: LossCommitment | None = None  # present if the job has sampled audits and needs a worker


@dataclass(frozen=True, slots=True)
class Judgement:
    trainer: Key
    proposal: Digest  # SHA-256 hash of the encoded body of the signed Proposal
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Ballot(_RoundMessage):
    """A voter's only statement on a round, with its verdicts on the proposals that have reached it."""

    TAG: ClassVar[str] = "ballot"
    model_root: Digest
    judgements: Annotated[tuple[Judgement, ...], Length(0, TRAINERS_MAX)]  # ascending by trainer, one for each
    reveal: AuditNonce | None = None  # nonce of the voter's former commitment; None, as in the next field: no sampled audits
    commitment: Digest | None = None  # SHA-256 hash of a new nonce, which the voter's next decided ballot reveals


@dataclass(frozen=True, slots=True)
class Vouch(_RoundMessage):
    """A voter's verdicts after its re-execution of these proposals.

    A voter may sign several vouches in a round, for different trainers. UNJUDGED means that the voter is unsure: the update
    differs by one to two tolerances, or data did not arrive.
    """

    TAG: ClassVar[str] = "vouch"
    judgements: Annotated[tuple[Judgement, ...], Length(1, TRAINERS_MAX)]  # ascending by trainer, one for each


@dataclass(frozen=True, slots=True)
class CutOff(_RoundMessage):
    """A voter's request to close the round without more ballots. It names the ballots that have reached the voter."""

    TAG: ClassVar[str] = "cut-off"
    ballots: Annotated[tuple[Digest, ...], Length(0, VOTERS_MAX)]  # SHA-256 hashes of the ballots' signed bodies


@dataclass(frozen=True, slots=True)
class Transaction:
    """A member's request to change the ledger. `kind` names a type of transaction that a ledger module defines."""

    TAG: ClassVar[str] = "transaction"
    nonce: Count  # previous nonce of the author plus one
    expires: Count  # last height at which the transaction may be decided
    kind: Name
    content: Annotated[bytes, Length(0, TRANSACTION_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class InclusionList:
    """The transactions that have waited in a voter's mempool through a whole block, and can still be decided after `height`."""

    TAG: ClassVar[str] = "inclusion-list"
    height: Count
    transactions: Annotated[tuple[Digest, ...], Length(1, INCLUSION_LIST_MAX)]  # ascending, without duplicates


# Rounds and transactions: envelopes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GossipEnvelope:
    """A signed Proposal, Ballot, Vouch, CutOff, Transaction or InclusionList. Any peer may pass it on."""

    TAG: ClassVar[str] = "gossip-envelope"
    signed: Signed


@dataclass(frozen=True, slots=True)
class GetRound(_RoundMessage):
    """Request for the receiver's proposals, ballots, vouches and cut-offs of a round."""

    TAG: ClassVar[str] = "get-round"


@dataclass(frozen=True, slots=True)
class EvidenceMessage:
    """Two signed messages that exclude each other.

    Peers pass on one such message for each culprit, until a block expels the culprit.
    """

    TAG: ClassVar[str] = "evidence"
    first: Signed
    second: Signed


# Snapshots: the certified state for a peer that is new or was away for long ------------------------------------------


@dataclass(frozen=True, slots=True)
class LightBlock:
    """A decided header with its commit certificate. A chain of light blocks leads from one voter set to the next."""

    header: Annotated[bytes, Length(1, HEADER_BYTES_MAX)]
    certificate: Certificate
    # Voters of the next height, ascending; empty: the voter set does not change.
    next_voters: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class GetSnapshot:
    """Request for the state after `wanted` or a later height. The sender knows the voters of the height after `known`."""

    TAG: ClassVar[str] = "get-snapshot"
    known: Count
    anchor: Count  # height of a block that the sender trusts, and whose header the proof must contain; 0: none
    wanted: Count


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """Proof of the state after `height`: each change of the voter set since `known`, then the headers of `height` − 1 to + 1."""

    TAG: ClassVar[str] = "snapshot-offer"
    height: Count
    light_blocks: Annotated[tuple[LightBlock, ...], Length(1, LIGHT_BLOCKS_MAX)]  # in ascending order of heights
    # Module name -> digest under the state root. Empty: the proof continues after the last of these light blocks.
    modules: Annotated[dict[Name, Digest], Length(0, 64)]


@dataclass(frozen=True, slots=True)
class NoSnapshot:
    """Answer that the sender does not have the state after `height`. 0: it has no state that the receiver can use."""

    TAG: ClassVar[str] = "no-snapshot"
    height: Count


class SnapshotContent(enum.StrEnum):
    """The kinds of parts of a snapshot. Every item except models and headers is cut into pieces of SNAPSHOT_PART_BYTES_MAX."""

    BLOCK = "block"  # name: digest of the block
    HEADERS = "headers"  # index: height of the first header; lower heights follow
    MODULE = "module"  # name: name of the ledger module
    ROWS = "rows"  # name: table and bits of the range, see `ledger.tables`
    MANIFEST = "manifest"  # name: job id and round; the manifest has the hashes of the model's leaves
    MODEL = "model"  # name: job id and round


@dataclass(frozen=True, slots=True)
class _SnapshotPlace:
    height: Count  # height of the snapshot
    content: SnapshotContent
    name: Annotated[bytes, Length(0, NAME_CHARACTERS_MAX)]
    index: Count


@dataclass(frozen=True, slots=True)
class GetSnapshotPart(_SnapshotPlace):
    TAG: ClassVar[str] = "get-snapshot-part"


@dataclass(frozen=True, slots=True)
class SnapshotPart(_SnapshotPlace):
    TAG: ClassVar[str] = "snapshot-part"
    data: Annotated[bytes, Length(0, SNAPSHOT_PART_BYTES_MAX)]


# Links: blobs and addresses ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BlobMessage:
    """The first field of all messages about a blob."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class GetBlob(_BlobMessage):
    TAG: ClassVar[str] = "get-blob"
    offset: Count


@dataclass(frozen=True, slots=True)
class BlobChunk(_BlobMessage):
    TAG: ClassVar[str] = "blob-chunk"
    offset: Count
    total: Annotated[int, Between(0, BLOB_PART_BYTES)]
    chunk: Annotated[bytes, Length(0, BLOB_CHUNK_BYTES)]


@dataclass(frozen=True, slots=True)
class NoBlob(_BlobMessage):
    TAG: ClassVar[str] = "no-blob"


@dataclass(frozen=True, slots=True)
class BlobElsewhere(_BlobMessage):
    """Answer to GetBlob from a peer that is busy or still downloads the blob. `holders` have the blob or download it."""

    TAG: ClassVar[str] = "blob-elsewhere"
    held: bool  # whether the sender has the blob, too
    holders: Annotated[tuple[Key, ...], Length(0, BLOB_HOLDERS_MAX)]


@dataclass(frozen=True, slots=True)
class HasBlob(_BlobMessage):
    """Notice that the sender now has this blob.

    It is sent to peers that it had asked for the blob, and to the next waiting peer.
    """

    TAG: ClassVar[str] = "has-blob"


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """Addresses of the signer for peers in one scope.

    For each signer and scope, only the record with the highest sequence is valid.
    """

    TAG: ClassVar[str] = "peer-record"
    sequence: Count
    scope: AddressScope
    addresses: Annotated[tuple[Address, ...], Length(0, ADVERTISED_MAX)]  # addresses that peers in this scope can reach
    # Relays of the signer, which are members; only in the public record.
    relays: Annotated[tuple[Key, ...], Length(0, RELAYS_MAX)]


@dataclass(frozen=True, slots=True)
class AgedPeerRecord:
    record: Signed  # signed PeerRecord
    # Seconds since the record was signed, as far as the sender knows.
    age_seconds: Annotated[int, Between(0, PEER_RECORD_AGE_SECONDS_MAX)]


@dataclass(frozen=True, slots=True)
class PeerRecords:
    """Peer records of any signers. Any peer may pass on the records."""

    TAG: ClassVar[str] = "peer-records"
    known: Annotated[tuple[AgedPeerRecord, ...], Length(1, PEER_RECORDS_MAX)]


@dataclass(frozen=True, slots=True)
class GetPeerRecords:
    """Request for all peer records of the receiver whose scope includes the scope of this link."""

    TAG: ClassVar[str] = "get-peer-records"


@dataclass(frozen=True, slots=True)
class ObservedAddress:
    """The receiver's address as it appears to the sender on this link."""

    TAG: ClassVar[str] = "observed-address"
    address: Address


@dataclass(frozen=True, slots=True)
class DialBack:
    """Request to dial the sender, at the host of this link and at this port, to test whether it can be reached."""

    TAG: ClassVar[str] = "dial-back"
    port: Port


@dataclass(frozen=True, slots=True)
class DialBackFailed:
    """Notice that the sender dialed the receiver at this port, as requested, and failed."""

    TAG: ClassVar[str] = "dial-back-failed"
    port: Port


@dataclass(frozen=True, slots=True)
class Ping:
    TAG: ClassVar[str] = "ping"
    number: Count


@dataclass(frozen=True, slots=True)
class Pong:
    """The immediate answer to the Ping with this number."""

    TAG: ClassVar[str] = "pong"
    number: Count


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """The voters from which the sender has recently heard, for people only.

    The report has one bit for each voter, by ascending key from the lowest bit of byte 0.
    """

    TAG: ClassVar[str] = "liveness-report"
    voters: Digest  # hash of the voter set
    heard_voters: Annotated[bytes, Length(1, -(-VOTERS_MAX // 8))]


@dataclass(frozen=True, slots=True)
class LinkClosing:
    """The last message on a link, with the sender's reason for closing the link."""

    TAG: ClassVar[str] = "link-closing"
    # The reason consists of lower-case letters, digits and hyphens. Pages do not show other characters.
    reason: Annotated[str, Length(1, CLOSE_REASON_CHARACTERS_MAX)]


@dataclass(frozen=True, slots=True)
class GuestInvitation:
    """The invitation of a guest, which is a sender that is not a member yet."""

    TAG: ClassVar[str] = "guest-invitation"
    invitation: Signed
    token_signature: SignatureBytes  # signature of the token's key over the content of `member/admit`, which names the guest


# Links: circuits through a third peer ---------------------------------------------------------------------------------

# Random number of the peer that opens the circuit; the same on both links of the relay.
CircuitId = Annotated[bytes, Length(16, 16)]
CircuitPriority = Annotated[int, Between(0, 2)]  # priority of the messages inside the circuit


@dataclass(frozen=True, slots=True)
class ReserveRelay:
    """Request that the receiver relays circuits to the sender, or stops relaying them (`wanted` is False)."""

    TAG: ClassVar[str] = "reserve-relay"
    wanted: bool


@dataclass(frozen=True, slots=True)
class RelayReservations:
    """All peers with a reservation at the sender, a relay. The message is sent on each new link, and after each change."""

    TAG: ClassVar[str] = "relay-reservations"
    peers: Annotated[tuple[Key, ...], Length(0, RELAY_RESERVATIONS_MAX)]  # keys of the peers with a reservation, ascending


@dataclass(frozen=True, slots=True)
class _CircuitMessage:
    """The first field of all messages about a circuit."""

    circuit: CircuitId


@dataclass(frozen=True, slots=True)
class OpenCircuit(_CircuitMessage):
    """Request to a relay for a circuit to `peer`."""

    TAG: ClassVar[str] = "open-circuit"
    peer: Key


@dataclass(frozen=True, slots=True)
class IncomingCircuit(_CircuitMessage):
    """Notice from a relay that `peer` opens a circuit to the receiver of the message."""

    TAG: ClassVar[str] = "incoming-circuit"
    peer: Key


@dataclass(frozen=True, slots=True)
class CircuitData(_CircuitMessage):
    """A record of the session between the ends of a circuit: handshake bytes, later ciphertext of messages of one priority."""

    TAG: ClassVar[str] = "circuit-data"
    priority: CircuitPriority
    data: Annotated[bytes, Length(1, CIRCUIT_RECORD_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class CircuitCredit(_CircuitMessage):
    """Credit for sending more bytes of one priority: the sender of the credit has read or forwarded this number of bytes."""

    TAG: ClassVar[str] = "circuit-credit"
    priority: CircuitPriority
    bytes: Annotated[int, Between(1, CIRCUIT_WINDOW_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class CloseCircuit(_CircuitMessage):
    TAG: ClassVar[str] = "close-circuit"
    reason: Name


@dataclass(frozen=True, slots=True)
class CircuitMigrated:
    """Notice inside a circuit whose ends now have a direct link: no more messages of this priority follow here.

    With `read`, the sender has received this notice for all priorities.
    """

    TAG: ClassVar[str] = "circuit-migrated"
    read: bool


@dataclass(frozen=True, slots=True)
class CircuitDeliveryReport:
    """Number of bytes of the receiver's messages that have arrived at the sender since the circuit began, for each priority."""

    TAG: ClassVar[str] = "circuit-delivery-report"
    votes: Count
    control: Count
    bulk: Count


AGREEMENT_MESSAGES = (
    ProposeEnvelope,
    Vote,
    TimeoutEnvelope,
    Decision,
    Prepared,
    ViewEnded,
    Status,
    GetDecisions,
    GetBlock,
    BlockBytes,
    GetRememberedStatements,
    RememberedStatements,
)
GOSSIP_MESSAGES = (GossipEnvelope, GetRound, EvidenceMessage)
SNAPSHOT_MESSAGES = (GetSnapshot, SnapshotOffer, NoSnapshot, GetSnapshotPart, SnapshotPart)
CIRCUIT_MESSAGES = (ReserveRelay, RelayReservations, OpenCircuit, IncomingCircuit, CircuitData, CircuitCredit, CloseCircuit)
LINK_MESSAGES = (
    GetBlob,
    BlobChunk,
    NoBlob,
    BlobElsewhere,
    HasBlob,
    Ping,
    Pong,
    PeerRecords,
    GetPeerRecords,
    ObservedAddress,
    DialBack,
    DialBackFailed,
    LivenessReport,
    LinkClosing,
    GuestInvitation,
    *CIRCUIT_MESSAGES,
    CircuitMigrated,
    CircuitDeliveryReport,
)
