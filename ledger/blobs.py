"""Content-addressed files: payloads and data are kept, error-feedback buffers live only as long as somebody may re-execute with them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO

from protocol.errors import RemoteProtocolError, StorageError


class Blobs:
    """Implements `transport.exchange.BlobStore`. A file is durable before it is visible under its name."""

    def __init__(self, kept: Path, passing: Path) -> None:
        self._kept, self._passing = kept, passing
        self._expected_to_pass: dict[bytes, object] = {}
        for folder in (kept, passing):
            folder.mkdir(parents=True, exist_ok=True)
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
        with self.path(digest).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def begin(self, digest: bytes, total: int) -> Writer:
        return Writer(self.path(digest), digest, total)

    def add(self, data: bytes) -> bytes:
        digest = hashlib.sha256(data).digest()
        if self.size(digest) is None:
            writer = self.begin(digest, len(data))
            writer.write(data)
            writer.finish()
        return digest

    def adopt(self, file: Path, digest: bytes) -> None:
        """Takes over a finished file that somebody else wrote on the same file system; the caller vouches for the digest."""
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(file, self.path(digest))

    # Passing blobs

    def expect_to_pass(self, digest: bytes, owner: object) -> None:
        """This blob, when it comes, is kept only as long as `owner` is not released or `delete_passed` is told to keep it."""
        if self.size(digest) is None:
            self._expected_to_pass[digest] = owner

    def release(self, owner: object) -> None:
        self._expected_to_pass = {digest: who for digest, who in self._expected_to_pass.items() if who != owner}

    def delete_passed(self, keep: set[bytes]) -> None:
        keep = keep | self._expected_to_pass.keys()
        for file in self._passing.iterdir():
            if file.suffix != ".part" and bytes.fromhex(file.name) not in keep:
                file.unlink(missing_ok=True)


class Writer:
    def __init__(self, path: Path, digest: bytes, total: int) -> None:
        self._path, self._digest, self._total = path, digest, total
        self._part = path.with_suffix(".part")
        self._hash, self._written = hashlib.sha256(), 0
        self._file: IO[bytes] = self._guard_open()

    def _guard_open(self) -> IO[bytes]:
        try:
            return self._part.open("wb")
        except OSError as error:
            raise StorageError(f"cannot write {self._part}: {error.strerror}") from error

    def write(self, chunk: bytes) -> None:
        self._written += len(chunk)
        if self._written > self._total:
            raise RemoteProtocolError("bad-blob", f"more than the {self._total} bytes announced")
        self._hash.update(chunk)
        try:
            self._file.write(chunk)
        except OSError as error:
            raise StorageError(f"cannot write {self._part}: {error.strerror}; free some space and start again") from error

    def finish(self) -> None:
        """Makes the blob durable and visible; `RemoteProtocolError` if it is not what its digest says."""
        if self._hash.digest() != self._digest:
            self.abort()
            raise RemoteProtocolError("bad-blob", f"{self._digest.hex()[:16]} has other bytes")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._part, self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}; free some space and start again") from error

    def abort(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
