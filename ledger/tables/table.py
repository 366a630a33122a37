"""An immutable map from keys to records of one type. It is hashed once per block.

A table is a tree and the changes since it was built. Peers apply a transaction several times: to select it, propose it, judge
it and finally decide it. Until the decision, changes are only records in dictionaries. The tree is updated and hashed when the
root of the decided block's table is read. The tables of an undecided body are simply discarded.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Annotated, Any, ClassVar, Final, Generic, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ledger.tables import sparse_merkle_tree, table_proofs
from ledger.tables.sparse_merkle_tree import Bucket, BucketReader, Node, Row, RowChange
from ledger.tables.table_proofs import KeyProof, PathPrefix, RangeProof, TableRoot
from protocol.codec import COLLECTION_MAX, Length, array_length, decode, encode, encoded_item
from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX

R = TypeVar("R")

# Bounds of the cache of decoded records. A body is first judged and then applied, which reads the same records again. The bytes
# are those of the encodings, about a fifth of the memory of the decoded records.
DECODED_RECORDS_MAX: Final = 4_096
DECODED_RECORDS_BYTES_MAX: Final = 2 << 20
NOT_DECODED: Final = object()

Layers = tuple[Mapping[bytes, Any], ...]  # changes by key, the newest layer last; None: the row is removed


# Stores ------------------------------------------------------------------------------------------------------------------

# A store reuses slots while a reader may still hold an older table, such as a snapshot. The version of the older table then keeps
# the former data of these slots in memory. When the last reader drops that table, its version and these data are freed.


class BucketStore(Protocol):
    """A store of the buckets that are not in memory."""

    def read_bucket(self, slot: int, hash: bytes) -> bytes | None:
        """Return the data of the bucket in this slot. None: the slot holds another bucket now. Raises `StorageError`."""

    def missing_bucket_error(self) -> StorageError:
        """Return the error for a bucket that is in no slot and no version."""


class StoreVersion:
    """The content of a store after one commit, for readers of tables of that time.

    Later versions do not refer to earlier ones.
    """

    __slots__ = ("_following", "_store", "superseded")

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        # Slot -> hash and data of the bucket that the next commit replaces. Both are put here before the slot is overwritten.
        self.superseded: dict[int, tuple[bytes, bytes]] = {}
        self._following: StoreVersion | None = None

    def read_bucket(self, slot: int, hash: bytes) -> bytes:
        data = self._kept(slot, hash)
        if data is None:
            data = self._store.read_bucket(slot, hash)
        if data is None:
            data = self._kept(slot, hash)  # another thread's commit may have reused the slot since the first lookup
        if data is None:
            raise self._store.missing_bucket_error()
        return data

    def _kept(self, slot: int, hash: bytes) -> bytes | None:
        version: StoreVersion | None = self
        while version is not None:
            found = version.superseded.get(slot)
            # Another thread may commit twice during this loop. Then an earlier version keeps the wanted bucket, and this
            # version keeps the later bucket of the same slot.
            if found is not None and found[0] == hash:
                return found[1]
            version = version._following
        return None

    def next_version(self) -> StoreVersion:
        """Return the version of the next commit. Call it after that commit's writes."""
        self._following = StoreVersion(self._store)
        return self._following


# Tables ------------------------------------------------------------------------------------------------------------------


class DecodedRecords(dict[bytes, Any]):
    """Cache of decoded records by key. None: the key has no row."""

    encoded_bytes = 0

    def add_record(self, key: bytes, value: Any, size: int) -> None:
        if len(self) >= DECODED_RECORDS_MAX or self.encoded_bytes + size > DECODED_RECORDS_BYTES_MAX:
            self.clear()
            self.encoded_bytes = 0
        self[key] = value
        self.encoded_bytes += size

    def without_keys(self, keys: Set[bytes]) -> DecodedRecords:
        """Return a copy of the cache without these keys. Another thread may read the original.

        The size of removed records still counts.
        """
        left = DecodedRecords((key, value) for key, value in self.copy().items() if key not in keys)
        left.encoded_bytes = self.encoded_bytes
        return left


class Table(Generic[R]):
    """An immutable map from keys to records of the type `kind`.

    Records contain no dictionaries, because the order of a dictionary in memory may differ from the order in its encoding.
    """

    __slots__ = ("_now", "kind")

    WIRE: ClassVar[type] = TableRoot  # type that is encoded for a table in a module's state

    def __init__(self, kind: type[R], node: Node = None, version: StoreVersion | None = None) -> None:
        """Make a table with the rows of the tree `node`. `version` belongs to the store of the buckets that are not in memory."""
        check_kind(cast(Any, kind))
        self.kind = kind
        # Tree, version, layers of changes, and cache. They are replaced in one step, so that another thread always sees the
        # same rows.
        self._now: tuple[Node, StoreVersion | None, Layers, DecodedRecords] = (node, version, (), DecodedRecords())

    def get_record(self, key: bytes) -> R | None:
        node, version, layers, known = self._now
        for layer in reversed(layers):
            if key in layer:
                found: R | None = layer[key]
                return found
        # One lookup instead of two, because another thread that reads this table may clear `known` between two lookups.
        kept = known.get(key, NOT_DECODED)
        if kept is not NOT_DECODED:
            return cast(R | None, kept)
        data = sparse_merkle_tree.find_row(node, _reader(version), key)
        value = None if data is None else self._decoded(data)
        known.add_record(key, value, 0 if data is None else len(data))
        return value

    def __getitem__(self, key: bytes) -> R:
        found = self.get_record(key)
        assert found is not None, "the caller knows that the row is there"
        return found

    def __contains__(self, key: bytes) -> bool:
        return self.get_record(key) is not None

    def with_rows(self, changes: Mapping[bytes, R | None]) -> Table[R]:
        """Return another table with these changes. None removes the row of its key, if there is one."""
        assert all(1 <= len(key) <= ROW_KEY_BYTES_MAX for key in changes)
        node, version, layers, known = self._now
        top = dict(changes)
        # Each layer has more than twice as many rows as the next layer. A row is therefore copied at most once per layer, and
        # there are few layers.
        while layers and len(layers[-1]) <= 2 * len(top):
            top = {**layers[-1], **top}
            layers = layers[:-1]
        after: Table[R] = Table.__new__(Table)
        after.kind, after._now = self.kind, (node, version, (*layers, top), known)
        return after

    def check_changes(self, before: Table[R] | None) -> None:
        """Raise an exception if a row that was added since `before` cannot be encoded and decoded again."""
        known = before._now[2] if before is not None else ()
        for layer in self._now[2]:
            if not any(layer is of_before for of_before in known):
                for value in layer.values():
                    if value is not None and self._decoded(self._encoded(value)) != value:
                        raise TypeError(f"a {type(value).__name__} that decodes to a different value")

    # Once per block --------------------------------------------------------------------------------------------------

    def hashed_tree(self) -> tuple[Node, BucketReader]:
        """Return the tree of the table's rows, and a reader of the buckets that are not in memory."""
        node, version, layers, known = self._now
        if layers:
            changes: dict[bytes, RowChange] = {}
            for layer in layers:
                for key, value in layer.items():
                    path = sparse_merkle_tree.path_of(key)
                    changes[path] = (path, key, None if value is None else self._encoded(value))
            ascending = sorted(changes.values(), key=operator.itemgetter(0))
            node = sparse_merkle_tree.apply_changes(node, ascending, _reader(version))
            # A written record is decoded again when it is read, as at a peer that restarts in between.
            written = {key for layer in layers for key in layer}
            self._now = (node, version, (), known.without_keys(written))
        return node, _reader(version)

    def drop_cache(self) -> None:
        """Free the cache of this table, because a newer table has replaced the table."""
        node, version, layers, _ = self._now
        self._now = (node, version, layers, DecodedRecords())

    def rebase_on_store(self, node: Node, version: StoreVersion) -> None:
        """Read the rows from this version of a store from now on. The tree `node` must have the same rows."""
        assert TableRoot.from_node(node) == self.root
        self._now = (node, version, (), self._now[3])

    @property
    def root(self) -> TableRoot:
        return TableRoot.from_node(self.hashed_tree()[0])

    def __len__(self) -> int:
        return self.root.rows

    def items(self) -> Iterator[tuple[bytes, R]]:
        """Return keys and decoded records, in order of the hashes of the keys."""
        return ((key, self._decoded(data)) for key, data in sparse_merkle_tree.iterate_rows(*self.hashed_tree()))

    def row_groups(self) -> Iterator[tuple[bytes, Callable[[], list[tuple[bytes, R]]]]]:
        """Yield groups of rows: for each group a name, and a function that reads its rows.

        Groups of the same name have the same rows, even in different tables.
        """
        node, read = self.hashed_tree()

        def rows(bucket: Bucket) -> list[tuple[bytes, R]]:
            return [(key, self._decoded(data)) for key, data in sparse_merkle_tree.iterate_rows(bucket, read)]

        return ((bucket[0], functools.partial(rows, bucket)) for bucket in sparse_merkle_tree.buckets(node))

    def encoded_record(self, key: bytes) -> bytes | None:
        """Return the encoded record of a key, without caching it. None: the key has no row."""
        return sparse_merkle_tree.find_row(*self.hashed_tree(), key)

    def prove_key(self, key: bytes) -> KeyProof:
        return table_proofs.prove_key(*self.hashed_tree(), key)

    def prove_range(self, of: PathPrefix) -> RangeProof:
        """Return a proof of all rows with paths in this range."""
        return table_proofs.prove_range(*self.hashed_tree(), of)

    # As a field of a state -------------------------------------------------------------------------------------------

    def to_wire(self) -> TableRoot:
        return self.root

    @classmethod
    def from_wire(cls, root: TableRoot, kind: type[R]) -> Table[R]:
        """Return a table that has a root but no rows yet.

        The caller supplies the rows with `adopt_rows_of` or `rebase_on_store`.
        """
        if root.rows:
            return cls(kind, (root.hash, root.rows, root.size, 0))
        if root != TableRoot(sparse_merkle_tree.EMPTY, 0, 0):
            raise RemoteProtocolError("malformed", f"a table without rows has the hash {root.hash.hex()}")
        return cls(kind)

    def adopt_rows_of(self, other: Table[R]) -> None:
        """Use the rows of the table `other`, which has the same root."""
        assert other.root == self.root
        self._now = other._now

    def _encoded(self, value: R) -> bytes:
        data = encode(value)
        assert len(data) <= ROW_BYTES_MAX
        return data

    def _decoded(self, data: bytes) -> R:
        return decode(self.kind, data, ROW_BYTES_MAX)


def _reader(version: StoreVersion | None) -> BucketReader:
    return version.read_bucket if version is not None else sparse_merkle_tree.read_no_bucket


class TableAssembly:
    """A table that is downloaded in ranges, in any order and from any peer. Each range is checked against the root of `table`."""

    def __init__(self, table: Table[Any]) -> None:
        self.root = table.root
        self._table = table
        self._parts: dict[PathPrefix, Node] = {}

    def add_range(self, of: PathPrefix, data: bytes) -> None:
        """Add the rows of a range. Raises `RemoteProtocolError` if they are not exactly the rows of that range under the root."""
        if (count := array_length(encoded_item(data, table_proofs.ROWS_FIELD))) > self.root.rows:
            raise RemoteProtocolError("bad-part", f"{count} rows in a range of a table with {self.root.rows} rows")
        rows: list[Row] = []
        for key, value in table_proofs.verify_range(self.root.hash, of, decode(RangeProof, data, len(data))):
            rows.append((sparse_merkle_tree.path_of(key), key, value))
        self._parts[of] = sparse_merkle_tree.build_tree(rows, len(of))

    def install_rows(self) -> None:
        """Put the rows of all ranges into the table. Every range must have been added."""
        nodes = [self._parts[of] for of in table_proofs.fetch_ranges(self.root)]
        while len(nodes) > 1:
            nodes = [
                sparse_merkle_tree.join_nodes(left, right, sparse_merkle_tree.read_no_bucket)
                for left, right in zip(nodes[::2], nodes[1::2], strict=True)
            ]
        self._table.adopt_rows_of(Table(self._table.kind, nodes[0]))


# Tables of a state -------------------------------------------------------------------------------------------------------


def _table_fields(state: type) -> tuple[str, ...]:
    """Return the names of the table fields of a state's type.

    Tables must not occur deeper in the type, because a store would miss them.
    """
    found: list[str] = []
    for name, hint in get_type_hints(state, include_extras=True).items():
        if get_origin(hint) is Table:
            found.append(name)
        else:
            assert not _holds_table(hint), f"{state.__name__}.{name} contains a nested table"
    return tuple(found)


table_fields: Callable[[type], tuple[str, ...]] = functools.cache(_table_fields)


def record_type(state: type, field: str) -> Any:
    """Return the record type of a table field of a state's type."""
    return get_args(get_type_hints(state, include_extras=True)[field])[0]


def _holds_table(kind: Any) -> bool:
    parts = list(get_args(kind))
    if dataclasses.is_dataclass(kind):
        parts += get_type_hints(kind, include_extras=True).values()
    return Table in (kind, get_origin(kind)) or any(map(_holds_table, parts))


# Bounds of a row ---------------------------------------------------------------------------------------------------------


@functools.cache
def check_kind(kind: Any) -> None:
    """Assert that every record of this type fits into a row, by the bounds that its fields declare."""
    size = encoded_bytes_max(kind)
    assert size <= ROW_BYTES_MAX, f"a row of {kind} may take {size} bytes, at most {ROW_BYTES_MAX} are allowed"


def encoded_bytes_max(kind: Any, bound: Any = None) -> int:
    """Return the maximum length in bytes of an encoded value of this type. Dictionaries are not allowed in rows."""
    origin, arguments = get_origin(kind), get_args(kind)
    most = bound.high if isinstance(bound, Length) else COLLECTION_MAX
    if origin is Annotated:
        return encoded_bytes_max(*arguments[:2])
    if origin in (Union, types.UnionType):
        return max(encoded_bytes_max(item) for item in arguments if item is not type(None))
    if origin is tuple and arguments[-1] is Ellipsis:
        return _head(most) + most * encoded_bytes_max(arguments[0])
    if origin is tuple:
        return _head(len(arguments)) + sum(map(encoded_bytes_max, arguments))
    if dataclasses.is_dataclass(kind):
        assert not hasattr(kind, "TAG"), f"{kind} is a message, not a record"
        hints = get_type_hints(kind, include_extras=True)
        sizes = [encoded_bytes_max(hints[field.name]) for field in dataclasses.fields(kind)]
        return _head(len(sizes)) + sum(sizes)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return max(len(encode(member)) for member in kind)
    if kind in (bytes, str):
        most *= 4 if kind is str else 1  # a character has at most four bytes in UTF-8
        return _head(most) + most
    assert kind in (bool, int, float), f"a row cannot contain {kind}"
    return 1 if kind is bool else 9


def _head(size: int) -> int:
    """Return the maximum length in bytes of the header of a text, an array or bytes."""
    return 3 if size < 1 << 16 else 5
