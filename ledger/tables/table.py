"""What a module holds: an immutable map from keys to records of one type, which hashes once a block.

A table is a tree and what was changed since. Peers apply a transaction several times: to select it, to propose it, to judge it,
and when it is decided. All of that only puts records into dictionaries. The tree is changed and hashed when somebody asks for the
root of the table that the block left. A body that is not decided leaves tables that nobody holds, and nothing else.
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

# Records that were read and are kept decoded: a body is judged and then applied, and reads the same ones again. The bytes are of
# their encodings, which are a fifth of what they take in memory.
DECODED_RECORDS_MAX: Final = 4_096
DECODED_RECORDS_BYTES_MAX: Final = 2 << 20
NOT_DECODED: Final = object()

Layers = tuple[Mapping[bytes, Any], ...]  # the newest last; None: the row goes


# Stores ------------------------------------------------------------------------------------------------------------------

# A store writes slots again, while somebody may still read an older table, a snapshot for example. What stood in these slots is
# then kept in memory by the version of the older table. When nobody holds that table any more, its version goes, and these data
# with it.


class BucketStore(Protocol):
    """Where buckets are that are not in memory."""

    def read_bucket(self, slot: int, hash: bytes) -> bytes | None:
        """The data of the bucket in this slot. None: another one has been put there. Raises `StorageError`."""

    def missing_bucket_error(self) -> StorageError:
        """There is no bucket of that hash where one must be."""


class StoreVersion:
    """What a store holds after one commit, for whoever reads a tree of it later. Newer versions do not know the older ones."""

    __slots__ = ("_following", "_store", "superseded")

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        # By slot: hash and data of the bucket that the following commit put another one in the place of. They are put here before
        # these slots are written again.
        self.superseded: dict[int, tuple[bytes, bytes]] = {}
        self._following: StoreVersion | None = None

    def read_bucket(self, slot: int, hash: bytes) -> bytes:
        data = self._kept(slot, hash)
        if data is None:
            data = self._store.read_bucket(slot, hash)
        if data is None:
            data = self._kept(slot, hash)  # a commit took the slot since we looked
        if data is None:
            raise self._store.missing_bucket_error()
        return data

    def _kept(self, slot: int, hash: bytes) -> bytes | None:
        version: StoreVersion | None = self
        while version is not None:
            found = version.superseded.get(slot)
            # Two commits of another thread may come while we look. The version that keeps our bucket then lies behind us, and the
            # next one keeps the bucket that followed ours in this slot.
            if found is not None and found[0] == hash:
                return found[1]
            version = version._following
        return None

    def next_version(self) -> StoreVersion:
        """Once they are written."""
        self._following = StoreVersion(self._store)
        return self._following


# Tables ------------------------------------------------------------------------------------------------------------------


class DecodedRecords(dict[bytes, Any]):
    """Decoded records by key; None: there is none."""

    encoded_bytes = 0

    def add_record(self, key: bytes, value: Any, size: int) -> None:
        if len(self) >= DECODED_RECORDS_MAX or self.encoded_bytes + size > DECODED_RECORDS_BYTES_MAX:
            self.clear()
            self.encoded_bytes = 0
        self[key] = value
        self.encoded_bytes += size

    def without_keys(self, keys: Set[bytes]) -> DecodedRecords:
        """A copy: another thread may read rows of a table that shares these. Its size counts the former records, too."""
        left = DecodedRecords((key, value) for key, value in self.copy().items() if key not in keys)
        left.encoded_bytes = self.encoded_bytes
        return left


class Table(Generic[R]):
    """`kind` is the type of the records, of which none holds a dictionary: it could be in another order than its bytes say."""

    __slots__ = ("_now", "kind")

    WIRE: ClassVar[type] = TableRoot  # as a field of a module's state it is this

    def __init__(self, kind: type[R], node: Node = None, version: StoreVersion | None = None) -> None:
        """`version` is of the store that has those buckets which are not in memory."""
        check_kind(cast(Any, kind))
        self.kind = kind
        # They change at once, into others with the same rows.
        self._now: tuple[Node, StoreVersion | None, Layers, DecodedRecords] = (node, version, (), DecodedRecords())

    def get_record(self, key: bytes) -> R | None:
        node, version, layers, known = self._now
        for layer in reversed(layers):
            if key in layer:
                found: R | None = layer[key]
                return found
        # One look: another thread that reads this table may clear `known` between two.
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
        """Another table, with these rows; None: without the row of that key, if there was one."""
        assert all(1 <= len(key) <= ROW_KEY_BYTES_MAX for key in changes)
        node, version, layers, known = self._now
        top = dict(changes)
        # Each layer is more than twice the next one: a row is copied as often as there are layers, and there are few.
        while layers and len(layers[-1]) <= 2 * len(top):
            top = {**layers[-1], **top}
            layers = layers[:-1]
        after: Table[R] = Table.__new__(Table)
        after.kind, after._now = self.kind, (node, version, (*layers, top), known)
        return after

    def check_changes(self, before: Table[R] | None) -> None:
        """Raise if a row that was put in since `before` has no encoding that can be read back."""
        known = before._now[2] if before is not None else ()
        for layer in self._now[2]:
            if not any(layer is of_before for of_before in known):
                for value in layer.values():
                    if value is not None and self._decoded(self._encoded(value)) != value:
                        raise TypeError(f"a {type(value).__name__} that is read back as something else")

    # Once a block ----------------------------------------------------------------------------------------------------

    def hashed_tree(self) -> tuple[Node, BucketReader]:
        """The tree of these rows, and how to read those of its buckets that are not in memory."""
        node, version, layers, known = self._now
        if layers:
            changes: dict[bytes, RowChange] = {}
            for layer in layers:
                for key, value in layer.items():
                    path = sparse_merkle_tree.path_of(key)
                    changes[path] = (path, key, None if value is None else self._encoded(value))
            ascending = sorted(changes.values(), key=operator.itemgetter(0))
            node = sparse_merkle_tree.apply_changes(node, ascending, _reader(version))
            # What was written is decoded again when it is read, as another peer's is that starts in between.
            written = {key for layer in layers for key in layer}
            self._now = (node, version, (), known.without_keys(written))
        return node, _reader(version)

    def drop_cache(self) -> None:
        """A newer one has taken its place: whoever still reads this one can do with less memory."""
        node, version, layers, _ = self._now
        self._now = (node, version, layers, DecodedRecords())

    def rebase_on_store(self, node: Node, version: StoreVersion) -> None:
        """The same rows, read from this store from now on."""
        assert TableRoot.from_node(node) == self.root
        self._now = (node, version, (), self._now[3])

    @property
    def root(self) -> TableRoot:
        return TableRoot.from_node(self.hashed_tree()[0])

    def __len__(self) -> int:
        return self.root.rows

    def items(self) -> Iterator[tuple[bytes, R]]:
        """By the hashes of the keys."""
        return ((key, self._decoded(data)) for key, data in sparse_merkle_tree.iterate_rows(*self.hashed_tree()))

    def row_groups(self) -> Iterator[tuple[bytes, Callable[[], list[tuple[bytes, R]]]]]:
        """All rows, some at a time. Whatever table a group is in, its name says which rows these are: they need not be read."""
        node, read = self.hashed_tree()

        def rows(bucket: Bucket) -> list[tuple[bytes, R]]:
            return [(key, self._decoded(data)) for key, data in sparse_merkle_tree.iterate_rows(bucket, read)]

        return ((bucket[0], functools.partial(rows, bucket)) for bucket in sparse_merkle_tree.buckets(node))

    def encoded_record(self, key: bytes) -> bytes | None:
        """The encoding of the record of a key, under the root of the table; nothing of it is kept decoded."""
        return sparse_merkle_tree.find_row(*self.hashed_tree(), key)

    def prove_key(self, key: bytes) -> KeyProof:
        return table_proofs.prove_key(*self.hashed_tree(), key)

    def prove_range(self, of: PathPrefix) -> RangeProof:
        """All rows of a range."""
        return table_proofs.prove_range(*self.hashed_tree(), of)

    # As a field of a state -------------------------------------------------------------------------------------------

    def to_wire(self) -> TableRoot:
        return self.root

    @classmethod
    def from_wire(cls, root: TableRoot, kind: type[R]) -> Table[R]:
        """A table whose rows are not here: `adopt_rows_of` it from where they are, or `rebase_on_store` it."""
        if root.rows:
            return cls(kind, (root.hash, root.rows, root.size, 0))
        if root != TableRoot(sparse_merkle_tree.EMPTY, 0, 0):
            raise RemoteProtocolError("malformed", f"a table without rows that has the hash {root.hash.hex()}")
        return cls(kind)

    def adopt_rows_of(self, other: Table[R]) -> None:
        """The same rows, read as `other` reads them from now on."""
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
    """A table that arrives by ranges, in any order and from anybody, each checked for itself. The root of `table` is known."""

    def __init__(self, table: Table[Any]) -> None:
        self.root = table.root
        self._table = table
        self._parts: dict[PathPrefix, Node] = {}

    def add_range(self, of: PathPrefix, data: bytes) -> None:
        """Raises `RemoteProtocolError` if these are not the rows of the range under the root."""
        if (count := array_length(encoded_item(data, table_proofs.ROWS_FIELD))) > self.root.rows:
            raise RemoteProtocolError("bad-part", f"{count} rows in a range of a table that has {self.root.rows}")
        rows: list[Row] = []
        for key, value in table_proofs.verify_range(self.root.hash, of, decode(RangeProof, data, len(data))):
            rows.append((sparse_merkle_tree.path_of(key), key, value))
        self._parts[of] = sparse_merkle_tree.build_tree(rows, len(of))

    def install_rows(self) -> None:
        """All ranges are here."""
        nodes = [self._parts[of] for of in table_proofs.fetch_ranges(self.root)]
        while len(nodes) > 1:
            nodes = [
                sparse_merkle_tree.join_nodes(left, right, sparse_merkle_tree.read_no_bucket)
                for left, right in zip(nodes[::2], nodes[1::2], strict=True)
            ]
        self._table.adopt_rows_of(Table(self._table.kind, nodes[0]))


# What a state may hold ---------------------------------------------------------------------------------------------------


def _table_fields(state: type) -> tuple[str, ...]:
    """The tables among the fields of a state's type. They stand nowhere else in it: a store would not find them."""
    found: list[str] = []
    for name, hint in get_type_hints(state, include_extras=True).items():
        if get_origin(hint) is Table:
            found.append(name)
        else:
            assert not _holds_table(hint), f"{state.__name__}.{name} holds a table inside of something else"
    return tuple(found)


table_fields: Callable[[type], tuple[str, ...]] = functools.cache(_table_fields)


def record_type(state: type, field: str) -> Any:
    """That of the records in one of the tables of a state's type."""
    return get_args(get_type_hints(state, include_extras=True)[field])[0]


def _holds_table(kind: Any) -> bool:
    parts = list(get_args(kind))
    if dataclasses.is_dataclass(kind):
        parts += get_type_hints(kind, include_extras=True).values()
    return Table in (kind, get_origin(kind)) or any(map(_holds_table, parts))


# What a row may be -------------------------------------------------------------------------------------------------------


@functools.cache
def check_kind(kind: Any) -> None:
    """That every record of this type fits into a row, by the bounds that its fields declare."""
    size = encoded_bytes_max(kind)
    assert size <= ROW_BYTES_MAX, f"a row of {kind} may take {size} bytes, the most is {ROW_BYTES_MAX}"


def encoded_bytes_max(kind: Any, bound: Any = None) -> int:
    """How long the encoding of a value can be. Dictionaries have no place in rows."""
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
        most *= 4 if kind is str else 1  # no character is longer in UTF-8
        return _head(most) + most
    assert kind in (bool, int, float), f"{kind} has no place in a row"
    return 1 if kind is bool else 9


def _head(size: int) -> int:
    """What says how long a text, an array or bytes are, at most."""
    return 3 if size < 1 << 16 else 5
