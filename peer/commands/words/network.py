"""Words about the network itself: what it runs, and how it moves on."""

from __future__ import annotations

from features.arguments import Argument, amount, whole_number
from features.words import Asked, listing, word
from peer.commands import views
from protocol.api import LimitView, ModuleView, PeerApi, ReachabilityMatrix


async def _show_reach(asked: Asked[PeerApi], reach: ReachabilityMatrix) -> None:
    asked.show(views.reach(reach, await asked.names(), (await asked.api.status()).peer))
    asked.show(views.REACH_SIGNS)


@listing("which voter hears which other one, as far as this peer knows", _show_reach)
async def reach(asked: Asked[PeerApi]) -> ReachabilityMatrix:
    return await asked.api.voter_reachability()


async def _show_features(asked: Asked[PeerApi], modules: tuple[ModuleView, ...]) -> None:
    asked.show(views.features(modules))


@listing("what this program brings along, and what the network runs", _show_features)
async def features(asked: Asked[PeerApi]) -> tuple[ModuleView, ...]:
    return await asked.api.modules()


@word(
    "let the network run another version of a module: upgrade MODULE VERSION --at HEIGHT (voters by a quorum)",
    Argument("module", metavar="MODULE", help="as `features` names it"),
    Argument("version", type=whole_number(1), metavar="VERSION", help="one that this program knows"),
    Argument("--at", type=whole_number(1), default=0, metavar="HEIGHT", help="first block of that version (default: in 100)"),
)
async def upgrade(asked: Asked[PeerApi]) -> None:
    options = asked.options
    asked.show(await asked.decided(asked.api.request_upgrade(options.module, options.version, options.at)))


async def _show_limits(asked: Asked[PeerApi], limits: tuple[LimitView, ...]) -> None:
    asked.show(views.limits(limits))


@listing("what the voters of this network allow at most", _show_limits)
async def limits(asked: Asked[PeerApi]) -> tuple[LimitView, ...]:
    return await asked.api.limits()


@word(
    "let the network allow more, or less: limit parameters N (voters by a quorum)",
    Argument("name", metavar="NAME", help="as `limits` names it: parameters, of the model of a job that is started"),
    Argument("most", type=amount, metavar="N", help="the most that is allowed, such as 300M"),
)
async def limit(asked: Asked[PeerApi]) -> None:
    asked.show(await asked.decided(asked.api.set_limit(asked.options.name, asked.options.most)))
