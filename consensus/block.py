"""The block envelope: all fields of a block that agreement reads. The body is opaque bytes.

A block's digest is the digest of its header, which contains the SHA-256 of the body instead of the body. A header and a
certificate therefore prove height, voters and state root without the body.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Annotated

from protocol.codec import Count, Digest, Key, Length, decode, encode
from protocol.errors import RemoteProtocolError
from protocol.limits import BLOCK_BYTES_MAX, HEADER_BYTES_MAX, VOTERS_MAX
from protocol.messages import Certificate

# Maximum bytes of a block's fields without the body: VOTERS_MAX signatures, VOTERS_MAX failed leaders, and fields of fixed
# size.
ENVELOPE_BYTES_MAX = VOTERS_MAX * (32 + 64 + 8) + VOTERS_MAX * (32 + 16) + 1_024
BODY_BYTES_MAX = BLOCK_BYTES_MAX - ENVELOPE_BYTES_MAX
FIRST_HEIGHT = 1  # height of the first block; height 0 is the genesis, which the chain id identifies

assert BODY_BYTES_MAX > BLOCK_BYTES_MAX // 2
assert ENVELOPE_BYTES_MAX <= HEADER_BYTES_MAX


@dataclass(frozen=True, slots=True)
class BlockEnvelope:
    """The fields that `Block` and `BlockHeader` share: all but the body."""

    height: Count
    parent: Digest  # digest of the previous block; in the first block, the chain id
    time_ms: Count  # milliseconds since the Unix epoch by the proposer's clock; later than the parent's time
    proposer: Key  # voter that made the block; another leader may propose it again in a later view
    voters: Digest  # hash of the voter set of this height
    next_voters: Digest  # hash of the voter set of the next height
    state_root: Digest  # state root after the parent block
    # Certificate of the parent, with all commits that the proposer had; None in the first block.
    parent_certificate: Certificate | None
    # Leader that failed -> first height whose block may remove the entry.
    failed: Annotated[dict[Key, Count], Length(0, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class Block(BlockEnvelope):
    body: Annotated[bytes, Length(0, BODY_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class BlockHeader(BlockEnvelope):
    """A block with the SHA-256 of its body instead of the body."""

    body: Digest


_SHARED = tuple(field.name for field in fields(BlockEnvelope))


def encode_block(block: Block) -> bytes:
    return encode(block)


def decode_block(data: bytes) -> Block:
    """Decode a block. Raises `RemoteProtocolError` unless `data` is the canonical encoding of one."""
    return decode(Block, data, BLOCK_BYTES_MAX)


def make_header(block: Block) -> BlockHeader:
    return BlockHeader(**{name: getattr(block, name) for name in _SHARED}, body=hashlib.sha256(block.body).digest())


def encode_header(header: BlockHeader) -> bytes:
    return encode(header)


def decode_header(data: bytes) -> BlockHeader:
    """Decode a header. Raises `RemoteProtocolError` unless `data` is the canonical encoding of one."""
    return decode(BlockHeader, data, HEADER_BYTES_MAX)


def header_digest(data: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/block\x00" + data).digest()


def block_digest(data: bytes) -> bytes:
    """Return the digest of an encoded block. Raises `RemoteProtocolError` if `data` is no block."""
    return header_digest(encode_header(make_header(decode_block(data))))


def assemble_block(header: BlockHeader, body: bytes) -> bytes:
    """Return the encoded block of a header and a body. Raises `RemoteProtocolError` if the header names another body."""
    if hashlib.sha256(body).digest() != header.body:
        raise RemoteProtocolError("wrong-block", f"the body does not match the header of height {header.height}")
    return encode_block(Block(**{name: getattr(header, name) for name in _SHARED}, body=body))
