"""Commands about the prompt itself. On the command line `peer help` lists the commands, and there is nothing to quit."""

from __future__ import annotations

from features.command_arguments import Argument
from features.commands import CommandContext, command
from features.text_tables import KeyValueTable
from peer.commands.command_line_parser import help_text
from protocol.api import PeerApi


@command(
    "this list, or one command: help COMMAND",
    Argument("topic", nargs="?", default="", metavar="COMMAND", help="a command of this list"),
    only_at_prompt=True,
)
async def help(asked: CommandContext[PeerApi]) -> None:
    words, topic = asked.commands, asked.options.topic
    asked.show(help_text(words, topic) if topic else KeyValueTable({name: word.about for name, word in words.items()}))


@command("stop the peer; in an attached console: leave it running", only_at_prompt=True)
async def quit(asked: CommandContext[PeerApi]) -> None:
    """Done by the reader of the lines, which knows what quitting means here."""
