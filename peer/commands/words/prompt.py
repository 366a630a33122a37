"""Words about the prompt itself. On the command line `peer help` lists the commands, and there is nothing to quit."""

from __future__ import annotations

from features.arguments import Argument
from features.tables import Pairs
from features.words import Asked, word
from peer.commands.grammar import help_text
from protocol.api import PeerApi


@word(
    "this list, or one command: help COMMAND",
    Argument("topic", nargs="?", default="", metavar="COMMAND", help="a command of this list"),
    only_at_prompt=True,
)
async def help(asked: Asked[PeerApi]) -> None:
    words, topic = asked.words, asked.options.topic
    asked.show(help_text(words, topic) if topic else Pairs({name: word.about for name, word in words.items()}))


@word("stop the peer; in an attached console: leave it running", only_at_prompt=True)
async def quit(asked: Asked[PeerApi]) -> None:
    """Done by the reader of the lines, which knows what quitting means here."""
