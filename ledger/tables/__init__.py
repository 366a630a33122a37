"""Merkle maps of many rows with one root, and proofs of rows and ranges.

docs/protocol/tables.md has the tree byte by byte.
"""

from ledger.tables.table import BucketStore, Table, TableAssembly, record_type, table_fields
from ledger.tables.table_proofs import (
    KeyProof,
    PathPrefix,
    RangeProof,
    TableRoot,
    decode_range_name,
    encode_range_name,
    fetch_ranges,
    range_depth,
    verify_key,
    verify_range,
)

__all__ = [
    "BucketStore",
    "KeyProof",
    "PathPrefix",
    "RangeProof",
    "Table",
    "TableAssembly",
    "TableRoot",
    "decode_range_name",
    "encode_range_name",
    "fetch_ranges",
    "range_depth",
    "record_type",
    "table_fields",
    "verify_key",
    "verify_range",
]
