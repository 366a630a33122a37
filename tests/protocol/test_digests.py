"""Digests of objects, and lists of parts as bytes."""

from __future__ import annotations

import hashlib
import io
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import merkle
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
    data = BlobPartList(BLOB_BYTES_MAX, (bytes(32),) * (BLOB_BYTES_MAX // BLOB_PART_BYTES)).encode()
    assert len(data) == LIST_BYTES_MAX and BlobPartList.decode(data) is not None


# Trees ----------------------------------------------------------------------------------------------------------------


# The test inputs and tree hashes of the RFC 6962 reference implementation.
INPUTS = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
ROOTS = {
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def recursive(leaves: list[bytes]) -> bytes:
    """RFC 6962 section 2.1, word for word."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + recursive(leaves[:split]) + recursive(leaves[split:])).digest()


def leaves(count: int) -> list[bytes]:
    return [merkle.leaf_hash(index.to_bytes(2, "big")) for index in range(count)]


@pytest.mark.parametrize("count", ROOTS)
def test_roots_equal_the_published_ones(count: int) -> None:
    assert merkle.merkle_root([merkle.leaf_hash(data) for data in INPUTS[:count]]).hex() == ROOTS[count]


def test_an_empty_tree_has_the_hash_of_nothing() -> None:
    assert merkle.merkle_root([]) == hashlib.sha256().digest()


@pytest.mark.parametrize("count", range(1, 40))
def test_the_root_is_the_one_of_the_recursive_definition(count: int) -> None:
    assert merkle.merkle_root(leaves(count)) == recursive(leaves(count))


@pytest.mark.parametrize("count", range(1, 20))
def test_every_leaf_is_proved_at_its_place_and_nowhere_else(count: int) -> None:
    tree = leaves(count)
    root = merkle.merkle_root(tree)
    for index in range(count):
        path = merkle.merkle_proof(tree, index)
        assert merkle.verify_merkle_proof(tree[index], index, count, path, root)
        for other in range(count):
            if other != index:
                assert not merkle.verify_merkle_proof(tree[other], index, count, path, root)


@given(st.integers(1, 40), st.data())
def test_a_changed_proof_proves_nothing(count: int, data: st.DataObject) -> None:
    tree = leaves(count)
    index = data.draw(st.integers(0, count - 1))
    path, root = merkle.merkle_proof(tree, index), merkle.merkle_root(tree)
    assert not merkle.verify_merkle_proof(tree[index], index, count, [*path, bytes(32)], root)
    assert not merkle.verify_merkle_proof(tree[index], index, count, path, bytes(32))
    if path:
        assert not merkle.verify_merkle_proof(tree[index], index, count, path[:-1], root)
        changed = data.draw(st.integers(0, len(path) - 1))
        assert not merkle.verify_merkle_proof(tree[index], index, count, [*path[:changed], bytes(32), *path[changed + 1 :]], root)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_leaf_outside_the_tree_has_no_proof(index: int) -> None:
    tree = leaves(3)
    with pytest.raises(IndexError):
        merkle.merkle_proof(tree, index)
    assert not merkle.verify_merkle_proof(tree[0], index, 3, [], merkle.merkle_root(tree))


def test_a_leaf_is_no_node() -> None:
    left, right = leaves(2)
    assert merkle.leaf_hash(left + right) != merkle.node_hash(left, right)
