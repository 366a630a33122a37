"""Every bound that peers must agree on or that protects memory, with its reason. Sizes are bytes, times are seconds."""

from __future__ import annotations

from typing import Final

VOTERS_MAX: Final = 200  # quorum rules are tested for n = 1..200; certificates grow linearly with n
MEMBERS_MAX: Final = 10_000  # the member table is hashed into every state root
TRAINERS_MAX: Final = 200  # a ballot names each trainer once

MESSAGE_BYTES_MAX: Final = 8 << 20  # one wire message; the largest is a Decision: a block and its certificate
BLOCK_BYTES_MAX: Final = 4 << 20  # leaves room in a message for certificates of VOTERS_MAX signatures
TRANSACTION_BYTES_MAX: Final = 256 << 10  # a job with its data manifest hash fits many times over
TRANSACTIONS_PER_BLOCK_MAX: Final = 1_000  # keeps check_block well under a second
TRANSACTIONS_PENDING_MAX: Final = 10_000  # a peer's memory for what is not decided yet
TRANSACTION_LIFETIME_HEIGHTS: Final = 1_000  # an expiry further away than this is refused: nonces can be forgotten

VIEWS_AHEAD_MAX: Final = 64  # votes kept for views beyond the current one, per voter; timers double long before
DECISIONS_PER_REPLY_MAX: Final = 32  # catch-up goes in small steps so that votes are not delayed behind it
CLOCK_AHEAD_SECONDS: Final = 2.0  # how far a block's time may lie before the clock of the voter that prepares it

BLOB_BYTES_MAX: Final = 512 << 20  # committed buffers of a 100M-parameter model are 400 MB
BLOB_CHUNK_BYTES: Final = 48 << 10  # fits one frame with its header, so a vote waits for at most one frame
DATA_SHARD_BYTES: Final = 1 << 20  # training text travels in shards of this size: resumable, from several holders
DATA_BYTES_MAX: Final = 64 << 30  # all shards of a job; the manifest then stays under MESSAGE_BYTES_MAX

FRAME_BYTES_MAX: Final = 64 << 10  # Noise messages are at most 65535 bytes
NAME_CHARACTERS_MAX: Final = 64  # names people give to networks, jobs and peers
ADDRESSES_MAX: Final = 64  # one peer-exchange message

assert BLOCK_BYTES_MAX + VOTERS_MAX * 200 < MESSAGE_BYTES_MAX
assert TRANSACTION_BYTES_MAX < BLOCK_BYTES_MAX
assert BLOB_CHUNK_BYTES + 1_024 < FRAME_BYTES_MAX
assert DATA_BYTES_MAX // DATA_SHARD_BYTES * 40 < BLOCK_BYTES_MAX
