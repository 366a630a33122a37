"""What objects are named by, and lists of parts as bytes."""

from __future__ import annotations

import hashlib
import io
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.blob_digest import LIST_BYTES_MAX, PART_LIST_DOMAIN, BlobHasher, BlobPartList, blob_digest
from protocol.limits import BLOB_BYTES_MAX, BLOB_PART_BYTES

PART = 10  # bytes


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def hasher_of(*pieces: bytes) -> BlobHasher:
    hasher = BlobHasher(part_bytes=PART)
    for piece in pieces:
        hasher.update(piece)
    return hasher


def by_hand(data: bytes) -> bytes:
    parts = [sha256(data[start : start + PART]) for start in range(0, len(data), PART)]
    return b"folkmoot/parts\0" + struct.pack(">Q", len(data)) + b"".join(parts)


@given(st.binary(max_size=4 * PART), st.lists(st.integers(0, 4 * PART), max_size=5))
def test_an_object_has_one_name_however_its_bytes_come(data: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    hasher = hasher_of(*(data[start:end] for start, end in itertools.pairwise(places)))
    assert hasher.digest() == sha256(data if len(data) <= PART else by_hand(data))
    assert (None if hasher.part_list is None else hasher.part_list.encode()) == (None if len(data) <= PART else by_hand(data))
    read = BlobHasher(part_bytes=PART)
    read.update_from_stream(io.BytesIO(data))
    assert read.digest() == hasher.digest()


def test_an_object_of_one_part_is_named_by_its_bytes_and_a_larger_one_by_its_list() -> None:
    data = bytes(BLOB_PART_BYTES)
    assert blob_digest(data) == sha256(data)
    assert blob_digest(data + b"x") == sha256(PART_LIST_DOMAIN + struct.pack(">Q", len(data) + 1) + sha256(data) + sha256(b"x"))


def test_a_list_is_read_as_it_was_written() -> None:
    parts = hasher_of(bytes(3 * PART), b"rest").part_list
    assert parts is not None and BlobPartList.decode(parts.encode(), PART) == parts
    assert [parts.part_size(index) for index in range(4)] == [PART, PART, PART, 4]
    assert len(parts.encode()) == parts.list_bytes and parts.blob_digest == sha256(parts.encode())


LISTED = by_hand(bytes(35))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" + LISTED[1:],
        PART_LIST_DOMAIN,
        LISTED[:-1],
        LISTED + b"\0",
        LISTED + bytes(32),
        LISTED[:-32],
        PART_LIST_DOMAIN + struct.pack(">Q", 45) + LISTED[23:],
        PART_LIST_DOMAIN + struct.pack(">Q", 0),
        PART_LIST_DOMAIN + struct.pack(">Q", PART) + bytes(32),
        PART_LIST_DOMAIN + struct.pack(">Q", BLOB_BYTES_MAX + 1) + bytes(32) * 40,
    ],
)
def test_what_has_another_length_than_its_list_says_is_none(data: bytes) -> None:
    assert BlobPartList.decode(data, PART) is None


def test_the_longest_list_is_of_the_largest_object() -> None:
    count = BLOB_BYTES_MAX // BLOB_PART_BYTES
    data = BlobPartList(BLOB_BYTES_MAX, (bytes(32),) * count).encode()
    assert len(data) == LIST_BYTES_MAX and BlobPartList.decode(data) is not None
