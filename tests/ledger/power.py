"""Simulation of a power cut, after which a disk keeps only synced data."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from pathlib import Path

import pytest


class PowerCut(Exception):
    pass


class Disk:
    """The sizes of files and the names in folders at their last sync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, syncs: int = 1 << 30) -> None:
        """The first `syncs` calls of `fsync` succeed, then the power is cut."""
        self._sizes: dict[int, int] = {}
        self._names: dict[int, set[tuple[str, int]]] = {}
        self._numbers, self._syncs = itertools.count(), syncs
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        if next(self._numbers) >= self._syncs:
            raise PowerCut
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(descriptor) as entries:
                self._names[found.st_ino] = {(entry.name, entry.inode()) for entry in entries}
        else:
            self._sizes[found.st_ino] = found.st_size

    def cut(self, folder: Path, names_stay: bool) -> None:
        """Truncate the files in `folder` that were not synced. Names that were not synced are lost, unless `names_stay`: a file
        system may write them at any time.
        """
        kept = self._names.get(folder.stat().st_ino, set())
        for path in list(folder.iterdir()):
            found = path.stat()
            if not names_stay and (path.name, found.st_ino) not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                self.cut(path, names_stay)
            else:
                os.truncate(path, self._sizes.get(found.st_ino, found.st_size // 2))
