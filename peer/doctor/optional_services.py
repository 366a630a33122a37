"""What a peer does beside its links where its settings say so: the router's forwarding, and the local network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Final

import trio

from peer.doctor.findings import DoctorFinding, ok, warning
from peer.settings.config import Config
from protocol.api import OptionalServiceView
from transport.discovery.upnp import Gateway, RouterError

PACKAGES: Final = {"upnp": "miniupnpc", "mdns": "zeroconf"}
ROUTER_SECONDS_MAX: Final = 15.0  # for a router to answer: the library waits some seconds for each of its steps
ADVICE: Final = {
    "upnp": "switch UPnP on in the router; or forward the port by hand, and name it with --advertise",
    "mdns": "name a peer with --bootstrap, or free UDP port 5353 for multicast on this machine",
}


def check_running_services(asides: Iterable[OptionalServiceView]) -> list[DoctorFinding]:
    return [ok(one.name, one.text) if one.is_working else warning(one.name, one.text, _advice(one.name)) for one in asides]


async def check_stopped_services(config: Config, make_router: Callable[[], Gateway] = Gateway) -> list[DoctorFinding]:
    """Whether the packages are there, and a router. Nothing is asked of it but its address."""
    found = []
    for name, package in PACKAGES.items():
        if getattr(config, name) and not _is_there(package):
            found.append(warning(name, f"the package {package} is not installed", _advice(name)))
        elif name == "mdns" and config.mdns:
            found.append(ok(name, "its package is there"))
        elif name == "upnp" and config.upnp:
            found.append(await _of_router(make_router))
    return found


async def _of_router(make_router: Callable[[], Gateway]) -> DoctorFinding:
    def outside() -> str:
        router = make_router()
        router.discover_router()
        return router.external_address()

    try:
        with trio.fail_after(ROUTER_SECONDS_MAX):
            host = await trio.to_thread.run_sync(outside, abandon_on_cancel=True)
            return ok("upnp", f"the router answers, and is {host} outside")
    except (RouterError, trio.TooSlowError) as error:
        return warning("upnp", str(error) or f"the router has not answered for {ROUTER_SECONDS_MAX:g} s", ADVICE["upnp"])


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _advice(name: str) -> str:
    return ADVICE[name] if _is_there(PACKAGES[name]) else f"pip install {PACKAGES[name]}, then start the peer again"
