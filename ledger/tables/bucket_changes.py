"""The writes that replace a stored table with its next version.

A store holds one tree of each table: the buckets, each in a slot, and the data from which the branches are rebuilt. A bucket that
both trees contain stays in its slot. The other new buckets take the slots of the buckets that they replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ledger.tables.sparse_merkle_tree import (
    BUCKET_ROWS_MAX,
    DEPTH_MAX,
    Bucket,
    Node,
    bucket_data,
    buckets,
    make_branch,
    rows_in,
    split_index,
)
from ledger.tables.table import StoreVersion, Table
from protocol.errors import StorageError

PATH_BYTES: Final = DEPTH_MAX // 8


class StoredBucket(NamedTuple):
    """Metadata of one bucket in a store."""

    start: bytes  # first path of the bucket; buckets are sorted by it
    depth: int
    rows: int
    size: int
    hash: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class BucketChanges:
    """Writes and deletions for one transaction of a store, which then holds the tree `node`."""

    node: Node
    puts: list[tuple[StoredBucket, bytes]]
    drops: list[int]  # slots whose buckets are deleted


def compute_bucket_changes(old: Node, version: StoreVersion, table: Table[Any] | None, fresh: Iterator[int]) -> BucketChanges:
    """Return the writes that turn `old`, the tree that a store holds in `version`, into `table`. `fresh` yields unused slots.

    Buckets that lose their slots are copied to memory first.
    """
    whole, read = table.hashed_tree() if table is not None else (None, version.read_bucket)
    superseded: list[Bucket] = []
    free: list[int] = []
    puts: list[tuple[StoredBucket, bytes]] = []

    def adopt(old: Node, new: Node, way: int, depth: int) -> Node:
        if old is not None and new is not None:
            if old[0] == new[0]:  # equal hashes at the same place mean equal rows in equal buckets
                return old
            if len(old) == 5 and len(new) == 5:
                left, right = new[3], new[4]
                if left is not old[3]:  # usually one half is the same object, and the call is skipped
                    left = adopt(old[3], left, 2 * way, depth + 1)
                if right is not old[4]:
                    right = adopt(old[4], right, 2 * way + 1, depth + 1)
                return new[0], new[1], new[2], left, right
        for bucket in buckets(old):
            superseded.append(bucket)
            free.append(_slot(bucket))
        return move(new, way, depth)

    def move(new: Node, way: int, depth: int) -> Node:
        if new is None:
            return None
        hash, rows, size = new[:3]
        if len(new) == 5:
            return hash, rows, size, move(new[3], 2 * way, depth + 1), move(new[4], 2 * way + 1, depth + 1)
        slot = free.pop() if free else next(fresh)
        start = (way << DEPTH_MAX - depth).to_bytes(PATH_BYTES, "big")
        puts.append((StoredBucket(start, depth, rows, size, hash, slot), bucket_data(new, read)))
        return hash, rows, size, slot

    node = adopt(old, whole, 0, 0)
    version.superseded.update((_slot(bucket), (bucket[0], bucket_data(bucket, version.read_bucket))) for bucket in superseded)
    return BucketChanges(node, puts, free)


def _slot(bucket: Bucket) -> int:
    place = bucket[3]
    assert isinstance(place, int)
    return place


def load_tree(stored: Iterable[StoredBucket]) -> Node:
    """Rebuild a tree from the buckets of a store. Raises `StorageError` if they form no tree.

    The function reads no rows. The caller compares the hash of the tree with the expected hash.
    """
    return _built(sorted(stored), 0)


def _built(places: Sequence[StoredBucket], depth: int) -> Node:
    if not places:
        return None
    first = places[0]
    if len(places) == 1 and first.depth == depth and 1 <= first.rows <= BUCKET_ROWS_MAX:
        return first.hash, first.rows, first.size, first.slot
    if first.depth <= depth or depth == DEPTH_MAX:
        raise StorageError("buckets of a table overlap")
    half = split_index(places, depth)
    left, right = _built(places[:half], depth + 1), _built(places[half:], depth + 1)
    if rows_in(left) + rows_in(right) <= BUCKET_ROWS_MAX:
        raise StorageError("buckets of a table are missing")
    return make_branch(left, right)
