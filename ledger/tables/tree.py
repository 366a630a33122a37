"""Which hash stands for which rows: a binary Merkle radix tree over SHA-256 of the keys, whose values never change.

It is the tree of Diem's state (Gao, Hu, Wu, "Jellyfish Merkle Tree", 2021, section 3), two ways at a branch. No rows have the
hash `EMPTY`. One row alone has its own hash, at whatever depth it is alone. More rows have the hash of their two halves. So the
root depends on the rows alone.

Buckets have no part in the root. A bucket is a highest subtree of at most `BUCKET_ROWS_MAX` rows: it is read and written at once,
and only what lies above the buckets is held in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

from protocol import codec
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX

EMPTY: Final = bytes(32)  # nobody knows anything with this hash
DEPTH_MAX: Final = 256  # bits of a path
# With half as many, branches take twice the memory; with twice as many, a block hashes twice the rows that it does not change.
BUCKET_ROWS_MAX: Final = 16
ROW_HEADS_BYTES: Final = 6  # what the encoding of a pair adds to key and value, at most

assert ROW_KEY_BYTES_MAX < 1 << 8 and ROW_BYTES_MAX < 1 << 16  # heads of one, two and three bytes

_sha256 = hashlib.sha256
_ROW, _BRANCH = b"folkmoot/row\x00", b"folkmoot/branch\x00"


def path_of(key: bytes) -> bytes:
    """Where a key lies: from the highest bit of the first byte on, 0 goes left and 1 goes right."""
    return _sha256(key).digest()


def leaf_hash(path: bytes, value_digest: bytes) -> bytes:
    return _sha256(_ROW + path + value_digest).digest()


def row_hash(path: bytes, value: bytes) -> bytes:
    return _sha256(_ROW + path + _sha256(value).digest()).digest()


def branch_hash(left: bytes, right: bytes) -> bytes:
    return _sha256(_BRANCH + left + right).digest()


def goes_right(path: bytes, depth: int) -> int:
    return path[depth >> 3] >> (7 - (depth & 7)) & 1


class Rows(Protocol):
    """Where buckets are that are not in memory."""

    def read(self, bucket: Bucket) -> bytes:
        """Its data. Raises `StorageError` if they are not what was written."""


class Bucket:
    """At least one row, at most `BUCKET_ROWS_MAX`. It has its data, or a store has them."""

    __slots__ = ("data", "hash", "rows", "size", "slot", "store")

    def __init__(self, hash: bytes, rows: int, size: int, data: bytes | None, store: Rows | None = None, slot: int = 0) -> None:
        assert 1 <= rows <= BUCKET_ROWS_MAX
        self.hash = hash
        self.rows = rows
        self.size = size  # of its rows, as `row_size` counts them
        self.data = data  # key, value, key, value …, by path
        self.store = store
        self.slot = slot  # which of the store's places it has

    def read(self) -> bytes:
        if (data := self.data) is not None:
            return data
        assert self.store is not None
        return self.store.read(self)

    def flat(self) -> list[bytes]:
        """Key, value, key, value …"""
        flat: list[bytes] = codec.unpack(data := self.read(), len(data))
        return flat


class Branch:
    """More rows than a bucket holds."""

    __slots__ = ("hash", "left", "right", "rows", "size")

    rows: int
    size: int

    def __init__(self, hash: bytes, left: Node, right: Node) -> None:
        self.hash = hash
        self.left = left
        self.right = right
        self.rows = (left.rows if left else 0) + (right.rows if right else 0)
        self.size = (left.size if left else 0) + (right.size if right else 0)
        assert self.rows > BUCKET_ROWS_MAX


Node: TypeAlias = Branch | Bucket | None  # None: no rows
Row: TypeAlias = tuple[bytes, bytes, bytes]  # path, key, encoded value
Change: TypeAlias = tuple[bytes, bytes, bytes | None]  # the same; None: the row goes


def row_size(key: bytes, value: bytes) -> int:
    """What a row adds to a part of a snapshot, at most."""
    return len(key) + len(value) + ROW_HEADS_BYTES


def hash_of(node: Node) -> bytes:
    return node.hash if node is not None else EMPTY


# Reading -----------------------------------------------------------------------------------------------------------------


def find(node: Node, key: bytes) -> bytes | None:
    """The encoded value of a key."""
    path, depth = path_of(key), 0
    while isinstance(node, Branch):
        node = node.right if goes_right(path, depth) else node.left
        depth += 1
    if node is None:
        return None
    flat = node.flat()
    try:
        return flat[2 * flat[::2].index(key) + 1]
    except ValueError:
        return None


def walk(node: Node) -> Iterator[tuple[bytes, bytes]]:
    """Keys and encoded values, by path."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Branch):
            waiting += (node.right, node.left)
        elif node is not None:
            flat = node.flat()
            yield from zip(flat[::2], flat[1::2], strict=True)


# Changing ----------------------------------------------------------------------------------------------------------------


def changed(node: Node, changes: Sequence[Change], depth: int = 0) -> Node:
    """The tree after `changes`, which ascend by path, each path once. What is not changed is the very same."""
    if not changes:
        return node
    if isinstance(node, Branch):
        half = middle(changes, depth)
        left = changed(node.left, changes[:half], depth + 1)
        right = changed(node.right, changes[half:], depth + 1)
        return node if left is node.left and right is node.right else _joined(left, right)
    before = rows_of(node)
    after = {row[0]: row for row in before}
    for path, key, value in changes:
        if value is None:
            after.pop(path, None)
        else:
            after[path] = (path, key, value)
    rows = sorted(after.values())
    return node if rows == before else built(rows, depth)


def built(rows: Sequence[Row], depth: int = 0) -> Node:
    """The subtree at `depth` of these rows (path, key, encoded value), which ascend by path."""
    return _built(rows, [row_hash(path, value) for path, _, value in rows], depth)


def rows_of(node: Node) -> list[Row]:
    """By path."""
    return [(path_of(key), key, value) for key, value in walk(node)]


def _built(rows: Sequence[Row], hashes: Sequence[bytes], depth: int) -> Node:
    if not rows:
        return None
    if len(rows) > BUCKET_ROWS_MAX:
        half = middle(rows, depth)
        left = _built(rows[:half], hashes[:half], depth + 1)
        right = _built(rows[half:], hashes[half:], depth + 1)
        return Branch(branch_hash(hash_of(left), hash_of(right)), left, right)
    flat: list[bytes] = []
    size = 0
    for _, key, value in rows:
        flat += (key, value)
        size += row_size(key, value)
    return Bucket(folded([row[0] for row in rows], hashes, depth), len(rows), size, codec.encode(flat))


def _joined(left: Node, right: Node) -> Node:
    """A branch of two halves, or one bucket if they fit into one: it never matters what stood there before."""
    rows = (left.rows if left else 0) + (right.rows if right else 0)
    if rows > BUCKET_ROWS_MAX:
        return Branch(branch_hash(hash_of(left), hash_of(right)), left, right)
    if rows <= 1:
        return left or right
    assert not isinstance(left, Branch) and not isinstance(right, Branch)  # such a half alone has more rows
    flat = (left.flat() if left else []) + (right.flat() if right else [])
    size = (left.size if left else 0) + (right.size if right else 0)
    return Bucket(branch_hash(hash_of(left), hash_of(right)), rows, size, codec.encode(flat))


def folded(paths: Sequence[bytes], hashes: Sequence[bytes], depth: int) -> bytes:
    """The hash of a subtree at `depth`, from the hashes of its rows."""
    if len(paths) < 2:
        return hashes[0] if hashes else EMPTY
    byte, mask = depth >> 3, 0x80 >> (depth & 7)
    half = 0
    for path in paths:
        if path[byte] & mask:
            break
        half += 1
    # This is where a block spends most of its time: what is one row or none is not worth a call.
    left = right = EMPTY
    if half:
        left = hashes[0] if half == 1 else folded(paths[:half], hashes[:half], depth + 1)
    if beside := len(paths) - half:
        right = hashes[-1] if beside == 1 else folded(paths[half:], hashes[half:], depth + 1)
    return _sha256(_BRANCH + left + right).digest()


def middle(items: Sequence[tuple[bytes, *tuple[Any, ...]]], depth: int) -> int:
    """How many of these go left. They begin with a path, ascend by it, and agree in the bits above `depth`."""
    low, high = 0, len(items)
    while low < high:
        half = (low + high) // 2
        if goes_right(items[half][0], depth):
            high = half
        else:
            low = half + 1
    return low
