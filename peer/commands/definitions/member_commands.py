"""Commands about members, voters and invitations."""

from __future__ import annotations

import sys

from features.command_arguments import Argument, member_argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from peer.commands import view_tables
from protocol.api import INVITATION_DAYS, INVITATION_DAYS_MAX, InvitationView, PeerApi, PeerView
from protocol.errors import UserError

TOPIC = "Members and invitations"

LOWER_TOLERANCE = Argument(
    "--lower-tolerance", action="store_true", help="Retire the member although the network then tolerates fewer faulty voters"
)

DAYS = Argument(
    "--days",
    type=parse_integer_in(1, INVITATION_DAYS_MAX),
    default=INVITATION_DAYS,
    metavar="N",
    help=f"Validity in days, 1 to {INVITATION_DAYS_MAX} (default {INVITATION_DAYS})",
)
REACHED_AT = Argument(
    "--address",
    dest="addresses",
    action="extend",
    nargs="+",
    default=[],
    metavar="HOST:PORT",
    help="Addresses that the newcomer dials (default the setting advertise, or the listen addresses)",
)


async def _show_peers(asked: CommandContext[PeerApi], peers: tuple[PeerView, ...]) -> None:
    asked.show(view_tables.peers(peers))
    for dial in (await asked.api.status()).unreached_addresses:
        asked.show(dial.text)


@listing_command(
    "Show members, voters and links",
    _show_peers,
    description="""
        - `round trip`: median of the last five pings.
        - `Mbit/s`: rate of transfers that the link limited.
        - `silent for`: nothing comes from the peer although the link has not ended.

        Fields of `link` in `--json`:

        - `kind`, `by`: the kind of link, and its relay.
        - `round_trip_ms`, `mbit_per_second`: as in the table.
        - `retransmitted`: share of segments that were sent again, or null if the kernel does not report it.
        - `history`: one entry per minute of the last hour.
        """,
)
async def peers(asked: CommandContext[PeerApi]) -> tuple[PeerView, ...]:
    return await asked.api.peers()


@command(
    "Approve a member as a voter",
    member_argument("peer", "PEER"),
    description="""
        The member becomes a voter when a quorum of voters has approved it. Approve only people whom you know: the
        network tolerates fewer than a third of faulty voters.

        Names are not unique. A name of several members is refused with their ids. A whole peer id always means that key.
        """,
)
async def approve(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.approve_voter(asked.options.peer)))


@command(
    "Vote to retire a member that is gone",
    member_argument("peer", "PEER"),
    LOWER_TOLERANCE,
    description="""
        When a quorum of voters has asked for it within seven days, the member loses its vote two heights later, its roles and its
        candidacy. It keeps its key. After its return it must be approved again. If fewer faulty voters are tolerated without it,
        each request needs `--lower-tolerance`.
        """,
)
async def retire(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.retire_member(asked.options.peer, asked.options.lower_tolerance)))


@command(
    "Give up the vote of this peer",
    description="""
        The peer stops voting two heights after the decision and stays a member. After its next start it is a candidate again,
        unless it runs with `--no-stand`.
        """,
)
async def resign(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.resign_as_voter()))


@command(
    "Dial addresses now",
    Argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT or PEERID@HOST:PORT"),
    description="""
        It reports the peer at each address, or the reason of the failure. The peer keeps dialing the addresses until it stops. If
        all peers have moved, connect one of them to all others: the others learn the addresses from it.
        """,
)
async def connect(asked: CommandContext[PeerApi]) -> None:
    """Dial all typed addresses at once. Raises `UserError` with the reasons of all failed dials."""
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


@command(
    "Print an invitation for a new peer",
    DAYS,
    REACHED_AT,
    description="""
        The invitation admits one new member, or all founders of a network. It contains at most 8 addresses. In a pipe they are
        printed on standard error. A peer that listens on a wildcard address and knows only loopback addresses needs
        `--address`. The validity is measured by the time of the network's last block.
        """,
)
async def invite(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.api.create_invitation(asked.options.days, tuple(asked.options.addresses)))
    note = f"the new peer dials {' '.join((await asked.api.invitations())[-1].addresses)}"
    if sys.stdout.isatty():
        asked.show(note)
    else:
        print(note, file=sys.stderr)  # only the invitation goes to standard output, so that scripts can read it


@listing_command(
    "Show the invitations of this peer",
    view_tables.show_table(view_tables.invitations, "no invitations yet; create one with `invite`"),
)
async def invitations(asked: CommandContext[PeerApi]) -> tuple[InvitationView, ...]:
    return await asked.api.invitations()


@command(
    "Revoke an invitation of this peer",
    Argument("token", metavar="TOKEN", help="First characters of the token, from `invitations`"),
    description="A member that was admitted with the invitation stays a member.",
)
async def revoke(asked: CommandContext[PeerApi]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.revoke_invitation(asked.options.token)))
