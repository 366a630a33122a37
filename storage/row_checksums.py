"""Rows with a digest of their table and values, and what the disk did wrong in one line."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from protocol import codec
from protocol.errors import LostVotesError, StorageError

EXPLANATION_CHARACTERS_MAX = 120  # of what SQLite says, which may quote the damaged bytes

REKEY_ADVICE = (
    "this peer may have forgotten what it signed, so give it a new key with `peer rekey`, and do not restore an older copy"
)


def insert_row(database: sqlite3.Connection, verb: str, table: str, *values: object) -> None:
    marks = ", ".join("?" * (len(values) + 1))
    database.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, row_digest(table, values)))


def row_digest(table: str, values: Sequence[object]) -> bytes:
    """Says that this row, whole, was put into this table."""
    return hashlib.sha256(codec.encode((table, *values))).digest()


def damage_error(path: Path, what: str) -> LostVotesError:
    return LostVotesError(f"{path} is damaged ({what}): {REKEY_ADVICE}")


def storage_error(path: Path, error: Exception) -> StorageError:
    """One line: what the disk did wrong, which file, and the way out."""
    text = " ".join(str(error).encode("ascii", "replace").decode().split())[:EXPLANATION_CHARACTERS_MAX]
    if "full" in text:
        return StorageError(f"the disk that holds {path} is full: nothing was lost, free some space and start again")
    if "readonly" in text or "unable to open" in text or "permission" in text:
        return StorageError(f"cannot write {path}: {text}; check the owner and permissions of its folder")
    if "locked" in text or "busy" in text:
        return StorageError(f"{path} is in use by another program: stop it first")
    if "I/O" in text:
        return StorageError(f"the disk does not read or write {path} ({text}): check the disk, then start again")
    return damage_error(path, text)
