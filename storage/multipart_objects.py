"""Objects with parts: the lists of their parts, and incomplete objects that still lack parts.

    parts/<digest>        the list
    parts/<digest>.data   the incomplete object, with each part at its offset
    parts/<digest>.here   one byte for each part: 1 if it is stored

| list | .here | blob | the object                              |
|------|-------|------|-----------------------------------------|
| no   | no    | yes  | fits one part                           |
| yes  | no    | yes  | is complete                             |
| yes  | yes   | no   | is incomplete                           |
| yes  | no    | no   | is missing, and the list is deleted soon |

A part is verified and durable before its byte in `.here` becomes 1. So no part is fetched twice, even after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from protocol.blob_digest import BlobPartList, hash_pieces
from protocol.errors import RemoteProtocolError
from protocol.limits import BLOB_BYTES_MAX, BLOB_PART_BYTES
from storage.crash_points import crash_points
from storage.durable_files import explain_os_errors, make_directory, sync_directory

LIST_SUFFIX = ".list"  # suffix of a list of parts that is beside a file for `DiskBlobStore.adopt_file`
DATA_SUFFIX, MARKS_SUFFIX, UNFINISHED_SUFFIX = ".data", ".here", ".part"
# Most incomplete objects that nobody waits for, after a restart or the end of a round.
ABANDONED_MAX = 16
ABANDONED_BYTES_MAX = BLOB_BYTES_MAX  # most bytes of the stored parts of these objects: the largest object fits
ABANDONED_SECONDS = 24 * 3600.0  # most seconds since the last part of such an object: the round that needed it is over
COPY_BYTES = 1 << 20  # bytes that are read and written at once

FileOf = Callable[[bytes], Path | None]  # a function of a digest that returns the path of the blob; None: the blob is missing
log = logging.getLogger(__name__)


class MultipartStore:
    """The lists of all objects with parts, and the incomplete objects. Its methods may run in any thread."""

    def __init__(self, folder: Path, part_bytes: int = BLOB_PART_BYTES) -> None:
        self.part_bytes = part_bytes
        self.folder = folder
        self._lists: dict[bytes, BlobPartList] = {}
        # By digest of a part, (digest of an object, number of the part in it).
        self._places: dict[bytes, dict[tuple[bytes, int], None]] = {}
        self._lacking: dict[bytes, set[int]] = {}  # numbers of the missing parts, by digest of an incomplete object
        self._adding = 0
        self._lock = threading.RLock()

    def load_lists(self, file_of: FileOf) -> None:
        """Read the lists and incomplete objects that an earlier process stored, and delete damaged and abandoned ones."""
        if not self.folder.exists():
            return
        with explain_os_errors(self.folder):
            for path in list(self.folder.iterdir()):
                if path.suffix == UNFINISHED_SUFFIX:
                    path.unlink()
                elif not path.suffix:
                    self._load(bytes.fromhex(path.name), file_of)
            for path in list(self.folder.iterdir()):
                if path.suffix and bytes.fromhex(path.stem) not in self._lacking:
                    path.unlink()
        self.sweep_partial((), file_of)

    def _load(self, digest: bytes, file_of: FileOf) -> None:
        parts = self.parse_list(digest, self._path(digest).read_bytes())
        blob, here = file_of(digest), self._path(digest, MARKS_SUFFIX)
        if parts is None:
            log.warning("%s is damaged: this peer deletes it with its blob", self._path(digest))
            self._path(digest).unlink()
            if blob is not None:  # Without its list, the blob would be served as an object without parts.
                blob.unlink()
            return
        self._register_list(digest, parts)
        if blob is None and here.exists() and self._path(digest, DATA_SUFFIX).exists():
            marks = here.read_bytes().ljust(len(parts.digests), b"\0")
            self._lacking[digest] = {index for index in range(len(parts.digests)) if marks[index] != 1}

    def parse_list(self, digest: bytes, data: bytes) -> BlobPartList | None:
        """Return the list of parts in `data`; None if it is not the list of the object `digest`."""
        parts = BlobPartList.decode(data, self.part_bytes)
        return parts if parts is not None and parts.blob_digest == digest else None

    def _path(self, digest: bytes, suffix: str = "") -> Path:
        return self.folder / f"{digest.hex()}{suffix}"

    # Lists -----------------------------------------------------------------------------------------------------------

    def add_encoded_list(self, digest: bytes, data: bytes) -> bool:
        """Store `data` durably if it is the list of parts of the object `digest`. Return true if it is."""
        parts = self.parse_list(digest, data)
        if parts is not None:
            self.add_list(parts)
        return parts is not None

    def add_list(self, parts: BlobPartList) -> None:
        """Store a list of parts durably."""
        digest = parts.blob_digest
        with self._lock, explain_os_errors(self.folder):
            if digest in self._lists:
                return
            make_directory(self.folder)
            unfinished = self._path(digest, UNFINISHED_SUFFIX)
            with unfinished.open("wb") as stream:
                stream.write(parts.encode())
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.rename(self._path(digest))
            sync_directory(self.folder)
            self._register_list(digest, parts)

    @contextlib.contextmanager
    def pause_sweeps(self) -> Iterator[None]:
        """Suspend the deletion of lists without a blob in the `with` block: a list is stored before its blob."""
        with self._lock:
            self._adding += 1
        try:
            yield
        finally:
            with self._lock:
                self._adding -= 1

    def _register_list(self, digest: bytes, parts: BlobPartList) -> None:
        self._lists[digest] = parts
        for index, part in enumerate(parts.digests):
            self._places.setdefault(part, {})[digest, index] = None

    def find_list(self, digest: bytes) -> BlobPartList | None:
        return self._lists.get(digest)

    def part_positions(self, part: bytes) -> list[tuple[bytes, int]]:
        """Return (digest of the object, number of the part in it) for each object with this part, even if the part is missing."""
        return list(self._places.get(part, ()))

    # Incomplete objects ----------------------------------------------------------------------------------------------

    def missing_parts(self, digest: bytes) -> dict[bytes, int]:
        """Return the digests of an object's missing parts, each with its size in bytes."""
        parts, lacking = self._lists.get(digest), set(self._lacking.get(digest, ()))
        return {parts.digests[index]: parts.part_size(index) for index in sorted(lacking)} if parts is not None else {}

    def lacks_part(self, digest: bytes, index: int) -> bool:
        return index in self._lacking.get(digest, ())

    def partial_path(self, digest: bytes) -> Path | None:
        """Return the path of the data of an incomplete object, with its stored parts; None if the object is not incomplete."""
        return self._path(digest, DATA_SUFFIX) if digest in self._lacking else None

    def store_part(self, part: bytes, source: int, size: int) -> None:
        """Copy a verified part from the file with the descriptor `source`, durably, into each object that lacks it."""
        for digest, index in self.part_positions(part):
            with self._lock:  # The lock ensures that a stored part is never written again.
                if not self.lacks_part(digest, index):
                    continue
                data = self._path(digest, DATA_SUFFIX)
                with explain_os_errors(data), crash_points("blob-part"):
                    with data.open("rb+", buffering=0) as stream:
                        _copy(source, stream.fileno(), index * self.part_bytes, size)
                        os.fsync(stream.fileno())
                    with self._path(digest, MARKS_SUFFIX).open("rb+", buffering=0) as marks:
                        os.pwrite(marks.fileno(), b"\1", index)
                        os.fsync(marks.fileno())
                self._lacking[digest].discard(index)

    def complete_object(self, digest: bytes, path: Path) -> None:
        """Move an object without missing parts to `path`, its path as a blob.

        An object of which only the list is stored becomes an incomplete object without any part.
        """
        with self._lock, explain_os_errors(path):
            parts = self._lists.get(digest)
            if self._lacking.get(digest) == set():
                with crash_points("blob"):
                    os.replace(self._path(digest, DATA_SUFFIX), path)
                    sync_directory(path.parent)
                del self._lacking[digest]
                self._path(digest, MARKS_SUFFIX).unlink()
            elif parts is not None and digest not in self._lacking and not path.exists():
                self._begin(digest, parts)

    def _begin(self, digest: bytes, parts: BlobPartList) -> None:
        self._path(digest, DATA_SUFFIX).touch()
        with self._path(digest, MARKS_SUFFIX).open("wb") as stream:
            stream.truncate(len(parts.digests))
            os.fsync(stream.fileno())
        sync_directory(self.folder)
        self._lacking[digest] = set(range(len(parts.digests)))

    # Deletion --------------------------------------------------------------------------------------------------------

    def forget_object(self, digest: bytes) -> None:
        """Delete the list of parts and the incomplete data of an object."""
        with self._lock, explain_os_errors(self.folder):
            parts = self._lists.pop(digest, None)
            for index, part in enumerate(parts.digests if parts else ()):
                places = self._places[part]
                del places[digest, index]
                if not places:
                    del self._places[part]
            self._abandon(digest)
            self._path(digest).unlink(missing_ok=True)

    def forget_deleted(self, file_of: FileOf) -> None:
        with self._lock:
            for digest in list(self._lists) if not self._adding else ():
                if digest not in self._lacking and file_of(digest) is None:
                    self.forget_object(digest)

    def sweep_partial(self, wanted: Collection[bytes], file_of: FileOf) -> None:
        """Delete incomplete objects that are not in `wanted`, except the latest ones within the ABANDONED limits."""
        with self._lock:
            if self._adding:  # The blob that is being added may be an incomplete object. A later sweep follows.
                return
            self.forget_deleted(file_of)
            coming = {digest: file_of(digest) is not None for digest in self._lacking}
            # This peer has stored the whole object by itself.
            for digest in [digest for digest, is_held in coming.items() if is_held]:
                self._abandon(digest)
            self._sweep(wanted)

    def _sweep(self, wanted: Collection[bytes]) -> None:
        left = [(self._changed(digest), digest) for digest in self._lacking if digest not in wanted]
        room, now = ABANDONED_BYTES_MAX, time.time()
        for place, (changed, digest) in enumerate(sorted(left, reverse=True)):
            parts, lacking = self._lists[digest], self._lacking[digest]
            room -= parts.total - sum(parts.part_size(index) for index in lacking)
            if place >= ABANDONED_MAX or room < 0 or now - changed > ABANDONED_SECONDS:
                self.forget_object(digest)

    def _abandon(self, digest: bytes) -> None:
        self._lacking.pop(digest, None)
        # The marks are deleted first: data without marks have no meaning, and the next start deletes them.
        for suffix in (MARKS_SUFFIX, DATA_SUFFIX):
            self._path(digest, suffix).unlink(missing_ok=True)

    def _changed(self, digest: bytes) -> float:
        with contextlib.suppress(FileNotFoundError):
            return self._path(digest, MARKS_SUFFIX).stat().st_mtime
        return 0.0


class PartWriter:
    """A writer of one part. Exactly one call of `finish` or `abort` ends it.

    The part is written to a file without a name, so that unverified bytes never reach an object and a crash leaves no file.
    """

    def __init__(self, store: MultipartStore, part: bytes, size: int) -> None:
        self._store, self._part, self._size = store, part, size
        self._hash, self._written = hashlib.sha256(), 0
        with explain_os_errors(store.folder):
            self._file = tempfile.TemporaryFile(dir=store.folder, buffering=0)  # noqa: SIM115 - `abort` closes the file

    def write(self, chunk: bytes) -> None:
        if self._written + len(chunk) > self._size:
            raise RemoteProtocolError("bad-blob", f"the part {self._part.hex()[:16]} is larger than {self._size} bytes")
        self._hash.update(chunk)
        with explain_os_errors(self._store.folder):
            _write(self._file.fileno(), chunk, self._written)
        self._written += len(chunk)

    def finish(self) -> None:
        """Verify the part and store it durably in all objects that lack it. Raises `RemoteProtocolError` if its hash is wrong."""
        try:
            if self._hash.digest() != self._part:
                raise RemoteProtocolError(
                    "bad-blob", f"the received bytes do not match the digest of the part {self._part.hex()[:16]}"
                )
            self._store.store_part(self._part, self._file.fileno(), self._size)
        finally:
            self.abort()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def write_list(file: Path, parts: BlobPartList | None) -> None:
    """Write the list of an object's parts beside the object's file, for `DiskBlobStore.adopt_file`.

    None: the object has no parts.
    """
    if parts is not None:
        file.with_name(f"{file.name}{LIST_SUFFIX}").write_bytes(parts.encode())


def write_object(file: Path, data: bytes | memoryview) -> bytes:
    """Write an object to a file, and the list of its parts, if any, beside it. Return its digest.

    `DiskBlobStore.adopt_file` makes the files durable.
    """
    file.write_bytes(data)
    hasher = hash_pieces([data])
    write_list(file, hasher.part_list)
    return hasher.digest()


def _write(descriptor: int, data: bytes, offset: int) -> None:
    if os.pwrite(descriptor, data, offset) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy(source: int, to: int, offset: int, size: int) -> None:
    for start in range(0, size, COPY_BYTES):
        _write(to, os.pread(source, min(COPY_BYTES, size - start), start), offset + start)
