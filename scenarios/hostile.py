"""`python -m scenarios.hostile --minutes 5`: strangers attack all peers of a network, which trains and admits a member.

All attacks run at once (`scenarios/attackers.py`): 300 half-open connections, slow handshakes, garbage, incomplete messages,
requests whose replies are not read, and floods of validly signed messages from 200 keys. The network is measured for a quarter of
the time before the attacks. For another quarter afterwards it runs beside a silent program that takes as much processor time as
the attackers took. This shows how much of the slowdown comes from sharing one machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import trio

from demo.demo_peers import DemoPeer
from peer.settings.process_resources import process_memory_mb
from scenarios import network
from scenarios.join import Join, join
from scenarios.network import Network, children
from scenarios.trials import SMALL_JOB, Trial, arguments, conduct, duration

SLOWER_MAX = 1.5  # median time of a decision, relative to the time before
GROWTH_MB_MAX = 100.0  # of a daemon's memory
JOIN_SECONDS_MAX = 10.0  # from the newcomer's first answer until it holds the network's earlier height
SETTLE_SECONDS = 5.0  # for links and workers to start
JOIN_AFTER_SECONDS = 15.0  # by then all attacks run
NICE = 10  # real attackers have their own machines; here they must not take the peers' processors
LOOK_SECONDS = 1.0
# Each attack must be counted under one of these reasons.
COUNTED = {
    "half-open connections": ("half-open", "handshake-timeout"),
    "garbage": ("not-folkmoot",),
    "messages that are never whole": ("memory-full", "gave-way"),
    "floods": ("too-busy", "gave-way"),
}


@dataclass
class Seen:
    """Measurements of the peers during an interval."""

    seconds: float = 0.0
    decision_ms: float = 0.0  # median
    decisions: int = 0
    memory_mb: dict[str, float] = field(default_factory=dict)  # maximum, by peer
    processors: dict[str, float] = field(default_factory=dict)  # average processors in use, by kind of process


async def watch(peers: Network, seconds: float, other: int | None = None) -> Seen:
    """Measure the peers for some seconds. `other` is a process beside them."""
    seen, watched = Seen(), peers.demo.watched
    first = await last_round(watched)
    daemons = [peer.process.pid for peer in peers.peers if peer.process is not None]
    whose = {"daemons": daemons, "workers": [worker for daemon in daemons for worker in children(daemon)]}
    whose |= {"others": [other]} if other is not None else {}
    spent, started = {name: sum(map(processor_seconds, of)) for name, of in whose.items()}, trio.current_time()
    with trio.move_on_after(seconds):
        while True:
            for peer in peers.peers:
                assert peer.process is not None
                seen.memory_mb[peer.name] = max(seen.memory_mb.get(peer.name, 0.0), process_memory_mb(peer.process.pid))
            await trio.sleep(LOOK_SECONDS)
    took = seen.seconds = trio.current_time() - started
    seen.processors = {name: (sum(map(processor_seconds, of)) - spent[name]) / took for name, of in whose.items()}
    views = await watched.client.rounds(10_000)
    taken = [view.decision_ms for view in views if view.round > first and view.decision_ms is not None]
    seen.decisions, seen.decision_ms = len(taken), median(taken) if taken else float("inf")
    return seen


def processor_seconds(process: int) -> float:
    """Return the processor seconds of all threads of a process, with kernel time; 0 once it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def last_round(peer: DemoPeer) -> int:
    views = await peer.client.rounds(1)
    return views[-1].round if views else -1


async def refused(peers: Network) -> dict[str, int]:
    found: dict[str, int] = {}
    for peer in peers.peers:
        for reason, number in (await peer.client.stats()).refused.items():
            found[reason] = found.get(reason, 0) + number
    return found


async def attack(options: argparse.Namespace, peers: Network, trial: Trial) -> None:
    seconds = 60 * options.minutes
    await trio.sleep(SETTLE_SECONDS)
    before = await watch(peers, seconds / 4)
    chain = (await peers.demo.watched.client.status()).chain_id
    addresses = [peer.address for peer in peers.peers]
    with beside("scenarios.attackers", chain, str(options.keys), *addresses) as attackers:
        assert attackers.stdin and attackers.stdout
        assert (await trio.to_thread.run_sync(attackers.stdout.readline)).strip() == "ready"
        joined: list[Join] = []

        async def newcomer() -> None:
            await trio.sleep(min(JOIN_AFTER_SECONDS, seconds / 8))
            joined.append(await join(peers, 0, keeps=False))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(newcomer)
            during = await watch(peers, seconds / 2, attackers.pid)
        counts = await refused(peers)
        attackers.stdin.close()
        told = json.loads(await trio.to_thread.run_sync(attackers.stdout.readline))
    with beside("scenarios.burn", str(during.processors["others"])) as burning:
        control = await watch(peers, seconds / 4, burning.pid)
    growth = max(during.memory_mb[name] - before.memory_mb[name] for name in before.memory_mb)
    slower, slower_beside = during.decision_ms / before.decision_ms, control.decision_ms / before.decision_ms
    # Rate of rounds relative to before. A round costs the daemons a fixed time, and they spend the rest on strangers and the
    # newcomer.
    slowed = during.decisions / during.seconds / (before.decisions / before.seconds or math.inf)
    trial.figures |= {
        "decisions before": before.decisions, "p50 ms": before.decision_ms, "during": during.decisions,
        "p50 ms during": during.decision_ms, "times": slower, "beside as much other work": control.decisions,
        "p50 ms beside it": control.decision_ms, "times beside it": slower_beside,
        "MB more": growth, "joined": joined[0].current_seconds, "heights": joined[0].height_at_start,
        "processors before": shown(before.processors), "processors during": shown(during.processors),
        "processors beside": shown(control.processors),
        "daemons' for others": during.processors["daemons"] - slowed * before.processors["daemons"],
        "counted": ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())),
        "attackers were told": ", ".join(f"{reason} {number}" for reason, number in sorted(told.items())),
    }  # fmt: skip
    trial.require(math.isfinite(before.decision_ms + control.decision_ms), "nothing was decided before or beside")
    told_beside = f"{slower_beside:.1f} times beside other work"
    trial.require(slower <= SLOWER_MAX, f"a decision takes {slower:.1f} times as long, {told_beside}")
    trial.require(growth <= GROWTH_MB_MAX, f"a daemon holds {growth:.0f} MB more")
    is_in = joined[0].succeeded and joined[0].current_seconds <= JOIN_SECONDS_MAX
    trial.require(is_in, f"the newcomer was not there after {JOIN_SECONDS_MAX:.0f} s: {joined[0].current_seconds:.1f} s")
    for what, reasons in COUNTED.items():
        trial.require(any(counts.get(reason) for reason in reasons), f"{what} are not counted")


@contextmanager
def beside(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program beside the peers until its standard input or this context ends."""
    command = ["nice", "-n", str(NICE), sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def shown(processors: dict[str, float]) -> str:
    return ", ".join(f"{name} {used:.2f}" for name, used in processors.items())


async def run(options: argparse.Namespace) -> int:
    async def attempt(peers: Network, trial: Trial) -> None:
        await attack(options, peers, trial)

    return await conduct(options, f"{options.keys} strange keys", [("attacked", attempt)], job=SMALL_JOB)


def main() -> int:
    parser = arguments("hostile", __doc__)
    parser.add_argument(
        "--minutes",
        type=duration,
        default=5.0,
        metavar="M",
        help="minutes in all: a quarter before the attack, half of them with it, and a quarter with other load",
    )
    parser.add_argument("--keys", type=int, default=200, metavar="N", help="number of keys that flood")
    return network.main(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
