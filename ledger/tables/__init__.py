"""Tables: maps from keys to records with one root, of which a block pays for what it changes and a row has a short proof.

docs/protocol/tables.md has the tree byte by byte. `tree` says which hash stands for which rows, `table` is what a module holds,
`proofs` shows one row or one range under a root, `rows` says what a store has to write.
"""

from ledger.tables.bucket_changes import MemoryBucketStore
from ledger.tables.store_versions import BucketStore
from ledger.tables.table import Table, record_type, table_fields
from ledger.tables.table_download import TableAssembly
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
    "MemoryBucketStore",
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
