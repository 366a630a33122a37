"""Bounds that peers must agree on or that several packages share, with their reasons. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from typing import Final

VOTERS_MAX: Final = 200  # quorum rules are tested for n = 1..200; certificates grow linearly with n
MEMBERS_MAX: Final = 10_000  # the member table is hashed into every state root
TRAINERS_MAX: Final = 200  # a ballot names each trainer once
CLOSING_VOUCHES_MAX: Final = 3 * (VOTERS_MAX // 3 + 1) * TRAINERS_MAX  # f + 1 called at once, f + 1 accepting, f + 1 rejecting
AUDITORS_MAX: Final = 8  # auditors of one proposal on average: more would cost more than full re-execution

MESSAGE_BYTES_MAX: Final = 8 << 20  # one wire message; the largest is a Decision, with a block and its certificate
BLOCK_BYTES_MAX: Final = 7 << 20  # holds a round certificate of VOTERS_MAX voters; a commit certificate still fits the message
HEADER_BYTES_MAX: Final = 32 << 10  # a block without its body: the parent's certificate and VOTERS_MAX failed leaders
TRANSACTION_BYTES_MAX: Final = 256 << 10  # many times the size of a job with the hash of its data manifest
TRANSACTIONS_PER_BLOCK_MAX: Final = 1_000  # keeps the check of a block well under a second
COST_PER_BLOCK_MAX: Final = 2_560  # signature checks of 0.12 ms, the unit in which modules count work: 0.3 s of a core
TRANSACTIONS_PENDING_MAX: Final = 10_000  # bounds the mempool
TRANSACTION_LIFETIME_HEIGHTS: Final = 1_000  # a later expiry is refused, so that nonces need not be kept for ever

VIEWS_AHEAD_MAX: Final = 64  # distance of views whose statements are kept; timeouts reach their maximum long before
DECISIONS_PER_REPLY_MAX: Final = 32  # small, so that votes do not wait behind a peer that catches up
REMEMBERED_STATEMENTS_MAX: Final = 256  # statements of one voter in one answer: three heights of twelve views, and open rounds
INCLUSION_LIST_MAX: Final = 64  # transactions in one list: the oldest first; the others follow when these are decided
EVIDENCE_PER_BLOCK_MAX: Final = 16  # two ballots of TRAINERS_MAX verdicts have 30 kB; more evidence waits for the next block
CLOCK_AHEAD_SECONDS: Final = 2.0  # maximum lead of a block's time over the clock of the first voter that prepares it

BLOB_BYTES_MAX: Final = 1 << 35  # 2^33 parameters in float32: 2,048 parts, whose list has 64 KiB
BLOB_PART_BYTES: Final = 16 << 20  # the unit of transfers of a larger blob: a wrong byte costs one part, and 32 bytes name it
BLOB_CHUNK_BYTES: Final = (64 << 10) - 128  # fills one frame with its header: no fragments, and a vote waits for one chunk only
MODEL_MANIFEST_BYTES_MAX: Final = 24 << 20  # hashes of all blocks of the largest model, and its state; it is sent in parts
SNAPSHOT_PART_BYTES_MAX: Final = 1 << 20  # the unit that is requested and verified, and requested again if it is wrong or late
LIGHT_BLOCKS_MAX: Final = 4_096  # changes of the voter set in one message; a longer proof takes several
DATA_SHARD_BYTES: Final = 1 << 20  # unit of training text: transfers can resume and have several holders
DATA_BYTES_MAX: Final = 64 << 30  # all shards of a job; so the manifest fits MESSAGE_BYTES_MAX

RELAY_RESERVATIONS_MAX: Final = 64  # peers that one relay serves: each may cost it two circuits to every other one
CIRCUIT_RECORD_BYTES_MAX: Final = 16 << 10  # a record with its tag; a vote waits for one record, 65 ms at 2 Mbit/s
CIRCUIT_WINDOW_BYTES_MAX: Final = 128 << 10  # bulk bytes that the next hop has not read: 1.3 MB/s at a round trip of 100 ms

FRAME_BYTES_MAX: Final = 64 << 10  # a Noise message has at most 65535 bytes
AUDIT_NONCE_BYTES: Final = 16  # 2^128 tries to guess a nonce, or to find a second one for a commitment
DECLARATION_BYTES_MAX: Final = 1_024  # an objective's record in a proposal: a few digests; a block may hold TRAINERS_MAX of them
ROW_KEY_BYTES_MAX: Final = 64  # key of a row in a table: two digests
ROW_BYTES_MAX: Final = 16 << 10  # a row in a table: sixteen of them are read and written together
BLOB_HOLDERS_MAX: Final = 3  # holders that one answer names: a liar can cause one request to each
NAME_CHARACTERS_MAX: Final = 64  # names that people give to networks, jobs and peers
ADDRESS_CHARACTERS_MAX: Final = 256  # HOST:PORT; a DNS name has at most 253 characters
CLOSE_REASON_CHARACTERS_MAX: Final = 32  # a word or two, which a table explains
PARAMETERS_ALLOWED: Final = 1 << 27  # parameters of a model, unless voters set another limit: half a gibibyte per disk
PARAMETERS_ALLOWED_MAX: Final = 1 << 33  # highest limit that voters can set: 32 GB on each disk
UPGRADE_NOTICE_HEIGHTS: Final = 10  # heights between an upgrade's decision and its first block: every peer can apply the decision
UPGRADE_AHEAD_HEIGHTS_MAX: Final = 1_000_000  # weeks of a busy network; the voters of later heights cannot be foreseen
ADVERTISED_MAX: Final = 8  # addresses of one peer or in one invitation: several networks, both IP versions, a name
RELAYS_MAX: Final = 4  # relays of one peer: two, and two more while these are replaced
PEER_RECORD_BYTES_MAX: Final = 4 << 10  # ADVERTISED_MAX addresses of the largest size, and RELAYS_MAX relays
PEER_RECORDS_MAX: Final = 64  # peer records in one message
PEER_RECORD_AGE_SECONDS_MAX: Final = 7 * 86_400  # maximum age of a record: then it is dropped, unless its peer sent a newer one

UPLINK_MBIT_MIN: Final = 2  # Mbit/s; no trainer with such a link is suspended for slow answers; a job may require more
ROUND_TRIP_MS_MAX: Final = 300  # round trip of such a link: a mobile phone in the country, or another continent
UPLINK_MBIT_MAX: Final = 10_000  # Mbit/s; the highest rate that a job may require
AUDIT_RESPONSE_MS: Final = 50 * ROUND_TRIP_MS_MAX  # eight blobs one after another, with three round trips each, and as much again
AUDIT_WINDOW_MAX: Final = 1_000  # rounds; for each of them every trainer keeps a buffer on its disk
AUDIT_WINDOW_MS_MAX: Final = 600_000  # milliseconds until a liar is caught, for which its proposals stay on every disk

assert BLOCK_BYTES_MAX + VOTERS_MAX * 200 < MESSAGE_BYTES_MAX
assert TRANSACTION_BYTES_MAX < BLOCK_BYTES_MAX
assert BLOB_CHUNK_BYTES + 128 <= FRAME_BYTES_MAX
assert BLOB_BYTES_MAX // BLOB_PART_BYTES * 32 <= 64 << 10 < BLOB_PART_BYTES < BLOB_BYTES_MAX
assert ADVERTISED_MAX * (ADDRESS_CHARACTERS_MAX + 3) + RELAYS_MAX * 34 + 64 <= PEER_RECORD_BYTES_MAX
assert SNAPSHOT_PART_BYTES_MAX + HEADER_BYTES_MAX < MESSAGE_BYTES_MAX
assert DATA_BYTES_MAX // DATA_SHARD_BYTES * 40 < BLOCK_BYTES_MAX
