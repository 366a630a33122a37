"""Merkle trees after RFC 6962 section 2.1: leaves and nodes are hashed under different prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

EMPTY = hashlib.sha256(b"").digest()
LEAF_PREFIX = b"\x00"


def leaf_hash(data: bytes) -> bytes:
    return hashlib.sha256(LEAF_PREFIX + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over the leaf hashes (`leaf_hash`) in `leaves`.

    An odd node moves up unchanged, which equals RFC 6962's split.
    """
    level = list(leaves)
    if not level:
        return EMPTY
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)] + odd
    return level[0]


def merkle_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the audit path of leaf `index`, from the leaf to the root (RFC 6962 section 2.1.1).

    Raises `IndexError` if there is no such leaf.
    """
    if not 0 <= index < len(leaves):
        raise IndexError(index)
    path: list[bytes] = []
    level = list(leaves)
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        odd = level[-1:] if len(level) % 2 else []
        level = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)] + odd
        index //= 2
    return path


def verify_merkle_proof(leaf: bytes, index: int, count: int, path: Sequence[bytes], expected_root: bytes) -> bool:
    """Return whether the leaf hash `leaf` is at position `index` of `count` leaves under `expected_root`."""
    if not 0 <= index < count:
        return False
    node, remaining = leaf, list(path)
    while count > 1:
        sibling = index ^ 1
        if sibling < count:
            if not remaining:
                return False
            other = remaining.pop(0)
            node = node_hash(node, other) if index % 2 == 0 else node_hash(other, node)
        index //= 2
        count = (count + 1) // 2
    return not remaining and node == expected_root
