"""The block envelope: what consensus needs to see of a block. The body is opaque.

A block is named by the digest of its header, which holds the body's digest in the body's place: so a header and a certificate
prove height, voters and state root to somebody who has not the body.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Annotated

from protocol.codec import Count, Digest, Key, Length, decode, encode
from protocol.errors import RemoteProtocolError
from protocol.limits import BLOCK_BYTES_MAX, HEADER_BYTES_MAX, VOTERS_MAX
from protocol.messages import Certificate

# What the envelope may need beside its body: VOTERS_MAX signatures, VOTERS_MAX failed leaders, the fixed fields.
ENVELOPE_BYTES_MAX = VOTERS_MAX * (32 + 64 + 8) + VOTERS_MAX * (32 + 16) + 1_024
BODY_BYTES_MAX = BLOCK_BYTES_MAX - ENVELOPE_BYTES_MAX
FIRST_HEIGHT = 1  # height 0 is the genesis, which is agreed on by having the same chain id

assert BODY_BYTES_MAX > BLOCK_BYTES_MAX // 2
assert ENVELOPE_BYTES_MAX <= HEADER_BYTES_MAX


@dataclass(frozen=True, slots=True)
class BlockEnvelope:
    """What a block and its header share: all but the body."""

    height: Count
    parent: Digest  # digest of the block before; of the first block the chain id
    time_ms: Count  # the proposer's clock, milliseconds since the Unix epoch
    proposer: Key  # who made the block; another leader may propose it again in a later view
    voters: Digest  # hash of the set that decides this height
    next_voters: Digest  # hash of the set that decides the next one
    state_root: Digest  # after the parent was applied
    parent_certificate: Certificate | None  # commits of the parent, as many as the proposer knew; None in the first block
    failed: Annotated[dict[Key, Count], Length(0, VOTERS_MAX)]  # leaders that failed -> first height whose block may drop them


@dataclass(frozen=True, slots=True)
class Block(BlockEnvelope):
    body: Annotated[bytes, Length(0, BODY_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class BlockHeader(BlockEnvelope):
    """A `Block` with the SHA-256 of its body in place of the body."""

    body: Digest


_SHARED = tuple(field.name for field in fields(BlockEnvelope))


def encode_block(block: Block) -> bytes:
    return encode(block)


def decode_block(data: bytes) -> Block:
    """Raises `RemoteProtocolError` for anything but the canonical bytes of a block."""
    return decode(Block, data, BLOCK_BYTES_MAX)


def make_header(block: Block) -> BlockHeader:
    return BlockHeader(**{name: getattr(block, name) for name in _SHARED}, body=hashlib.sha256(block.body).digest())


def encode_header(header: BlockHeader) -> bytes:
    return encode(header)


def decode_header(data: bytes) -> BlockHeader:
    """Raises `RemoteProtocolError` for anything but the canonical bytes of a header."""
    return decode(BlockHeader, data, HEADER_BYTES_MAX)


def header_digest(data: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/block\x00" + data).digest()


def block_digest(data: bytes) -> bytes:
    """Of the bytes of a block. Raises `RemoteProtocolError` if they are none."""
    return header_digest(encode_header(make_header(decode_block(data))))


def assemble_block(header: BlockHeader, body: bytes) -> bytes:
    """The block of this header. Raises `RemoteProtocolError` if the body is not the one that the header names."""
    if hashlib.sha256(body).digest() != header.body:
        raise RemoteProtocolError("wrong-block", f"the body of a block at height {header.height}")
    return encode_block(Block(**{name: getattr(header, name) for name in _SHARED}, body=body))
