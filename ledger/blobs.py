"""Content-addressed files: payloads and data are kept, error-feedback buffers pass when nobody re-executes with them any more."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from ledger.crash_points import crash_points
from ledger.durable import make_directory, sync_directory
from protocol.errors import RemoteProtocolError, StorageError


class Blobs:
    """Implements `transport.exchange.BlobStore`. A file is durable before it is visible under its name."""

    def __init__(self, kept: Path, passing: Path) -> None:
        self._kept, self._passing = kept, passing
        self._expected_to_pass: dict[bytes, object] = {}
        self._numbers = itertools.count()
        for folder in (kept, passing):
            with _explained(folder):
                make_directory(folder)
                for leftover in folder.glob("*.part"):
                    leftover.unlink()

    def path(self, digest: bytes) -> Path:
        """Where this blob is, or would be."""
        name = digest.hex()
        passing = self._passing / name
        return passing if digest in self._expected_to_pass or passing.exists() else self._kept / name

    def size(self, digest: bytes) -> int | None:
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, digest: bytes, offset: int = 0, length: int = -1) -> bytes:
        with _explained(self.path(digest), "read"), self.path(digest).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def begin(self, digest: bytes, total: int) -> Writer:
        """Several writers may work on one blob: each has a file of its own, and whoever finishes gives the same bytes."""
        return Writer(self.path(digest), digest, total, next(self._numbers))

    def add(self, data: bytes) -> bytes:
        digest = hashlib.sha256(data).digest()
        if self.size(digest) is None:
            writer = self.begin(digest, len(data))
            writer.write(data)
            writer.finish()
        return digest

    def adopt(self, file: Path, digest: bytes) -> None:
        """Takes over a finished file that somebody else wrote on the same file system; the caller vouches for the digest."""
        path = self.path(digest)
        with _explained(path), crash_points("blob"):
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(file, path)
            sync_directory(path.parent)

    # Passing blobs

    def expect_to_pass(self, digest: bytes, owner: object) -> None:
        """This blob, when it comes, is kept only as long as `owner` is not released or `delete_passed` is told to keep it."""
        if self.size(digest) is None:
            self._expected_to_pass[digest] = owner

    def keep(self, digest: bytes) -> None:
        """This blob stays, whoever said that it would pass."""
        self._expected_to_pass.pop(digest, None)
        passing, kept = self._passing / digest.hex(), self._kept / digest.hex()
        with _explained(kept):
            if passing.exists():
                with crash_points("blob-keep"):
                    os.replace(passing, kept)
                    sync_directory(self._kept)

    def release(self, owner: object) -> None:
        self._expected_to_pass = {digest: who for digest, who in self._expected_to_pass.items() if who != owner}

    def delete_passed(self, keep: set[bytes]) -> None:
        keep = keep | self._expected_to_pass.keys()
        for file in self._passing.iterdir():
            if file.suffix != ".part" and bytes.fromhex(file.name) not in keep:
                file.unlink(missing_ok=True)


class Writer:
    """Exactly one of `finish` and `abort` ends it."""

    def __init__(self, path: Path, digest: bytes, total: int, number: int) -> None:
        self._path, self._digest, self._total = path, digest, total
        self._part = path.with_name(f"{path.name}.{number}.part")
        self._hash, self._written = hashlib.sha256(), 0
        with _explained(self._part):
            self._file = self._part.open("wb")

    def write(self, chunk: bytes) -> None:
        self._written += len(chunk)
        if self._written > self._total:
            raise RemoteProtocolError("bad-blob", f"more than the {self._total} bytes announced")
        self._hash.update(chunk)
        with _explained(self._part):
            self._file.write(chunk)

    def finish(self) -> None:
        """Makes the blob durable and visible; `RemoteProtocolError` if it is not what its digest says."""
        if self._hash.digest() != self._digest:
            self.abort()
            raise RemoteProtocolError("bad-blob", f"{self._digest.hex()[:16]} has other bytes")
        try:
            with _explained(self._path), crash_points("blob"):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self._path)
                sync_directory(self._path.parent)
        except StorageError:
            self.abort()
            raise

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk does not take is not wanted any more
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path, verb: str = "write") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        way_out = "free some space and start again" if error.errno == errno.ENOSPC else "check the disk and its permissions"
        raise StorageError(f"cannot {verb} {path}: {error.strerror}; {way_out}") from error
