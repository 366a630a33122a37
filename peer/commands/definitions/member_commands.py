"""Commands about members: who takes part, who votes, who is gone."""

from __future__ import annotations

from features.command_arguments import Argument, member_argument
from features.commands import CommandContext, command, listing_command
from peer.commands import view_tables
from protocol.api import PeerApi, PeerView

LOWER_TOLERANCE = Argument(
    "--lower-tolerance", action="store_true", help="also where fewer liars are tolerated without it; a quorum must say so"
)


async def _show_peers(asked: CommandContext[PeerApi], peers: tuple[PeerView, ...]) -> None:
    asked.show(view_tables.peers(peers))
    for dial in (await asked.api.status()).unreached_addresses:
        asked.show(dial.text)


@listing_command("who takes part, and the links to them", _show_peers)
async def peers(asked: CommandContext[PeerApi]) -> tuple[PeerView, ...]:
    return await asked.api.peers()


@command("let a member vote: approve PEER", member_argument("peer", "PEER"))
async def approve(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.approve_voter(asked.options.peer)))


@command(
    "take the vote and the place in rounds from a member that is gone: retire PEER (voters by a quorum)",
    member_argument("peer", "PEER"),
    LOWER_TOLERANCE,
)
async def retire(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.retire_member(asked.options.peer, asked.options.lower_tolerance)))


@command("stop voting")
async def resign(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.resign_as_voter()))
