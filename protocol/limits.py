"""Every bound that peers must agree on or that protects memory, with its reason. Sizes are bytes, times are seconds."""

from __future__ import annotations

from typing import Final

VOTERS_MAX: Final = 200  # quorum rules are tested for n = 1..200; certificates grow linearly with n
MEMBERS_MAX: Final = 10_000  # the member table is hashed into every state root
TRAINERS_MAX: Final = 200  # a ballot names each trainer once
CLOSING_VOUCHES_MAX: Final = 3 * (VOTERS_MAX // 3 + 1) * TRAINERS_MAX  # f + 1 called at once, f + 1 for, f + 1 against each
AUDITORS_MAX: Final = 8  # re-executors drawn for one proposal on average: more of them cost more than re-executing everything

MESSAGE_BYTES_MAX: Final = 8 << 20  # one wire message; the largest is a Decision: a block and its certificate
BLOCK_BYTES_MAX: Final = 7 << 20  # a closing of VOTERS_MAX voters fits; leaves room in a message for a certificate of them all
HEADER_BYTES_MAX: Final = 32 << 10  # a block without its body: certificate of the parent and failed leaders of VOTERS_MAX voters
TRANSACTION_BYTES_MAX: Final = 256 << 10  # a job with its data manifest hash fits many times over
TRANSACTIONS_PER_BLOCK_MAX: Final = 1_000  # keeps check_block well under a second
COST_PER_BLOCK_MAX: Final = 2_560  # in signature checks of .12 ms, as modules count the work of transactions: .3 s of a core
TRANSACTIONS_PENDING_MAX: Final = 10_000  # a peer's memory for what is not decided yet
TRANSACTION_LIFETIME_HEIGHTS: Final = 1_000  # an expiry further away than this is refused: nonces can be forgotten

VIEWS_AHEAD_MAX: Final = 64  # votes kept for views beyond the current one, per voter; timers double long before
DECISIONS_PER_REPLY_MAX: Final = 32  # catch-up goes in small steps so that votes are not delayed behind it
REMEMBERED_STATEMENTS_MAX: Final = 256  # one voter's signatures in one answer: three heights of twelve views, and open rounds
INCLUSION_LIST_MAX: Final = 64  # transactions in one notice: those that waited longest, the others follow when these are decided
EVIDENCE_PER_BLOCK_MAX: Final = 16  # two ballots of TRAINERS_MAX verdicts are 30 kB; what is left over comes in the next block
CLOCK_AHEAD_SECONDS: Final = 2.0  # how far a block's time may lie before the clock of the voter that is the first to prepare it

BLOB_BYTES_MAX: Final = 1 << 35  # float32 of 2^33 parameters: 2,048 parts, whose list is 64 KiB
BLOB_PART_BYTES: Final = 16 << 20  # of a blob, and a part of a larger object: a wrong byte costs so much, 32 bytes name it
BLOB_CHUNK_BYTES: Final = (64 << 10) - 128  # fills one frame together with its header: no fragments, and a vote waits for one
MODEL_MANIFEST_BYTES_MAX: Final = 24 << 20  # hashes of all blocks of the largest model, and its state; it comes in parts
SNAPSHOT_PART_BYTES_MAX: Final = 1 << 20  # the unit that is asked for, checked, and asked of another if it is wrong or late
LIGHT_BLOCKS_MAX: Final = 4_096  # changes of the voter set proven in one message; a longer proof comes in several
DATA_SHARD_BYTES: Final = 1 << 20  # training text travels in shards of this size: resumable, from several holders
DATA_BYTES_MAX: Final = 64 << 30  # all shards of a job; the manifest then stays under MESSAGE_BYTES_MAX

RELAY_RESERVATIONS_MAX: Final = 64  # peers that one relay forwards to: each may cost it two circuits to every other one
CIRCUIT_RECORD_BYTES_MAX: Final = 16 << 10  # with its tag; a vote waits for one of them, which is 65 ms at 2 Mbit/s
CIRCUIT_WINDOW_BYTES_MAX: Final = 128 << 10  # of bulk, unread by the next hop: 1.3 MB/s over a hop with a round trip of 100 ms

FRAME_BYTES_MAX: Final = 64 << 10  # Noise messages are at most 65535 bytes
AUDIT_NONCE_BYTES: Final = 16  # nobody finds a second nonce for a commitment, nor guesses one: 2^128 tries
DECLARATION_BYTES_MAX: Final = 1_024  # an objective's record in a proposal, of which a block may hold TRAINERS_MAX: some digests
ROW_KEY_BYTES_MAX: Final = 64  # of a table: two digests
ROW_BYTES_MAX: Final = 16 << 10  # of a record in a table: sixteen of them are read and written at once
BLOB_HOLDERS_MAX: Final = 3  # of a blob, named to a peer that asks for it: as many questions a liar can cause
NAME_CHARACTERS_MAX: Final = 64  # names people give to networks, jobs and peers
ADDRESS_CHARACTERS_MAX: Final = 256  # HOST:PORT; names of the DNS have at most 253 characters, real ones far fewer
CLOSE_REASON_CHARACTERS_MAX: Final = 32  # why a link is closed: a word or two that a table explains
PARAMETERS_ALLOWED: Final = 1 << 27  # of a model until voters say otherwise: half a gibibyte on each disk
PARAMETERS_ALLOWED_MAX: Final = 1 << 33  # that voters can allow: 32 GB on each disk
UPGRADE_NOTICE_HEIGHTS: Final = 10  # from an upgrade's decision to its first block: every peer has applied the decision by then
UPGRADE_AHEAD_HEIGHTS_MAX: Final = 1_000_000  # weeks of a busy network; further away nobody knows who will vote
ADVERTISED_MAX: Final = 8  # addresses of one peer, or in one invitation: several networks, both IP versions, a name
RELAYS_MAX: Final = 4  # that one peer is reached over: two, and as many while they are replaced
PEER_RECORD_BYTES_MAX: Final = 4 << 10  # of a peer record: addresses as long as they may be, and relays
PEER_RECORDS_MAX: Final = 64  # peer records in one message
PEER_RECORD_AGE_SECONDS_MAX: Final = 7 * 86_400  # without a newer record of its peer, after which one is forgotten

UPLINK_MBIT_MIN: Final = 2  # a second: no trainer is suspended for a faster link; a job may ask for more
ROUND_TRIP_MS_MAX: Final = 300  # of such a link: a mobile phone in the country, another continent
UPLINK_MBIT_MAX: Final = 10_000  # that a job may ask for
AUDIT_RESPONSE_MS: Final = 50 * ROUND_TRIP_MS_MAX  # eight blobs one after another, three round trips each, and the same again
AUDIT_WINDOW_MAX: Final = 1_000  # rounds of a job's window; each keeps a buffer of every trainer on its disk
AUDIT_WINDOW_MS_MAX: Final = 600_000  # so long a liar may go on, and its proposals stay on every disk

assert BLOCK_BYTES_MAX + VOTERS_MAX * 200 < MESSAGE_BYTES_MAX
assert TRANSACTION_BYTES_MAX < BLOCK_BYTES_MAX
assert BLOB_CHUNK_BYTES + 128 <= FRAME_BYTES_MAX
assert BLOB_BYTES_MAX // BLOB_PART_BYTES * 32 <= 64 << 10 < BLOB_PART_BYTES < BLOB_BYTES_MAX
assert ADVERTISED_MAX * (ADDRESS_CHARACTERS_MAX + 3) + RELAYS_MAX * 34 + 64 <= PEER_RECORD_BYTES_MAX
assert SNAPSHOT_PART_BYTES_MAX + HEADER_BYTES_MAX < MESSAGE_BYTES_MAX
assert DATA_BYTES_MAX // DATA_SHARD_BYTES * 40 < BLOCK_BYTES_MAX
