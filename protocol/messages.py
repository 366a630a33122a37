"""Every message that crosses the wire. `docs/protocol/` gives the same tables byte by byte.

Signed messages are bodies of `identity.Signed`; the others are protected by the authenticated link they arrive on and are
never evidence for anything.
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

NO_VIEW = -1  # the `high_view` of a Timeout whose sender holds no prepare certificate

Name = Annotated[str, Length(1, NAME_CHARACTERS_MAX)]
Address = Annotated[str, Length(3, ADDRESS_CHARACTERS_MAX)]  # "host:port"
Port = Annotated[int, Between(1, 65535)]
AuditNonce = Annotated[bytes, Length(AUDIT_NONCE_BYTES, AUDIT_NONCE_BYTES)]  # of a voter, for the drawing of audits


# Agreement: signed by voters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BlockStatement:
    """What Propose, Prepare and Commit have in common: they name one block in one view."""

    voters: Digest  # hash of the voter set that decides this height
    height: Count
    view: Count
    block: Digest


@dataclass(frozen=True, slots=True)
class Propose(_BlockStatement):
    """The leader of (height, view) puts this block forward; its header and short body travel beside it in `ProposeEnvelope`."""

    TAG: ClassVar[str] = "propose"


@dataclass(frozen=True, slots=True)
class Prepare(_BlockStatement):
    TAG: ClassVar[str] = "prepare"


@dataclass(frozen=True, slots=True)
class Commit(_BlockStatement):
    TAG: ClassVar[str] = "commit"


@dataclass(frozen=True, slots=True)
class Timeout:
    """I give up on `view`; the highest prepare certificate I hold is for (`high_view`, `high_block`)."""

    TAG: ClassVar[str] = "timeout"
    voters: Digest
    height: Count
    view: Count
    high_view: Annotated[int, Between(NO_VIEW, COUNT_MAX)]
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
class ProposeEnvelope:
    """`short` is the body with whatever others should hold already named by digest; who lacks a part asks with `GetBlock`."""

    TAG: ClassVar[str] = "propose-envelope"
    propose: Signed
    header: Annotated[bytes, Length(1, HEADER_BYTES_MAX)]
    compact_body: Annotated[bytes, Length(0, BLOCK_BYTES_MAX)]
    justification: TimeoutCertificate | None


@dataclass(frozen=True, slots=True)
class Vote:
    """A signed Prepare or Commit."""

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


@dataclass(frozen=True, slots=True)
class GetRememberedStatements:
    """What have you last heard me sign? Asked at start, before anything is signed: a rolled-back disk does not show by itself."""

    TAG: ClassVar[str] = "get-remembered-statements"


@dataclass(frozen=True, slots=True)
class RememberedStatements:
    """My next height, and what I hold of the asker's signed messages for it, the two heights before and the open rounds."""

    TAG: ClassVar[str] = "remembered-statements"
    height: Count
    signed: Annotated[tuple[Signed, ...], Length(0, REMEMBERED_STATEMENTS_MAX)]


# Rounds: signed by trainers and voters -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossCommitment:
    """The loss of a trainer's last inner step, hidden until reports of auditors are in (`ledger.audits.loss_commitments`)."""

    digest: Digest  # of a secret and the loss
    key: Key  # X25519, of the same secret: auditors seal for it


@dataclass(frozen=True, slots=True)
class _RoundMessage:
    """What all messages of a round begin with."""

    job: Digest
    round: Count


@dataclass(frozen=True, slots=True)
class Proposal(_RoundMessage):
    """A trainer's claim: `payload` is my update for this round, computed on this model root."""

    TAG: ClassVar[str] = "proposal"
    model_root: Digest
    payload: Digest
    payload_bytes: Annotated[int, Between(0, BLOB_BYTES_MAX)]
    buffer: Digest | None  # of the levels of m = decay·e + Δ; None where the job carries nothing from round to round
    feedback: Digest | None  # the `buffer` of my last accepted proposal, from which e comes; None: e is zero
    inner: Digest | None = None  # of the inner optimizer's state after the last step, where a job keeps it
    inner_from: Digest | None = None  # the `inner` of my last accepted proposal, from which the first step goes on; None: fresh
    declaration: Annotated[bytes, Length(0, DECLARATION_BYTES_MAX)] = b""  # encoding of the objective's own record, if it has one
    loss: LossCommitment | None = None  # where audits are sampled and the job needs a worker


@dataclass(frozen=True, slots=True)
class Judgement:
    trainer: Key
    proposal: Digest  # SHA-256 of the encoded, signed Proposal body
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Ballot(_RoundMessage):
    """A voter's one statement on a round: its verdict on every proposal it saw."""

    TAG: ClassVar[str] = "ballot"
    model_root: Digest
    judgements: Annotated[tuple[Judgement, ...], Length(0, TRAINERS_MAX)]  # ascending by trainer, each once
    reveal: AuditNonce | None = None  # what my ballot of an earlier round committed to; where audits are sampled, as the next
    commitment: Digest | None = None  # SHA-256 of the nonce of this round, which my next decided ballot of the job reveals


@dataclass(frozen=True, slots=True)
class Vouch(_RoundMessage):
    """I have re-executed these proposals: a voter's verdicts, one on each trainer in a round.

    A voter may sign several in a round, of different trainers. UNJUDGED says that the voter is unsure: the update is between one
    and two tolerances off, or something did not arrive.
    """

    TAG: ClassVar[str] = "vouch"
    judgements: Annotated[tuple[Judgement, ...], Length(1, TRAINERS_MAX)]  # ascending by trainer, each once


@dataclass(frozen=True, slots=True)
class CutOff(_RoundMessage):
    """Close the round without waiting longer: these are the ballots I hold (SHA-256 of their signed bodies)."""

    TAG: ClassVar[str] = "cut-off"
    ballots: Annotated[tuple[Digest, ...], Length(0, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class Transaction:
    """Anything a member asks the network to decide. `kind` names the ledger module's transaction type."""

    TAG: ClassVar[str] = "transaction"
    nonce: Count  # the author's previous nonce plus one
    expires: Count  # the last height at which it may be decided
    kind: Name
    content: Annotated[bytes, Length(0, TRANSACTION_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class InclusionList:
    """By a voter that has applied `height`: these transactions waited here through a whole block, and could still be decided."""

    TAG: ClassVar[str] = "inclusion-list"
    height: Count
    transactions: Annotated[tuple[Digest, ...], Length(1, INCLUSION_LIST_MAX)]  # ascending, each once


# Rounds and transactions: envelopes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GossipEnvelope:
    """A signed Proposal, Ballot, Vouch, CutOff, Transaction or InclusionList, from its author or passed on by anybody."""

    TAG: ClassVar[str] = "gossip-envelope"
    signed: Signed


@dataclass(frozen=True, slots=True)
class GetRound(_RoundMessage):
    """Send me the proposals, ballots, vouches and cut-offs that you hold for this round."""

    TAG: ClassVar[str] = "get-round"


@dataclass(frozen=True, slots=True)
class EvidenceMessage:
    """Two messages of one signer that no honest peer signs both; passed on until a block carries them."""

    TAG: ClassVar[str] = "evidence"
    first: Signed
    second: Signed


# Snapshots: how a newcomer, or a peer that was away for long, gets the certified state -------------------------------


@dataclass(frozen=True, slots=True)
class LightBlock:
    """A decided header with its commits; a chain of them leads from one voter set to the next."""

    header: Annotated[bytes, Length(1, HEADER_BYTES_MAX)]
    certificate: Certificate
    next_voters: Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)]  # ascending; empty: the same as of this height


@dataclass(frozen=True, slots=True)
class GetSnapshot:
    """I know who decides the height after `known`. Offer me the state after `wanted`, or after a later height."""

    TAG: ClassVar[str] = "get-snapshot"
    known: Count
    anchor: Count  # I trust one block at this height: the proof must show its header; 0: none
    wanted: Count


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """The state after `height`, proven: every change of the voter set since `known`, then the headers of `height` − 1 to + 1."""

    TAG: ClassVar[str] = "snapshot-offer"
    height: Count
    light_blocks: Annotated[tuple[LightBlock, ...], Length(1, LIGHT_BLOCKS_MAX)]  # ascending
    # Digests of the modules under the state root; empty: the proof goes on after the last of these links.
    modules: Annotated[dict[Name, Digest], Length(0, 64)]


@dataclass(frozen=True, slots=True)
class NoSnapshot:
    """I do not hold the state after `height` (any more); 0: nor any other that you could use."""

    TAG: ClassVar[str] = "no-snapshot"
    height: Count


class SnapshotContent(enum.StrEnum):
    """What a part of a snapshot is of. All but model and headers are cut into pieces of SNAPSHOT_PART_BYTES_MAX."""

    BLOCK = "block"  # name: its digest
    HEADERS = "headers"  # index: height of the first; goes down from there
    MODULE = "module"  # name: the ledger module's
    ROWS = "rows"  # name: the table's and the bits of a range of it, as `ledger.tables` says
    MANIFEST = "manifest"  # name: the job; what the parts of its model are checked with
    MODEL = "model"  # name: the job


@dataclass(frozen=True, slots=True)
class _SnapshotPlace:
    height: Count  # of the snapshot
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
    """What all messages about one blob begin with."""

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
    """The answer to GetBlob of a peer that serves enough others, or is only getting the blob: these have it or are getting it."""

    TAG: ClassVar[str] = "blob-elsewhere"
    held: bool  # I have it, too
    holders: Annotated[tuple[Key, ...], Length(0, BLOB_HOLDERS_MAX)]


@dataclass(frozen=True, slots=True)
class HasBlob(_BlobMessage):
    """I have this blob now: to those I asked for it, and to those that I told to wait, whose turn it is."""

    TAG: ClassVar[str] = "has-blob"


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """Where the signer is reached, for peers of one scope. Of one signer and scope the highest sequence holds."""

    TAG: ClassVar[str] = "peer-record"
    sequence: Count
    scope: AddressScope
    addresses: Annotated[tuple[Address, ...], Length(0, ADVERTISED_MAX)]  # all of them of this scope
    relays: Annotated[tuple[Key, ...], Length(0, RELAYS_MAX)]  # members that forward to the signer; in the public record alone


@dataclass(frozen=True, slots=True)
class AgedPeerRecord:
    record: Signed  # a PeerRecord
    age_seconds: Annotated[int, Between(0, PEER_RECORD_AGE_SECONDS_MAX)]  # since it was new, as the sender has heard


@dataclass(frozen=True, slots=True)
class PeerRecords:
    """Signed by anybody, passed on by anybody."""

    TAG: ClassVar[str] = "peer-records"
    known: Annotated[tuple[AgedPeerRecord, ...], Length(1, PEER_RECORDS_MAX)]


@dataclass(frozen=True, slots=True)
class GetPeerRecords:
    """Send me all that you know."""

    TAG: ClassVar[str] = "get-peer-records"


@dataclass(frozen=True, slots=True)
class ObservedAddress:
    """The address at which I see you on this link."""

    TAG: ClassVar[str] = "observed-address"
    address: Address


@dataclass(frozen=True, slots=True)
class DialBack:
    """Please dial me: at the host at which you see me on this link, and this port."""

    TAG: ClassVar[str] = "dial-back"
    port: Port


@dataclass(frozen=True, slots=True)
class DialBackFailed:
    """I dialed you at this port, as you asked, and did not reach you."""

    TAG: ClassVar[str] = "dial-back-failed"
    port: Port


@dataclass(frozen=True, slots=True)
class Ping:
    TAG: ClassVar[str] = "ping"
    number: Count


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to the Ping of that number, at once."""

    TAG: ClassVar[str] = "pong"
    number: Count


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """Which of these voters I hear. They ascend by key; the first one is the lowest bit of the first byte. For people alone."""

    TAG: ClassVar[str] = "liveness-report"
    voters: Digest  # hash of the voter set
    heard_voters: Annotated[bytes, Length(1, -(-VOTERS_MAX // 8))]


@dataclass(frozen=True, slots=True)
class LinkClosing:
    """The last message on a link: why its sender ends it. Nothing follows."""

    TAG: ClassVar[str] = "link-closing"
    # Lower-case letters, digits and hyphens. Other characters are not shown.
    reason: Annotated[str, Length(1, CLOSE_REASON_CHARACTERS_MAX)]


@dataclass(frozen=True, slots=True)
class GuestInvitation:
    """I am no member yet, and hold this invitation."""

    TAG: ClassVar[str] = "guest-invitation"
    invitation: Signed
    token_signature: SignatureBytes  # by the invitation's token, over what `member/admit` has, so that it names me


# Links: circuits through a third peer ---------------------------------------------------------------------------------

CircuitId = Annotated[bytes, Length(16, 16)]  # drawn by whoever opens the circuit; the same on both links of the relay
CircuitPriority = Annotated[int, Between(0, 2)]  # the priority of what is inside


@dataclass(frozen=True, slots=True)
class ReserveRelay:
    """Let others reach me through you, or no longer."""

    TAG: ClassVar[str] = "reserve-relay"
    wanted: bool


@dataclass(frozen=True, slots=True)
class RelayReservations:
    """I forward to these peers, which have reserved it here. All of them; sent when a link is made and when they change."""

    TAG: ClassVar[str] = "relay-reservations"
    peers: Annotated[tuple[Key, ...], Length(0, RELAY_RESERVATIONS_MAX)]  # ascending


@dataclass(frozen=True, slots=True)
class _CircuitMessage:
    """What all messages about one circuit begin with."""

    circuit: CircuitId


@dataclass(frozen=True, slots=True)
class OpenCircuit(_CircuitMessage):
    """To a relay: I want to speak to `peer`."""

    TAG: ClassVar[str] = "open-circuit"
    peer: Key


@dataclass(frozen=True, slots=True)
class IncomingCircuit(_CircuitMessage):
    """From a relay: `peer` wants to speak to you."""

    TAG: ClassVar[str] = "incoming-circuit"
    peer: Key


@dataclass(frozen=True, slots=True)
class CircuitData(_CircuitMessage):
    """One record of the session that the two ends have: handshake bytes, then ciphertext of messages of one priority."""

    TAG: ClassVar[str] = "circuit-data"
    priority: CircuitPriority
    data: Annotated[bytes, Length(1, CIRCUIT_RECORD_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class CircuitCredit(_CircuitMessage):
    """I have passed on, or read, so much of what you sent in this lane; you may send as much again."""

    TAG: ClassVar[str] = "circuit-credit"
    priority: CircuitPriority
    bytes: Annotated[int, Between(1, CIRCUIT_WINDOW_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class CloseCircuit(_CircuitMessage):
    TAG: ClassVar[str] = "close-circuit"
    reason: Name


@dataclass(frozen=True, slots=True)
class CircuitMigrated:
    """Inside a circuit whose ends now have a direct link: nothing follows in this lane, or (`read`) all were read so far."""

    TAG: ClassVar[str] = "circuit-migrated"
    read: bool


@dataclass(frozen=True, slots=True)
class CircuitDeliveryReport:
    """Inside a circuit: so many bytes of your messages have arrived here since it began, by lane."""

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
