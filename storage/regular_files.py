"""Opening of files that people name, without blocking: a named pipe without a writer would block its thread for ever."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from protocol.errors import UserError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file for reading.

    Raises `UserError` for a pipe, a socket, a device or a folder, and `OSError` as `open` does.
    """
    _require_regular(os.stat(path).st_mode, path)  # This check precedes `open`, since opening alone already moves some devices.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as stream:
        return stream.read()


def require_writable_kind(path: Path | str) -> None:
    """Raise `UserError` if `path` is a folder, a pipe, a socket or a block device. Missing files and `/dev/null` are allowed."""
    if os.path.exists(path) and not stat.S_ISCHR(mode := os.stat(path).st_mode):
        _require_regular(mode, path)


def _require_regular(mode: int, path: Path | str) -> None:
    if stat.S_ISREG(mode):
        return
    shown = str(path) if str(path).isprintable() else repr(str(path))
    if stat.S_ISDIR(mode):
        raise UserError(f"{shown} is a folder: give a file")
    raise UserError(
        f"{shown} is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}: save its content in a file and name that file"
    )
