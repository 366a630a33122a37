"""The databases of a serving peer: each statement is durable once it has returned."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """Opens one, and makes its tables if there are none. Threads may share it: each statement is a transaction."""
    opened = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    opened.execute("PRAGMA journal_mode=WAL")
    opened.execute("PRAGMA synchronous=FULL")
    opened.executescript(schema)
    return opened
