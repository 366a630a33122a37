"""`python -m scenarios.large`: costs of each round, phase and peer for a model of realistic size.

Two of four peers train, and two vote without a worker. No proposal is re-executed (`audit: off`). One peer is killed in the
middle round (`kill -9`). The local step has no bound; everything else has one.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from demo.demo_peers import DemoPeer, PeerDisk
from features.command_arguments import parse_count, parse_set_options
from protocol.api import BULK_TRAFFIC_KINDS
from protocol.errors import UserError
from scenarios import network
from scenarios.network import Network, Watch, children
from scenarios.trials import COUNT, WIDTH, arguments, duration, report
from training.transformer import ModelSpec

TRAINERS = 2
LIGHT_MB_MAX = 300.0  # anonymous memory of a voter without a worker
DAEMON_MB_MAX = 400.0  # anonymous memory of a trainer's daemon, beside its worker
OUTSIDE_SECONDS_MAX = 15.0  # part of a round outside the worker
ROUND_SECONDS_MAX = 900.0
LOOK_SECONDS = 0.1  # interval between samples of memory
DISK_SECONDS = 2.0  # interval between samples of the disk
HEAD = 64  # features per head, as in GPT-2
HIDDEN_STEP = 16
JOB = {
    "audit": "off",
    "byzantine_max": "0",
    "local_steps": "1",
    "inner": "adamw",
    "batch": "2",
    "micro_batch": "2",
    "model.context": "64",
    "held_out_permille": "0",
    "proposal_seconds": "600",
}


@dataclass
class Cost:
    """Maxima of one peer, in 10^6 bytes."""

    peer: str
    daemon_mb: float = 0.0  # anonymous memory
    worker_mb: float = 0.0
    disk_mb: float = 0.0
    sent_mb: float = 0.0
    received_mb: float = 0.0


@dataclass
class RoundTimes:
    """Times of one round, in seconds. A phase ends when the slowest peer has finished it; the phases add up to the round."""

    round: int
    worker: float  # the slowest worker: opening the job, steps, m and payload
    handing: float  # the rest until the last proposal is sent: fetching the text, making files durable
    judging: float  # until the last ballot before the decision: fetching and checking payloads
    agreeing: float  # until the decision
    applying: float  # until the next round is open
    killed: str = ""  # name of the peer that was killed in this round

    @property
    def outside(self) -> float:
        return self.handing + self.judging + self.agreeing + self.applying


@dataclass
class Seen:
    """Times of one round in one peer's events, in seconds since the epoch."""

    opened: float
    closed: float
    decided: float
    proposals: dict[str, float]  # by trainer
    ballots: list[float]


def shape_of(parameters: int) -> dict[str, Any]:
    """Return the shape of a model of about this number of parameters in GPT-2's proportions.

    It has as many layers as heads, and 64 features per head.
    """
    heads = max(1, round((parameters / 12 / HEAD**2) ** (1 / 3)))
    sizes = {"vocabulary": 256, "width": heads * HEAD, "layers": heads, "heads": heads, "kv_heads": heads}
    least = ModelSpec(**sizes, hidden=HIDDEN_STEP).parameters
    more = (parameters - least) // (3 * heads * heads * HEAD * HIDDEN_STEP)
    return {**sizes, "hidden": HIDDEN_STEP * (1 + max(0, more))}


def dress(peer: DemoPeer) -> None:
    peer.trains = peer.number < TRAINERS
    peer.evaluates = False


async def run(options: argparse.Namespace) -> int:
    shape = shape_of(options.parameters)
    model = {f"model.{name}": str(value) for name, value in shape.items() if name != "vocabulary"}
    async with network.running(4, seed=options.seed, folder=options.keep, dress=dress) as peers:
        costs = {peer.name: Cost(peer.name) for peer in peers.peers}
        watches = {peer.name: Watch(peer) for peer in peers.peers}
        started = time.time()
        job = await peers.train({**JOB, **model, **options.settings}, options.rounds)
        async with trio.open_nursery() as looking:
            looking.start_soon(look, peers, costs)
            looking.start_soon(look_at_disks, peers, costs)
            killed = await hurt(peers, options, job)
            with trio.fail_after(options.rounds * ROUND_SECONDS_MAX):
                for peer in peers.peers:
                    await until_finished(peer, job)
            looking.cancel_scope.cancel()
        for peer in peers.peers:
            await watches[peer.name].more(0.0)
            await count(peer, costs[peer.name])
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        failures, working = peers.failures(), worker_seconds(peers, job)
    survivors = [watch for name, watch in watches.items() if name != killed]
    begun = max(map(begun_at, survivors))
    in_round = [killed if number == middle(options) else "" for number in range(options.rounds)]
    rounds = [times_of(number, survivors, working.get(number, 0.0), who) for number, who in enumerate(in_round)]
    return conclude(options, peers, ModelSpec(**shape).parameters, begun - started, costs, rounds, failures)


async def count(peer: DemoPeer, cost: Cost) -> None:
    stats = await peer.client.stats()
    cost.sent_mb, cost.received_mb = (
        sum(count for kind, count in counts.items() if kind not in BULK_TRAFFIC_KINDS) / 1e6
        for counts in (stats.bytes_sent, stats.bytes_received)
    )


def middle(options: argparse.Namespace) -> int:
    return int(options.rounds) // 2


async def hurt(peers: Network, options: argparse.Namespace, job: str) -> str:
    """Kill one peer while the middle round is open, and restart it at once. Return its name."""
    victim = next(peer for peer in peers.peers if peer.trains is (options.victim == "trainer") and peer is not peers.demo.watched)
    with trio.fail_after((options.rounds + 1) * ROUND_SECONDS_MAX):
        while await round_of(peers.demo.watched, job) < middle(options):  # noqa: ASYNC110 - it is another process
            await trio.sleep(LOOK_SECONDS)
    await trio.sleep(options.after)
    peers.kill(victim)
    await peers.restart(victim)
    return victim.name


async def round_of(peer: DemoPeer, job: str) -> int:
    return next((view.round for view in await peer.client.jobs() if view.job == job and view.model_root), -1)


async def state_of(peer: DemoPeer, job: str) -> str:
    return next((view.state for view in await peer.client.jobs() if view.job == job), "")


async def until_finished(peer: DemoPeer, job: str) -> None:
    while await state_of(peer, job) != "finished":  # noqa: ASYNC110 - it is another process
        await trio.sleep(LOOK_SECONDS)


# Looking -------------------------------------------------------------------------------------------------------------


async def look(peers: Network, costs: dict[str, Cost]) -> None:
    while True:
        for peer in peers.peers:
            assert peer.process is not None
            cost = costs[peer.name]
            cost.daemon_mb = max(cost.daemon_mb, anonymous_mb(peer.process.pid))
            cost.worker_mb = max(cost.worker_mb, sum(map(anonymous_mb, children(peer.process.pid))))
        await trio.sleep(LOOK_SECONDS)


def anonymous_mb(process: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


async def look_at_disks(peers: Network, costs: dict[str, Cost]) -> None:
    while True:
        for peer in peers.peers:
            size = await trio.to_thread.run_sync(disk_mb, peer.directory)
            costs[peer.name].disk_mb = max(costs[peer.name].disk_mb, size)
        await trio.sleep(DISK_SECONDS)


def disk_mb(folder: Path) -> float:
    """Return the disk space of the files in a folder. A file with several names counts once."""
    blocks = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found = path.stat()
            blocks[found.st_ino] = found.st_blocks * 512 * path.is_file()
    return sum(blocks.values()) / 1e6


# Times ---------------------------------------------------------------------------------------------------------------


def begun_at(watch: Watch) -> float:
    """Return the time at which the first round was open."""
    return next(event.at_ms for event in watch.events if event.kind == "job") / 1000


def seen_of(number: int, watch: Watch) -> Seen | None:
    """Return a round's times in the events of one peer, or None if it was away for a part of the round."""
    closed = dict(watch.rounds())
    opened = closed.get(number - 1) if number else begun_at(watch)
    mine = [event for event in watch.events if event.fields.get("round") == str(number)]
    if opened is None or number not in closed:
        return None
    height = next(event.fields["height"] for event in mine if event.kind == "round")
    decided = (event.at_ms / 1000 for event in watch.events if event.kind == "decided" and event.fields["height"] == height)
    return Seen(
        opened,
        closed[number],
        next(decided),
        {event.fields["peer"]: event.at_ms / 1000 for event in reversed(mine) if event.kind == "proposal"},
        [event.at_ms / 1000 for event in mine if event.kind == "ballot"],
    )


def worker_seconds(peers: Network, job: str) -> dict[int, float]:
    """Return the seconds of the slowest worker in each round.

    They are read from the disks, because a killed peer has lost its events.
    """
    slowest = dict[int, float]()
    for peer in peers.peers:
        with contextlib.closing(PeerDisk(peer.directory)) as disk:
            for number, seconds in disk.figures(job, "worker_seconds").items():
                slowest[number] = max(seconds, slowest.get(number, 0.0))
    return slowest


def times_of(number: int, watches: Sequence[Watch], worker: float, killed: str) -> RoundTimes:
    found = [seen for watch in watches if (seen := seen_of(number, watch))]
    opened, decided, closed = (max(getattr(seen, name) for seen in found) for name in ("opened", "decided", "closed"))
    proposed = max(min(seen.proposals[key] for seen in found if key in seen.proposals) for key in found[0].proposals)
    voted = max(at for seen in found for at in seen.ballots if at <= decided)
    phases = (proposed - opened - worker, voted - proposed, decided - voted, closed - decided)
    return RoundTimes(number, worker, *phases, killed)


# Report --------------------------------------------------------------------------------------------------------------


def conclude(
    options: argparse.Namespace,
    peers: Network,
    size: int,
    first_model: float,
    costs: dict[str, Cost],
    rounds: Sequence[RoundTimes],
    failures: list[str],
) -> int:
    for peer in peers.peers:
        most = DAEMON_MB_MAX if peer.trains else LIGHT_MB_MAX
        if costs[peer.name].daemon_mb > most:
            failures.append(f"{peer.name} uses {costs[peer.name].daemon_mb:.0f} MB, at most {most:.0f} MB are allowed")
    for times in rounds:
        if not times.killed and times.outside > OUTSIDE_SECONDS_MAX:
            failures.append(
                f"round {times.round} takes {times.outside:.1f} s outside the worker, allowed are {OUTSIDE_SECONDS_MAX:g} s"
            )
    columns = ("round", "worker s", "handing over", "judging", "agreeing", "applying", "outside s", "killed")
    rows = []
    for times in rounds:
        figures = (times.worker, times.handing, times.judging, times.agreeing, times.applying, times.outside)
        rows.append([str(times.round), *(f"{value:.1f}" for value in figures), times.killed])
    table = Table(title=f"{size} parameters, first model {first_model:.1f} s")
    kinds = ("peer", "daemon MB (anonymous)", "worker MB (anonymous)", "disk MB", "sent MB", "received MB")
    for kind in kinds:
        table.add_column(kind, justify="left" if kind == "peer" else "right")
    for cost in costs.values():
        table.add_row(cost.peer, *(f"{value:.0f}" for value in tuple(asdict(cost).values())[1:]))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    result = {
        "parameters": size,
        "first_model_seconds": first_model,
        "rounds": [{**asdict(times), "outside": times.outside} for times in rounds],
        "peers": [asdict(cost) for cost in costs.values()],
    }
    return report(options, f"{size} parameters, seconds of each phase", columns, rows, failures, result)


def main() -> int:
    parser = arguments("large", __doc__, peers=None)
    parser.add_argument(
        "--parameters", type=parse_count, default="124M", metavar="N", help="parameters of the model, such as 124M"
    )
    parser.add_argument("--rounds", type=COUNT, default=3, metavar="N", help="rounds of the job")
    parser.add_argument("--victim", choices=("trainer", "voter"), default="trainer", help="role of the peer that is killed")
    parser.add_argument(
        "--after", type=duration, default=2.0, metavar="S", help="seconds from the start of the middle round to the kill"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="another field of the job, such as model.context=32"
    )
    options = parser.parse_args()
    try:
        options.settings = parse_set_options(options.set)
    except UserError as error:
        parser.error(str(error))
    return network.main(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
