"""Standard input as a file argument (`-`). The process of the command reads its standard input, because the daemon has another
one.

`peer join` reads its invitation from standard input, an argument, a file or the environment.
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
SECONDS_MAX = 60.0  # longest time without input: a program that hangs must not block the command
READ_BYTES = 1 << 16
BYTES_MAX = 16 << 30  # largest copy of standard input on disk: the text of a job may have 8 GiB

# Command -> (its arguments that name a file to read, the suffix of the file that copies standard input unless that is JSON).
FILE_ARGUMENTS = {
    "train": (("data", "examples"), ".txt"),
    "tasks": (("what", "guidelines"), ".csv"),
    "rlhf": (("preferences", "blocklist"), ".txt"),
}

# Environment variable for an invitation. All users of a machine can read a process's arguments, but not its environment.
INVITATION_VARIABLE = "PEER_INVITATION"
FILE_PREFIX = "@"  # prefix of an argument that names a file instead of the invitation itself, as in curl


def read_chunks(seconds: float = SECONDS_MAX) -> Iterator[bytes]:
    """Yield the bytes of standard input as they arrive.

    Raises `UserError` after `seconds` without input, unless standard input is a terminal.
    """
    number = sys.stdin.fileno()
    while True:
        if not os.isatty(number) and not select.select([number], [], [], seconds)[0]:
            raise UserError(f"no input for {seconds:g} s: check the program that writes to standard input, or give a file")
        piece = os.read(number, READ_BYTES)
        if not piece:
            return
        yield piece


@contextmanager
def standard_input_as_file(options: argparse.Namespace, data_directory: Path) -> Iterator[None]:
    """Put a copy of standard input into the options if a file argument is `-`.

    The copy is a temporary file and lasts for the block.
    """
    names, ending = FILE_ARGUMENTS.get(options.command, ((), ""))
    asked = [name for name in names if getattr(options, name, None) == STANDARD_INPUT]
    if not asked or not data_directory.is_dir():  # without a data directory, the command fails anyway
        yield
        return
    if len(asked) > 1:
        raise UserError("- is given twice, but standard input can be read once: give a file for one of them")
    with storage_errors(data_directory):
        folder = tempfile.TemporaryDirectory(prefix=".standard-input-", dir=data_directory)
    with folder as name:
        with storage_errors(data_directory):
            setattr(options, asked[0], str(_copied(Path(name), ending)))
        yield


def _copied(folder: Path, ending: str) -> Path:
    """Copy standard input into the folder and return the file.

    The first character decides the file's suffix, and thus its format.
    """
    part, size, first = folder / "part", 0, b""
    with part.open("wb") as stream:
        for piece in read_chunks():
            first = first or piece.lstrip()[:1]
            size += len(piece)
            if size > BYTES_MAX:
                raise UserError(f"standard input has more than {BYTES_MAX >> 30} GiB: give a file")
            stream.write(piece)
    ending = {b"{": ".jsonl", b"[": ".json"}.get(first, ending)
    return part.rename(folder / f"standard-input{ending}")


def hide_argument(secret: str) -> None:
    """Restart this program without the secret argument and pass the secret in the environment.

    Returns without a restart if the argument is not secret, or is not an argument of this process.
    """
    at = next((at for at, text in enumerate(sys.orig_argv) if at and text == secret), None)
    if not secret or secret == STANDARD_INPUT or secret.startswith(FILE_PREFIX) or at is None or not sys.executable:
        return
    os.environ[INVITATION_VARIABLE] = secret
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:at], *sys.orig_argv[at + 1 :]])


def read_invitation(said: str) -> str:
    """Return the text of an invitation and remove it from the environment, so that no child process inherits it.

    Raises `UserError` if there is none, or if a file or standard input is too long. The length of an argument is not checked.
    """
    from peer.settings.invitation import INVITATION_BYTES_MAX  # a slow import: it loads the ledger

    from_environment = os.environ.pop(INVITATION_VARIABLE, "")
    size_max = 2 * INVITATION_BYTES_MAX  # longest text: base64 and the line breaks of a mail program add to the bytes
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
        raise UserError(f"join: missing INVITATION: give the output of `peer invite`, {way}")
    if len(found) > size_max:
        raise UserError(f"{origin} has more than {size_max} bytes, so it is not an invitation: give the output of `peer invite`")
    if not found.strip():
        raise UserError(f"{origin} is empty: give the output of `peer invite`")
    return found.decode(errors="replace")
