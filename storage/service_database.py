"""SQLite databases of a serving peer. Each SQL statement waits for the disk, so its changes are durable once it has returned."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import ClassVar


class ServiceDatabase:
    """SQLite database in a file of the service's folder. Threads may share an object: each statement is a transaction."""

    file_name: ClassVar[str]
    file_mode: ClassVar[int] = 0o644
    schema: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        path = folder / self.file_name
        path.touch(mode=self.file_mode)
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(self.schema)

    def close(self) -> None:
        self._database.close()
