"""Looks at a SQLite write-ahead log before SQLite does (sqlite.org/fileformat2.html, section 4).

SQLite reads the log up to the first frame that does not fit, and forgets the rest without a word. That is right for the end of a
write that was never finished; but where a frame in the middle is damaged, every transaction behind it is forgotten too, although
each had been synced. For a voter that is amnesia.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # byte order of the words that are summed

Sums = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Frame:
    is_ours: bool  # of this log, not left over from what the file held before it began anew
    is_whole: bool
    commits: bool


def find_damage(log: bytes) -> str | None:
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
