"""Commands about the network itself: liveness, modules, upgrades and limits."""

from __future__ import annotations

from features.command_arguments import Argument, parse_count, parse_integer_in
from features.commands import CommandContext, command, listing_command
from peer.commands import view_tables
from protocol.api import LimitView, LivenessMatrix, ModuleView, PeerApi

TOPIC = "The network"


async def _show_reach(asked: CommandContext[PeerApi], reach: LivenessMatrix) -> None:
    asked.show(view_tables.reachability(reach, await asked.load_names(), (await asked.api.status()).peer))
    asked.show(view_tables.REACH_SIGNS)


@listing_command(
    "Show which voters hear each other",
    _show_reach,
    description="""
        Each row is an observer, and each column a voter: `+` if the observer hears the voter, the seconds of its silence, or
        `?` if no peer here can know. In `--json`, 0 means that the observer reports to hear the voter, and null is unknown. A
        silent column is a voter that stopped or is cut off. Two groups that do not hear each other are a partition.
        """,
)
async def reach(asked: CommandContext[PeerApi]) -> LivenessMatrix:
    return await asked.api.voter_liveness()


@listing_command(
    "Show the modules of this program and the versions that the network runs",
    view_tables.show_table(view_tables.features),
)
async def features(asked: CommandContext[PeerApi]) -> tuple[ModuleView, ...]:
    return await asked.api.modules()


@command(
    "Vote for another version of a module",
    Argument("module", metavar="MODULE", help="Module, from `features`"),
    Argument("version", type=parse_integer_in(1), metavar="VERSION", help="Version that this program knows"),
    Argument(
        "--at",
        type=parse_integer_in(1),
        default=0,
        metavar="HEIGHT",
        help="First height with the version (default 100 heights from now)",
    ),
    description="The upgrade is decided when a quorum of voters has asked for the same version.",
)
async def upgrade(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    asked.show(await asked.wait_for_decision(asked.api.request_upgrade(options.module, options.version, options.at)))


@listing_command("Show the limits of this network", view_tables.show_table(view_tables.limits))
async def limits(asked: CommandContext[PeerApi]) -> tuple[LimitView, ...]:
    return await asked.api.limits()


@command(
    "Vote for a limit of the network",
    Argument("name", metavar="NAME", help="Limit, from `limits`"),
    Argument("most", type=parse_count, metavar="N", help="Largest allowed number, such as 300M"),
    description="""
        The limit changes when a quorum of voters has asked for the same number. Voting for the present number withdraws your
        request. `parameters` is the limit of each network, up to 8,589,934,592. Features bring further ones.

            peer limit parameters 300M
        """,
)
async def limit(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.set_limit(asked.options.name, asked.options.most)))
