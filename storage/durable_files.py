"""Files that are there whole or not at all, whatever happens meanwhile."""

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
    """A name is durable once its directory is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes `path` and what is missing above it, durably. Raises `OSError`."""
    if not path.exists():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def lock_file(descriptor: int, operation: int, path: Path) -> None:
    """`flock` of an open file. `BlockingIOError` where it would wait; `StorageError` on a file system that has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        told = f"{path} cannot be locked ({error.strerror})"
        raise StorageError(f"{told}: move the folder to a file system with file locks, such as a local disk") from None


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A stream whose bytes stand durably at `path` once the block ends well; otherwise what was there stays. Raises `OSError`."""
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
    """Whether this process, or the machine, has no file descriptor left: often a matter of seconds."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return isinstance(error, StorageError) and is_descriptor_shortage(error.__cause__)


@contextmanager
def skip_without_descriptors(what: str) -> Iterator[None]:
    """Skip the rest of the block if no file descriptor is left. A later call does the same work."""
    try:
        yield
    except (OSError, StorageError) as error:
        if not is_descriptor_shortage(error):
            raise
        log.warning("%s is put off: %s", what, error)


@contextmanager
def explain_os_errors(path: Path, verb: str = "write") -> Iterator[None]:
    """Turns an `OSError` into a line for a person; `MissingBlobError` if what is read is not there."""
    try:
        yield
    except OSError as error:
        way_out = "free some space and start again" if error.errno == errno.ENOSPC else "check the disk and its permissions"
        is_missing = verb == "read" and isinstance(error, FileNotFoundError)
        kind = MissingBlobError if is_missing else StorageError
        raise kind(f"cannot {verb} {path}: {error.strerror}; {way_out}") from error
