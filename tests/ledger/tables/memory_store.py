"""A store of buckets in memory, with a simulated restart that keeps the stored buckets."""

from __future__ import annotations

import itertools
from typing import TypeVar

from ledger.tables.bucket_changes import BucketChanges, StoredBucket, compute_bucket_changes, load_tree
from ledger.tables.sparse_merkle_tree import Node
from ledger.tables.table import StoreVersion, Table
from protocol.errors import StorageError

R = TypeVar("R")


class MemoryBucketStore:
    """Implements `BucketStore` for one table."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[StoredBucket, bytes]] = {}
        self._tree: Node = None
        self._version = StoreVersion(self)
        self._fresh = itertools.count()

    def save_table(self, table: Table[R]) -> BucketChanges:
        change = compute_bucket_changes(self._tree, self._version, table, self._fresh)
        self.kept.update({stored.slot: (stored, data) for stored, data in change.puts})
        for slot in change.drops:
            del self.kept[slot]
        self._tree, self._version = change.node, self._version.next_version()
        table.rebase_on_store(self._tree, self._version)
        return change

    def load_table(self, kind: type[R]) -> Table[R]:
        """Load the table, as after a restart."""
        self._tree, self._version = load_tree(stored for stored, _ in self.kept.values()), StoreVersion(self)
        self._fresh = itertools.count(max(self.kept, default=-1) + 1)
        return Table(kind, self._tree, self._version)

    def read_bucket(self, slot: int, hash: bytes) -> bytes | None:
        found = self.kept.get(slot)
        return found[1] if found is not None and found[0].hash == hash else None

    def missing_bucket_error(self) -> StorageError:
        return StorageError("a slot holds other rows")
