"""Commands about the rows of tables."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from features.command_arguments import Argument
from features.commands import CommandContext, command
from protocol.api import PeerApi

HEX = "0x"


def row_key(text: str) -> bytes:
    """A type for argparse."""
    if not text.startswith(HEX):
        return text.encode()
    try:
        return bytes.fromhex(text.removeprefix(HEX))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no hex: two digits a byte follow 0x") from None


@command(
    "one row of a table, or that there is none, as a file for `peer verify`: prove TABLE KEY -o FILE",
    Argument("table", metavar="TABLE", help="module/field"),
    Argument("key", type=row_key, metavar="KEY", help="text, or bytes in hex behind 0x"),
    Argument("-o", "--output", metavar="FILE", help="a new file (default: named by table and key, in this directory)"),
)
async def prove(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    file = options.output or f"{options.table.replace('/', '-')}-{options.key.hex()[:32]}.proof"
    view = await asked.api.prove_row(options.table, options.key, str(Path(file).expanduser().absolute()))
    what = "the row" if view.has_row else "there is no row of this key"
    asked.show(
        f"{view.path}: {what} after height {view.height}, {view.bytes} bytes, of which {view.row_bytes} show it in its table\n"
        f"check it anywhere with `peer verify {shlex.quote(view.path)}`"
    )
