"""Standard input in the place of a file: `-`. The command reads it, since the daemon's own standard input is another.

The invitation of `peer join` comes from there, or from an argument, a file, or the environment.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peer.settings.data_directory import storage_errors
from protocol.errors import UserError
from storage.regular_files import open_regular

STANDARD_INPUT = "-"
SECONDS_MAX = 60.0  # without a byte: a pipe whose writer hangs must not hold a command for ever
READ_BYTES = 1 << 16
BYTES_MAX = 16 << 30  # of the copy on disk; a text of a job may have 8 GiB

# Arguments of commands that name a file to read, with the ending of a copy that is no JSON.
FILE_ARGUMENTS = {
    "train": (("data", "examples"), ".txt"),
    "tasks": (("what", "guidelines"), ".csv"),
    "rlhf": (("preferences", "blocklist"), ".txt"),
}

# Everybody on a machine can read the arguments of a process, and only its user the environment.
INVITATION_VARIABLE = "PEER_INVITATION"
FILE_PREFIX = "@"  # before the name of a file, as curl and argparse have it


def read_chunks(seconds: float = SECONDS_MAX) -> Iterator[bytes]:
    """The bytes of standard input as they come. `UserError` after `seconds` without one; a person at a terminal may be slow."""
    number = sys.stdin.fileno()
    while True:
        if not os.isatty(number) and not select.select([number], [], [], seconds)[0]:
            raise UserError(f"standard input gave nothing for {seconds:g} s: look at the program that writes it, or name a file")
        piece = os.read(number, READ_BYTES)
        if not piece:
            return
        yield piece


@contextmanager
def standard_input_as_file(options: argparse.Namespace, data_directory: Path) -> Iterator[None]:
    """Copies standard input into a file of this user while the block runs, if an argument that names a file is `-`."""
    names, ending = FILE_ARGUMENTS.get(options.command, ((), ""))
    asked = [name for name in names if getattr(options, name, None) == STANDARD_INPUT]
    if not asked or not data_directory.is_dir():  # the command itself says that there is no peer
        yield
        return
    if len(asked) > 1:
        raise UserError("- stands twice: standard input can be read once, name a file for the other")
    with storage_errors(data_directory):
        folder = tempfile.TemporaryDirectory(prefix=".standard-input-", dir=data_directory)
    with folder as name:
        with storage_errors(data_directory):
            setattr(options, asked[0], str(_copied(Path(name), ending)))
        yield


def _copied(folder: Path, ending: str) -> Path:
    """The ending says how the file is read, so it follows from the first character."""
    part, size, first = folder / "part", 0, b""
    with part.open("wb") as stream:
        for piece in read_chunks():
            first = first or piece.lstrip()[:1]
            size += len(piece)
            if size > BYTES_MAX:
                raise UserError(f"standard input has more than {BYTES_MAX >> 30} GiB: name a file")
            stream.write(piece)
    ending = {b"{": ".jsonl", b"[": ".json"}.get(first, ending)
    return part.rename(folder / f"standard-input{ending}")


def hide_argument(secret: str) -> None:
    """Starts this program again without the argument, which goes on in the environment.

    Returns where the argument is no secret, or none of this process: a call inside another program.
    """
    at = next((at for at, text in enumerate(sys.orig_argv) if at and text == secret), None)
    if not secret or secret == STANDARD_INPUT or secret.startswith(FILE_PREFIX) or at is None or not sys.executable:
        return
    os.environ[INVITATION_VARIABLE] = secret
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:at], *sys.orig_argv[at + 1 :]])


def read_invitation(said: str) -> str:
    """The text of an invitation. Raises `UserError`. No child of this process inherits the variable."""
    from peer.settings.invitation import INVITATION_BYTES_MAX  # loads the ledger, which no other command here needs

    from_environment = os.environ.pop(INVITATION_VARIABLE, "")
    size_max = 2 * INVITATION_BYTES_MAX  # base64, and line breaks of a mail program
    if said == STANDARD_INPUT:
        found, origin = b"", "standard input"
        for piece in read_chunks():
            found += piece
            if len(found) > size_max or (sys.stdin.isatty() and found.endswith(b"\n")):
                break
    elif said.startswith(FILE_PREFIX):
        origin = said.removeprefix(FILE_PREFIX)
        with open_regular(os.path.expanduser(origin)) as stream:
            found = stream.read(size_max + 1)
    elif text := said or from_environment:
        return text
    else:
        way = f"@FILE, - for standard input, or the variable {INVITATION_VARIABLE}"
        raise UserError(f"join: give the string that `peer invite` printed, {way}")
    if len(found) > size_max:
        raise UserError(f"{origin} has more than {size_max} bytes, which is no invitation")
    if not found.strip():
        raise UserError(f"{origin} is empty: `peer invite` prints an invitation")
    return found.decode(errors="replace")
