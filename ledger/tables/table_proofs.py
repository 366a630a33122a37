"""Proofs that a table contains a row, no row of a key, or exactly the given rows of a range.

A proof follows the path of a key from the root and gives the hash of the sibling at every branch. It ends at no row, at the row
of the key, or at another row that is alone in the subtree of the key.

A range is the text of the bits that its paths share: "" is the whole table, "01" its second quarter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Final, TypeAlias

from ledger.tables.sparse_merkle_tree import (
    DEPTH_MAX,
    EMPTY,
    BucketReader,
    Node,
    Row,
    branch_hash,
    fold_hashes,
    goes_right,
    hash_of,
    leaf_hash,
    path_of,
    row_hash,
    rows_in,
    rows_of,
    size_of,
)
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX

RowKey = Annotated[bytes, Length(1, ROW_KEY_BYTES_MAX)]
RowValue = Annotated[bytes, Length(1, ROW_BYTES_MAX)]  # encoded record of a row
# Hashes of the other halves from the root down; nil: that half has no row.
Siblings = Annotated[tuple[Digest | None, ...], Length(0, DEPTH_MAX)]
PathPrefix: TypeAlias = str

# Bytes of an average range, half of a part: nearly every range then fits into one part.
RANGE_BYTES: Final = SNAPSHOT_PART_BYTES_MAX // 2
RANGE_ROWS_MAX: Final = 1 << 24  # rows of a range: a peer can choose keys that make one range as large as the whole table


@dataclass(frozen=True, slots=True)
class TableRoot:
    """The summary of a table in a module's state: hash and size of its rows. It depends only on the rows."""

    hash: Digest
    rows: Count
    size: Count  # bytes of keys and values, and ROW_HEADS_BYTES per row: a new peer knows the size of its download

    @classmethod
    def from_node(cls, node: Node) -> TableRoot:
        return cls(hash_of(node), rows_in(node), size_of(node))

    @property
    def part_bytes_max(self) -> int:
        """Maximum length in bytes of the encoding of any range of this table."""
        return self.size + 34 * DEPTH_MAX + 100


@dataclass(frozen=True, slots=True)
class OtherLeaf:
    """Another row in a proof, represented by its hashes."""

    path: Digest
    value: Digest


@dataclass(frozen=True, slots=True)
class KeyProof:
    """A proof that a table contains a row of a key, or that it contains none."""

    siblings: Siblings
    # The only row of a subtree that includes the path of the key, if this row has another key; None: there is no such row.
    other: OtherLeaf | None


@dataclass(frozen=True, slots=True)
class RangeProof(KeyProof):
    """A proof of all rows in a range, in order of their paths.

    `other` proves that the range has no rows: it is the only row of a subtree that includes the range, and lies outside it.
    """

    rows: Annotated[tuple[tuple[RowKey, RowValue], ...], Length(0, RANGE_ROWS_MAX)]


ROWS_FIELD: Final = [field.name for field in fields(RangeProof)].index("rows")


# Making ------------------------------------------------------------------------------------------------------------------


def prove_key(node: Node, read: BucketReader, key: bytes) -> KeyProof:
    siblings, other, _ = _descend(node, path_of(key), DEPTH_MAX, read)
    return KeyProof(siblings, other)


def prove_range(node: Node, read: BucketReader, of: PathPrefix) -> RangeProof:
    siblings, other, rows = _descend(node, _path(of), len(of), read)
    return RangeProof(siblings, other, tuple((key, value) for _, key, value in rows))


def _descend(node: Node, path: bytes, depth_max: int, read: BucketReader) -> tuple[Siblings, OtherLeaf | None, list[Row]]:
    """Follow `path` from the root.

    Return the siblings, and the end of the path: another row, or all rows that agree with `path`.
    """
    siblings: list[Digest | None] = []
    while node is not None and len(node) == 5 and len(siblings) < depth_max:
        right = goes_right(path, len(siblings))
        siblings.append(_unless_empty(hash_of(node[3] if right else node[4])))
        node = node[4] if right else node[3]
    rows = rows_of(node, read)
    while len(rows) > 1 and len(siblings) < depth_max:  # the path continues inside a bucket
        depth = len(siblings)
        right = goes_right(path, depth)
        beside = [row for row in rows if goes_right(row[0], depth) != right]
        rows = [row for row in rows if goes_right(row[0], depth) == right]
        siblings.append(_unless_empty(_folded(beside, depth + 1)))
    if len(rows) == 1 and not _agree(rows[0][0], path, depth_max):
        return tuple(siblings), OtherLeaf(rows[0][0], hashlib.sha256(rows[0][2]).digest()), []
    return tuple(siblings), None, rows


# Checking ----------------------------------------------------------------------------------------------------------------


def verify_key(root: bytes, key: bytes, value: bytes | None, proof: KeyProof) -> bool:
    """Return whether the table with the root `root` contains this encoded row of `key`.

    For None: whether it contains no row of `key`.
    """
    rows = [] if value is None else [(path_of(key), key, value)]
    return _root(path_of(key), DEPTH_MAX, proof, rows) == root


def verify_range(root: bytes, of: PathPrefix, shown: RangeProof) -> tuple[tuple[bytes, bytes], ...]:
    """Return the keys and encoded values in a range.

    Raises `RemoteProtocolError` if they are not exactly the rows under `root`.
    """
    path, depth = _path(of), len(of)
    rows = [(path_of(key), key, value) for key, value in shown.rows]
    if any(left[0] >= right[0] for left, right in pairwise(rows)) or not all(_agree(row[0], path, depth) for row in rows):
        raise RemoteProtocolError("bad-part", f"the rows of the range {of!r} are out of order or belong to another range")
    if _root(path, depth, shown, rows) != root:
        raise RemoteProtocolError("bad-part", f"the rows of the range {of!r} do not match the root of the table")
    return shown.rows


def _root(path: bytes, depth_max: int, proof: KeyProof, rows: list[Row]) -> bytes | None:
    """Return the root of a table in which exactly these rows agree with `path`, according to `proof`.

    None: the proof is malformed.
    """
    depth, other = len(proof.siblings), proof.other
    if depth > depth_max or EMPTY in proof.siblings:  # a half without rows has only one encoding, which is nil
        return None
    if other is not None:
        if rows or not _agree(other.path, path, depth) or _agree(other.path, path, depth_max):
            return None
        node = leaf_hash(other.path, other.value)
    elif depth < depth_max and len(rows) > 1:  # a path must continue while a subtree has more than one row
        return None
    else:
        node = _folded(rows, depth)
    for above in reversed(range(depth)):
        beside = proof.siblings[above] or EMPTY
        node = branch_hash(beside, node) if goes_right(path, above) else branch_hash(node, beside)
    return node


# Ranges ------------------------------------------------------------------------------------------------------------------


def range_depth(root: TableRoot) -> int:
    """Return the number of bits that name a range when this table is downloaded. All peers compute the same number."""
    return (max(0, root.size - 1) // RANGE_BYTES).bit_length()


def fetch_ranges(root: TableRoot) -> list[PathPrefix]:
    depth = range_depth(root)
    return [f"{index:0{depth}b}" if depth else "" for index in range(1 << depth)]


def encode_range_name(table: str, of: PathPrefix) -> bytes:
    """Return the name of a range in requests."""
    return f"{table}:{of}".encode()


def decode_range_name(name: bytes) -> tuple[str, PathPrefix]:
    """Return the table and the range of a name in requests. Raises `RemoteProtocolError` if the name is malformed."""
    table, _, of = name.decode(errors="replace").partition(":")
    if not table or len(of) > DEPTH_MAX or not set("01").issuperset(of):
        raise RemoteProtocolError("bad-request", f"{name!r} does not name a range of a table")
    return table, of


def _path(of: PathPrefix) -> bytes:
    """Return the lowest path in a range."""
    assert len(of) <= DEPTH_MAX
    return int(of.ljust(DEPTH_MAX, "0"), 2).to_bytes(DEPTH_MAX // 8, "big")


def _agree(one: bytes, other: bytes, bits: int) -> bool:
    """Return whether two paths agree in their first `bits` bits."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")) >> (DEPTH_MAX - bits) == 0


def _folded(rows: list[Row], depth: int) -> bytes:
    return fold_hashes([row[0] for row in rows], [row_hash(row[0], row[2]) for row in rows], depth)


def _unless_empty(found: bytes) -> bytes | None:
    return None if found == EMPTY else found
