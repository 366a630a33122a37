"""What objects are named by: the SHA-256 of their bytes or, above one part, of the list of their parts.

    list = "folkmoot/parts" ‖ 0 ‖ bytes of the object, u64 big-endian ‖ SHA-256 of each part, in order
    digest = SHA-256(list)

The list is so itself a small blob under the object's digest, and each part one under its own.
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
READ_BYTES: Final = 1 << 20  # of a stream at a time
LIST_BYTES_MAX: Final = _HEAD + BLOB_BYTES_MAX // BLOB_PART_BYTES * _DIGEST


@dataclass(frozen=True, slots=True)
class BlobPartList:
    """The list of an object's parts. Each has `part_bytes`, the last one what is left."""

    total: int
    digests: tuple[bytes, ...]
    part_bytes: int = BLOB_PART_BYTES

    def encode(self) -> bytes:
        return PART_LIST_DOMAIN + _TOTAL.pack(self.total) + b"".join(self.digests)

    @property
    def blob_digest(self) -> bytes:
        """Of the object."""
        return hashlib.sha256(self.encode()).digest()

    @property
    def list_bytes(self) -> int:
        return _HEAD + len(self.digests) * _DIGEST

    def part_size(self, index: int) -> int:
        return min(self.part_bytes, self.total - index * self.part_bytes)

    @classmethod
    def decode(cls, data: bytes, part_bytes: int = BLOB_PART_BYTES) -> BlobPartList | None:
        """None if these bytes are no list: of anything that fits one part there is none."""
        if len(data) < _HEAD or not data.startswith(PART_LIST_DOMAIN):
            return None
        (total,) = _TOTAL.unpack_from(data, len(PART_LIST_DOMAIN))
        if not part_bytes < total <= BLOB_BYTES_MAX or len(data) != _HEAD + -(-total // part_bytes) * _DIGEST:
            return None
        return cls(total, tuple(data[start : start + _DIGEST] for start in range(_HEAD, len(data), _DIGEST)), part_bytes)


class BlobHasher:
    """Takes an object's bytes as they come, and names it."""

    def __init__(self, part_bytes: int = BLOB_PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._whole: list[bytes] = []  # digests of the parts before this one
        self._part, self._filled = hashlib.sha256(), 0  # of this one

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
        """All that is left of it, a piece at a time."""
        while data := stream.read(READ_BYTES):
            self.update(data)

    @property
    def part_list(self) -> BlobPartList | None:
        """None: the object fits one part, and is named by the hash of its bytes."""
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
    """Has taken the object that these pieces are together."""
    hasher = BlobHasher()
    for piece in pieces:
        hasher.update(piece)
    return hasher
