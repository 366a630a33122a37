"""`python -m scenarios.links --profile dsl`: links as people have them: asked and measured, and what peers do over them.

A profile (`transport/profiles.py`, or a trace file) is carried by the in-memory network, by a proxy, and by kernel TCP through
TUN devices. Each carrier's round trip, rate and loss are measured from outside; then real peers decide, train and are joined over
it, and as many in-memory ones decide the same in virtual time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks.consensus import scratch_round
from peer.demo.cast import DemoPeer
from protocol.errors import UserError
from scenarios import network, probe, tun, virtual
from scenarios.alarm import hurried
from scenarios.join import MILLION, is_long, join, parameters
from scenarios.network import Network, Watch
from scenarios.probe import Pings, Poured, Server
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import COUNT, Trial, arguments, duration, report, write
from scenarios.tun import Router, running_router
from transport.profiles import CONGESTION_CONTROL, FREE, MEGABIT_BYTES, PROFILES, SHIFT_SECONDS, Access, Profile, Way, profile_of

CARRIERS = ("memory", "proxy", "kernel")
ENDS_SECONDS = 3.0  # for which both ends are measured by themselves, over a link that takes no time
ASK_SECONDS_MAX = 60.0  # for a probe's start and end
PORT = 7800  # of the probe, in a namespace of its own
STREAMS = 32  # poured at once: one flow alone is slowed by its losses
FLOOD = 1.2  # datagrams, times what the link can carry at most
ROUND_TRIP_OFF_MAX, RATE_OFF_MAX, ROUNDS_OFF_MAX = 0.10, 0.15, 0.25
LOSS_OFF_MAX = 0.01
JOIN_SECONDS_MAX = 15.0  # on `transatlantic`, with a million parameters
CALM_SECONDS = 2.0  # around a drop-out no ping is counted: connections wait a while after it, as TCP does
STEP_SECONDS = 0.05  # in which a profile's rates are added up
ROUND_SECONDS_MAX = 600.0
LINKED_SECONDS_MAX = 60.0
ROUNDS_WARM = 1


# Asked and measured -----------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """From `a` to `b`, both on the profile, and from a peer with a fast link to `b`; what was measured of them."""

    way: Way
    fast: Way
    ends: float  # seconds that both ends take for a ping by themselves
    pings: Pings
    up: Poured
    down: Poured
    one: Poured | None = None  # over one TCP connection; None: not measured


def ways(profile: Profile) -> tuple[Way, Way]:
    """As each carrier makes them of peers that come in this order."""
    a, b = (Access(profile.shifted(SHIFT_SECONDS * number)) for number in range(2))
    return Way(a, b), Way(Access(PROFILES["lan"]), b)


def carried(way: Way, poured: Poured) -> float:
    """Bytes a second that the path can carry at that time, by its profiles."""
    steps = max(1, round((poured.end - poured.begin) / STEP_SECONDS))
    times = [poured.begin + (step + 0.5) * STEP_SECONDS for step in range(steps)]
    return statistics.mean(min(way.speaker.profile.at(at).up, way.hearer.profile.at(at).down) for at in times)


def is_calm(way: Way, at: float) -> bool:
    profiles = (way.speaker.profile, way.hearer.profile)
    times = [at + step * STEP_SECONDS for step in range(-round(CALM_SECONDS / STEP_SECONDS), round(1.0 / STEP_SECONDS))]
    return all(min(profile.at(time).up, profile.at(time).down) > 0 for profile in profiles for time in times)


def compare(link: Link, trial: Trial) -> None:
    """The figures of the table, and what is wrong with them."""
    way, figures = link.way, trial.figures
    calm = [(sent, took) for sent, took in zip(link.pings.sent, link.pings.seconds, strict=True) if is_calm(way, sent)]
    asked = [way.round_trip(sent) for sent, _ in calm]
    # Whatever comes later than a lost segment is sent again was lost, or waited for one that was.
    on_time = [(took, trip) for (_, took), trip in zip(calm, asked, strict=True) if took is not None and took < 1.5 * trip + 0.1]
    ratios = [(took - link.ends) / trip for took, trip in on_time]
    if not ratios:
        trial.problems.append("no ping came back in time")
        return
    off = statistics.median(ratios) - 1
    loss, lost = statistics.mean(way.loss(sent) for sent, _ in calm), 1 - math.sqrt(len(ratios) / len(calm))
    figures |= {"round_trip_ms": 1e3 * statistics.mean(asked), "round_trip_off": off, "loss": loss, "loss_measured": lost}
    trial.require(abs(off) <= ROUND_TRIP_OFF_MAX, f"round trip {off:+.1%}")
    trial.require(abs(lost - loss) <= LOSS_OFF_MAX, f"loss {lost:.2%} instead of {loss:.2%}")
    for name, poured, path in (("up", link.up, way), ("down", link.down, link.fast)):
        rate = carried(path, poured)
        off = poured.rate / rate - 1
        figures |= {f"{name}_mbit": rate / MEGABIT_BYTES, f"{name}_off": off}
        trial.require(abs(off) <= RATE_OFF_MAX, f"rate {name} {off:+.1%}")
    if link.one is not None:
        figures["one_tcp_mbit"] = link.one.rate / MEGABIT_BYTES


async def over_proxy(profile: Profile, seconds: float) -> Link:
    server, way, fast = Server(trio.current_time), *ways(profile)
    pingers = probe.PINGERS if any(moment.loss for moment in profile.moments) else 1
    with hurried():
        async with running_proxy(profile) as proxy, trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, server.serve_stream, [listener])
            b, near = (f"{host}:{listener.socket.getsockname()[1]}" for host in ("127.0.0.1", "localhost"))
            for name, address, own in (
                ("a", "-", None), ("b", b, None), ("fast", "-", PROFILES["lan"]), ("here", "-", FREE), ("there", near, FREE)
            ):  # fmt: skip
                proxy.add(virtual.Place(name, address), own)

            async def dial(name: str, address: str = b) -> trio.SocketStream:
                stream = await trio.open_tcp_stream("127.0.0.1", proxy.port)
                await stream.send_all(f"{name} {address}\n".encode())
                return stream

            ends = await probe.ping_streams(partial(dial, "here", near), trio.current_time, ENDS_SECONDS, pingers)
            pings = await probe.ping_streams(partial(dial, "a"), trio.current_time, seconds, pingers)
            poured = []
            for name, streams in (("a", STREAMS), ("fast", STREAMS), ("a", 1)):
                await probe.pour_streams(partial(dial, name), seconds + probe.WARM_SECONDS, streams)
                proxy.cut([(name, "b")], close=True)  # what still waits is not to take the next one's room
                proxy.heal()
                poured.append(server.poured())
            nursery.cancel_scope.cancel()
    return Link(way, fast, ends.median(), pings, *poured)


def over_kernel(profile: Profile, seconds: float, congestion: str) -> Link:
    with hurried(with_children=True), running_router(profile, congestion) as router, ExitStack() as stack:
        a, b, fast = router.host("a"), router.host("b"), router.host("fast", PROFILES["lan"])
        here, there = router.host("here", FREE), router.host("there", FREE)
        way, quick = ways(profile)

        def serve(host: str) -> subprocess.Popen[str]:
            server = stack.enter_context(module_at(router, host, "serve", host, str(PORT)))
            assert server.stdout is not None
            server.stdout.readline()
            return server

        def ask(host: str, what: str, whom: str, long: float, much: float) -> str:
            with module_at(router, host, what, whom, str(PORT), str(long), str(much)) as asking:
                return asking.communicate(timeout=long + ASK_SECONDS_MAX)[0]

        def poured(server: subprocess.Popen[str]) -> Poured:
            assert server.stdin is not None and server.stdout is not None
            time.sleep(2 * probe.PAUSE_SECONDS)  # what still flew is there
            server.stdin.write("?")
            server.stdin.flush()
            return Poured(**json.loads(server.stdout.readline()))

        serve(there)
        ends = Pings(**json.loads(ask(here, "ping", there, ENDS_SECONDS, 0)))
        server = serve(b)
        pings = Pings(**json.loads(ask(a, "ping", b, seconds, 0)))
        up, down = (FLOOD * one.up_max for one in (profile, PROFILES["lan"]))
        found = []
        for host, what, much in ((a, "datagrams", up), (fast, "datagrams", down), (a, "streams", 1)):
            ask(host, what, b, seconds + probe.WARM_SECONDS, much)
            found.append(poured(server))
        return Link(way, quick, ends.median(), pings, *found)


@contextmanager
def module_at(router: Router, host: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command, environment = router.command(host, "scenarios.probe", *arguments)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# Peers over it ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def carrier(name: str, profile: Profile, congestion: str) -> AsyncIterator[Callable[[DemoPeer], None]]:
    if name == "proxy":
        with hurried():
            async with running_proxy(profile) as proxy:
                yield partial(Proxy.dress, proxy)
    else:
        with running_router(profile, congestion) as router:
            yield partial(Router.dress, router)


async def peers_over(name: str, profile: Profile, options: argparse.Namespace, trial: Trial) -> None:
    figures, folder = trial.figures, options.keep / f"{Path(profile.name).name}-{name}" if options.keep else None
    async with (
        carrier(name, profile, options.congestion) as dress,
        network.running(options.peers, seed=options.seed, folder=folder, dress=dress) as peers,
    ):
        with trio.fail_after(LINKED_SECONDS_MAX):
            while (await peers.demo.watched.client.status()).links < options.peers - 1:  # noqa: ASYNC110 - another process
                await trio.sleep(network.POLL_SECONDS)
        seconds = [await scratch_round(peers.demo.watched) for _ in range(ROUNDS_WARM + options.rounds)][ROUNDS_WARM:]
        stats = [await peer.client.stats() for peer in peers.peers]
        figures["decision_p50"] = statistics.median(view.decision_ms_p50 or 0.0 for view in stats) / 1e3
        figures["decision_p99"] = max(view.decision_ms_p99 or 0.0 for view in stats) / 1e3
        figures["test_round"] = statistics.median(seconds)
        figures["million_round"], figures["join"] = await million(peers, options, dress)
        trial.require(
            profile.name != "transatlantic" or figures["join"] <= JOIN_SECONDS_MAX, f"a join took {figures['join']:.1f} s"
        )


async def million(peers: Network, options: argparse.Namespace, dress: Callable[[DemoPeer], None]) -> tuple[float, float]:
    """Seconds of a round of a job with a million parameters, and of a join while it trains."""
    watch = Watch(peers.demo.watched)
    job = await peers.train(MILLION)
    with trio.fail_after(ROUND_SECONDS_MAX):
        await watch.until_round(options.trained - 1)
        while not await is_long(peers):  # noqa: ASYNC110 - it is another process
            await trio.sleep(network.POLL_SECONDS)
    views = [view for view in await peers.demo.watched.client.rounds(options.trained) if view.job == job]
    joined = await join(peers, 0, keeps=options.keep is not None, dress=dress)
    if not joined.succeeded:
        raise UserError(f"the join with {parameters(peers.demo.watched, job):,} parameters did not succeed")
    return statistics.median(view.seconds or 0.0 for view in views), joined.certified_seconds


# All of it --------------------------------------------------------------------------------------------------------------


async def case(options: argparse.Namespace, profile: Profile, name: str) -> Trial:
    trial = Trial(f"{profile.name} {name}")
    trial.figures["congestion_control"] = options.congestion if name == "kernel" else f"as {CONGESTION_CONTROL}"
    try:
        match name:
            case "proxy":
                link = await over_proxy(profile, options.seconds)
            case "kernel":
                link = await trio.to_thread.run_sync(over_kernel, profile, options.seconds, options.congestion)
            case _:
                pings, up, down = await trio.to_thread.run_sync(virtual.measured, profile, options.seconds)
                link = Link(*ways(profile), 0.0, pings, up, down)
        compare(link, trial)
        if options.network:
            # Before and after the real ones: the load of the machine is not to be what they differ by.
            rounds = await virtual_rounds(profile, options)
            if name != "memory":
                await peers_over(name, profile, options, trial)
            compare_rounds(trial, rounds + await virtual_rounds(profile, options))
    except* (UserError, trio.TooSlowError) as group:
        trial.problems.append(str(first_of(group)) or "it took too long")
    return trial


async def virtual_rounds(profile: Profile, options: argparse.Namespace) -> list[float]:
    """Seconds of test rounds. A process of its own: what runs in threads elsewhere does not in virtual time."""
    command = [sys.executable, "-m", "scenarios.virtual", profile.name, str(options.peers), str(ROUNDS_WARM + options.rounds)]
    done = await trio.run_process(command, capture_stdout=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds[ROUNDS_WARM:]


def compare_rounds(trial: Trial, rounds: list[float]) -> None:
    seconds = trial.figures["virtual_round"] = statistics.median(rounds)
    if "test_round" in trial.figures:
        off = trial.figures["virtual_off"] = seconds / trial.figures["test_round"] - 1
        trial.require(abs(off) <= ROUNDS_OFF_MAX, f"virtual rounds {off:+.0%}")


def first_of(error: BaseException) -> BaseException:
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def run(options: argparse.Namespace, carriers: list[str]) -> int:
    trials = list[Trial]()
    for profile in options.profile:
        for name in carriers:
            note(options, trials, await case(options, profile, name))
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    title = f"{options.peers} peers; asked, and how far off what was measured is; seconds where nothing is said"
    rows = [
        [trial.what, *(cell(trial.figures) for cell in CELLS.values()), "no" if trial.problems else "yes"] for trial in trials
    ]
    return report(options, title, ["what", *CELLS, "held"], rows, failures, {"trials": [asdict(trial) for trial in trials]})


def note(options: argparse.Namespace, trials: list[Trial], trial: Trial) -> None:
    """A run that is ended half-way keeps what it has."""
    trials.append(trial)
    print(f"{trial.what}: {'; '.join(trial.problems) or 'held'}", file=sys.stderr, flush=True)
    write(options, {"trials": [asdict(trial) for trial in trials], "failures": ["not over yet"]})


def cell(form: str) -> Callable[[dict[str, Any]], str]:
    """Empty where one of the figures was not measured."""

    def filled(figures: dict[str, Any]) -> str:
        try:
            return form.format(**figures)
        except KeyError:
            return ""

    return filled


CELLS = {
    "TCP": cell("{congestion_control}"),
    "RTT ms": cell("{round_trip_ms:.0f} {round_trip_off:+.1%}"),
    "loss": cell("{loss:.1%}, is {loss_measured:.1%}"),
    "up Mbit/s": cell("{up_mbit:.1f} {up_off:+.1%}"),
    "down": cell("{down_mbit:.1f} {down_off:+.1%}"),
    "one TCP": cell("{one_tcp_mbit:.1f}"),
    "decision p50, p99": cell("{decision_p50:.2f}, {decision_p99:.2f}"),
    "test round": cell("{test_round:.2f}"),
    "virtual": cell("{virtual_round:.2f}"),
    "round of 1.0M": cell("{million_round:.1f}"),
    "join": cell("{join:.1f}"),
}


def _profile(text: str) -> Profile:
    try:
        return profile_of(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = arguments("links", __doc__)
    names = f"{', '.join(PROFILES)}, or a trace file"
    parser.add_argument("--profile", type=_profile, nargs="+", default=None, metavar="P", help=f"{names}; all of them, if none")
    parser.add_argument("--carrier", choices=CARRIERS, nargs="+", default=CARRIERS, help="what carries the links")
    parser.add_argument("--seconds", type=duration, default=20.0, metavar="S", help="of each measurement of a link")
    parser.add_argument("--rounds", type=COUNT, default=20, metavar="N", help="test rounds, each of a few decisions")
    parser.add_argument("--trained", type=COUNT, default=5, metavar="N", help="rounds of the job with 1.0M parameters")
    parser.add_argument("--congestion", default=CONGESTION_CONTROL, metavar="NAME", help="what kernel TCP uses")
    parser.add_argument("--no-network", dest="network", action="store_false", help="links alone, without peers")
    options = parser.parse_args()
    options.profile = options.profile or list(PROFILES.values())
    carriers = list(options.carrier)
    if "kernel" in carriers and (why := tun.refusal(options.congestion)):
        print(f"python -m scenarios.links: not over kernel TCP: {why}", file=sys.stderr, flush=True)
        carriers.remove("kernel")
    return network.main(partial(run, options, carriers))


if __name__ == "__main__":
    sys.exit(main())
