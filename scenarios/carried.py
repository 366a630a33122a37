"""Measurement of the links of a profile on each carrier, from their two ends. Part of `scenarios.links`."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from protocol.errors import UserError
from scenarios import probe, virtual
from scenarios.alarm import hurried
from scenarios.emulation.link_profiles import (
    MEGABIT_BYTES,
    PROFILES,
    SHIFT_SECONDS,
    UNLIMITED,
    AccessLink,
    AccessProfile,
    NetworkPath,
)
from scenarios.probe import Dial, Pings, Poured, Server
from scenarios.proxy import running_proxy
from scenarios.tun import Router, running_router

ENDS_SECONDS = 3.0  # to measure both ends alone, over a link without delay
DIALED_SECONDS = 1.0  # to open all connections besides those of the pings
ASK_SECONDS_MAX = 60.0  # for the start and the end of a probe
PORT = 7800  # of the probe, in a namespace of its own
STREAMS = 32  # parallel bulk streams; the losses of a single flow would slow it down
FLOOD = 1.2  # datagrams, relative to the capacity of the link
CALM_SECONDS = 2.0  # no ping counts this close to an outage: connections back off after it, as TCP does
STEP_SECONDS = 0.05  # step of the sum over a profile's rates
SLOW_BYTES = 10 * MEGABIT_BYTES  # bytes per second; a round with a million parameters waits for an uplink of this rate


@dataclass
class Link:
    """Measurements of a link from `a` to `b`, both on the profile, and from a peer with a fast link to `b`."""

    way: NetworkPath
    fast: NetworkPath
    ends: float  # seconds that the two ends alone take for a ping
    pings: Pings
    up: Poured
    down: Poured
    one: Poured | None = None  # over one TCP connection; None: not measured


def ways(profile: AccessProfile) -> tuple[NetworkPath, NetworkPath]:
    """Return the paths of both links, with the same shifts of the profile that each carrier gives peers in this order."""
    a, b = (AccessLink(profile.shifted(SHIFT_SECONDS * number)) for number in range(2))
    return NetworkPath(a, b), NetworkPath(AccessLink(PROFILES["lan"]), b)


def is_steady(profile: AccessProfile) -> bool:
    return len(profile.moments) == 1


def is_slow(profile: AccessProfile) -> bool:
    return profile.up_max <= SLOW_BYTES


def asked_rate(way: NetworkPath, poured: Poured) -> float:
    """Return the bytes per second that the path can carry during this transfer, by its profiles."""
    steps = max(1, round((poured.end - poured.begin) / STEP_SECONDS))
    times = [poured.begin + (step + 0.5) * STEP_SECONDS for step in range(steps)]
    return statistics.mean(min(way.speaker.profile.segment_at(at).up, way.hearer.profile.segment_at(at).down) for at in times)


def is_calm(way: NetworkPath, at: float) -> bool:
    profiles = (way.speaker.profile, way.hearer.profile)
    times = [at + step * STEP_SECONDS for step in range(-round(CALM_SECONDS / STEP_SECONDS), round(1.0 / STEP_SECONDS))]
    return all(min(profile.segment_at(time).up, profile.segment_at(time).down) > 0 for profile in profiles for time in times)


def compare(link: Link) -> dict[str, Any]:
    """Return the figures of the table. Raises `UserError` if no ping came back in time."""
    way = link.way
    calm = [(sent, took) for sent, took in zip(link.pings.sent, link.pings.seconds, strict=True) if is_calm(way, sent)]
    asked = [way.round_trip(sent) for sent, _ in calm]
    # A ping that takes longer than a retransmission was lost, or waited for a lost segment.
    on_time = [(took, trip) for (_, took), trip in zip(calm, asked, strict=True) if took is not None and took < 1.5 * trip + 0.1]
    ratios = [(took - link.ends) / trip for took, trip in on_time]
    if not ratios:
        raise UserError("no ping was answered in time")
    figures: dict[str, Any] = {
        "round_trip_ms": 1e3 * statistics.mean(asked),
        "round_trip_off": statistics.median(ratios) - 1,
        "loss": statistics.mean(way.loss(sent) for sent, _ in calm),
        "loss_measured": 1 - math.sqrt(len(ratios) / len(calm)),
    }
    for name, poured, path in (("up", link.up, way), ("down", link.down, link.fast)):
        rate = asked_rate(path, poured)
        figures |= {f"{name}_mbit": rate / MEGABIT_BYTES, f"{name}_off": poured.rate / rate - 1}
    if link.one is not None:
        figures["one_tcp_mbit"] = link.one.rate / MEGABIT_BYTES
    return figures


async def over_proxy(profile: AccessProfile, seconds: float) -> Link:
    way, fast = ways(profile)
    pingers = probe.PINGERS if any(moment.loss for moment in profile.moments) else 1
    with hurried():
        async with running_proxy(profile) as proxy, trio.open_nursery() as nursery:

            async def pair(speaker: AccessProfile, hearer: AccessProfile) -> tuple[Server, Dial, Callable[[], None]]:
                """Make two ends and a function that cuts them off, so that data in flight does not delay other measurements."""
                server = Server(trio.current_time)
                (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, server.serve_stream, [listener])
                address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
                proxy.add(virtual.Place(f"to-{address}", "-"), speaker)
                proxy.add(virtual.Place(f"at-{address}", address), hearer)

                async def dial() -> trio.SocketStream:
                    stream = await trio.open_tcp_stream("127.0.0.1", proxy.port)
                    await stream.send_all(f"to-{address} {address}\n".encode())
                    return stream

                def cut() -> None:
                    proxy.cut([(f"to-{address}", f"at-{address}")], close=True)
                    proxy.heal()

                return server, dial, cut

            pinged, poured = dict[str, Pings](), dict[str, Poured]()

            async def ping(name: str, speaker: AccessProfile, hearer: AccessProfile, long: float) -> None:
                _, dial, _ = await pair(speaker, hearer)
                await trio.sleep(DIALED_SECONDS)
                pinged[name] = await probe.ping_streams(dial, trio.current_time, long, pingers)

            async def pour(name: str, speaker: AccessProfile, hearer: AccessProfile, streams: int) -> None:
                server, dial, cut = await pair(speaker, hearer)
                await probe.pour_streams(dial, seconds + probe.WARM_SECONDS, streams)
                cut()
                poured[name] = server.poured()

            a, b, near = way.speaker.profile, way.hearer.profile, fast.speaker.profile
            asked = [
                partial(ping, "ends", UNLIMITED, UNLIMITED, ENDS_SECONDS),
                partial(ping, "link", a, b, seconds),
                partial(pour, "up", a, b, STREAMS),
                partial(pour, "down", near, b, STREAMS),
                partial(pour, "one", a, b, 1),
            ]
            if is_slow(profile):
                async with trio.open_nursery() as beside:
                    for one in asked:
                        beside.start_soon(one)
            else:
                for one in asked:
                    await one()
            nursery.cancel_scope.cancel()
    return Link(way, fast, pinged["ends"].median(), pinged["link"], poured["up"], poured["down"], poured["one"])


def over_kernel(profile: AccessProfile, seconds: float, congestion: str) -> Link:
    with hurried(with_children=True), running_router(profile, congestion) as router, ExitStack() as stack:
        way, fast = ways(profile)
        servers = list[subprocess.Popen[str]]()

        def ask(what: str, path: NetworkPath, long: float, much: float) -> tuple[str, ...]:
            """Return the arguments of a probe at a host of its own, and start its server at another host."""
            names = [f"{what}-{len(router.hosts)}-{end}" for end in ("to", "at")]
            host, whom = (router.host(name, end.profile) for name, end in zip(names, (path.speaker, path.hearer), strict=True))
            servers.append(server := stack.enter_context(module_at(router, whom, "serve", whom, str(PORT))))
            assert server.stdout is not None
            server.stdout.readline()
            return host, what, whom, str(PORT), str(long), str(much)

        free, long = NetworkPath(AccessLink(UNLIMITED), AccessLink(UNLIMITED)), seconds + probe.WARM_SECONDS
        asked = [
            ask("ping", free, ENDS_SECONDS, 0),
            ask("ping", way, seconds, 0),
            *(ask("datagrams", path, long, flood(path)) for path in (way, fast)),
            ask("streams", way, long, 1),
        ]
        said = list[str]()
        for group in [asked] if is_slow(profile) else [[one] for one in asked]:
            with ExitStack() as running:
                processes = [running.enter_context(module_at(router, *one)) for one in group]
                said += [process.communicate(timeout=long + ASK_SECONDS_MAX)[0] for process in processes]
        time.sleep(2 * probe.PAUSE_SECONDS)  # let the packets in flight arrive
        ends, pings = (Pings(**json.loads(one)) for one in said[:2])
        return Link(way, fast, ends.median(), pings, *map(poured_into, servers[2:]))


def flood(way: NetworkPath) -> float:
    """Return a rate in bytes per second that surely fills the path."""
    return FLOOD * min(way.speaker.profile.up_max, max(moment.down for moment in way.hearer.profile.moments))


def poured_into(server: subprocess.Popen[str]) -> Poured:
    said, _ = server.communicate("?", timeout=ASK_SECONDS_MAX)
    return Poured(**json.loads(said))


@contextmanager
def module_at(router: Router, host: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command, environment = router.command(host, "scenarios.probe", *arguments)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def over_memory(profile: AccessProfile, seconds: float) -> Link:
    pings, up, down = await in_virtual_time("link", profile, seconds)
    return Link(*ways(profile), 0.0, Pings(**pings), Poured(**up), Poured(**down))


async def in_virtual_time(what: str, profile: AccessProfile, *numbers: float) -> Any:
    """Run a measurement in a process of its own: in virtual time nothing runs in threads."""
    done = await trio.run_process(
        [sys.executable, "-m", "scenarios.virtual", what, profile.name, *map(str, numbers)], capture_stdout=True
    )
    return json.loads(done.stdout)
