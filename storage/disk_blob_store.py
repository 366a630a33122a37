"""Content-addressed files in two folders: kept blobs, and temporary blobs that only audits need.

Payloads and data are kept blobs. Buffers of trainers are temporary: they are deleted after the audits that need them. A payload
is *lent* to each round with a proposal that names it, until the round's accepted payloads are decided (`add_round_reference`). A
note file beside the blob lists the rounds that it is lent to. Blobs that the audits of one round need are linked into one folder,
and deleted together after these audits. An object larger than a part is one file like any other. `storage.multipart_objects`
stores its list of parts and its incomplete data.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from protocol.blob_digest import LIST_BYTES_MAX, BlobHasher
from protocol.errors import MissingBlobError, RemoteProtocolError, StorageError
from protocol.limits import BLOB_PART_BYTES
from storage.crash_points import crash_points
from storage.durable_files import explain_os_errors, make_directory, sync_directory
from storage.multipart_objects import LIST_SUFFIX, MultipartStore, PartWriter
from transport.blobs.blob_store import MissingParts

PIN_SUFFIX = ".lent"  # suffix of a note file, which lists the rounds that a blob is lent to
UNFINISHED_SUFFIX = ".made"  # suffix of a round's folder until all its hard links exist
JOB_BYTES = 16  # bytes of a job's id in the name of a round's folder: enough to distinguish jobs

# A function of digest and bytes: if the bytes are the list of parts of this object, it stores them and returns true.
AddList = Callable[[bytes, bytes], bool]
log = logging.getLogger(__name__)


class DiskBlobStore:
    """An implementation of `transport.blobs.blob_store.BlobStore`. A file is durable before it is visible under its name."""

    def __init__(self, kept: Path, passing: Path, part_bytes: int = BLOB_PART_BYTES) -> None:
        self._kept, self._passing = kept, passing
        self._parts = MultipartStore(kept / "parts", part_bytes)
        # By digest of a lent blob, (job, round) of the rounds that it is lent to.
        self._lent: dict[bytes, frozenset[tuple[bytes, int]]] = {}
        self._borrowed: set[bytes] = set()  # digests of lent blobs that were not stored before they were lent
        self._loans_lock = threading.RLock()
        self._expected_to_pass: dict[bytes, frozenset[object]] = {}  # owners of temporary blobs, by digest
        self._together: dict[bytes, Path] = {}  # digest -> folder of a round with a hard link to the blob
        self._whole: set[Path] = set()  # folders of rounds that this process has written or verified
        self._together_lock = threading.Lock()  # training retains rounds and audits delete rounds, in different threads
        self._numbers = itertools.count()
        for folder in (kept, passing):
            with explain_os_errors(folder):
                make_directory(folder)
                for leftover in folder.glob("*.part"):
                    leftover.unlink()
        self._parts.load_lists(self._find_blob)
        self._load_pins()

    def path(self, digest: bytes) -> Path:
        """Return the path of a blob. For a missing blob, return the path that it would get."""
        name = digest.hex()
        if os.path.exists(os.path.join(self._passing, name)):
            return self._passing / name
        if digest in self._together:
            return self._together[digest] / name
        is_kept = digest not in self._expected_to_pass or os.path.exists(os.path.join(self._kept, name))
        return (self._kept if is_kept else self._passing) / name

    def size(self, digest: bytes) -> int | None:
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def is_audit_data(self, digest: bytes) -> bool:
        """Return whether a blob is temporary, or would be if it were stored. For a part: whether its object is."""
        places = self._parts.part_positions(digest)
        return self.path(places[0][0] if places else digest).parent != self._kept

    def read_range(self, digest: bytes, offset: int = 0, length: int = -1) -> bytes:
        """Return `length` bytes of a blob from `offset`, or all bytes from `offset` by default.

        Raises `MissingBlobError` if the blob is missing.
        """
        return _read(self.path(digest), offset, length)

    def read_blob(self, digest: bytes, size_max: int) -> bytes:
        """Return a whole blob. Raises `MissingBlobError` if it is missing or larger than `size_max` bytes."""
        data = self.read_range(digest, 0, size_max + 1)
        if len(data) > size_max:
            raise MissingBlobError(f"the blob {digest.hex()} is larger than {size_max} bytes")
        return data

    def open_writer(self, digest: bytes, total: int, of: bytes | None = None) -> BlobFileWriter | PartWriter:
        """Return a writer for a blob of `total` bytes, or for a part of the object `of`.

        Several writers of one blob may be open. Each has its own file, and all finish with the same bytes. If the bytes are the
        list of parts of the object `digest`, they are stored as this list.
        """
        if of is not None:
            return PartWriter(self._parts, digest, total)
        take = self._parts.add_encoded_list if total <= LIST_BYTES_MAX else None
        return BlobFileWriter(self.path(digest), digest, total, next(self._numbers), BlobHasher(self._parts.part_bytes), take)

    def add_bytes(self, data: bytes) -> bytes:
        """Store `data` durably and return its digest.

        The digest of an object larger than a part is the digest of its list of parts.
        """
        hasher = BlobHasher(self._parts.part_bytes)
        hasher.update(data)
        digest = hasher.digest()
        self._delete_pin(digest)
        if self.size(digest) is None:
            with self._parts.pause_sweeps():
                if hasher.part_list is not None:
                    self._parts.add_list(hasher.part_list)
                again = BlobHasher(self._parts.part_bytes)
                writer = BlobFileWriter(self.path(digest), digest, len(data), next(self._numbers), again)
                writer.write(data)
                writer.finish()
        return digest

    def adopt_file(self, file: Path, digest: bytes, lent: tuple[bytes, int] | None = None) -> None:
        """Move a finished file on the same file system into the store, durably. The caller guarantees its digest.

        If the object has parts, their list is beside the file (`storage.multipart_objects.write_list`). `lent` is the job and the
        round that the blob is lent to (`add_round_reference`), or None for a kept blob.
        """
        if lent is None:
            self._delete_pin(digest)
        else:
            self.add_round_reference(digest, *lent)
        path = self.path(digest)
        with self._parts.pause_sweeps(), explain_os_errors(path), crash_points("blob"):
            listed = file.with_name(f"{file.name}{LIST_SUFFIX}")
            # The list of parts is stored first: without it the blob would be served as an object without parts.
            with contextlib.suppress(FileNotFoundError):
                is_list = self._parts.add_encoded_list(digest, listed.read_bytes())
                assert is_list, f"{listed} is not the list of {digest.hex()}"
                listed.unlink()
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
            os.replace(file, path)
            sync_directory(path.parent)

    # Parts of objects, and lists of parts. Both are transferred like blobs.

    def piece_size(self, digest: bytes) -> int | None:
        """Return how many bytes the piece with this digest has: a part, the list of an object with parts, or any other blob."""
        if (parts := self._parts.find_list(digest)) is not None:
            return parts.list_bytes
        found = self._find_part(digest)
        return self.size(digest) if found is None else found[2]

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
        if (parts := self._parts.find_list(digest)) is not None:
            return parts.encode()[offset : offset + length]
        if (found := self._find_part(digest)) is not None:
            path, start, size = found
            return _read(path, start + offset, min(length, size - offset))
        return self.read_range(digest, offset, length)

    def _find_part(self, part: bytes) -> tuple[Path, int, int] | None:
        """Return the path of a file with this part, the part's offset in it and its size in bytes; None if no file has it."""
        for digest, index in self._parts.part_positions(part):
            parts, path = self._parts.find_list(digest), self._parts.partial_path(digest) or self._find_blob(digest)
            if parts is not None and path is not None and not self._parts.lacks_part(digest, index):
                return path, index * parts.part_bytes, parts.part_size(index)
        return None

    def missing_parts(self, digest: bytes) -> MissingParts | None:
        """Return the missing parts of an object; None if its list is not stored."""
        parts = self._parts.find_list(digest)
        return None if parts is None else MissingParts(parts.total, self._parts.missing_parts(digest))

    def lacks_part(self, digest: bytes, part: bytes) -> bool:
        return any(of == digest and self._parts.lacks_part(of, index) for of, index in self._parts.part_positions(part))

    def complete_object(self, digest: bytes) -> None:
        self._parts.complete_object(digest, self.path(digest))

    def sweep_partial(self, wanted: Collection[bytes]) -> None:
        self._parts.sweep_partial(wanted, self._find_blob)

    def _find_blob(self, digest: bytes) -> Path | None:
        """Return the path of a stored blob, even in a folder that `verify_retained` has not read; None if it is missing."""
        name = digest.hex()
        if os.path.exists(path := self.path(digest)):
            return path
        return next((folder / name for folder in self._folders() if os.path.exists(os.path.join(folder, name))), None)

    # Lent blobs

    def add_round_reference(self, digest: bytes, job: bytes, round: int) -> None:
        """Lend a blob to a round, since a proposal of this round names it.

        `drop_blobs` spares the blob until `release_round_references`. A blob that was not stored before its loan is deleted at
        the release, unless a round accepted it or `pin_blob` was called.
        """
        with self._loans_lock:
            if self.size(digest) is None:
                self._borrowed.add(digest)
            self._lent[digest] = rounds = self._lent.get(digest, frozenset()) | {(job, round)}
            if digest in self._borrowed:
                note = self._pin_path(digest)
                with explain_os_errors(note):
                    note.write_text(json.dumps([(key.hex(), number) for key, number in rounds]))

    def round_references(self) -> dict[bytes, frozenset[tuple[bytes, int]]]:
        """Return, by digest, the rounds that a blob is lent to, as (job, number)."""
        return dict(self._lent)

    def release_round_references(self, digest: bytes, rounds: frozenset[tuple[bytes, int]], keeps: bool) -> None:
        """End the loan of a blob to these rounds. Delete the blob if it was only lent, unless a round accepted it (`keeps`).

        Do nothing if the blob has been lent to another round in the meantime.
        """
        with self._loans_lock:
            if self._lent.get(digest) != rounds:
                return
            del self._lent[digest]
            if digest not in self._borrowed:
                return
            self._delete_pin(digest)
            if not keeps:
                self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        """Delete a kept blob. If it has owners (`mark_temporary`), move it to the temporary blobs instead."""
        kept, passing = self._kept / digest.hex(), self._passing / digest.hex()
        with explain_os_errors(kept):
            if digest in self._expected_to_pass and kept.exists():
                os.replace(kept, passing)
            kept.unlink(missing_ok=True)
        if self._find_blob(digest) is None:
            self._parts.forget_object(digest)

    def _pin_path(self, digest: bytes) -> Path:
        return self._kept / f"{digest.hex()}{PIN_SUFFIX}"

    def _load_pins(self) -> None:
        """Restore the loans of blobs to rounds from the note files.

        A note that a crash left incomplete is ignored. Its blob counts as a kept blob.
        """
        for note in self._kept.glob(f"*{PIN_SUFFIX}"):
            with explain_os_errors(note, "read"), contextlib.suppress(ValueError):
                rounds = frozenset((bytes.fromhex(job), int(number)) for job, number in json.loads(note.read_text()))
                self._lent[bytes.fromhex(note.stem)] = rounds
        self._borrowed |= self._lent.keys()

    def _delete_pin(self, digest: bytes) -> None:
        """Delete the note of a lent blob, so that the blob stays after its rounds."""
        with self._loans_lock:
            if digest in self._borrowed:
                self._borrowed.discard(digest)
                with explain_os_errors(self._pin_path(digest)):
                    self._pin_path(digest).unlink(missing_ok=True)

    # Temporary blobs

    def mark_temporary(self, digest: bytes, owner: object) -> None:
        """Add an owner to a temporary blob, which may be stored later.

        `delete_unowned` deletes the blob when all its owners are released. A kept blob is not changed.
        """
        if digest in self._borrowed or self.size(digest) is None or (self._passing / digest.hex()).exists():
            self._expected_to_pass[digest] = self._expected_to_pass.get(digest, frozenset()) | {owner}

    def pin_blob(self, digest: bytes) -> None:
        """Make a temporary or lent blob a kept blob."""
        self._delete_pin(digest)
        self._expected_to_pass.pop(digest, None)
        passing, kept = self._passing / digest.hex(), self._kept / digest.hex()
        with explain_os_errors(kept):
            if passing.exists():
                with crash_points("blob-keep"):
                    os.replace(passing, kept)
                    sync_directory(self._kept)

    def keep_temporary(self, digest: bytes) -> None:
        """Keep a temporary blob until `drop_blobs`, or longer if it still has owners then."""
        kept = self._kept / digest.hex()
        if (path := self.path(digest)) != kept:
            with explain_os_errors(kept), contextlib.suppress(FileExistsError):
                os.link(path, kept)
                sync_directory(self._kept)

    def delete_blob(self, digest: bytes) -> None:
        """Delete a blob durably, even a kept or lent one."""
        self._expected_to_pass.pop(digest, None)
        path = self.path(digest)
        with explain_os_errors(path):
            path.unlink(missing_ok=True)
            sync_directory(path.parent)
        if self._find_blob(digest) is None:
            self._parts.forget_object(digest)

    def drop_blobs(self, digests: Iterable[bytes]) -> None:
        """Delete kept blobs that are not lent. The deletion is not durable: the blobs may reappear if the machine stops."""
        for digest in digests:
            with self._loans_lock:
                if digest not in self._lent:
                    self._remove(digest)

    def release_owner(self, owner: object) -> None:
        left = {digest: owners - {owner} for digest, owners in self._expected_to_pass.items()}
        self._expected_to_pass = {digest: owners for digest, owners in left.items() if owners}

    def delete_unowned(self, keep: set[bytes]) -> None:
        keep = keep | self._expected_to_pass.keys()
        for file in self._passing.iterdir():
            if file.suffix == ".part" or "-" in file.name or (digest := bytes.fromhex(file.name)) in keep:
                continue
            if digest not in self._expected_to_pass:  # The blob may have got an owner since `keep` was computed.
                file.unlink(missing_ok=True)
        self._parts.forget_deleted(self._find_blob)

    # Blobs of a round, which are deleted together

    def retain_round(self, job: bytes, round: int, digests: Iterable[bytes]) -> None:
        """Make durable hard links to the stored blobs with these digests in the round's folder.

        The blobs stay until `delete_rounds`.
        """
        folder = self._passing / _folder_name(job, round)
        with self._together_lock, self._parts.pause_sweeps(), explain_os_errors(folder), crash_points("blob"):
            made = folder.with_name(f"{folder.name}{UNFINISHED_SUFFIX}")
            made.mkdir(exist_ok=True)
            for digest in digests:
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    os.link(self.path(digest), made / digest.hex())
            sync_directory(made)
            # The old folder is left by a crash in the same round. The new links may point to its files, so it is deleted last.
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
            sync_directory(self._passing)
            self._register_folder(folder)

    def verify_retained(self) -> None:
        """Verify and register the folders of rounds that an earlier process retained, and delete damaged files.

        A damaged file must be deleted, since a peer that sends bytes with the wrong hash loses its link. The call reads every
        file and may run in a thread.
        """
        with self._together_lock:
            for left in self._passing.glob(f"*{UNFINISHED_SUFFIX}"):
                shutil.rmtree(left, ignore_errors=True)
        for folder in sorted(set(self._folders()) - self._whole):
            # The folder has been deleted in the meantime.
            with explain_os_errors(folder, "read"), contextlib.suppress(FileNotFoundError):
                for file in list(folder.iterdir()):
                    if not self._is_whole(file):
                        self._delete_damaged(file)
                with self._together_lock:
                    self._register_folder(folder)

    def _delete_damaged(self, file: Path) -> None:
        log.warning("%s is damaged: this peer deletes it and can no longer show it to auditors", file)
        with contextlib.suppress(FileNotFoundError):
            # The temporary blob is deleted only if it is this damaged file, and not a good copy that arrived later.
            if (passing := self._passing / file.name).samefile(file):
                passing.unlink()
        file.unlink(missing_ok=True)

    def retained_rounds(self) -> list[tuple[bytes, int]]:
        """Return (first JOB_BYTES bytes of the job's id, number) of each round that has a folder."""
        names = [folder.name.partition("-") for folder in self._folders()]
        return [(bytes.fromhex(job), int(number)) for job, _, number in names]

    def delete_rounds(self, rounds: Iterable[tuple[bytes, int]]) -> None:
        """Delete the folders of these rounds. The rounds are named as in `retained_rounds`."""
        with self._together_lock:
            for job, number in rounds:
                folder = self._passing / _folder_name(job, number)
                shutil.rmtree(folder, ignore_errors=True)
                self._whole.discard(folder)
            listed: dict[bytes, Path] = {}
            for folder in self._whole:  # Another folder may have a link to a blob of a deleted folder.
                listed |= _listed(folder)
            self._together = listed
        self._parts.forget_deleted(self._find_blob)

    def _is_whole(self, file: Path) -> bool:
        hasher = BlobHasher(self._parts.part_bytes)
        try:
            with file.open("rb", buffering=0) as stream:
                hasher.update_from_stream(stream)
            return hasher.digest().hex() == file.name
        except FileNotFoundError:
            raise
        except OSError:
            return False  # The disk has an unreadable sector.

    def _folders(self) -> list[Path]:
        return [path for path in self._passing.iterdir() if path.is_dir() and path.suffix != UNFINISHED_SUFFIX]

    def _register_folder(self, folder: Path) -> None:
        self._together |= _listed(folder)
        self._whole.add(folder)


def _listed(folder: Path) -> dict[bytes, Path]:
    return {bytes.fromhex(file.name): folder for file in folder.iterdir()}


def _read(path: Path, offset: int, length: int) -> bytes:
    with explain_os_errors(path, "read"), path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)


def _folder_name(job: bytes, round: int) -> str:
    return f"{job[:JOB_BYTES].hex()}-{round}"


class BlobFileWriter:
    """A writer of one blob. Exactly one call of `finish` or `abort` ends it."""

    def __init__(
        self, path: Path, digest: bytes, total: int, number: int, hasher: BlobHasher, take_list: AddList | None = None
    ) -> None:
        self._path, self._digest, self._total = path, digest, total
        self._part = path.with_name(f"{path.name}.{number}.part")
        self._hash, self._written, self._take_list = hasher, 0, take_list
        with explain_os_errors(self._part):
            self._file = self._part.open("wb")

    def write(self, chunk: bytes) -> None:
        self._written += len(chunk)
        if self._written > self._total:
            raise RemoteProtocolError("bad-blob", f"{self._digest.hex()[:16]} is larger than the announced {self._total} bytes")
        self._hash.update(chunk)
        with explain_os_errors(self._part):
            self._file.write(chunk)

    def finish(self) -> None:
        """Make the blob durable, then visible. Raises `RemoteProtocolError` if its hash is wrong."""
        if self._hash.digest() != self._digest:
            self.abort()
            raise RemoteProtocolError("bad-blob", f"the received bytes do not match the digest {self._digest.hex()[:16]}")
        if self._take_list is not None:
            with explain_os_errors(self._part):
                self._file.flush()
                data = self._part.read_bytes()
            if self._take_list(self._digest, data):
                self.abort()
                return
        try:
            with explain_os_errors(self._path), crash_points("blob"):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self._path)
                sync_directory(self._path.parent)
        except StorageError:
            self.abort()
            raise

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # Closing writes buffered bytes, which nobody needs, and fails on a full disk.
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)
