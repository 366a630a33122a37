"""What a peer does beside its links where its settings say so: the router's forwarding, and the local network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from features.feature import Role
from peer.doctor.findings import DoctorFinding, FindingLevel, ok, warning
from peer.doctor.reachability_checks import check_free_port
from peer.settings.config import Config
from protocol.addresses import parse_address
from protocol.api import OptionalServiceView
from transport.discovery.upnp import Gateway, Router, RouterError
from web import metrics_endpoint

PACKAGES: Final = {"upnp": "miniupnpc", "mdns": "zeroconf"}
ROUTER_SECONDS_MAX: Final = 15.0  # for a router to answer: the library waits some seconds for each of its steps
ADVICE: Final = {
    "upnp": "switch UPnP on in the router; or forward the port by hand, and name it with --advertise",
    "mdns": "name a peer with --bootstrap, or free UDP port 5353 for multicast on this machine",
}

HTTP_SECONDS_MAX: Final = 5.0  # as long as a peer waits for its monitor
ANSWER_BYTES_MAX: Final = 1 << 20  # a network of 10,000 members gives some kilobytes


def check_running_services(asides: Iterable[OptionalServiceView]) -> list[DoctorFinding]:
    return [ok(one.name, one.text) if one.is_working else warning(one.name, one.text, _advice(one.name)) for one in asides]


async def check_stopped_services(config: Config, make_router: Callable[[], Router] = Gateway) -> list[DoctorFinding]:
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


async def _of_router(make_router: Callable[[], Router]) -> DoctorFinding:
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


async def check_free_ports(config: Config, role: Role) -> list[DoctorFinding]:
    """Of a peer that does not run. It goes on without these ports."""
    wanted = {"metrics": config.feature_settings["metrics"]}
    if "serve" in role.services:
        wanted["web"] = config.feature_settings["web_listen"]
    flags = {"metrics": "metrics", "web": "web-listen"}
    found = [await check_free_port(check, address, flags[check]) for check, address in wanted.items() if address]
    return [replace(finding, level=FindingLevel.WARNING) if finding.level == FindingLevel.FAULT else finding for finding in found]


async def check_served_endpoints(config: Config, role: Role, parts: Path, me: str) -> list[DoctorFinding]:
    """Of a peer that runs."""
    found = []
    listen, written = config.feature_settings["metrics"], parts / "metrics" / metrics_endpoint.ADDRESS_FILE
    if listen or written.exists():  # the peer may have been started with other settings than these
        found.append(await _of_metrics(listen, written, me))
    if "serve" in role.services:
        written = parts / "serve" / "address"
        if written.exists():
            found.append(ok("web", f"web pages are served at {written.read_text()}"))
        else:
            found.append(warning("web", "web pages are not served", "`peer log` says why; perhaps name another --web-listen"))
    return found


async def _of_metrics(listen: str, written: Path, me: str) -> DoctorFinding:
    advice = "name another --metrics, and start the peer again with it"
    if not written.exists():
        return warning("metrics", f"not served at {listen}: the address was taken, or the peer started without it", advice)
    address = written.read_text()
    answer = await _get(address, "/metrics")
    if f'peer="{me}"'.encode() not in answer:
        return warning("metrics", f"at {address} not this peer answers", advice)
    return ok("metrics", f"served at http://{address}/metrics")


async def _get(address: str, path: str) -> bytes:
    """The whole answer; what came until it broke off or took too long."""
    host, port = parse_address(address)
    answer = b""
    try:
        with trio.move_on_after(HTTP_SECONDS_MAX):
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
                while len(answer) < ANSWER_BYTES_MAX and (part := await stream.receive_some()):
                    answer += part
    except (OSError, trio.BrokenResourceError):
        pass
    return answer
