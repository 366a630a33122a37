"""`python -m scenarios.links --profile dsl`: realistic links: their measured figures, and the work of peers over them.

The in-memory network, a proxy, and kernel TCP through TUN devices each carry a profile (`scenarios/emulation/link_profiles.py`,
or a trace file). Round trip, rate and loss of each carrier are measured from outside. Then real peers decide test rounds, train,
and admit a newcomer over it. The same number of in-memory peers decides the same test rounds in virtual time.

The time of a test round is that of computation and links. The in-memory network emulates the links. It charges computation as
processor time of one thread, without waits for kernel, disk, console or carrier, times a pace. The pace is the ratio of a real
round over this carrier to a virtual round, both over links without delay. It is measured once per carrier without any profile, so
the comparison covers only the profile's effect. Virtual rounds begin at the same moment of a profile.

Measurements that depend on the processor run alone. Those that depend on slow links run side by side: a link's own figures, and
at the end the jobs with a million parameters, beside the in-memory network.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks import provenance
from benchmarks.consensus import scratch_round
from demo.demo_peers import DemoPeer
from protocol.errors import UserError
from scenarios import carried, network, tun
from scenarios.alarm import hurried
from scenarios.carried import in_virtual_time, is_slow, is_steady
from scenarios.emulation.link_profiles import CONGESTION_CONTROL, PROFILES, UNLIMITED, AccessProfile, load_profile
from scenarios.join import MILLION, is_long, join, parameters
from scenarios.network import Network, Watch
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import COUNT, Trial, arguments, duration, report, write
from scenarios.tun import Router, running_router

CARRIERS = ("memory", "proxy", "kernel")
ROUND_TRIP_OFF_MAX, RATE_OFF_MAX, ROUNDS_OFF_MAX = 0.10, 0.15, 0.25
LOSS_OFF_MAX = 0.01
JOIN_SECONDS_MAX = 15.0  # on `transatlantic`, with a million parameters
ROUND_SECONDS_MAX = 600.0
LINKED_SECONDS_MAX = 60.0
STEADY_SHARE = 0.25  # share of the measured seconds, for links with a varying profile
VARYING_SECONDS = 60.0  # duration of test rounds, so that they cover many moments of such a profile
CLOCKS: dict[str, Callable[[], float]] = {"proxy": trio.current_time, "kernel": time.monotonic}  # clocks of the profiles
FAILED = (UserError, trio.TooSlowError, subprocess.SubprocessError)  # errors that fail one part; the run continues
Found = dict[str, Any]


# Peers over links ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def carrier(name: str, profile: AccessProfile, congestion: str) -> AsyncIterator[Callable[[DemoPeer], None]]:
    if name == "proxy":
        with hurried():
            async with running_proxy(profile) as proxy:
                yield partial(Proxy.dress, proxy)
    else:
        with running_router(profile, congestion) as router:
            yield partial(Router.dress, router)


@dataclass
class Over:
    """A network over one carrier whose watched peer is linked with all others. `dress` prepares a later peer."""

    name: str  # name of the carrier
    profile: AccessProfile
    peers: Network
    dress: Callable[[DemoPeer], None]
    options: argparse.Namespace

    async def rounds(self) -> tuple[list[float], float]:
        """Return the seconds of test rounds without the first one, and the moment of the profile at which they began."""
        began, found, clock = trio.current_time(), list[float](), CLOCKS[self.name]
        begins = clock() % self.profile.seconds
        while len(found) <= self.options.rounds or trio.current_time() - began < window(self.profile):
            found.append(await scratch_round(self.peers.demo.watched))
        return found[1:], begins

    async def compared(self, pace: float) -> Found:
        """Measure decisions and test rounds, and compare them with as many rounds in virtual time."""
        seconds, begins = await self.rounds()
        stats = [await peer.client.stats() for peer in self.peers.peers]
        unreal = await virtual_rounds(self.profile, self.options, begins, pace)
        real_round, virtual_round = statistics.median(seconds), statistics.median(unreal)
        return {
            "decision_p50": statistics.median(view.decision_ms_p50 or 0.0 for view in stats) / 1e3,
            "decision_p99": max(view.decision_ms_p99 or 0.0 for view in stats) / 1e3,
            "pace": pace,
            "test_round": real_round,
            "virtual_round": virtual_round,
            "virtual_off": virtual_round / real_round - 1,
        }

    async def million(self) -> Found:
        """Measure a round of a job with a million parameters, and a join while it trains, in seconds."""
        peers, options = self.peers, self.options
        while not await is_long(peers):  # so that a newcomer requests a snapshot
            await scratch_round(peers.demo.watched)
        watch = Watch(peers.demo.watched)
        job = await peers.train(MILLION)
        with trio.fail_after(ROUND_SECONDS_MAX):
            while sum(event.kind == "round" and event.fields.get("job") == job for event in watch.events) < options.trained:
                await watch.more(10.0)
        views = [view for view in await peers.demo.watched.client.rounds(options.trained) if view.job == job]
        joined = await join(peers, 0, keeps=options.keep is not None, dress=self.dress)
        if not joined.succeeded:
            raise UserError(f"the join with {parameters(peers.demo.watched, job):,} parameters did not succeed")
        return {"million_round": statistics.median(view.seconds or 0.0 for view in views), "join": joined.certified_seconds}


def window(profile: AccessProfile) -> float:
    return min(profile.seconds, VARYING_SECONDS)


async def virtual_rounds(profile: AccessProfile, options: argparse.Namespace, begins: float, pace: float) -> list[float]:
    seconds: list[float] = await in_virtual_time(
        "rounds", profile, options.peers, options.rounds + 1, window(profile), begins, pace
    )
    return seconds[1:]


@asynccontextmanager
async def linked_over(
    name: str, profile: AccessProfile, options: argparse.Namespace, what: str = "rounds"
) -> AsyncIterator[Over]:
    folder = options.keep / f"{Path(profile.name).name}-{name}-{what}" if options.keep else None
    async with (
        carrier(name, profile, options.congestion) as dress,
        network.running(options.peers, seed=options.seed, folder=folder, dress=dress) as peers,
    ):
        with trio.fail_after(LINKED_SECONDS_MAX):
            while (await peers.demo.watched.client.status()).links < options.peers - 1:  # noqa: ASYNC110 - another process
                await trio.sleep(network.POLL_SECONDS)
        yield Over(name, profile, peers, dress, options)


# The run ---------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Measurements in parts. A part whose figures an earlier run has left is not measured again."""

    options: argparse.Namespace
    carriers: list[str]
    trials: dict[str, Trial] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=trio.current_time)

    @property
    def about(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in ("peers", "seed", "seconds", "rounds", "trained", "congestion")}

    def resume(self) -> None:
        left = provenance.earlier(Path(self.options.json), self.about)
        self.paces = left.get("paces", {})
        for trial in left.get("trials", ()):
            what, figures = trial["what"], trial["figures"]
            self.trials[what] = Trial(what, figures, judged(what, figures))

    def trial(self, profile: AccessProfile, name: str) -> Trial:
        what = f"{profile.name} {name}"
        return self.trials.setdefault(what, Trial(what))

    def lacks(self, profile: AccessProfile, name: str, figure: str) -> bool:
        return figure not in self.trial(profile, name).figures

    async def part(self, profile: AccessProfile, name: str, called: str, measure: Callable[[], Awaitable[Found]]) -> None:
        trial, begun = self.trial(profile, name), time.time()
        try:
            found = await measure()
        except* FAILED as group:
            problems = [why(group)]
        else:
            problems = judged(trial.what, found)
            trial.figures |= found
        trial.problems += problems
        self.tell(f"{trial.what}: {called} in {time.time() - begun:.0f} s: {'; '.join(problems) or 'held'}")

    def tell(self, what: str) -> None:
        """Print progress and write the results so far, so that an interrupted run keeps them."""
        minutes, seconds = divmod(int(trio.current_time() - self.started), 60)
        print(f"{minutes:3}:{seconds:02} {what}", file=sys.stderr, flush=True)
        write(self.options, self.result(["not over yet"]))

    def result(self, failures: list[str]) -> dict[str, Any]:
        return {
            **self.about,
            "paces": self.paces,
            "trials": [asdict(trial) for trial in self.trials.values()],
            "failures": failures,
        }

    async def everything(self) -> None:
        shaped = [name for name in self.carriers if name != "memory"]
        await self.measure_paces(shaped)
        for profile in self.options.profile:
            for name in shaped:
                await self.alone(profile, name)
        with hurried():  # like each proxy, one of which may end before others
            async with trio.open_nursery() as beside:
                beside.start_soon(self.in_memory)
                for profile in filter(is_slow, self.options.profile):
                    for name in shaped:
                        beside.start_soon(self.peers, profile, name, False, True)

    async def measure_paces(self, shaped: list[str]) -> None:
        """Measure the pace of each carrier: the ratio of its rounds to virtual ones, both over links without delay."""
        wanted = [name for name in shaped if self.options.network and name not in self.paces]
        if not wanted:
            return
        unreal = statistics.median(await virtual_rounds(UNLIMITED, self.options, 0.0, 1.0))
        for name in wanted:
            async with linked_over(name, UNLIMITED, self.options) as over:
                self.paces[name] = statistics.median((await over.rounds())[0]) / unreal
            self.tell(f"pace over {name}: {self.paces[name]:.1f}")

    async def alone(self, profile: AccessProfile, name: str) -> None:
        await self.link(profile, name)
        await self.peers(profile, name, True, not is_slow(profile))

    async def link(self, profile: AccessProfile, name: str) -> None:
        options = self.options
        seconds = options.seconds * (STEADY_SHARE if is_steady(profile) else 1.0)

        async def measure() -> Found:
            if name == "memory":
                link = await carried.over_memory(profile, seconds)
            elif name == "proxy":
                link = await carried.over_proxy(profile, seconds)
            else:
                link = await trio.to_thread.run_sync(carried.over_kernel, profile, seconds, options.congestion)
            return {
                "congestion_control": options.congestion if name == "kernel" else f"as {CONGESTION_CONTROL}",
                **carried.compare(link),
            }

        if self.lacks(profile, name, "round_trip_off"):
            await self.part(profile, name, "link", measure)

    async def peers(self, profile: AccessProfile, name: str, rounds: bool, million: bool) -> None:
        rounds = rounds and self.options.network and self.lacks(profile, name, "virtual_off")
        million = million and self.options.network and self.lacks(profile, name, "join")
        if not rounds and not million:
            return
        try:
            async with linked_over(name, profile, self.options, "rounds" if rounds else "million") as over:
                if rounds:
                    await self.part(profile, name, "test rounds", partial(over.compared, self.paces[name]))
                if million:
                    await self.part(profile, name, "1.0M parameters", over.million)
        except* FAILED as group:
            trial = self.trial(profile, name)
            trial.problems.append(f"no network: {why(group)}")
            self.tell(f"{trial.what}: {trial.problems[-1]}")

    async def in_memory(self) -> None:
        """Measure everything in memory, which uses no real clock."""
        for profile in self.options.profile if "memory" in self.carriers else ():
            await self.link(profile, "memory")
            if self.options.network and self.lacks(profile, "memory", "virtual_round"):
                await self.part(profile, "memory", "test rounds", partial(self._virtual, profile))

    async def _virtual(self, profile: AccessProfile) -> Found:
        return {"pace": 1.0, "virtual_round": statistics.median(await virtual_rounds(profile, self.options, 0.0, 1.0))}


def judged(what: str, figures: Found) -> list[str]:
    """Return the problems of these figures, as far as they were measured."""
    found = []
    for name, says, most in (
        ("round_trip_off", "round trip {:+.1%}", ROUND_TRIP_OFF_MAX),
        ("up_off", "rate up {:+.1%}", RATE_OFF_MAX),
        ("down_off", "rate down {:+.1%}", RATE_OFF_MAX),
        ("virtual_off", "virtual rounds {:+.0%}", ROUNDS_OFF_MAX),
    ):
        if abs(figures.get(name, 0.0)) > most:
            found.append(says.format(figures[name]))
    loss, lost = figures.get("loss", 0.0), figures.get("loss_measured", 0.0)
    if abs(lost - loss) > LOSS_OFF_MAX:
        found.append(f"loss {lost:.2%} instead of {loss:.2%}")
    if what.startswith("transatlantic ") and figures.get("join", 0.0) > JOIN_SECONDS_MAX:
        found.append(f"a join took {figures['join']:.1f} s")
    return found


def why(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return why(error.exceptions[0])
    return str(error) or "it took too long"


async def run(options: argparse.Namespace, carriers: list[str]) -> int:
    measured = Run(options, carriers)
    if options.resume:
        measured.resume()
    await measured.everything()
    trials = list(measured.trials.values())
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    title = f"{options.peers} peers; asked, and how far off what was measured is; seconds where nothing is said"
    rows = [
        [trial.what, *(filled(trial.figures) for filled in CELLS.values()), "no" if trial.problems else "yes"] for trial in trials
    ]
    return report(options, title, ["what", *CELLS, "held"], rows, failures, measured.result([]))


def cell(form: str) -> Callable[[Found], str]:
    """Return a formatter that gives "" if one of its figures was not measured."""

    def filled(figures: Found) -> str:
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
    "virtual, pace": cell("{virtual_round:.2f}, {pace:.1f}"),
    "off": cell("{virtual_off:+.0%}"),
    "round of 1.0M": cell("{million_round:.1f}"),
    "join": cell("{join:.1f}"),
}


def _profile(text: str) -> AccessProfile:
    try:
        return load_profile(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = arguments("links", __doc__)
    names = f"{', '.join(PROFILES)}, or a trace file"
    parser.add_argument("--profile", type=_profile, nargs="+", default=None, metavar="P", help=f"{names}; default: all")
    parser.add_argument("--carrier", choices=CARRIERS, nargs="+", default=CARRIERS, help="carriers of the links")
    much = "seconds of each measurement of a link; a quarter for links that do not vary"
    parser.add_argument("--seconds", type=duration, default=20.0, metavar="S", help=much)
    parser.add_argument("--rounds", type=COUNT, default=20, metavar="N", help="number of test rounds, each of a few decisions")
    parser.add_argument("--trained", type=COUNT, default=3, metavar="N", help="rounds of the job with 1.0M parameters")
    parser.add_argument("--congestion", default=CONGESTION_CONTROL, metavar="NAME", help="congestion control of the kernel's TCP")
    parser.add_argument("--no-network", dest="network", action="store_false", help="measure links only, without peers")
    parser.add_argument("--resume", action="store_true", help="measure only cases that the file of --json lacks")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs a file: name it with --json")
    options.profile = options.profile or list(PROFILES.values())
    carriers = list(options.carrier)
    if "kernel" in carriers and (why := tun.refusal(options.congestion)):
        print(f"python -m scenarios.links: not over kernel TCP: {why}", file=sys.stderr, flush=True)
        carriers.remove("kernel")
    return network.main(partial(run, options, carriers))


if __name__ == "__main__":
    sys.exit(main())
