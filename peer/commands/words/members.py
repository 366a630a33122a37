"""Words about members: who takes part, who votes, who is gone."""

from __future__ import annotations

from features.arguments import Argument, member
from features.words import Asked, listing, word
from peer.commands import views
from protocol.api import PeerApi, PeerView

LOWER_TOLERANCE = Argument(
    "--lower-tolerance", action="store_true", help="also where fewer liars are tolerated without it; a quorum must say so"
)


async def _show_peers(asked: Asked[PeerApi], peers: tuple[PeerView, ...]) -> None:
    asked.show(views.peers(peers))
    for dial in (await asked.api.status()).unreached:
        asked.show(dial.text)


@listing("who takes part, and the links to them", _show_peers)
async def peers(asked: Asked[PeerApi]) -> tuple[PeerView, ...]:
    return await asked.api.peers()


@word("let a member vote: approve PEER", member("peer", "PEER"))
async def approve(asked: Asked[PeerApi]) -> None:
    asked.show(await asked.decided(asked.api.approve_voter(asked.options.peer)))


@word(
    "take the vote and the place in rounds from a member that is gone: retire PEER (voters by a quorum)",
    member("peer", "PEER"),
    LOWER_TOLERANCE,
)
async def retire(asked: Asked[PeerApi]) -> None:
    asked.show(await asked.decided(asked.api.retire_member(asked.options.peer, asked.options.lower_tolerance)))


@word("stop voting")
async def leave(asked: Asked[PeerApi]) -> None:
    asked.show(await asked.decided(asked.api.resign_as_voter()))
