"""The interface of a store of content-addressed bytes, for transfers of blobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


class BlobWriter(Protocol):
    """A writer of a blob from its first byte to its last. A call of `finish` or of `abort`, but never both, ends the writing."""

    def write(self, chunk: bytes) -> None: ...

    def finish(self) -> None:
        """Verify the digest, make the blob durable, then visible. May run in a worker thread.

        Raises `RemoteProtocolError("bad-blob")` if the digest is wrong.
        """

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MissingParts:
    """The missing parts of an object whose list is stored."""

    total: int  # bytes
    lacking: Mapping[bytes, int]  # digest of a missing part -> its size in bytes


class BlobStore(Protocol):
    """A store of objects by digest. A *piece* is the unit of transfer: a list, a part, or an object without parts."""

    def size(self, digest: bytes) -> int | None:
        """Return the size in bytes of a complete object. None: the object is not stored."""

    def is_audit_data(self, digest: bytes) -> bool:
        """Return whether this piece serves audits only. Its traffic is counted separately."""

    def piece_size(self, digest: bytes) -> int | None:
        """Return the size in bytes of a piece. None: the piece is not stored."""

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes: ...

    def open_writer(self, digest: bytes, total: int, of: bytes | None = None) -> BlobWriter:
        """Return a writer of a piece. `of` is the digest of the object if the piece is a part."""

    def missing_parts(self, digest: bytes) -> MissingParts | None:
        """Return the missing parts of an object. None: the object's list of parts is not stored."""

    def lacks_part(self, digest: bytes, part: bytes) -> bool:
        """Return whether this part of an object is missing."""

    def complete_object(self, digest: bytes) -> None:
        """Store an object that has all its parts.

        If the object was deleted, mark all its parts as missing again. May run in a worker thread.
        """

    def sweep_partial(self, wanted: Collection[bytes]) -> None:
        """Delete incomplete objects outside `wanted`, except a bounded rest. May run in a worker thread."""
