from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import merkle

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
