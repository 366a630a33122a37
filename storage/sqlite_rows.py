"""Tables of the ledger in its SQLite file.

Each SQL row contains one bucket of a table's rows, and `ledger.tables` keeps the hash of the bucket in memory. The transaction
that stores a block's state also writes the changed buckets, so that a crash leaves both the state and the buckets, or neither. A
start reads the hashes of buckets without their data, and compares their root with that of the state. Each read of a bucket
compares its stored hash with the hash in memory, and checks the digest of its data, since SQLite does not detect changed bytes.

Reads have their own connection, so that they do not wait for the fsync of a transaction. If the next block has just overwritten a
bucket's slot, the old bucket is still in memory (`ledger.tables.table.StoreVersion`).
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from ledger.tables import Table, TableRoot
from ledger.tables.bucket_changes import PATH_BYTES, BucketChanges, StoredBucket, compute_bucket_changes, load_tree
from ledger.tables.sparse_merkle_tree import Node
from ledger.tables.table import StoreVersion
from protocol.errors import StorageError
from storage.ledger_integrity import damage_error, explain_sqlite_errors

R = TypeVar("R")

LAYOUT: Final = 1
_ROWS: Final = f"rows_{LAYOUT}"
SCHEMA: Final = f"""CREATE TABLE {_ROWS} (
    slot INTEGER PRIMARY KEY, name TEXT NOT NULL, start BLOB NOT NULL, depth INTEGER NOT NULL, rows INTEGER NOT NULL,
    size INTEGER NOT NULL, hash BLOB NOT NULL, data BLOB NOT NULL, digest BLOB NOT NULL
)"""

_PUT: Final = f"INSERT OR REPLACE INTO {_ROWS} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

# Most bytes in the cache of recent buckets: a block's reads are repeated when the block is applied, and often by the next block.
RECENT_BYTES_MAX: Final = 16 << 20
BUSY_SECONDS: Final = 10.0  # timeout in seconds of a read: a checkpoint may block readers


@dataclass(frozen=True, slots=True)
class TableChange:
    name: str
    table: Table[Any] | None
    change: BucketChanges


class SqliteBucketStore:
    """An implementation of `ledger.tables.BucketStore` for a whole ledger. Raises `StorageError` for errors of the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        # Cache of buckets by slot: hash and data, the least recently used first.
        self._recent: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._recent_bytes = 0
        with explain_sqlite_errors(self.path):
            self._reading = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
            self._reading.execute("PRAGMA query_only=1")
        self._trees, last = self._load()
        self.version = StoreVersion(self)
        self._tables: dict[str, Table[Any]] = {}  # tables as of the last commit
        self._fresh = itertools.count(last + 1)

    def close(self) -> None:
        self._reading.close()

    def _load(self) -> tuple[dict[str, Node], int]:
        """Return the tree of each stored table by name, and the highest slot."""
        found: defaultdict[str, list[StoredBucket]] = defaultdict(list)
        last = -1
        with explain_sqlite_errors(self.path):
            layouts = self._reading.execute("SELECT name FROM sqlite_schema WHERE name LIKE 'rows\\_%' ESCAPE '\\'").fetchall()
            if layouts != [(_ROWS,)]:
                names = ", ".join(name for (name,) in layouts) or "none"
                raise StorageError(f"{self.path} has tables in the format {names}, but this program reads {_ROWS}")
            places = self._reading.execute(f"SELECT name, start, depth, rows, size, hash, slot FROM {_ROWS}")
            try:
                for name, start, *place in places:
                    found[name].append(StoredBucket(start.ljust(PATH_BYTES, b"\x00"), *place))
                    last = max(last, place[-1])
                return {name: load_tree(stored) for name, stored in found.items()}, last
            # TypeError and AttributeError are raised if a damaged column has another type.
            except (StorageError, TypeError, AttributeError) as error:
                raise damage_error(self.path, str(error)) from None

    def table(self, name: str, kind: type[R]) -> Table[R]:
        """Return a table as of the last commit. It is empty if no table with this name is stored."""
        return Table(kind, self._trees.get(name), self.version)

    def attach_tables(self, tables: Mapping[str, Table[Any]]) -> None:
        """Let the tables of the stored state read their rows from this store.

        Raises `StorageError` if the root of a table differs.
        """
        for name, table in tables.items():
            if TableRoot.from_node(self._trees.get(name)) != table.root:
                raise self._damaged(f"the rows of {name} do not match the state")
            table.rebase_on_store(self._trees.get(name), self.version)
            self._tables[name] = table

    # Reading ---------------------------------------------------------------------------------------------------------

    def read_bucket(self, slot: int, hash: bytes) -> bytes | None:
        with self._lock:
            known = self._recent.get(slot)
            if known is not None and known[0] == hash:
                self._recent.move_to_end(slot)
                return known[1]
            with explain_sqlite_errors(self.path):
                rows = self._reading.execute(f"SELECT hash, data, digest FROM {_ROWS} WHERE slot = ?", (slot,)).fetchall()
            for found, data, digest in rows:
                if found == hash and hashlib.sha256(data).digest() == digest:
                    self._remember(slot, hash, data)
                    whole: bytes = data
                    return whole
        return None

    def missing_bucket_error(self) -> StorageError:
        return self._damaged("rows of a table do not match their digests")

    def _damaged(self, what: str) -> StorageError:
        """Return an error that does not ask for a new key, since lost rows are not lost votes."""
        kept = "this peer's signatures are not lost, and other peers have these rows"
        return StorageError(
            f"{self.path} is damaged ({what}): {kept}; check the disk, and ask for help before you delete anything"
        )

    def _remember(self, slot: int, of: bytes, data: bytes) -> None:
        self._forget(slot)
        self._recent[slot] = (of, data)
        self._recent_bytes += len(data)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._forget(next(iter(self._recent)))

    def _forget(self, slot: int) -> None:
        if slot in self._recent:
            self._recent_bytes -= len(self._recent.pop(slot)[1])

    # Writing ---------------------------------------------------------------------------------------------------------

    def plan_changes(self, tables: Mapping[str, Table[Any]]) -> list[TableChange]:
        """Return the changes that make the stored tables equal to `tables`. All other stored tables are deleted."""
        found: list[TableChange] = []
        for name in sorted({*self._trees, *tables}):
            table = tables.get(name)
            change = compute_bucket_changes(self._trees.get(name), self.version, table, self._fresh)
            found.append(TableChange(name, table, change))
        return found

    def write_changes(self, database: sqlite3.Connection, changes: Sequence[TableChange]) -> None:
        """Write changes in the caller's transaction. The caller calls `apply_committed` after the commit."""
        for of in changes:
            database.executemany(f"DELETE FROM {_ROWS} WHERE slot = ?", ((slot,) for slot in of.change.drops))
            database.executemany(_PUT, (_row(of.name, place, data) for place, data in of.change.puts))

    def apply_committed(self, changes: Sequence[TableChange]) -> None:
        """Let the tables read the committed rows from this store, and free their copies in memory."""
        self.version = self.version.next_version()
        for of in changes:
            self._trees[of.name] = of.change.node
            before = self._tables.pop(of.name, None)
            if of.table is not None:
                of.table.rebase_on_store(of.change.node, self.version)
                self._tables[of.name] = of.table
            if before is not None and before is not of.table:
                before.drop_cache()
            with self._lock:
                for slot in of.change.drops:
                    self._forget(slot)
                for place, data in of.change.puts:
                    self._remember(place.slot, place.hash, data)


def _row(name: str, place: StoredBucket, data: bytes) -> tuple[Any, ...]:
    start, digest = place.start.rstrip(b"\x00"), hashlib.sha256(data).digest()
    return place.slot, name, start, place.depth, place.rows, place.size, place.hash, data, digest
