"""Commands about this peer itself, and about the prompt.

The commands `help` and `quit` of this module exist only at the prompt: the command line has another `peer help`.
"""

from __future__ import annotations

from features import exit_statuses
from features.command_arguments import LAST_COUNT, Argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from features.text_tables import KeyValueTable
from peer.api.alerts import ALERT_KINDS
from peer.commands import view_tables
from peer.commands.command_line_parser import help_text
from protocol.api import AlertView, BlockView, DiskView, EngineView, EventView, PeerApi, PeerState, StatsView, StatusView

TOPIC = "State of a peer"

# Exit status of `peer status` for each state of the peer.
EXIT_STATUS = {
    PeerState.WORKING: exit_statuses.SUCCESS,
    PeerState.SUSPENDED: exit_statuses.SUCCESS,
    PeerState.BEHIND: exit_statuses.DEGRADED,
    PeerState.WAITING: exit_statuses.DEGRADED,
    PeerState.SILENT: exit_statuses.DEGRADED,
    PeerState.JOINING: exit_statuses.DEGRADED,
    PeerState.HALTED: exit_statuses.UNUSABLE,
    PeerState.EXPELLED: exit_statuses.UNUSABLE,
}
STATE_MEANINGS = {
    PeerState.WORKING: "the peer works, or there is nothing to decide",
    PeerState.SUSPENDED: "it votes, but must not train for some rounds",
    PeerState.BEHIND: "voters have decided four heights or more that it has not applied, or fewer but more than ten seconds ago",
    PeerState.WAITING: "too few voters or trainers are connected, or no block was decided for 30 seconds although work waits",
    PeerState.SILENT: "signatures of this peer are missing from its disk, so it does not sign until a later height",
    PeerState.JOINING: "the peer is not a member yet",
    PeerState.HALTED: "the peer needs a person, or restores its state",
    PeerState.EXPELLED: "the key of the peer is expelled",
}

ALERTS_DESCRIPTION = "Each alert is listed as long as its cause lasts:\n\n" + "\n".join(
    f"- `{cause}`: {kind.meaning}" for cause, kind in ALERT_KINDS.items()
)


def _states_with(status: int) -> str:
    """Return a sentence that lists the states of a peer with this exit status."""
    return f"The state is {' or '.join(f'`{state}`' for state, of_state in EXIT_STATUS.items() if of_state == status)}"


STATUS_DESCRIPTION = f"""
    It shows the peer's name and id, its network, role, addresses and height, the last decision, and the state of the peer. If
    several states are true, it shows the last one of this list:

    {chr(10).join(f"    - `{state}`: {meaning}." for state, meaning in STATE_MEANINGS.items()).strip()}

    Fields of `--json`:

    - `state`: the state in one word.
    - `halted`, `waiting`, `suspended`: the reason why the peer does not work or train.
    - `fork`: two histories exist.
    - `straggling`: this trainer's updates come too late.
    - `disk_shortage`: a job does not fit on the disk.
    - `reexecution_limits`: this peer is not asked to re-execute, or is asked last.
    - `unaudited`: running jobs without audits.
    - `decided_seconds_ago`: null before the first decision.
    - `heights_behind`: null if no voter is linked that knows.
    """


@listing_command(
    "Show decisions, traffic, refused messages, evidence and memory",
    view_tables.show_table(view_tables.stats),
    description="""
        Traffic is counted by kind: `blobs` is the part of `bulk` that is served by digest, and `reveals` the part of `blobs` for
        audits. Refused messages are counted by reason.
        """,
)
async def stats(asked: CommandContext[PeerApi]) -> StatsView:
    return await asked.api.stats()


@listing_command(
    "Show the state of this peer",
    view_tables.show_table(view_tables.status),
    description=STATUS_DESCRIPTION,
    exit_status=lambda view: EXIT_STATUS[PeerState(view.state)],
    exit_statuses={
        status: _states_with(status) for status in (exit_statuses.SUCCESS, exit_statuses.DEGRADED, exit_statuses.UNUSABLE)
    },
)
async def status(asked: CommandContext[PeerApi]) -> StatusView:
    return await asked.api.status()


async def _show_events(asked: CommandContext[PeerApi], events: tuple[EventView, ...]) -> None:
    known = await asked.load_names()
    for event in events:
        asked.show(view_tables.event_line(event, known))


@listing_command("Show the last events", _show_events, LAST_COUNT)
async def log(asked: CommandContext[PeerApi]) -> tuple[EventView, ...]:
    return await asked.api.events(-asked.options.last, 0.0)


@listing_command(
    "Show alerts for the operator, the most severe first",
    view_tables.show_named_table(view_tables.alerts, "no alerts"),
    description=ALERTS_DESCRIPTION,
)
async def alerts(asked: CommandContext[PeerApi]) -> tuple[AlertView, ...]:
    return await asked.api.alerts()


HEIGHT = Argument(
    "height", nargs="?", type=parse_integer_in(1), default=0, metavar="HEIGHT", help="Height of the block (default the last)"
)


@listing_command(
    "Show a decided block",
    view_tables.show_named_table(view_tables.block),
    HEIGHT,
    description="""
        It shows the leader that proposed the block and the voters that signed it. Beside the state root that the block
        certifies it shows the state root of this peer. Header, certificate and voters are hexadecimal.
        """,
)
async def block(asked: CommandContext[PeerApi]) -> BlockView:
    return await asked.api.block(asked.options.height)


@listing_command("Show the disk space of the data directory", view_tables.show_table(view_tables.disk))
async def disk(asked: CommandContext[PeerApi]) -> DiskView:
    return await asked.api.disk_usage()


async def _show_engines(asked: CommandContext[PeerApi], engines: tuple[EngineView, ...]) -> None:
    asked.show(view_tables.engines(engines))
    if devices := [device for engine in engines for device in engine.devices]:
        asked.show(view_tables.devices(devices))
    elif not any(engine.in_use for engine in engines):
        asked.show("this peer has no worker")


@listing_command(
    "Show the engines and devices of the worker",
    _show_engines,
    description="""
        It shows the engines of this program with their versions and compilers, or with the package or compiler that this
        machine lacks. For the worker it shows threads, and the memory of processor and GPUs. While the worker is busy, the
        command shows its last answer.
        """,
)
async def engines(asked: CommandContext[PeerApi]) -> tuple[EngineView, ...]:
    return await asked.api.engines()


@command(
    "Show all commands, or explain one",
    Argument("topic", nargs="?", default="", metavar="COMMAND", help="Command of the prompt"),
    only_at_prompt=True,
)
async def help(asked: CommandContext[PeerApi]) -> None:
    words, topic = asked.commands, asked.options.topic
    asked.show(help_text(words, topic) if topic else KeyValueTable({name: word.about for name, word in words.items()}))


@command("Stop the peer, or detach the console and leave it running", only_at_prompt=True)
async def quit(asked: CommandContext[PeerApi]) -> None:
    """Do nothing. The loop that reads lines acts on `quit`, because it knows whether the console is attached to a daemon."""
