"""The files of a model's directory: which models are durable, and how one takes the place of another.

A model that nobody needs and that is not durable is set aside, and the next one is written over it: the kernel takes many times
longer to find pages for a new file than to fill those that are there. Whoever maps a file holds a shared lock on it for as long,
and what is locked is not written over.
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
    """What all the parts of a model can be checked with: an encoded `ModelManifest`."""
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
    """`fresh` becomes `directory`; what was there moves aside first, since a rename cannot replace a full directory."""
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
    """After a crash between the two renames the old model stands aside: it comes back."""
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
    """Nobody needs this model any more: the next one of the job is written over it. Durable ones are deleted, which leaves no
    doubt of what is durable, and so is all but one."""
    try:
        if is_durable(directory) or directory.name.startswith("."):
            raise FileExistsError
        directory.rename(spare_directory(directory))
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)


def spare_directory(directory: Path) -> Path:
    return directory.with_name(".spare")


def open_over(path: Path) -> BinaryIO:
    """To write what is at `path` anew, in place if it is there and nobody maps it."""
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
