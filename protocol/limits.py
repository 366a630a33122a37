"""Bounds that peers must agree on or that several packages share, with their reasons. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from typing import Final

VOTERS_MAX: Final = 200  # voters of a network: quorum rules are tested for n = 1..200, and certificates grow linearly with n
MEMBERS_MAX: Final = 10_000  # keys in the table of members, which is hashed into every state root
TRAINERS_MAX: Final = 200  # trainers of a round: a ballot names each trainer once
CLOSING_VOUCHES_MAX: Final = 3 * (VOTERS_MAX // 3 + 1) * TRAINERS_MAX  # vouches: f + 1 asked, f + 1 accepting, f + 1 rejecting
AUDITORS_MAX: Final = 8  # average number of auditors of one proposal: more would cost more than full re-execution

MESSAGE_BYTES_MAX: Final = 8 << 20  # bytes of one message on a link; the largest is a Decision, with a block and its certificate
BLOCK_BYTES_MAX: Final = 7 << 20  # bytes of a block: a round certificate of VOTERS_MAX voters fits, and a Decision fits a message
HEADER_BYTES_MAX: Final = 32 << 10  # bytes of a block without its body: the parent's certificate and VOTERS_MAX failed leaders
TRANSACTION_BYTES_MAX: Final = 256 << 10  # bytes of a transaction: many times the size of a job with its data hash
TRANSACTIONS_PER_BLOCK_MAX: Final = 1_000  # transactions of one block, whose check must take far less than a second
COST_PER_BLOCK_MAX: Final = 2_560  # signature checks of 0.12 ms, the unit of all costs: 0.3 s of a core per block
TRANSACTIONS_PENDING_MAX: Final = 10_000  # transactions in the mempool
TRANSACTION_LIFETIME_HEIGHTS: Final = 1_000  # heights after which every transaction has expired: old nonces can be dropped

VIEWS_AHEAD_MAX: Final = 64  # views ahead whose statements are kept: timeouts reach their maximum long before
DECISIONS_PER_REPLY_MAX: Final = 32  # decisions in one answer: few, so that votes do not wait behind a peer that catches up
REMEMBERED_STATEMENTS_MAX: Final = 256  # statements of one voter in one answer: three heights of twelve views, and open rounds
INCLUSION_LIST_MAX: Final = 64  # transactions in one inclusion list, the oldest first; later lists name the others
EVIDENCE_PER_BLOCK_MAX: Final = 16  # pieces of evidence in one block: two ballots of TRAINERS_MAX verdicts have 30 kB
CLOCK_AHEAD_SECONDS: Final = 2.0  # seconds by which a block's time may exceed the clock of the first voter that prepares it

BLOB_BYTES_MAX: Final = 1 << 35  # bytes of a blob: 2^33 parameters in float32, in 2,048 parts with a part list of 64 KiB
BLOB_PART_BYTES: Final = 16 << 20  # bytes of a part of a large blob: a wrong byte costs one part, and a hash of 32 bytes names it
BLOB_CHUNK_BYTES: Final = (64 << 10) - 128  # bytes of a blob in one message, which fits a frame: a vote waits for one chunk only
MODEL_MANIFEST_BYTES_MAX: Final = 24 << 20  # bytes of the largest model's manifest: hashes of all its leaves, sent in pieces
SNAPSHOT_PART_BYTES_MAX: Final = 1 << 20  # bytes of a snapshot's part, which is requested and verified alone
LIGHT_BLOCKS_MAX: Final = 4_096  # changes of the voter set in one message; a longer proof takes several messages
DATA_SHARD_BYTES: Final = 1 << 20  # bytes of a shard of training text: transfers can resume and use several peers
DATA_BYTES_MAX: Final = 64 << 30  # bytes of all shards of a job, so that the list of their hashes fits a message

RELAY_RESERVATIONS_MAX: Final = 64  # peers that one relay serves: each may use two circuits to every other peer of the relay
CIRCUIT_RECORD_BYTES_MAX: Final = 16 << 10  # bytes of one record in a circuit: a vote waits for one record, 65 ms at 2 Mbit/s
CIRCUIT_WINDOW_BYTES_MAX: Final = 128 << 10  # bulk bytes that the next peer has not read: 1.3 MB/s at a round trip of 100 ms

FRAME_BYTES_MAX: Final = 64 << 10  # bytes of a frame on a link: a Noise message has at most 65535 bytes
AUDIT_NONCE_BYTES: Final = 16  # bytes of a nonce: 2^128 tries to guess it, or to find a second nonce for a commitment
DECLARATION_BYTES_MAX: Final = 1_024  # bytes of an objective's record in a proposal; a block may hold TRAINERS_MAX of these
ROW_KEY_BYTES_MAX: Final = 64  # bytes of a row's key in a table: two digests
ROW_BYTES_MAX: Final = 16 << 10  # bytes of a row in a table: sixteen rows are read and written together
BLOB_HOLDERS_MAX: Final = 3  # holders that one answer names: a faulty peer can cause one request to each
NAME_CHARACTERS_MAX: Final = 64  # characters of names that people give to networks, jobs and peers
ADDRESS_CHARACTERS_MAX: Final = 256  # characters of HOST:PORT: a DNS name has at most 253
CLOSE_REASON_CHARACTERS_MAX: Final = 32  # characters of the reason for closing a link: a word or two, which a table explains
PARAMETERS_ALLOWED: Final = 1 << 27  # parameters of a model unless voters set another limit: half a gibibyte on each disk
PARAMETERS_ALLOWED_MAX: Final = 1 << 33  # highest limit of parameters that voters can set: 32 GB on each disk
UPGRADE_NOTICE_HEIGHTS: Final = 10  # heights between an upgrade's decision and its first block: every peer can apply the decision
UPGRADE_AHEAD_HEIGHTS_MAX: Final = 1_000_000  # heights until an upgrade, weeks of a busy network: later voters cannot be foreseen
ADVERTISED_MAX: Final = 8  # addresses of one peer or in one invitation: several networks, both IP versions, a name
RELAYS_MAX: Final = 4  # relays of one peer: two, and two more while these are replaced
PEER_RECORD_BYTES_MAX: Final = 4 << 10  # bytes of a peer record: ADVERTISED_MAX addresses of the largest size, RELAYS_MAX relays
PEER_RECORDS_MAX: Final = 64  # peer records in one message
PEER_RECORD_AGE_SECONDS_MAX: Final = 7 * 86_400  # seconds after which a peer record is dropped, unless a newer one arrived

UPLINK_MBIT_MIN: Final = 2  # Mbit/s of the slowest link for which no trainer is suspended; a job may require a faster link
ROUND_TRIP_MS_MAX: Final = 300  # ms of a round trip over the slowest allowed link: a phone in the country, or another continent
UPLINK_MBIT_MAX: Final = 10_000  # Mbit/s of the fastest link that a job may require
AUDIT_RESPONSE_MS: Final = 50 * ROUND_TRIP_MS_MAX  # ms for eight blobs in turn with three round trips each, and as much again
AUDIT_WINDOW_MAX: Final = 1_000  # rounds of an audit window: for each round, every trainer keeps a buffer on its disk
AUDIT_WINDOW_MS_MAX: Final = 600_000  # ms of an audit window: until its end, proposals stay on every disk

assert BLOCK_BYTES_MAX + VOTERS_MAX * 200 < MESSAGE_BYTES_MAX
assert TRANSACTION_BYTES_MAX < BLOCK_BYTES_MAX
assert BLOB_CHUNK_BYTES + 128 <= FRAME_BYTES_MAX
assert BLOB_BYTES_MAX // BLOB_PART_BYTES * 32 <= 64 << 10 < BLOB_PART_BYTES < BLOB_BYTES_MAX
assert ADVERTISED_MAX * (ADDRESS_CHARACTERS_MAX + 3) + RELAYS_MAX * 34 + 64 <= PEER_RECORD_BYTES_MAX
assert SNAPSHOT_PART_BYTES_MAX + HEADER_BYTES_MAX < MESSAGE_BYTES_MAX
assert DATA_BYTES_MAX // DATA_SHARD_BYTES * 40 < BLOCK_BYTES_MAX
