"""What proves that the ledger's database is whole: digests of rows, its write-ahead log, and a count of its transactions.

SQLite reads the log (sqlite.org/fileformat2.html, section 4) up to the first frame that does not fit, and forgets the rest
without a word. That is right for the end of a write that was never finished; but where a frame in the middle is damaged, every
transaction behind it is forgotten too, although each had been synced. For a voter that is amnesia. So the log is looked at before
SQLite does.
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

EXPLANATION_CHARACTERS_MAX = 120  # of what SQLite says, which may quote the damaged bytes
# By words of what SQLite says; what none of them is in is damage.
_EXPLANATIONS = {
    ("full",): "the disk that holds {path} is full: nothing was lost, free some space and start again",
    ("readonly", "unable to open", "permission"): "cannot write {path}: {text}; check the owner and permissions of its folder",
    ("locked", "busy"): "{path} is in use by another program: stop it first",
    ("I/O",): "the disk does not read or write {path} ({text}): check the disk, then start again",
}

REKEY_ADVICE = (
    "this peer may have forgotten what it signed, so give it a new key with `peer rekey`, and do not restore an older copy"
)

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # byte order of the words that are summed

Sums = tuple[int, int]

CHECK_CHARACTERS = 16
DIGITS = 16  # always as many, so that writing replaces bytes in place and takes no room on a full disk


def insert_row(database: sqlite3.Connection, verb: str, table: str, *values: object) -> None:
    marks = ", ".join("?" * (len(values) + 1))
    database.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, row_digest(table, values)))


def row_digest(table: str, values: Sequence[object]) -> bytes:
    """Says that this row, whole, was put into this table."""
    return hashlib.sha256(codec.encode((table, *values))).digest()


def damage_error(path: Path, what: str) -> LostVotesError:
    return LostVotesError(f"{path} is damaged ({what}): {REKEY_ADVICE}")


@contextmanager
def explain_sqlite_errors(path: Path) -> Iterator[None]:
    """Raises `StorageError` in one line: what the disk did wrong, which file, and the way out."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes damaged bytes
        text = " ".join(str(error).encode("ascii", "replace").decode().split())[:EXPLANATION_CHARACTERS_MAX]
        for words, told in _EXPLANATIONS.items():
            if any(word in text for word in words):
                raise StorageError(told.format(path=path, text=text)) from error
        raise damage_error(path, text) from error


@dataclass(frozen=True, slots=True)
class _Frame:
    is_ours: bool  # of this log, not left over from what the file held before it began anew
    is_whole: bool
    commits: bool


def find_log_damage(log: bytes) -> str | None:
    """What is wrong with the synced part of a log. None if nothing is, also where a last, unfinished transaction is torn.

    A transaction begins when the one before has been synced. So a frame behind a commit proves that everything up to that commit
    was on disk once, and must still be there.
    """
    if len(log) <= HEADER_BYTES:
        return None  # no transaction was ever in it
    magic, _, page_bytes = struct.unpack_from(">3I", log)
    order = MAGIC.get(magic, ">")
    if magic not in MAGIC or _add((0, 0), log[:24], order) != struct.unpack_from(">2I", log, 24):
        return "its header has other bytes"  # it is synced before the first frame is written
    first_bad, commit_behind = None, False
    for number, frame in enumerate(_frames(log, page_bytes, order)):
        if first_bad is None and not frame.is_whole:
            first_bad = number
        if first_bad is not None and frame.is_ours:
            if commit_behind:
                return f"frame {first_bad} has other bytes, and later transactions stand behind it"
            commit_behind = frame.commits
    return None


def _frames(log: bytes, page_bytes: int, order: str) -> Iterator[_Frame]:
    salts, sums, is_ours = log[16:24], _sums_at(log, 24), True
    for start in range(HEADER_BYTES, len(log) - FRAME_HEADER_BYTES - page_bytes + 1, FRAME_HEADER_BYTES + page_bytes):
        page = start + FRAME_HEADER_BYTES
        expected = _add(_add(sums, log[start : start + 8], order), log[page : page + page_bytes], order)
        sums = _sums_at(log, start + 16)  # as written, so that one bad frame does not make all behind it look bad
        fits, has_our_salts = sums == expected, log[start + 8 : start + 16] == salts
        is_ours = has_our_salts or (fits and is_ours)  # whatever fits behind a frame of ours is ours, with damaged salts
        yield _Frame(is_ours, has_our_salts and fits, log[start + 4 : start + 8] != bytes(4))


def _sums_at(log: bytes, offset: int) -> Sums:
    first, second = struct.unpack_from(">2I", log, offset)
    return first, second


def _add(sums: Sums, data: bytes, order: str) -> Sums:
    """The checksum of `data` that follows `sums`."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


class HighWaterMark:
    """How far a database had come, in a small file beside it: a database that comes back with less has lost something.

    Written after each commit and not synced: the file may lag behind, by what the kernel had not written when the power failed.
    It is never ahead, so that a database that is behind it was synced further once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def exists(self) -> bool:
        return self._path.exists()

    def read_value(self) -> int:
        """Zero if the file is not there or damaged: it is a hint, and what it guards is checked in other ways too."""
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
