"""What a store writes when the table of the last block takes the place of the one before.

A store holds one tree of each table: the buckets, each in a slot, with what it takes to build the branches again. `replaced` says
what to write. A bucket that is in both trees stays where it is. What a new bucket takes the place of is put into memory first: an
older table may still be read, by a snapshot for example. When nobody holds that table any more, its buckets go with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ledger.tables.table import Table
from ledger.tables.tree import BUCKET_ROWS_MAX, DEPTH_MAX, Branch, Bucket, Node, Rows, branch_hash, hash_of, middle
from protocol.errors import StorageError

R = TypeVar("R")

PATH_BYTES: Final = DEPTH_MAX // 8


@dataclass(frozen=True, slots=True)
class Stored:
    """One bucket as a store keeps it, beside its data."""

    slot: int
    start: bytes  # the first path that belongs to it, without the zero bytes at its end: in this order buckets are side by side
    depth: int
    rows: int
    size: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Replacement:
    """After `puts` are written and `drops` are deleted, all at once, the store holds the tree `node`."""

    node: Node
    puts: list[tuple[Stored, bytes]]
    drops: list[int]  # slots


def replaced(old: Node, new: Node, store: Rows, fresh: Iterator[int]) -> Replacement:
    """`old` is the tree that `store` holds; `fresh` are slots that are free beside those of `old`."""
    superseded: list[Bucket] = []
    moved: list[tuple[Bucket, int, int, bytes]] = []  # with start and depth

    def adopt(old: Node, new: Node, start: int, depth: int) -> Node:
        if hash_of(old) == hash_of(new):  # at one place of the tree: the same rows, so the same buckets
            return old
        if isinstance(old, Branch) and isinstance(new, Branch):
            left = adopt(old.left, new.left, start, depth + 1)
            return Branch(new.hash, left, adopt(old.right, new.right, _right(start, depth), depth + 1))
        superseded.extend(_buckets(old))
        return move(new, start, depth)

    def move(new: Node, start: int, depth: int) -> Node:
        if isinstance(new, Branch):
            left = move(new.left, start, depth + 1)
            return Branch(new.hash, left, move(new.right, _right(start, depth), depth + 1))
        if new is None:
            return None
        bucket = Bucket(new.hash, new.rows, new.size, None, store)
        moved.append((bucket, start, depth, new.read()))
        return bucket

    node = adopt(old, new, 0, 0)
    slots = [bucket.slot for bucket in superseded]
    for bucket in superseded:
        bucket.data = bucket.read()
    puts: list[tuple[Stored, bytes]] = []
    for bucket, start, depth, data in moved:
        bucket.slot = slots.pop() if slots else next(fresh)
        first = start.to_bytes(PATH_BYTES, "big").rstrip(b"\x00")
        puts.append((Stored(bucket.slot, first, depth, bucket.rows, bucket.size, bucket.hash), data))
    return Replacement(node, puts, slots)


def loaded(stored: Iterable[Stored], store: Rows) -> Node:
    """The tree over buckets that a store kept. Raises `StorageError` if they are not those of any tree.

    Whether they are the right ones is for the caller to say, by the hash of the tree: no data are read here.
    """
    places = [(place.start.ljust(PATH_BYTES, b"\x00"), place) for place in stored]
    return _built(sorted(places, key=lambda item: item[0]), store, 0)


def _built(places: Sequence[tuple[bytes, Stored]], store: Rows, depth: int) -> Node:
    if not places:
        return None
    first = places[0][1]
    if len(places) == 1 and first.depth == depth and 1 <= first.rows <= BUCKET_ROWS_MAX:
        return Bucket(first.hash, first.rows, first.size, None, store, first.slot)
    if first.depth <= depth or depth == DEPTH_MAX:
        raise StorageError("buckets of a table overlap")
    half = middle(places, depth)
    left, right = _built(places[:half], store, depth + 1), _built(places[half:], store, depth + 1)
    if (left.rows if left else 0) + (right.rows if right else 0) <= BUCKET_ROWS_MAX:
        raise StorageError("buckets of a table are missing")
    return Branch(branch_hash(hash_of(left), hash_of(right)), left, right)


def _buckets(node: Node) -> Iterator[Bucket]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Branch):
            waiting += (node.right, node.left)
        elif node is not None:
            yield node


def _right(start: int, depth: int) -> int:
    return start | 1 << DEPTH_MAX - 1 - depth


class MemoryRows:
    """Implements `Rows` for one table, for simulated peers and for tests: what it kept is there again after a restart."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Stored, bytes]] = {}
        self._tree: Node = None
        self._fresh = itertools.count()

    def save(self, table: Table[R]) -> Replacement:
        change = replaced(self._tree, table.node, self, self._fresh)
        self.kept.update({stored.slot: (stored, data) for stored, data in change.puts})
        for slot in change.drops:
            del self.kept[slot]
        self._tree = change.node
        table.settle(change.node)
        return change

    def load(self, kind: type[R]) -> Table[R]:
        self._tree = loaded([stored for stored, _ in self.kept.values()], self)
        self._fresh = itertools.count(max(self.kept, default=-1) + 1)
        return Table(kind, self._tree)

    def read(self, bucket: Bucket) -> bytes:
        stored, data = self.kept[bucket.slot]
        if stored.hash != bucket.hash:
            raise StorageError("a slot holds other rows")
        return data
