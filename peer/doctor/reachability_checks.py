"""Whether this peer can be reached, and reaches others; and what it serves beside its links.

A dial is one as a peer makes it, up to the proof of who answers there, and hangs up. It calls with a key of its own that nobody
knows: with the peer's own key a second link would take the place of the first.
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

DIALS_MAX: Final = 16  # addresses that are dialed, the named ones first: the book holds 64
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # by wildcard

DIAL_SECONDS_MAX: Final = 5.0  # for connection and handshake together: slower links are no use to a vote either
READ_BYTES: Final = 4_096  # a handshake has a tenth of that

FIREWALL_ADVICE = "let its operator start it, and open that port in firewalls and routers on the way"
NETWORK_ADVICE = "this machine has no way there: look at its network, its routes and its firewall"
BUSY_PEER_ADVICE = "that peer may be full, or have banned this machine: wait a minute"
ADVICE = {  # by reason of the handshake
    "not-folkmoot": "something else than a peer has that port: correct the address",
    "wrong-version": "one of the two programs is too old: update it",
    "wrong-chain": "that peer belongs to another network: correct the address, or take an invitation of yours",
    "wrong-peer": "the peer there has another key: ask its operator for the present one",
}

PACKAGES: Final = {"upnp": "miniupnpc", "mdns": "zeroconf"}
ROUTER_SECONDS_MAX: Final = 15.0  # for a router to answer: the library waits some seconds for each of its steps
SERVICE_ADVICE: Final = {
    "upnp": "switch UPnP on in the router; or forward the port by hand, and name it with --advertise",
    "mdns": "name a peer with --bootstrap, or free UDP port 5353 for multicast on this machine",
}

HTTP_SECONDS_MAX: Final = 5.0  # as long as a peer waits for its monitor
ANSWER_BYTES_MAX: Final = 1 << 20  # a network of 10,000 members gives some kilobytes


async def check_free_port(check: str, address: str, setting: str) -> DoctorFinding:
    """Whether a peer that is started now could listen there."""
    host, port = parse_address(address)
    try:
        for listener in await trio.open_tcp_listeners(port, host=host):
            await listener.aclose()
    except OSError as error:
        why, _, way = format_listen_error(error).partition("; ")
        return fault(check, f"{address} cannot be listened on: {why}", f"{way} with --{setting}")
    return ok(check, f"{address} is free")


async def check_own_port(address: str, chain_id: bytes, me: bytes) -> list[DoctorFinding]:
    """Whether the running peer answers where it listens."""
    host, port = parse_address(address)
    here = await dial_peer(format_address(LOOPBACK.get(host, host), port), chain_id, me)
    if here.peer is None:
        return [fault("port", f"{here.address}, where this peer listens: {here.why}", "look at its log; start it again")]
    return [ok("port", f"{here.address} answers")]


def check_listen_settings(wanted: Sequence[str], listening: Sequence[str]) -> list[DoctorFinding]:
    """Whether the running peer listens where the settings say now. At port 0 the system has chosen one."""
    left = list(listening)
    for address in wanted:
        host, port = parse_address(address)
        found = next((one for one in left if parse_address(one) == (host, port or parse_address(one)[1])), None)
        if found is None:
            return [
                warning(
                    "port",
                    f"the settings name {address}, and the peer that runs listens at {', '.join(listening) or 'none'}",
                    "start the peer again, or ask with the settings that it runs with",
                )
            ]
        left.remove(found)
    return []


async def check_advertised_addresses(
    told: Sequence[str], chain_id: bytes, me: bytes, *, are_reached: bool
) -> list[DoctorFinding]:
    """Whether the running peer answers where others are told to dial it. `are_reached`: they say that they reach it."""
    found = []
    for answer in await _called(told[:DIALS_MAX], chain_id):
        if answer.peer is None and are_reached:
            found.append(ok("port", f"{answer.address} does not answer from inside, and others reach this peer"))
        elif answer.peer is None:
            text = f"{answer.address}, which others are told to dial: {answer.why}"
            way = "forward that port to this machine, or correct --advertise; some routers let nobody inside dial their outside"
            found.append(warning("port", text, way))
        elif answer.peer != me:
            found.append(
                fault(
                    "port",
                    f"at {answer.address}, which others are told to dial, peer {short_id(answer.peer)} answers",
                    "correct --advertise, or the forwarding of that port",
                )
            )
        else:
            found.append(ok("port", f"{answer.address} answers"))
    return found


def check_reachability(said: str) -> list[DoctorFinding]:
    """What other peers have found who dialed back. Too few have, at first."""
    if said == ReachabilityState.DIRECT:
        return [ok("port", "others reach this peer, as they say")]
    if said == ReachabilityState.RELAYED:
        return [
            warning(
                "port",
                "others do not reach this peer, as they say: it links where it dials, or over members",
                "forward its port in the router, open it in the firewall, name the outside with --advertise",
            )
        ]
    return []


async def check_other_peers(
    addresses: Sequence[str], chain_id: bytes, me: bytes | None, *, links: int | None, alone: bool
) -> list[DoctorFinding]:
    """Whether those answer whom this peer dials first.

    `links`: that it has; None: it does not run. `alone`: it is the only voter, and needs nobody.
    """
    answers = await _called(addresses[:DIALS_MAX], chain_id)
    if links is None and (copies := [answer.address for answer in answers if answer.peer is not None and answer.peer == me]):
        return [
            fault(
                "peers",
                f"at {copies[0]} a peer runs with this peer's key",
                "never start both: they would contradict each other, and be expelled",
            )
        ]
    others = [answer for answer in answers if answer.peer is None or answer.peer != me]
    reached = [answer for answer in others if answer.peer is not None]
    if not others:
        if alone:
            return [ok("peers", "this peer is the only voter: it needs nobody")]
        return [warning("peers", "no address of another peer is known here", "name one with --bootstrap, or wait to be dialed")]
    lost = [warning("peers", f"{answer.address}: {answer.why}", answer.advice) for answer in others if answer.peer is None]
    if reached:
        return [ok("peers", f"{len(reached)} of {len(others)} addresses answer"), *lost]
    none, advice = f"none of {len(others)} addresses answers", "mend what the next lines say"
    if links:  # those peers have dialed this one
        return [warning("peers", f"{none}; the peer has {pluralize(links, 'link')} all the same", advice), *lost]
    return [fault("peers", none, advice), *lost]


async def _called(addresses: Iterable[str], chain_id: bytes) -> list[DialResult]:
    """All at once."""
    answers: dict[str, DialResult] = {}

    async def dial(text: str) -> None:
        peer, _, address = text.rpartition("@")
        try:
            expected = parse_peer_id(peer) if peer else None
        except UserError as error:
            answers[text] = DialResult(text, None, str(error), "write PEERID@HOST:PORT, or the address alone")
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
    """Each place once, the named ones first."""
    places: dict[str, str] = {}
    for text in (*bootstrap, *remembered):
        places.setdefault(text.rpartition("@")[2], text)
    return tuple(places.values())


@dataclass(frozen=True, slots=True)
class DialResult:
    address: str
    peer: bytes | None  # whoever proved its key there
    why: str = ""  # nobody did
    advice: str = ""


async def dial_peer(address: str, chain_id: bytes, expected: bytes | None = None) -> DialResult:
    """Who answers at HOST:PORT in this network. `expected`: anybody else counts as nobody."""
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
    await stream.send_all(session.data_to_send())  # the proof of our key: without it the peer would tell of a broken handshake
    assert isinstance(events[0], PeerAuthenticated)
    return events[0].peer


def _of_error(error: OSError | ValueError) -> tuple[str, str]:
    """Trio tries all addresses of a name and hangs their errors behind its own."""
    if isinstance(error, (socket.gaierror, ValueError)):
        return "no such name", "correct the address, or mend this machine's name service"
    group = error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else (error,)
    numbers = {cause.errno for cause in group if isinstance(cause, OSError) and cause.errno}
    told = ", ".join(sorted(os.strerror(number).lower() for number in numbers)) or str(error)
    return told, FIREWALL_ADVICE if errno.ECONNREFUSED in numbers else NETWORK_ADVICE


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
        return warning("upnp", str(error) or f"the router has not answered for {ROUTER_SECONDS_MAX:g} s", SERVICE_ADVICE["upnp"])


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _advice(name: str) -> str:
    return SERVICE_ADVICE[name] if _is_there(PACKAGES[name]) else f"pip install {PACKAGES[name]}, then start the peer again"


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
    if f'peer="{me}"'.encode() not in (await _get(address, "/metrics")):
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
