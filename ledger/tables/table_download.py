"""A table that arrives by ranges, in any order and from anybody, each checked for itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ledger.tables.sparse_merkle_tree import Node, Row, build_tree, join_nodes, path_of, read_no_bucket
from ledger.tables.table import Table
from ledger.tables.table_proofs import PathPrefix, RangeProof, fetch_ranges, verify_range
from protocol import codec
from protocol.errors import RemoteProtocolError

_ROWS_FIELD = [field.name for field in fields(RangeProof)].index("rows")


class TableAssembly:
    """Makes the rows of `table` be there, of which the root is known."""

    def __init__(self, table: Table[Any]) -> None:
        self.root = table.root
        self._table = table
        self._parts: dict[PathPrefix, Node] = {}

    def add_range(self, of: PathPrefix, data: bytes) -> None:
        """Raises `RemoteProtocolError` if these are not the rows of the range under the root."""
        if (count := codec.array_length(codec.encoded_item(data, _ROWS_FIELD))) > self.root.rows:
            raise RemoteProtocolError("bad-part", f"{count} rows in a range of a table that has {self.root.rows}")
        rows: list[Row] = []
        for key, value in verify_range(self.root.hash, of, codec.decode(RangeProof, data, len(data))):
            rows.append((path_of(key), key, value))
        self._parts[of] = build_tree(rows, len(of))

    def install_rows(self) -> None:
        """All ranges are here."""
        nodes = [self._parts[of] for of in fetch_ranges(self.root)]
        while len(nodes) > 1:
            nodes = [join_nodes(left, right, read_no_bucket) for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
        self._table.adopt_rows_of(Table(self._table.kind, nodes[0]))
