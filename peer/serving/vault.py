"""Answers that are committed and not opened yet: durable here before anybody is told that they count."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol import codec

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers (assignment BLOB PRIMARY KEY, salt BLOB NOT NULL, answer BLOB NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Kept:
    assignment: bytes
    salt: bytes
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    choices: tuple[int, ...]


def _decoded(data: bytes) -> tuple[int, ...]:
    return codec.decode(_Answer, data).choices


class Vault:
    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(_SCHEMA)

    def keep(self, kept: Kept) -> None:
        """Waits for the disk."""
        row = (kept.assignment, kept.salt, codec.encode(_Answer(kept.answer)))
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)

    def forget(self, assignment: bytes) -> None:
        self._database.execute("DELETE FROM answers WHERE assignment = ?", (assignment,))

    def all(self) -> Iterator[Kept]:
        for assignment, salt, answer in self._database.execute("SELECT assignment, salt, answer FROM answers"):
            yield Kept(assignment, salt, _decoded(answer))

    def close(self) -> None:
        self._database.close()
