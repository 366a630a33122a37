"""Checks of reachability in both directions, and of the peer's optional services and HTTP endpoints.

A test dial makes the handshake of a link up to the proof of the remote key, then it disconnects. It uses a new random key,
because a second link with the peer's own key would replace that peer's link.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from features.feature import Role
from features.text_tables import pluralize
from peer.doctor.findings import DoctorFinding, FindingLevel, fault, ok, warning
from peer.settings.config import Config
from protocol.addresses import format_address, format_listen_error, parse_address
from protocol.api import OptionalServiceView
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Identity, parse_peer_id, short_id
from transport.discovery.reachability import ReachabilityState
from transport.discovery.upnp import Gateway, RouterError
from transport.wire.framing import Message
from transport.wire.noise_session import KeyPair, NoiseSession, PeerAuthenticated
from web import metrics_endpoint

DIALS_MAX: Final = 16  # addresses that one check dials, those of the settings first; a peer's address book holds 64
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> loopback address to dial in its place

# Longest time for connection and handshake of a test dial: a slower link is too slow for votes, too.
DIAL_SECONDS_MAX: Final = 5.0
READ_BYTES: Final = 4_096  # bytes of one read: a handshake has a tenth of them

FIREWALL_ADVICE = "ask its operator to start it, and to open that port in firewalls and routers"
NETWORK_ADVICE = "check the network, the routes and the firewall of this machine"
BUSY_PEER_ADVICE = "that peer may be full, or have banned this peer: wait a minute"
ADVICE = {  # reason of a failed handshake -> remedy
    "not-folkmoot": "another program uses that port: correct the address",
    "wrong-version": "update the older of the two programs",
    "wrong-chain": "that peer belongs to another network: correct the address",
    "wrong-peer": "that peer has another key: ask its operator for the current peer id",
}

PACKAGES: Final = {"upnp": "miniupnpc", "mdns": "zeroconf"}
ROUTER_SECONDS_MAX: Final = 15.0  # longest wait for the router: the UPnP library waits some seconds in each of its steps
SERVICE_ADVICE: Final = {
    "upnp": "enable UPnP in the router, or forward the port by hand and announce it with --advertise",
    "mdns": "add a peer with --bootstrap, or free UDP port 5353 for multicast on this machine",
}

HTTP_SECONDS_MAX: Final = 5.0  # longest HTTP request of a check, equal to `web.metrics_endpoint.REQUEST_SECONDS_MAX`
# Longest HTTP answer that a check reads: metrics of a network with 10,000 members have some kilobytes.
ANSWER_BYTES_MAX: Final = 1 << 20


async def check_free_port(check: str, address: str, setting: str) -> DoctorFinding:
    """Check that a peer started now could listen on this address. `setting` is the option that changes the address."""
    host, port = parse_address(address)
    try:
        for listener in await trio.open_tcp_listeners(port, host=host):
            await listener.aclose()
    except OSError as error:
        why, _, way = format_listen_error(error).partition("; ")
        return fault(check, f"cannot listen on {address}: {why}", f"{way} with --{setting}")
    return ok(check, f"{address} is free")


async def check_own_port(address: str, chain_id: bytes, me: bytes) -> list[DoctorFinding]:
    """Check that the running peer answers on a listening address."""
    host, port = parse_address(address)
    here = await dial_peer(format_address(LOOPBACK.get(host, host), port), chain_id, me)
    if here.peer is None:
        return [
            fault(
                "port",
                f"this peer does not answer on its own address {here.address}: {here.why}",
                "read its log, and restart the peer",
            )
        ]
    return [ok("port", f"{here.address} answers")]


def check_listen_settings(wanted: Sequence[str], listening: Sequence[str]) -> list[DoctorFinding]:
    """Warn if the running peer does not listen on the addresses of the settings. Port 0 matches any port."""
    left = list(listening)
    for address in wanted:
        host, port = parse_address(address)
        found = next((one for one in left if parse_address(one) == (host, port or parse_address(one)[1])), None)
        if found is None:
            return [
                warning(
                    "port",
                    f"the settings name {address}, but the running peer listens at {', '.join(listening) or 'no address'}",
                    "restart the peer, or run this command with the settings of the running peer",
                )
            ]
        left.remove(found)
    return []


async def check_advertised_addresses(
    told: Sequence[str], chain_id: bytes, me: bytes, *, are_reached: bool
) -> list[DoctorFinding]:
    """Check that the running peer answers on its announced addresses.

    `are_reached` means that other peers have reached these addresses. A missing answer from inside the network is then no
    problem.
    """
    found = []
    for answer in await _called(told[:DIALS_MAX], chain_id):
        if answer.peer is None and are_reached:
            found.append(ok("port", f"{answer.address} does not answer from this network, but other peers reach this peer"))
        elif answer.peer is None:
            text = f"the announced address {answer.address} does not answer: {answer.why}"
            way = "forward that port to this machine, or correct --advertise; some routers do not answer dials from inside"
            found.append(warning("port", text, way))
        elif answer.peer != me:
            found.append(
                fault(
                    "port",
                    f"the other peer {short_id(answer.peer)} answers at the announced address {answer.address}",
                    "correct --advertise, or the port forwarding",
                )
            )
        else:
            found.append(ok("port", f"{answer.address} answers"))
    return found


def check_reachability(said: str) -> list[DoctorFinding]:
    """Return the finding from other peers' dials to this peer, or an empty list if too few peers have reported."""
    if said == ReachabilityState.DIRECT:
        return [ok("port", "other peers reach this peer")]
    if said == ReachabilityState.RELAYED:
        return [
            warning(
                "port",
                "other peers cannot dial this peer: its links are those that it dials, or go through relays",
                "forward its port in the router, open it in the firewall, and announce the external address with --advertise",
            )
        ]
    return []


async def check_other_peers(
    addresses: Sequence[str], chain_id: bytes, me: bytes | None, *, links: int | None, alone: bool
) -> list[DoctorFinding]:
    """Check that other peers answer at the first `DIALS_MAX` addresses.

    `links` is this peer's number of links, or None if it is stopped. `alone` means that it is the only voter and needs no other
    peer.
    """
    answers = await _called(addresses[:DIALS_MAX], chain_id)
    if links is None and (copies := [answer.address for answer in answers if answer.peer is not None and answer.peer == me]):
        return [
            fault(
                "peers",
                f"a peer with the key of this peer runs at {copies[0]}",
                "never run both: the key would be expelled for contradicting signatures",
            )
        ]
    others = [answer for answer in answers if answer.peer is None or answer.peer != me]
    reached = [answer for answer in others if answer.peer is not None]
    if not others:
        if alone:
            return [ok("peers", "this peer is the only voter and needs no other peer")]
        return [
            warning(
                "peers", "no address of another peer is known", "add one with --bootstrap, or wait until a peer dials this one"
            )
        ]
    lost = [warning("peers", f"{answer.address}: {answer.why}", answer.advice) for answer in others if answer.peer is None]
    if reached:
        return [ok("peers", f"{len(reached)} of {len(others)} addresses answer"), *lost]
    none, advice = f"none of {len(others)} addresses answers", "correct the errors below"
    if links:  # other peers have dialed this peer
        return [warning("peers", f"{none}, but the peer has {pluralize(links, 'link')}", advice), *lost]
    return [fault("peers", none, advice), *lost]


async def _called(addresses: Iterable[str], chain_id: bytes) -> list[DialResult]:
    """Dial all addresses at once and return the results in the order of the addresses."""
    answers: dict[str, DialResult] = {}

    async def dial(text: str) -> None:
        peer, _, address = text.rpartition("@")
        try:
            expected = parse_peer_id(peer) if peer else None
        except UserError as error:
            answers[text] = DialResult(text, None, str(error), "write PEERID@HOST:PORT or HOST:PORT")
        else:
            answer = await dial_peer(address, chain_id, expected)
            if expected is not None and answer.peer is None:
                answer = replace(answer, address=f"{address} ({short_id(expected)})")
            answers[text] = answer

    wanted = tuple(dict.fromkeys(addresses))
    async with trio.open_nursery() as nursery:
        for text in wanted:
            nursery.start_soon(dial, text)
    return [answers[text] for text in wanted]


def dial_candidates(bootstrap: Iterable[str], remembered: Iterable[str]) -> tuple[str, ...]:
    """Return each address once. The addresses of the settings (`bootstrap`) come first, then the `remembered` ones."""
    places: dict[str, str] = {}
    for text in (*bootstrap, *remembered):
        places.setdefault(text.rpartition("@")[2], text)
    return tuple(places.values())


@dataclass(frozen=True, slots=True)
class DialResult:
    address: str
    peer: bytes | None  # the key that the remote peer proved; None after a failed dial
    why: str = ""  # reason of the failure
    advice: str = ""


async def dial_peer(address: str, chain_id: bytes, expected: bytes | None = None) -> DialResult:
    """Dial HOST:PORT and return the key of the remote peer, or the reason of the failure.

    A key other than `expected` is a failure.
    """
    host, port = parse_address(address)
    try:
        with trio.fail_after(DIAL_SECONDS_MAX):
            async with await trio.open_tcp_stream(host, port) as stream:
                return DialResult(address, await _shaken(stream, chain_id, expected))
    except trio.TooSlowError:
        return DialResult(address, None, f"no answer within {DIAL_SECONDS_MAX:g} s", FIREWALL_ADVICE)
    except RemoteProtocolError as error:
        return DialResult(address, None, error.detail or error.reason, ADVICE.get(error.reason, FIREWALL_ADVICE))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return DialResult(address, None, "the connection was closed", BUSY_PEER_ADVICE)
    except (OSError, ValueError) as error:
        return DialResult(address, None, *_of_error(error))


async def _shaken(stream: trio.SocketStream, chain_id: bytes, expected: bytes | None) -> bytes:
    static, ephemeral = (KeyPair.from_private(secrets.token_bytes(32)) for _ in range(2))
    me = Identity.generate()
    session = NoiseSession(me, chain_id, initiator=True, static=static, ephemeral=ephemeral, expected=expected)
    events: list[PeerAuthenticated | Message] = []
    while not events:
        await stream.send_all(session.data_to_send())
        if not (data := await stream.receive_some(READ_BYTES)):
            raise trio.BrokenResourceError("closed by the peer")
        events = session.receive(data)
    # Sends the proof of our key: without that, the remote peer would log a failed handshake.
    await stream.send_all(session.data_to_send())
    assert isinstance(events[0], PeerAuthenticated)
    return events[0].peer


def _of_error(error: OSError | ValueError) -> tuple[str, str]:
    """Return reason and advice for a failed connection.

    For a host name with several addresses, Trio attaches the errors of all as cause.
    """
    if isinstance(error, (socket.gaierror, ValueError)):
        return "the host name is unknown", "correct the address, or the name resolution of this machine"
    group = error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else (error,)
    numbers = {cause.errno for cause in group if isinstance(cause, OSError) and cause.errno}
    told = ", ".join(sorted(os.strerror(number).lower() for number in numbers)) or str(error)
    return told, FIREWALL_ADVICE if errno.ECONNREFUSED in numbers else NETWORK_ADVICE


def check_running_services(asides: Iterable[OptionalServiceView]) -> list[DoctorFinding]:
    return [ok(one.name, one.text) if one.is_working else warning(one.name, one.text, _advice(one.name)) for one in asides]


async def check_stopped_services(config: Config, make_router: Callable[[], Gateway] = Gateway) -> list[DoctorFinding]:
    """Check the packages of enabled discovery services, and ask the router for its external address if UPnP is enabled."""
    found = []
    for name, package in PACKAGES.items():
        if getattr(config, name) and not _is_there(package):
            found.append(warning(name, f"the package {package} is not installed", _advice(name)))
        elif name == "mdns" and config.mdns:
            found.append(ok(name, "its package is installed"))
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
            return ok("upnp", f"the router answers; its external address is {host}")
    except (RouterError, trio.TooSlowError) as error:
        return warning("upnp", str(error) or f"the router has not answered for {ROUTER_SECONDS_MAX:g} s", SERVICE_ADVICE["upnp"])


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _advice(name: str) -> str:
    return SERVICE_ADVICE[name] if _is_there(PACKAGES[name]) else f"pip install {PACKAGES[name]}, then restart the peer"


async def check_free_ports(config: Config, role: Role) -> list[DoctorFinding]:
    """Check the HTTP ports of a stopped peer.

    A port in use by another program is only a warning, because the peer also runs without the pages and metrics.
    """
    wanted = {"metrics": config.feature_settings["metrics"]}
    if "serve" in role.services:
        wanted["web"] = config.feature_settings["web_listen"]
    flags = {"metrics": "metrics", "web": "web-listen"}
    found = [await check_free_port(check, address, flags[check]) for check, address in wanted.items() if address]
    return [replace(finding, level=FindingLevel.WARNING) if finding.level == FindingLevel.FAULT else finding for finding in found]


async def check_served_endpoints(config: Config, role: Role, parts: Path, me: str) -> list[DoctorFinding]:
    """Check the metrics and the web pages of a running peer."""
    found = []
    listen, written = config.feature_settings["metrics"], parts / "metrics" / metrics_endpoint.ADDRESS_FILE
    if listen or written.exists():  # the running peer may have other settings than this command
        found.append(await _of_metrics(listen, written, me))
    if "serve" in role.services:
        written = parts / "serve" / "address"
        if written.exists():
            found.append(ok("web", f"web pages are served at {written.read_text()}"))
        else:
            found.append(
                warning(
                    "web", "web pages are not served", "read the cause in `peer log`; a taken port needs another --web-listen"
                )
            )
    return found


async def _of_metrics(listen: str, written: Path, me: str) -> DoctorFinding:
    advice = "restart the peer with another --metrics"
    if not written.exists():
        return warning(
            "metrics", f"not served at {listen}: the address was taken, or the peer was started without this setting", advice
        )
    address = written.read_text()
    if f'peer="{me}"'.encode() not in (await _get(address, "/metrics")):
        return warning("metrics", f"another peer answers at {address}", advice)
    return ok("metrics", f"served at http://{address}/metrics")


async def _get(address: str, path: str) -> bytes:
    """Return the whole HTTP answer, or its beginning if the connection breaks or is too slow."""
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
