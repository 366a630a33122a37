"""Commands about members: who takes part, who votes, who is gone, who is invited."""

from __future__ import annotations

import sys

from features.command_arguments import Argument, member_argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from peer.commands import view_tables
from protocol.api import INVITATION_DAYS, INVITATION_DAYS_MAX, InvitationView, PeerApi, PeerView
from protocol.errors import UserError

LOWER_TOLERANCE = Argument(
    "--lower-tolerance", action="store_true", help="also where fewer liars are tolerated without it; a quorum must say so"
)

DAYS = Argument(
    "--days",
    type=parse_integer_in(1, INVITATION_DAYS_MAX),
    default=INVITATION_DAYS,
    metavar="N",
    help=f"how long it is valid, 1 to {INVITATION_DAYS_MAX} (default {INVITATION_DAYS})",
)
REACHED_AT = Argument(
    "--address",
    dest="addresses",
    action="extend",
    nargs="+",
    default=[],
    metavar="HOST:PORT",
    help="where newcomers reach this peer (default: the setting advertise, or where it listens)",
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


@command(
    "dial an address at once, and keep to it: connect HOST:PORT …",
    Argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT, or PEER-ID@HOST:PORT"),
)
async def connect(asked: CommandContext[PeerApi]) -> None:
    """All at once. `UserError` with every reason if one of them is not reached."""
    import trio

    failed: list[str] = []

    async def dial(address: str) -> None:
        try:
            asked.show((await asked.load_names()).replace_ids(await asked.api.dial_address(address)))
        except UserError as error:
            failed.append(str(error))

    async with trio.open_nursery() as nursery:
        for address in dict.fromkeys(asked.options.addresses):
            nursery.start_soon(dial, address)
    if failed:
        raise UserError("; ".join(failed))


@command("a string that lets somebody join as a member", DAYS, REACHED_AT)
async def invite(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.api.create_invitation(asked.options.days, tuple(asked.options.addresses)))
    note = f"whoever joins with it dials {' '.join((await asked.api.invitations())[-1].addresses)}"
    if sys.stdout.isatty():
        asked.show(note)
    else:
        print(note, file=sys.stderr)  # standard output is for what reads the invitation


@listing_command(
    "those that this peer made, and what has become of them",
    view_tables.show_table(view_tables.invitations, "this peer has made no invitation yet; `invite` makes one"),
)
async def invitations(asked: CommandContext[PeerApi]) -> tuple[InvitationView, ...]:
    return await asked.api.invitations()


@command(
    "take an invitation back: revoke TOKEN",
    Argument("token", metavar="TOKEN", help="of `invitations`; its first characters are enough"),
)
async def revoke(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.revoke_invitation(asked.options.token)))
