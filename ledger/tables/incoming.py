"""A table that arrives by ranges, in any order and from anybody, each checked for itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ledger.tables.proofs import Range, RangeProof, proven_rows, ranges
from ledger.tables.table import Table
from ledger.tables.tree import Node, Row, built, joined, nowhere, path_of
from protocol import codec
from protocol.errors import RemoteProtocolError

_ROWS_FIELD = [field.name for field in fields(RangeProof)].index("rows")


class IncomingRows:
    """Makes the rows of `table` be there, of which the root is known."""

    def __init__(self, table: Table[Any]) -> None:
        self.root = table.root
        self._table = table
        self._parts: dict[Range, Node] = {}

    def put(self, of: Range, data: bytes) -> None:
        """Raises `RemoteProtocolError` if these are not the rows of the range under the root."""
        if (count := codec.array_length(codec.encoded_item(data, _ROWS_FIELD))) > self.root.rows:
            raise RemoteProtocolError("bad-part", f"{count} rows in a range of a table that has {self.root.rows}")
        rows: list[Row] = []
        for key, value in proven_rows(self.root.hash, of, codec.decode(RangeProof, data, len(data))):
            rows.append((path_of(key), key, value))
        self._parts[of] = built(rows, len(of))

    def install(self) -> None:
        """All ranges are here."""
        nodes = [self._parts[of] for of in ranges(self.root)]
        while len(nodes) > 1:
            nodes = [joined(left, right, nowhere) for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
        self._table.take(Table(self._table.kind, nodes[0]))
