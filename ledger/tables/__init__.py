"""Tables: maps from keys to records with one root, of which a block pays for what it changes and a row has a short proof.

docs/protocol/tables.md has the tree byte by byte. `tree` says which hash stands for which rows, `table` is what a module holds,
`proofs` shows one row or one range under a root, `rows` says what a store has to write.
"""

from ledger.tables.incoming import IncomingRows
from ledger.tables.proofs import (
    Proof,
    Range,
    RangeProof,
    TableRoot,
    named_range,
    proven_rows,
    range_depth,
    range_name,
    ranges,
    verify,
)
from ledger.tables.rows import MemoryRows
from ledger.tables.table import Table, record_type, table_fields
from ledger.tables.versions import Rows

__all__ = [
    "IncomingRows",
    "MemoryRows",
    "Proof",
    "Range",
    "RangeProof",
    "Rows",
    "Table",
    "TableRoot",
    "named_range",
    "proven_rows",
    "range_depth",
    "range_name",
    "ranges",
    "record_type",
    "table_fields",
    "verify",
]
