"""What payload exchange needs of a store of content-addressed bytes."""

from __future__ import annotations

from typing import Protocol


class BlobWriter(Protocol):
    """A blob being written front to back. Exactly one of `finish` and `abort` ends it."""

    def write(self, chunk: bytes) -> None: ...

    def finish(self) -> None:
        """Verify SHA-256, make durable, then visible. Raises `RemoteProtocolError("bad-blob")`. May run in a worker thread."""

    def abort(self) -> None: ...


class BlobStore(Protocol):
    def size(self, digest: bytes) -> int | None:
        """Bytes of a blob that is held and verified; None if it is not."""

    def is_reveal(self, digest: bytes) -> bool:
        """Whether it serves audits alone: what is sent of such blobs is counted apart."""

    def read(self, digest: bytes, offset: int, length: int) -> bytes: ...

    def begin(self, digest: bytes, total: int) -> BlobWriter: ...
