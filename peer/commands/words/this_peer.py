"""Words about this peer itself."""

from __future__ import annotations

from features.arguments import HOW_MANY, Argument, whole_number
from features.words import Asked, listing
from peer.commands import views
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


async def _show_stats(asked: Asked[PeerApi], stats: StatsView) -> None:
    asked.show(views.stats(stats))


@listing("decisions, traffic, refusals, memory", _show_stats)
async def stats(asked: Asked[PeerApi]) -> StatsView:
    return await asked.api.stats()


async def _show_status(asked: Asked[PeerApi], status: StatusView) -> None:
    asked.show(views.status(status))


@listing("who and where this peer is", _show_status, exit_status=lambda view: EXIT_STATUS[PeerState(view.state)])
async def status(asked: Asked[PeerApi]) -> StatusView:
    return await asked.api.status()


async def _show_events(asked: Asked[PeerApi], events: tuple[EventView, ...]) -> None:
    known = await asked.names()
    for event in events:
        asked.show(views.event(event, known))


@listing("what happened last", _show_events, HOW_MANY)
async def log(asked: Asked[PeerApi]) -> tuple[EventView, ...]:
    return await asked.api.events(-asked.options.last, 0.0)


async def _show_alerts(asked: Asked[PeerApi], alerts: tuple[AlertView, ...]) -> None:
    asked.show(views.alerts(alerts, await asked.names()) if alerts else "nothing to worry about")


@listing("what its operator should know, the gravest first", _show_alerts)
async def alerts(asked: Asked[PeerApi]) -> tuple[AlertView, ...]:
    return await asked.api.alerts()


async def _show_block(asked: Asked[PeerApi], block: BlockView) -> None:
    asked.show(views.block(block, await asked.names()))


HEIGHT = Argument("height", nargs="?", type=whole_number(1), default=0, metavar="HEIGHT", help="which block (default: the last)")


@listing("a decided block: header, certificate, voters", _show_block, HEIGHT)
async def block(asked: Asked[PeerApi]) -> BlockView:
    return await asked.api.block(asked.options.height)


async def _show_disk(asked: Asked[PeerApi], disk: DiskView) -> None:
    asked.show(views.disk(disk))


@listing("how much of the disk is used and free", _show_disk)
async def disk(asked: Asked[PeerApi]) -> DiskView:
    return await asked.api.disk_usage()


async def _show_engines(asked: Asked[PeerApi], engines: tuple[EngineView, ...]) -> None:
    asked.show(views.engines(engines))
    if devices := [device for engine in engines for device in engine.devices]:
        asked.show(views.devices(devices))
    elif not any(engine.in_use for engine in engines):
        asked.show("this peer has no worker: it computes with none of them")


@listing("what this peer computes with: engine, devices, memory, versions", _show_engines)
async def engines(asked: Asked[PeerApi]) -> tuple[EngineView, ...]:
    return await asked.api.engines()
