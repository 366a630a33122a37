"""Digests of blobs: the SHA-256 of their bytes or, if they exceed one part, of the list of their parts.

    list = "folkmoot/parts" ‖ 0 ‖ size of the blob in bytes, u64 big-endian ‖ SHA-256 of each part, in order
    digest = SHA-256(list)

So the list is itself a small blob under the digest of the large one, and each part is a blob under its own digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Final

from protocol.limits import BLOB_BYTES_MAX, BLOB_PART_BYTES

PART_LIST_DOMAIN: Final = b"folkmoot/parts\x00"
_TOTAL = struct.Struct(">Q")
_HEAD = len(PART_LIST_DOMAIN) + _TOTAL.size
_DIGEST: Final = 32
READ_BYTES: Final = 1 << 20  # bytes per read from a stream
LIST_BYTES_MAX: Final = _HEAD + BLOB_BYTES_MAX // BLOB_PART_BYTES * _DIGEST


@dataclass(frozen=True, slots=True)
class BlobPartList:
    """The list of a blob's parts. Each part has `part_bytes` bytes, and the last part may be shorter."""

    total: int
    digests: tuple[bytes, ...]
    part_bytes: int = BLOB_PART_BYTES

    def encode(self) -> bytes:
        return PART_LIST_DOMAIN + _TOTAL.pack(self.total) + b"".join(self.digests)

    @property
    def blob_digest(self) -> bytes:
        """Digest of the whole blob."""
        return hashlib.sha256(self.encode()).digest()

    @property
    def list_bytes(self) -> int:
        return _HEAD + len(self.digests) * _DIGEST

    def part_size(self, index: int) -> int:
        return min(self.part_bytes, self.total - index * self.part_bytes)

    @classmethod
    def decode(cls, data: bytes, part_bytes: int = BLOB_PART_BYTES) -> BlobPartList | None:
        """Return the part list that is encoded in `data`. None: `data` is no part list of a blob that exceeds one part."""
        if len(data) < _HEAD or not data.startswith(PART_LIST_DOMAIN):
            return None
        (total,) = _TOTAL.unpack_from(data, len(PART_LIST_DOMAIN))
        if not part_bytes < total <= BLOB_BYTES_MAX or len(data) != _HEAD + -(-total // part_bytes) * _DIGEST:
            return None
        return cls(total, tuple(data[start : start + _DIGEST] for start in range(_HEAD, len(data), _DIGEST)), part_bytes)


class BlobHasher:
    """A hasher that computes a blob's digest from its bytes, which arrive in pieces of any size."""

    def __init__(self, part_bytes: int = BLOB_PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._whole: list[bytes] = []  # digests of the complete parts
        self._part, self._filled = hashlib.sha256(), 0  # hash state and length in bytes of the current part

    def update(self, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data).cast("B")
        while left:
            if self._filled == self._part_bytes:
                self._whole.append(self._part.digest())
                self._part, self._filled = hashlib.sha256(), 0
            piece = left[: self._part_bytes - self._filled]
            self._part.update(piece)
            self._filled += len(piece)
            left = left[len(piece) :]

    def update_from_stream(self, stream: BinaryIO) -> None:
        """Hash all remaining bytes of a stream."""
        while data := stream.read(READ_BYTES):
            self.update(data)

    @property
    def part_list(self) -> BlobPartList | None:
        """Part list of the blob. None: the blob fits one part, so its digest is the hash of its bytes."""
        if not self._whole:
            return None
        total = len(self._whole) * self._part_bytes + self._filled
        return BlobPartList(total, (*self._whole, self._part.digest()), self._part_bytes)

    def digest(self) -> bytes:
        parts = self.part_list
        return self._part.digest() if parts is None else parts.blob_digest


def blob_digest(data: bytes | bytearray | memoryview) -> bytes:
    return hash_pieces([data]).digest()


def hash_pieces(pieces: Iterable[bytes | bytearray | memoryview]) -> BlobHasher:
    """Return a hasher that has hashed the blob which these pieces form."""
    hasher = BlobHasher()
    for piece in pieces:
        hasher.update(piece)
    return hasher
