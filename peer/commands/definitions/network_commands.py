"""Commands about the network itself: what it runs, and how it moves on."""

from __future__ import annotations

from features.command_arguments import Argument, parse_count, parse_integer_in
from features.commands import CommandContext, command, listing_command
from peer.commands import view_tables
from protocol.api import LimitView, LivenessMatrix, ModuleView, PeerApi


async def _show_reach(asked: CommandContext[PeerApi], reach: LivenessMatrix) -> None:
    asked.show(view_tables.reachability(reach, await asked.load_names(), (await asked.api.status()).peer))
    asked.show(view_tables.REACH_SIGNS)


@listing_command("which voter hears which other one, as far as this peer knows", _show_reach)
async def reach(asked: CommandContext[PeerApi]) -> LivenessMatrix:
    return await asked.api.voter_liveness()


@listing_command("what this program brings along, and what the network runs", view_tables.show_table(view_tables.features))
async def features(asked: CommandContext[PeerApi]) -> tuple[ModuleView, ...]:
    return await asked.api.modules()


@command(
    "let the network run another version of a module: upgrade MODULE VERSION --at HEIGHT (voters by a quorum)",
    Argument("module", metavar="MODULE", help="as `features` names it"),
    Argument("version", type=parse_integer_in(1), metavar="VERSION", help="one that this program knows"),
    Argument("--at", type=parse_integer_in(1), default=0, metavar="HEIGHT", help="first block of that version (default: in 100)"),
)
async def upgrade(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    asked.show(await asked.wait_for_decision(asked.api.request_upgrade(options.module, options.version, options.at)))


@listing_command("what the voters of this network allow at most", view_tables.show_table(view_tables.limits))
async def limits(asked: CommandContext[PeerApi]) -> tuple[LimitView, ...]:
    return await asked.api.limits()


@command(
    "let the network allow more, or less: limit parameters N (voters by a quorum)",
    Argument("name", metavar="NAME", help="as `limits` names it: parameters, of the model of a job that is started"),
    Argument("most", type=parse_count, metavar="N", help="the most that is allowed, such as 300M"),
)
async def limit(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.set_limit(asked.options.name, asked.options.most)))
