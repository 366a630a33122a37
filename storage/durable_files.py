"""Durable files and folders, and errors of the operating system as messages for people."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from protocol.errors import MissingBlobError, StorageError
from storage.crash_points import crash_points

log = logging.getLogger(__name__)


def sync_directory(path: Path) -> None:
    """Make the names of files in a directory durable: new, renamed and deleted ones. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents durably. Raises `OSError`."""
    if not path.exists():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def lock_file(descriptor: int, operation: int, path: Path) -> None:
    """Lock an open file. Raises `BlockingIOError` if `flock` would wait, `StorageError` on a file system without locks."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        told = f"cannot lock {path} ({error.strerror})"
        raise StorageError(f"{told}: move the folder to a file system with file locks, such as a local disk") from None


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a stream whose bytes replace the file at `path` durably, or not at all if the `with` block fails.

    Raises `OSError`.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        with crash_points(f"file-{path.suffix.lstrip('.') or path.name}"):
            os.replace(part, path)
            sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def is_descriptor_shortage(error: BaseException | None) -> bool:
    """Return whether the process or the machine has no file descriptor left. Such a shortage often lasts seconds only."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return isinstance(error, StorageError) and is_descriptor_shortage(error.__cause__)


@contextmanager
def skip_without_descriptors(what: str) -> Iterator[None]:
    """Skip the rest of the `with` block if no file descriptor is left. Use it only for work that a later call does again."""
    try:
        yield
    except (OSError, StorageError) as error:
        if not is_descriptor_shortage(error):
            raise
        log.warning("%s is postponed: %s", what, error)


@contextmanager
def explain_os_errors(path: Path, verb: str = "write") -> Iterator[None]:
    """Turn an `OSError` of the `with` block into a `StorageError`, or a `MissingBlobError` if the file to read is missing."""
    try:
        yield
    except OSError as error:
        way_out = "free some space and start again" if error.errno == errno.ENOSPC else "check the disk and its permissions"
        is_missing = verb == "read" and isinstance(error, FileNotFoundError)
        kind = MissingBlobError if is_missing else StorageError
        raise kind(f"cannot {verb} {path}: {error.strerror}; {way_out}") from error
