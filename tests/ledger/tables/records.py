"""Rows of tests, and a second, small implementation of docs/protocol/tables.md, independent of the first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from protocol.codec import Length


@dataclass(frozen=True, slots=True)
class Note:
    number: int
    text: Annotated[str, Length(0, 40)] = ""


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def bits(key: bytes) -> str:
    return "".join(f"{byte:08b}" for byte in sha256(key))


def row(key: bytes, value: bytes) -> bytes:
    return sha256(b"folkmoot/row\0", sha256(key), sha256(value))


def root(rows: Mapping[bytes, bytes], depth: int = 0) -> bytes:
    """Return the root of keys and encoded values, by the definition in the protocol documents."""
    if len(rows) == 0:
        return bytes(32)
    if len(rows) == 1:
        return row(*next(iter(rows.items())))
    halves = ({key: value for key, value in rows.items() if bits(key)[depth] == side} for side in "01")
    return sha256(b"folkmoot/branch\0", *(root(half, depth + 1) for half in halves))


def climbed(way: str, siblings: Sequence[bytes | None], node: bytes) -> bytes:
    """Compute the root from a node, its path and the siblings along this path, listed from the root down."""
    for side, beside in reversed(list(zip(way, siblings, strict=False))):
        pair = (node, beside or bytes(32)) if side == "0" else (beside or bytes(32), node)
        node = sha256(b"folkmoot/branch\0", *pair)
    return node
