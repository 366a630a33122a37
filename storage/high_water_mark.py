"""How far a database had come, in a small file beside it: a database that comes back with less has lost something.

Written after each commit and not synced: the file may lag behind, by what the kernel had not written when the power failed. It is
never ahead, so that a database that is behind it was synced further once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import StorageError
from storage import durable_files
from storage.crash_points import crash_points

CHECK_CHARACTERS = 16
DIGITS = 16  # always as many, so that writing replaces bytes in place and takes no room on a full disk


class HighWaterMark:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def exists(self) -> bool:
        return self._path.exists()

    def read_value(self) -> int:
        """Zero if the file is not there or damaged: it is a hint, and what it guards is checked in other ways too."""
        with self._explained():
            text = self._path.read_bytes() if self.exists() else b""
        number = text[:DIGITS]
        return int(number) if number.isdigit() and text == _line(int(number)) else 0

    def open(self, value: int) -> None:
        with self._explained():
            if not self.exists():
                with durable_files.atomic_write(self._path) as stream:
                    stream.write(_line(value))
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        self.write_value(value)

    def write_value(self, value: int) -> None:
        assert self._descriptor is not None
        with self._explained(), crash_points("store-count"):
            os.pwrite(self._descriptor, _line(value), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            with self._explained():
                os.fsync(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot use {self._path}: {error.strerror}; check the disk and its permissions") from error


def _line(value: int) -> bytes:
    number = b"%0*d" % (DIGITS, value)
    return number + b" " + hashlib.sha256(number).hexdigest()[:CHECK_CHARACTERS].encode() + b"\n"
