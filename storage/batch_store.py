"""The data of closed rounds on request, with a bound in bytes: a folder for each round, which has its files by digest.

A round's files are hard links to blobs. They are linked while the round is open, since other code deletes the blobs when it
closes. A folder is visible under its name once its links are durable.

| folder | round |
|---|---|
| `open-JOB-ROUND` | open: nobody knows yet whether it accepts an update |
| `HEIGHT-JOB-ROUND` | closed by the block of this height, with an accepted update |
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.blob_digest import blob_digest
from protocol.errors import MissingBlobError
from storage.durable_files import explain_os_errors, make_directory, sync_directory

OPEN: Final = "open"
UNFINISHED_SUFFIX: Final = ".made"  # suffix of a folder until all its links exist, and while its files are deleted
HEIGHT_DIGITS: Final = 12  # digits of a height in a folder's name, so that names have the order of heights
FOLDER_NAME: Final = re.compile(r"(?P<height>open|\d+)-(?P<job>[0-9a-f]{64})-(?P<round>\d+)")
FILE_NAME: Final = re.compile("[0-9a-f]{64}")  # a digest

log = logging.getLogger("peer")


@dataclass(frozen=True, slots=True, order=True)
class KeptRound:
    """A round whose data are kept. The order is that of the blocks that closed the rounds."""

    height: int  # height of the block that closed the round
    job: bytes
    round: int

    @property
    def folder_name(self) -> str:
        return f"{self.height:0{HEIGHT_DIGITS}}-{self.job.hex()}-{self.round}"


class BatchStore:
    """The kept data of rounds, at most `bytes_max` bytes: the rounds that were closed first are deleted first."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Open the store, and delete rounds beyond the bound. 0 bytes delete all rounds, also those of an earlier setting."""
        self.bytes_max = bytes_max
        self._folder = folder
        self._open: dict[tuple[bytes, int], int] = {}  # (job, round) of open rounds -> bytes
        self._kept: dict[KeptRound, int] = {}  # bytes of kept rounds; replaced at each change, since other threads read it
        if not folder.is_dir():
            return
        with explain_os_errors(folder):
            for left in folder.glob(f"*{UNFINISHED_SUFFIX}"):
                shutil.rmtree(left)
            kept = dict[KeptRound, int]()
            for path in folder.iterdir():
                if not (named := FOLDER_NAME.fullmatch(path.name)):
                    continue  # Another program wrote it, such as a file manager.
                key = bytes.fromhex(named["job"]), int(named["round"])
                if named["height"] == OPEN:
                    self._open[key] = _size(path)
                else:
                    kept[KeptRound(int(named["height"]), *key)] = _size(path)
            if not bytes_max:
                for key in self._open:
                    self._delete(self._open_path(*key))
                self._open.clear()
        self._replace_kept(kept)

    @property
    def bytes_left(self) -> int:
        """Bytes that the store may still write until it has to delete rounds."""
        return max(0, self.bytes_max - sum(self._kept.values()) - sum(self._open.values()))

    def open_rounds(self) -> set[tuple[bytes, int]]:
        return set(self._open)

    def kept_rounds(self) -> list[KeptRound]:
        """Return the kept rounds, the oldest first."""
        return sorted(self._kept)

    def add_open_round(self, job: bytes, round: int, files: Mapping[bytes, Path]) -> None:
        """Link an open round's files. Raises `MissingBlobError` if one was deleted, since the round is over then."""
        path = self._open_path(job, round)
        made = path.with_name(f"{path.name}{UNFINISHED_SUFFIX}")
        with explain_os_errors(made):
            make_directory(self._folder)
            shutil.rmtree(made, ignore_errors=True)  # an earlier call may have failed for lack of descriptors
            made.mkdir()
        try:
            with explain_os_errors(made, "read"):
                for digest, file in files.items():
                    os.link(file, made / digest.hex())
        except MissingBlobError:
            shutil.rmtree(made)
            raise
        with explain_os_errors(made):
            sync_directory(made)
            made.rename(path)
            sync_directory(self._folder)
        self._open[job, round] = _size(path)

    def drop_open_round(self, job: bytes, round: int) -> None:
        """Delete the files of a round that accepted no update."""
        self._delete(self._open_path(job, round))
        del self._open[job, round]

    def keep_round(self, job: bytes, round: int, height: int) -> list[KeptRound]:
        """Keep the files of a round that accepted an update. Return the rounds that are deleted for it, the oldest first."""
        kept, path = KeptRound(height, job, round), self._open_path(job, round)
        with explain_os_errors(path):
            path.rename(self._folder / kept.folder_name)
            sync_directory(self._folder)
        return self._replace_kept({**self._kept, kept: self._open.pop((job, round))})

    def read_round(self, kept: KeptRound) -> dict[bytes, bytes] | None:
        """Return the files of a round by digest. None: the round is deleted, or a file does not have the digest in its name."""
        folder = self._folder / kept.folder_name
        try:
            named = [file for file in folder.iterdir() if FILE_NAME.fullmatch(file.name)]  # Other programs may write others.
            files = {bytes.fromhex(file.name): file.read_bytes() for file in named}
        except OSError as error:
            # The disk has an unreadable sector, or the round has just been deleted.
            log.warning("the data of %s cannot be read: %s", folder, error.strerror)
            return None
        damaged = [digest for digest, data in files.items() if blob_digest(data) != digest]
        if damaged:
            log.warning("%s is damaged: exports leave out the data of this round", folder / damaged[0].hex())
        return None if damaged else files

    def _replace_kept(self, sizes: dict[KeptRound, int]) -> list[KeptRound]:
        """Set the kept rounds to those of `sizes` that fit into the bound, delete the others, and return these.

        Other threads see the rounds of either before or after this call.
        """
        deleted, left = list[KeptRound](), sum(sizes.values())
        for kept in sorted(sizes):
            if left <= self.bytes_max:
                break
            left -= sizes[kept]
            deleted.append(kept)
        self._kept = {kept: size for kept, size in sizes.items() if kept not in deleted}
        for kept in deleted:
            self._delete(self._folder / kept.folder_name)
        return deleted

    def _delete(self, path: Path) -> None:
        """Delete a folder. After a crash, either all its files are there or none."""
        with explain_os_errors(path):
            gone = path.rename(path.with_name(f"{path.name}{UNFINISHED_SUFFIX}"))
            sync_directory(self._folder)
            shutil.rmtree(gone)

    def _open_path(self, job: bytes, round: int) -> Path:
        return self._folder / f"{OPEN}-{job.hex()}-{round}"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
