"""The block envelope: what consensus needs to see of a block. The body is opaque."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from protocol import codec
from protocol.codec import Count, Digest, Key, Length
from protocol.limits import BLOCK_BYTES_MAX, VOTERS_MAX
from protocol.messages import Certificate

# What the envelope may need beside its body: VOTERS_MAX signatures, VOTERS_MAX failed leaders, the fixed fields.
ENVELOPE_BYTES_MAX = VOTERS_MAX * (32 + 64 + 8) + VOTERS_MAX * (32 + 16) + 1_024
BODY_BYTES_MAX = BLOCK_BYTES_MAX - ENVELOPE_BYTES_MAX
FIRST_HEIGHT = 1  # height 0 is the genesis, which is agreed on by having the same chain id

assert BODY_BYTES_MAX > BLOCK_BYTES_MAX // 2


@dataclass(frozen=True, slots=True)
class Block:
    height: Count
    parent: Digest  # digest of the block before; of the first block the chain id
    time_ms: Count  # the proposer's clock, milliseconds since the Unix epoch
    proposer: Key  # who made the block; another leader may propose it again in a later view
    voters: Digest  # hash of the set that decides this height
    next_voters: Digest  # hash of the set that decides the next one
    state_root: Digest  # after the parent was applied
    parent_certificate: Certificate | None  # commits of the parent, as many as the proposer knew; None in the first block
    failed: Annotated[dict[Key, Count], Length(0, VOTERS_MAX)]  # leaders that failed -> first height at which they may lead again
    body: Annotated[bytes, Length(0, BODY_BYTES_MAX)]


def encode_block(block: Block) -> bytes:
    return codec.encode(block)


def decode_block(data: bytes) -> Block:
    """Raises `RemoteProtocolError` for anything but the canonical bytes of a block."""
    return codec.decode(Block, data, BLOCK_BYTES_MAX)


def block_digest(data: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/block\x00" + data).digest()
