"""Words about newcomers and addresses: invitations, and dialing somebody at once."""

from __future__ import annotations

import sys

from features.arguments import Argument, whole_number
from features.words import Asked, listing, word
from peer.commands import views
from protocol.api import INVITATION_DAYS, INVITATION_DAYS_MAX, InvitationView, PeerApi
from protocol.errors import UserError

DAYS = Argument(
    "--days",
    type=whole_number(1, INVITATION_DAYS_MAX),
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


@word(
    "dial an address at once, and keep to it: connect HOST:PORT …",
    Argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT, or PEER-ID@HOST:PORT"),
)
async def connect(asked: Asked[PeerApi]) -> None:
    """All at once. `UserError` with every reason if one of them is not reached."""
    import trio

    failed: list[str] = []

    async def dial(address: str) -> None:
        try:
            asked.show((await asked.names()).in_text(await asked.api.dial_address(address)))
        except UserError as error:
            failed.append(str(error))

    async with trio.open_nursery() as nursery:
        for address in dict.fromkeys(asked.options.addresses):
            nursery.start_soon(dial, address)
    if failed:
        raise UserError("; ".join(failed))


@word("a string that lets somebody join as a member", DAYS, REACHED_AT)
async def invite(asked: Asked[PeerApi]) -> None:
    asked.show(await asked.api.create_invitation(asked.options.days, tuple(asked.options.addresses)))
    note = f"whoever joins with it dials {' '.join((await asked.api.invitations())[-1].addresses)}"
    if sys.stdout.isatty():
        asked.show(note)
    else:
        print(note, file=sys.stderr)  # standard output is for what reads the invitation


async def _show_invitations(asked: Asked[PeerApi], made: tuple[InvitationView, ...]) -> None:
    asked.show(views.invitations(made) if made else "this peer has made no invitation yet; `invite` makes one")


@listing("those that this peer made, and what has become of them", _show_invitations)
async def invitations(asked: Asked[PeerApi]) -> tuple[InvitationView, ...]:
    return await asked.api.invitations()


@word(
    "take an invitation back: revoke TOKEN",
    Argument("token", metavar="TOKEN", help="of `invitations`; its first characters are enough"),
)
async def revoke(asked: Asked[PeerApi]) -> None:
    asked.show(await asked.decided(asked.api.revoke_invitation(asked.options.token)))
