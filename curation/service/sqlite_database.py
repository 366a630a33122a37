"""The databases of a serving peer: each statement waits for the disk, and is durable once it has returned."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import ClassVar


class ServiceDatabase:
    """A file of the service's folder, with its tables. Threads may share it: each statement is a transaction."""

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
