"""The files in a model's directory: the mark of durable models, and the replacement of a model by another.

The files of a model that is neither needed nor durable are kept, and the next model overwrites them, since the kernel takes many
times longer to allocate pages for a new file. A reader that maps a file holds a shared lock on it, and a locked file is not
overwritten.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from protocol.errors import StorageError
from storage.crash_points import crash_points
from storage.durable_files import sync_directory

STATE: Final = "state.msgpack"
DURABLE: Final = "durable"


def is_durable(directory: Path) -> bool:
    return (directory / DURABLE).exists()


def read_manifest(directory: Path) -> bytes:
    """Return the encoded `ModelManifest` in a directory, with the hashes against which a model's parts are checked.

    Raises `StorageError`.
    """
    try:
        return (directory / STATE).read_bytes()
    except OSError as error:
        raise StorageError(f"{directory / STATE} cannot be read ({error}): restore a snapshot") from None


@contextmanager
def model_write_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {directory}: {error.strerror}; free some space and start again") from error


def replace_directory(fresh: Path, directory: Path, durable: bool = True) -> None:
    """Rename `fresh` to `directory`. The old directory is renamed first, since a rename cannot replace a directory with files."""
    aside = _aside(directory)
    if directory.exists():
        with crash_points("model-aside"):
            directory.rename(aside)
    with crash_points("model-name"):
        fresh.rename(directory)
        if durable:
            sync_directory(directory.parent)
    with crash_points("model-remove"):
        remove_directory(aside)


def recover_replaced_directory(directory: Path) -> None:
    """Restore the old model after a crash between the two renames of `replace_directory`."""
    aside = _aside(directory)
    if not aside.exists():
        return
    if directory.exists():
        remove_directory(aside)
    else:
        aside.rename(directory)
        sync_directory(directory.parent)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.aside")


def recycle_directory(directory: Path) -> None:
    """Keep the files of an unneeded model, so that the job's next model overwrites them.

    Durable models are deleted instead, so that the mark `durable` stays reliable. Only the files of one unneeded model are kept.
    """
    try:
        if is_durable(directory) or directory.name.startswith("."):
            raise FileExistsError
        directory.rename(spare_directory(directory))
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)


def spare_directory(directory: Path) -> Path:
    return directory.with_name(".spare")


def open_over(path: Path) -> BinaryIO:
    """Open a file to overwrite it in place, or create it if it is missing. A file that a reader maps is replaced by a new one."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        path.unlink()
        return path.open("wb")
    return file


def remove_directory(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
