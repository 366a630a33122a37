"""Checks that the ledger's database is complete: of the digests of rows, the write-ahead log, and the number of transactions.

SQLite reads the log (sqlite.org/fileformat2.html, section 4) up to the first invalid frame, and silently ignores the rest. This
is right if the last write was not finished. But a damaged frame in the middle also discards all later transactions, although each
of them was synced: a voter would forget its own votes. So this module checks the log before SQLite opens it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol import codec
from protocol.errors import LostVotesError, StorageError
from storage.crash_points import crash_points
from storage.durable_files import atomic_write, explain_os_errors

EXPLANATION_CHARACTERS_MAX = 120  # most characters of SQLite's message in an error: the message may quote damaged bytes
# Explanations for people by words in SQLite's message. A message without any of these words means damage.
_EXPLANATIONS = {
    ("full",): "the disk of {path} is full, and nothing was lost: free some space and start again",
    ("readonly", "unable to open", "permission"): "cannot write {path}: {text}; check the owner and permissions of its folder",
    ("locked", "busy"): "{path} is in use by another program: stop that program first",
    ("I/O",): "the disk failed to read or write {path} ({text}): check the disk, then start again",
}

REKEY_ADVICE = (
    "this peer may have lost its own signatures, so give it a new key with `peer rekey`, and do not restore an older copy"
)

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # byte order of a log's checksums, by the log's magic number

Sums = tuple[int, int]

CHECK_CHARACTERS = 16
# Digits of the number in a high-water mark: fixed, so that a write replaces bytes in place and needs no space on a full disk.
DIGITS = 16


def insert_row(database: sqlite3.Connection, verb: str, table: str, *values: object) -> None:
    marks = ", ".join("?" * (len(values) + 1))
    database.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, row_digest(table, values)))


def row_digest(table: str, values: Sequence[object]) -> bytes:
    """Return the digest of a table's name and a row's values. It is stored as the row's last column."""
    return hashlib.sha256(codec.encode((table, *values))).digest()


def damage_error(path: Path, what: str) -> LostVotesError:
    return LostVotesError(f"{path} is damaged ({what}): {REKEY_ADVICE}")


@contextmanager
def explain_sqlite_errors(path: Path) -> Iterator[None]:
    """Turn an error of SQLite in the `with` block into a `StorageError` of one line with the file, the fault and the remedy."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # The second kind is raised if SQLite's message quotes damaged bytes.
        text = " ".join(str(error).encode("ascii", "replace").decode().split())[:EXPLANATION_CHARACTERS_MAX]
        for words, told in _EXPLANATIONS.items():
            if any(word in text for word in words):
                raise StorageError(told.format(path=path, text=text)) from error
        raise damage_error(path, text) from error


@dataclass(frozen=True, slots=True)
class _Frame:
    is_ours: bool  # True if the frame was written since the log last restarted at its beginning. Older frames remain behind.
    is_whole: bool
    commits: bool


def find_log_damage(log: bytes) -> str | None:
    """Return a description of the damage in the synced part of a write-ahead log; None if there is none.

    An unfinished last transaction is no damage. A transaction begins after the previous one was synced. So a frame behind a
    commit proves that all frames up to this commit were on disk and must still be there.
    """
    if len(log) <= HEADER_BYTES:
        return None  # The log has no transaction.
    magic, _, page_bytes = struct.unpack_from(">3I", log)
    order = MAGIC.get(magic, ">")
    if magic not in MAGIC or _add((0, 0), log[:24], order) != struct.unpack_from(">2I", log, 24):
        return "its header does not match its checksum"  # SQLite syncs the header before the first frame, so this is damage.
    first_bad, commit_behind = None, False
    for number, frame in enumerate(_frames(log, page_bytes, order)):
        if first_bad is None and not frame.is_whole:
            first_bad = number
        if first_bad is not None and frame.is_ours:
            if commit_behind:
                return f"frame {first_bad} does not match its checksum, and later transactions follow it"
            commit_behind = frame.commits
    return None


def _frames(log: bytes, page_bytes: int, order: str) -> Iterator[_Frame]:
    salts, sums, is_ours = log[16:24], _sums_at(log, 24), True
    for start in range(HEADER_BYTES, len(log) - FRAME_HEADER_BYTES - page_bytes + 1, FRAME_HEADER_BYTES + page_bytes):
        page = start + FRAME_HEADER_BYTES
        expected = _add(_add(sums, log[start : start + 8], order), log[page : page + page_bytes], order)
        # Each frame continues the stored sums of the previous frame, so that one bad frame does not invalidate all later frames.
        sums = _sums_at(log, start + 16)
        fits, has_our_salts = sums == expected, log[start + 8 : start + 16] == salts
        # After a frame of ours, a valid sum proves that only the frame's salts are damaged.
        is_ours = has_our_salts or (fits and is_ours)
        yield _Frame(is_ours, has_our_salts and fits, log[start + 4 : start + 8] != bytes(4))


def _sums_at(log: bytes, offset: int) -> Sums:
    first, second = struct.unpack_from(">2I", log, offset)
    return first, second


def _add(sums: Sums, data: bytes, order: str) -> Sums:
    """Return the checksum `sums`, continued over `data`."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


class HighWaterMark:
    """A small file beside the database with the number of committed transactions.

    A database with fewer transactions has lost some. The file is written after each commit, without a sync. So after a power
    failure its number may be too small, but never too large.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def exists(self) -> bool:
        return self._path.exists()

    def read_value(self) -> int:
        """Return the number, or 0 if the file is missing or damaged. The database has other checks, too."""
        with explain_os_errors(self._path, "use"):
            text = self._path.read_bytes() if self.exists() else b""
        number = text[:DIGITS]
        return int(number) if number.isdigit() and text == _line(int(number)) else 0

    def open(self, value: int) -> None:
        with explain_os_errors(self._path, "use"):
            if not self.exists():
                with atomic_write(self._path) as stream:
                    stream.write(_line(value))
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        self.write_value(value)

    def write_value(self, value: int) -> None:
        assert self._descriptor is not None
        with explain_os_errors(self._path, "use"), crash_points("store-count"):
            os.pwrite(self._descriptor, _line(value), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            with explain_os_errors(self._path, "use"):
                os.fsync(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = None


def _line(value: int) -> bytes:
    number = b"%0*d" % (DIGITS, value)
    return number + b" " + hashlib.sha256(number).hexdigest()[:CHECK_CHARACTERS].encode() + b"\n"
