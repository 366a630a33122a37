"""What payload exchange needs of a store of content-addressed bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


class BlobWriter(Protocol):
    """A blob being written front to back. Exactly one of `finish` and `abort` ends it."""

    def write(self, chunk: bytes) -> None: ...

    def finish(self) -> None:
        """Verify SHA-256, make durable, then visible. Raises `RemoteProtocolError("bad-blob")`. May run in a worker thread."""

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MissingParts:
    """An object of which the list is here."""

    total: int  # bytes
    lacking: Mapping[bytes, int]  # the parts that still have to come, and their bytes


class BlobStore(Protocol):
    """Objects by digest. What travels is a *piece*: a list, a part, or an object that has no parts."""

    def size(self, digest: bytes) -> int | None:
        """Bytes of an object that is held and verified; None if it is not."""

    def is_audit_data(self, digest: bytes) -> bool:
        """Whether this piece serves audits alone: what is sent of such is counted apart."""

    def piece_size(self, digest: bytes) -> int | None:
        """Bytes of a piece that is here; None if it is not."""

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes: ...

    def open_writer(self, digest: bytes, total: int, of: bytes | None = None) -> BlobWriter:
        """Of a piece; `of` is the object of which it is a part."""

    def missing_parts(self, digest: bytes) -> MissingParts | None:
        """None: of this object no list is here."""

    def lacks_part(self, digest: bytes, part: bytes) -> bool:
        """Whether this part of an object still has to come."""

    def complete_object(self, digest: bytes) -> None:
        """An object whose parts have come is held from here on; one that is gone lacks all again. May run in a worker thread."""

    def sweep_partial(self, wanted: Collection[bytes]) -> None:
        """Of objects that came in part and are not `wanted` now, a bounded rest stays. May run in a worker thread."""
