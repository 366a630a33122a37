"""What a module holds: an immutable map from keys to records of one type, which hashes once a block.

A table is a tree and what was changed since. Peers apply a transaction several times: to select it, to propose it, to judge it,
and when it is decided. All of that only puts records into dictionaries. The tree is changed and hashed when somebody asks for the
root of the table that the block left. A body that is not decided leaves tables that nobody holds, and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Generic, TypeVar

from ledger.tables import proofs, tree
from ledger.tables.proofs import Proof, Range, RangeProof, TableRoot
from ledger.tables.tree import Change, Node, path_of
from protocol import codec
from protocol.codec import Length
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX

R = TypeVar("R")

# Records that were read from one tree and are kept decoded: about 8 MB. A body is judged and then applied, and reads them again.
READ_MAX: Final = 8_192

Layers = tuple[Mapping[bytes, Any], ...]  # the newest last; None: the row goes


class Table(Generic[R]):
    """`kind` is the type of the records, of which none holds a dictionary: it could be in another order than its bytes say."""

    __slots__ = ("_kind", "_now")

    def __init__(self, kind: type[R], node: Node = None) -> None:
        check_kind(typing.cast(Any, kind))
        self._kind = kind
        # Tree, layers, and the records read from the tree. They change at once, into others with the same rows.
        self._now: tuple[Node, Layers, dict[bytes, R | None]] = (node, (), {})

    def get(self, key: bytes) -> R | None:
        node, layers, read = self._now
        for layer in reversed(layers):
            if key in layer:
                found: R | None = layer[key]
                return found
        if key in read:
            return read[key]
        data = tree.find(node, key)
        value = None if data is None else self._decoded(data)
        if len(read) >= READ_MAX:
            read.clear()
        read[key] = value
        return value

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def with_rows(self, changes: Mapping[bytes, R | None]) -> Table[R]:
        """Another table, with these rows; None: without the row of that key, if there was one."""
        assert all(1 <= len(key) <= ROW_KEY_BYTES_MAX for key in changes)
        node, layers, read = self._now
        top = dict(changes)
        # Each layer is more than twice the next one: a row is copied as often as there are layers, and there are few.
        while layers and len(layers[-1]) <= 2 * len(top):
            top = {**layers[-1], **top}
            layers = layers[:-1]
        after: Table[R] = Table.__new__(Table)
        after._kind, after._now = self._kind, (node, (*layers, top), read)
        return after

    def with_row(self, key: bytes, value: R) -> Table[R]:
        return self.with_rows({key: value})

    def without(self, key: bytes) -> Table[R]:
        return self.with_rows({key: None})

    # Once a block ----------------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The tree of these rows."""
        node, layers, _ = self._now
        if layers:
            changes: dict[bytes, Change] = {}
            for layer in layers:
                for key, value in layer.items():
                    path = path_of(key)
                    changes[path] = (path, key, None if value is None else self._encoded(value))
            node = tree.changed(node, sorted(changes.values(), key=lambda change: change[0]))
            self._now = (node, (), {})
        return node

    def settle(self, node: Node) -> None:
        """The same rows, read from elsewhere from now on."""
        assert tree.hash_of(node) == tree.hash_of(self.node)
        self._now = (node, (), self._now[2])

    @property
    def root(self) -> TableRoot:
        node = self.node
        return TableRoot(tree.hash_of(node), node.rows if node else 0, node.size if node else 0)

    def __len__(self) -> int:
        return self.root.rows

    def items(self) -> Iterator[tuple[bytes, R]]:
        """By the hashes of the keys."""
        return ((key, self._decoded(data)) for key, data in tree.walk(self.node))

    def prove(self, key: bytes) -> Proof:
        return proofs.prove(self.node, key)

    def verified(self, root: bytes, key: bytes, value: R | None, proof: Proof) -> bool:
        return proofs.verify(root, key, None if value is None else self._encoded(value), proof)

    def part(self, of: Range) -> RangeProof:
        """All rows of a range."""
        return proofs.part(self.node, of)

    def _encoded(self, value: R) -> bytes:
        data = codec.encode(value)
        assert len(data) <= ROW_BYTES_MAX
        return data

    def _decoded(self, data: bytes) -> R:
        return codec.decode(self._kind, data, ROW_BYTES_MAX)


# What a row may be -------------------------------------------------------------------------------------------------------


@functools.cache
def check_kind(kind: Any) -> None:
    """That every record of this type fits into a row, by the bounds that its fields declare."""
    size = bytes_max(kind)
    assert size <= ROW_BYTES_MAX, f"a row of {kind} may take {size} bytes, the most is {ROW_BYTES_MAX}"


def bytes_max(kind: Any, bound: Any = None) -> int:
    """How long the encoding of a value can be. Dictionaries have no place in rows."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    most = bound.high if isinstance(bound, Length) else codec.COLLECTION_MAX
    if origin is Annotated:
        return bytes_max(*arguments[:2])
    if origin in (typing.Union, types.UnionType):
        return max(bytes_max(item) for item in arguments if item is not type(None))
    if origin is tuple and arguments[-1] is Ellipsis:
        return _head(most) + most * bytes_max(arguments[0])
    if origin is tuple:
        return _head(len(arguments)) + sum(map(bytes_max, arguments))
    if dataclasses.is_dataclass(kind):
        assert not hasattr(kind, "TAG"), f"{kind} is a message, not a record"
        hints = typing.get_type_hints(kind, include_extras=True)
        sizes = [bytes_max(hints[field.name]) for field in dataclasses.fields(kind)]
        return _head(len(sizes)) + sum(sizes)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return max(len(codec.encode(member)) for member in kind)
    if kind in (bytes, str):
        most *= 4 if kind is str else 1  # no character is longer in UTF-8
        return _head(most) + most
    assert kind in (bool, int, float), f"{kind} has no place in a row"
    return 1 if kind is bool else 9


def _head(size: int) -> int:
    """What says how long a text, an array or bytes are, at most."""
    return 3 if size < 1 << 16 else 5
