"""Commands about this peer itself, and about the prompt.

On the command line `peer help` lists the commands, and there is nothing to quit.
"""

from __future__ import annotations

from features.command_arguments import LAST_COUNT, Argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from features.text_tables import KeyValueTable
from peer.commands import view_tables
from peer.commands.command_line_parser import help_text
from protocol.api import AlertView, BlockView, DiskView, EngineView, EventView, PeerApi, PeerState, StatsView, StatusView

# The exit status of `peer status`; 2 is an error, such as that no peer runs there.
EXIT_STATUS = {
    PeerState.WORKING: 0,
    PeerState.SUSPENDED: 0,
    PeerState.BEHIND: 3,
    PeerState.WAITING: 3,
    PeerState.SILENT: 3,
    PeerState.JOINING: 3,
    PeerState.HALTED: 4,
    PeerState.EXPELLED: 4,
}


@listing_command("decisions, traffic, refusals, memory", view_tables.show_table(view_tables.stats))
async def stats(asked: CommandContext[PeerApi]) -> StatsView:
    return await asked.api.stats()


@listing_command(
    "who and where this peer is",
    view_tables.show_table(view_tables.status),
    exit_status=lambda view: EXIT_STATUS[PeerState(view.state)],
)
async def status(asked: CommandContext[PeerApi]) -> StatusView:
    return await asked.api.status()


async def _show_events(asked: CommandContext[PeerApi], events: tuple[EventView, ...]) -> None:
    known = await asked.load_names()
    for event in events:
        asked.show(view_tables.event_line(event, known))


@listing_command("what happened last", _show_events, LAST_COUNT)
async def log(asked: CommandContext[PeerApi]) -> tuple[EventView, ...]:
    return await asked.api.events(-asked.options.last, 0.0)


@listing_command(
    "what its operator should know, the gravest first", view_tables.show_named_table(view_tables.alerts, "nothing to worry about")
)
async def alerts(asked: CommandContext[PeerApi]) -> tuple[AlertView, ...]:
    return await asked.api.alerts()


HEIGHT = Argument(
    "height", nargs="?", type=parse_integer_in(1), default=0, metavar="HEIGHT", help="which block (default: the last)"
)


@listing_command("a decided block: header, certificate, voters", view_tables.show_named_table(view_tables.block), HEIGHT)
async def block(asked: CommandContext[PeerApi]) -> BlockView:
    return await asked.api.block(asked.options.height)


@listing_command("how much of the disk is used and free", view_tables.show_table(view_tables.disk))
async def disk(asked: CommandContext[PeerApi]) -> DiskView:
    return await asked.api.disk_usage()


async def _show_engines(asked: CommandContext[PeerApi], engines: tuple[EngineView, ...]) -> None:
    asked.show(view_tables.engines(engines))
    if devices := [device for engine in engines for device in engine.devices]:
        asked.show(view_tables.devices(devices))
    elif not any(engine.in_use for engine in engines):
        asked.show("this peer has no worker: it computes with none of them")


@listing_command("what this peer computes with: engine, devices, memory, versions", _show_engines)
async def engines(asked: CommandContext[PeerApi]) -> tuple[EngineView, ...]:
    return await asked.api.engines()


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
