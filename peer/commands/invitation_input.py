"""The invitation of `peer join`: from an argument, a file, standard input or the environment.

Everybody on a machine can read the arguments of a process, and only its user the environment.
"""

from __future__ import annotations

import os
import sys

from peer.commands.standard_input import STANDARD_INPUT, read_chunks
from peer.settings.invitation import INVITATION_BYTES_MAX
from protocol.errors import UserError
from storage.regular_files import open_regular

INVITATION_VARIABLE = "PEER_INVITATION"
FILE_PREFIX = "@"  # before the name of a file, as curl and argparse have it
TEXT_BYTES_MAX = 2 * INVITATION_BYTES_MAX  # base64, and line breaks of a mail program


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
    from_environment = os.environ.pop(INVITATION_VARIABLE, "")
    if said == STANDARD_INPUT:
        return _from_standard_input()
    if said.startswith(FILE_PREFIX):
        with open_regular(os.path.expanduser(said.removeprefix(FILE_PREFIX))) as stream:
            return _text(stream.read(TEXT_BYTES_MAX + 1), said.removeprefix(FILE_PREFIX))
    if not (text := said or from_environment):
        way = f"@FILE, - for standard input, or the variable {INVITATION_VARIABLE}"
        raise UserError(f"join: give the string that `peer invite` printed, {way}")
    return text


def _from_standard_input() -> str:
    found = b""
    for piece in read_chunks():
        found += piece
        if len(found) > TEXT_BYTES_MAX or (sys.stdin.isatty() and found.endswith(b"\n")):
            break
    return _text(found, "standard input")


def _text(data: bytes, origin: str) -> str:
    if len(data) > TEXT_BYTES_MAX:
        raise UserError(f"{origin} has more than {TEXT_BYTES_MAX} bytes, which is no invitation")
    if not data.strip():
        raise UserError(f"{origin} is empty: `peer invite` prints an invitation")
    return data.decode(errors="replace")
