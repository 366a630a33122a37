"""Costs of a whole round without computation of updates: `python -m benchmarks.round --json FILE`.

Real daemons on loopback train and vote, with workers that have their updates ready (`benchmarks.free`). The rest of a round is
proposals, exchange of payloads, verdicts, ballots, both phases of agreement, aggregation and the outer step, with every signature
and every durable write. A round's time runs from one applied block to the next, as the first peer sees it.

Beside it stands hivemind's time to average one vector of that size in f16, in an environment of its own (off with
`--no-hivemind`). Each average is a single attempt. The result is that of the smallest matchmaking time with which all averages of
a run are whole, in one of three runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from benchmarks import dispatch
from benchmarks.provenance import write
from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from benchmarks.rivals.processes import reports
from benchmarks.rivals.work import Work
from benchmarks.settings import with_settings
from benchmarks.verdicts import conclude, verdict
from demo.demo_peers import DemoPeer
from demo.network_demo import assign_roles
from demo.shutdown_signals import map_signals_to_interrupt
from peer.settings.data_directory import DataDirectory
from protocol.api import BULK_TRAFFIC_KINDS
from protocol.errors import UserError
from scenarios import network as scenario
from scenarios.network import Watch
from scenarios.trials import COUNT, Parser
from training.job_spec import JobSpec
from training.transformer import ModelSpec

TICKS = os.sysconf("SC_CLK_TCK")
ROUND_SECONDS_MAX = 60.0  # for a busy machine; a longer round hangs
ROUNDS_WARM = 2  # not counted: the job's text is opened, records are new
SECONDS_MAX, SECONDS_AIM = 0.5, 0.25
MODEL = ModelSpec(width=128, layers=5, heads=4, kv_heads=4, hidden=344)  # 1,022,336 parameters
BASE = JobSpec(name="benchmark", model=MODEL, data=bytes(32))
# Each job has one inner step: there are no states to keep, and an audit replays the whole update.
JOBS = {
    "1 bit": {"audit": "off", "byzantine_max": "0"},
    "4 bits, AdamW": {"audit": "sampled", "bits": "4", "outer": "adamw", "audit_rate": "0.1"},
    "1 bit, all audited": {"audit": "full"},
}
MATCHMAKING_SECONDS = (0.5, 1.0, 3.0)  # the least that forms whole groups counts; hivemind's default is 5
RIVAL_RUNS = 3  # per matchmaking time; a failed average ends a run without a result
RIVAL_SECONDS_MAX = 600.0


@dataclass(frozen=True)
class Task:
    peers: int
    rounds: int
    seed: int = 0
    model: ModelSpec = MODEL

    def row(self, name: str, reason: str = "") -> Row:
        """Return a row without measurements."""
        return Row(name, self.peers, self.model.parameters, 0, self.seed, reason=reason)


@dataclass
class Row:
    """Measurements of a job. None: not measured; `reason` tells why a row has none."""

    name: str
    peers: int
    parameters: int
    rounds: int
    seed: int
    seconds: float | None = None  # median
    seconds_least: float | None = None
    daemon_seconds: float | None = None  # processor time per round of one peer's daemon, and of its worker
    worker_seconds: float | None = None
    bytes_per_peer: dict[str, float] = field(default_factory=dict)  # sent in a round, by kind
    heights: float | None = None  # decided in a round
    fsyncs: float | None = None  # of one peer in a round, for files and folders
    commits: float | None = None  # of its database
    reason: str = ""
    failed: list[str] = field(default_factory=list)  # earlier runs of the rival, with reasons


@dataclass
class _Look:
    """Figures of all peers at one moment."""

    at: float
    daemons: list[float]
    workers: list[float]
    sent: list[dict[str, int]]
    commits: list[int]
    heights: int


async def ours(name: str, settings: Mapping[str, str], task: Task) -> Row:
    place = Path(tempfile.mkdtemp(prefix="folkmoot-round-"))
    options = argparse.Namespace(peers=task.peers, malicious=0, seed=task.seed, attack="", mixed=False)
    peers = assign_roles(options, place)
    for peer in peers:
        peer.trains, peer.module = True, ("benchmarks.free",)
        peer.environment = {"PYTHONPATH": str(dispatch.REPOSITORY), "FREE_FSYNCS": str(place / f"fsyncs-{peer.number}")}
    network = scenario.Network(scenario.network_demo.Demo(options, place, peers))
    try:
        await network.start()
        before, after, seconds = await _measure(network, settings, task)
        await trio.to_thread.run_sync(network.stop)
        times = [float(line) for peer in peers for line in (place / f"fsyncs-{peer.number}").read_text().split()]
        return _row(task.row(name), before, after, seconds, sum(before.at <= at < after.at for at in times))
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(network.stop)
        shutil.rmtree(place, ignore_errors=True)


def attempt(name: str, settings: Mapping[str, str], task: Task) -> Row:
    """Measure a job. If it fails, its row has the reason, and the others still run."""
    try:
        return trio.run(partial(ours, name, settings, task))
    except (UserError, trio.TooSlowError, OSError) as error:
        failure: BaseException = error
    except BaseExceptionGroup as group:  # of peers in one nursery
        known, others = group.split((UserError, trio.TooSlowError, OSError))
        if known is None or others is not None:
            raise
        failure = known
    return task.row(name, f"{type(failure).__name__}: {failure}")


async def _measure(network: scenario.Network, settings: Mapping[str, str], task: Task) -> tuple[_Look, _Look, list[float]]:
    watch, rounds = Watch(network.peers[0]), task.rounds
    common = {f"model.{name}": str(value) for name, value in asdict(task.model).items()}
    common |= {"local_steps": "1", "seed": str(task.seed)}
    with trio.fail_after(ROUND_SECONDS_MAX):
        while (await watch.peer.client.status()).links < len(network.peers) - 1:  # noqa: ASYNC110 - it is another process
            await trio.sleep(0.1)
    await network.train({**common, **settings}, rounds + ROUNDS_WARM + 1)
    with trio.fail_after(ROUND_SECONDS_MAX * ROUNDS_WARM):
        await watch.until_round(ROUNDS_WARM - 1)
    before = await _look(network)
    with trio.fail_after(ROUND_SECONDS_MAX * rounds):
        await watch.until_round(ROUNDS_WARM + rounds - 1)
    after = await _look(network)
    durations = watch.durations()
    return before, after, [durations[number] for number in range(ROUNDS_WARM, ROUNDS_WARM + rounds)]


async def _look(network: scenario.Network) -> _Look:
    stats = [await peer.client.stats() for peer in network.peers]
    return _Look(
        at=time.time(),
        daemons=[_processor_seconds(peer.process.pid) for peer in network.peers if peer.process],
        workers=[sum(map(_processor_seconds, scenario.children(peer.process.pid))) for peer in network.peers if peer.process],
        sent=[view.bytes_sent for view in stats],
        commits=[_commits(peer) for peer in network.peers],
        heights=stats[0].decisions,
    )


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _commits(peer: DemoPeer) -> int:
    with closing(sqlite3.connect(DataDirectory(peer.directory).ledger, timeout=30)) as database:
        count: int = database.execute("SELECT value FROM meta WHERE key = 'transactions'").fetchone()[0]
    return count


def _row(empty: Row, before: _Look, after: _Look, seconds: list[float], fsyncs: int) -> Row:
    peers, rounds = len(before.daemons), len(seconds)

    def each(first: list[float] | list[int], last: list[float] | list[int]) -> float:
        return (sum(last) - sum(first)) / peers / rounds

    return replace(
        empty,
        rounds=rounds,
        seconds=statistics.median(seconds),
        seconds_least=min(seconds),
        daemon_seconds=each(before.daemons, after.daemons),
        worker_seconds=each(before.workers, after.workers),
        bytes_per_peer={
            kind: each([view[kind] for view in before.sent], [view[kind] for view in after.sent]) for kind in after.sent[0]
        },
        heights=(after.heights - before.heights) / rounds,
        fsyncs=fsyncs / peers / rounds,
        commits=each(before.commits, after.commits),
    )


# The rival ------------------------------------------------------------------------------------------------------------


def hivemind(task: Task) -> list[Row]:
    """Measure hivemind's average of one such vector in f16, with and without the time to find the group."""
    missing = task.row("hivemind f16")
    try:
        python = str(environment.hivemind())
    except Unavailable as error:
        return [replace(missing, reason=str(error))]
    failed: list[str] = []
    for seconds in MATCHMAKING_SECONDS:
        for _ in range(RIVAL_RUNS):
            try:
                return [replace(row, failed=failed) for row in _averaged(python, task, seconds)]
            except Unavailable as error:
                failed.append(f"{seconds:g} s to meet: {error}")
                print(f"hivemind: {failed[-1]}", file=sys.stderr, flush=True)
    return [replace(missing, reason=failed[-1], failed=failed)]


def _averaged(python: str, task: Task, matchmaking_seconds: float) -> list[Row]:
    spec = replace(BASE, model=task.model, rounds=task.rounds)
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        work = Work(folder, "", spec.encode().hex(), ROUNDS_WARM, task.peers, 1, matchmaking_seconds)
        found = reports(python, "hivemind_averager", work, task.peers, RIVAL_SECONDS_MAX)
    row = replace(task.row(f"hivemind f16, {matchmaking_seconds:g} s to meet"), rounds=task.rounds)
    whole, exchange = zip(*((sum(times), times[1]) for times in found[0]["times"]), strict=True)
    return [
        replace(
            row,
            seconds=statistics.median(whole),
            seconds_least=min(whole),
            daemon_seconds=statistics.mean(report["processor_seconds"] for report in found),  # of all its processes
            bytes_per_peer={"all": statistics.mean(report["bytes_sent"] for report in found)},
        ),
        replace(row, name="the exchange alone", seconds=statistics.median(exchange), seconds_least=min(exchange)),
    ]


# Report ---------------------------------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    table = Table(title=f"one round of {rows[0].peers} peers, {rows[0].parameters:,} parameters")
    headings = ("", "p50 ms", "least", "CPU ms: daemon", "worker", "kB sent", "of them payloads", "heights", "fsyncs", "commits")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        if row.reason:
            table.add_row(row.name, row.reason)
            continue
        kinds = row.bytes_per_peer
        sent = sum(count for kind, count in kinds.items() if kind not in BULK_TRAFFIC_KINDS) if kinds else None
        figures = [_cell(value, 1e3, 0) for value in (row.seconds, row.seconds_least, row.daemon_seconds, row.worker_seconds)]
        figures += [_cell(value, 1e-3, 1) for value in (sent, kinds.get("blobs"))]
        table.add_row(row.name, *figures, *(_cell(value, 1, 1) for value in (row.heights, row.fsyncs, row.commits)))
    Console(width=130).print(table)


def verdicts(rows: list[Row]) -> list[str]:
    own = [row for row in rows if row.name in JOBS]
    found = [verdict(False, f"{row.name}: not measured: {row.reason}") for row in own if row.reason]
    seconds = [row.seconds for row in own if row.seconds and JOBS[row.name]["audit"] != "full"]
    text = f"a round, not audited in full: p50 ≤ {SECONDS_MAX:g} s (aim {SECONDS_AIM:g})"
    return found + ([verdict(max(seconds) <= SECONDS_MAX, f"{text}: {max(seconds):.3f}")] if seconds else [])


def _cell(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def main() -> int:
    parser = Parser("round", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--peers", type=COUNT, default=4, metavar="N", help="peers of one network, which all train and vote")
    parser.add_argument("--rounds", type=COUNT, default=20, metavar="N", help="measured rounds of each job")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of networks and jobs, with a row for each"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the model: width, layers, …")
    parser.add_argument("--jobs", nargs="*", choices=tuple(JOBS), default=tuple(JOBS), help="measured jobs")
    parser.add_argument("--no-hivemind", dest="hivemind", action="store_false", help="skip hivemind")
    options = parser.parse_args()
    if not options.jobs and not options.hivemind:
        parser.error("nothing to measure: give a name to --jobs")
    try:
        model = with_settings(BASE, options.set).model
    except UserError as error:
        parser.error(str(error))
    map_signals_to_interrupt()
    started, rows = time.time(), list[Row]()

    def measured(*new: Row) -> None:
        rows.extend(new)
        for row in new:
            print(f"{row.name}: {row.reason or _cell(row.seconds, 1e3, 0) + ' ms'}", file=sys.stderr, flush=True)
        write(
            options.json,
            started,
            {"processor": dispatch.processor(), "seeds": list(options.seeds), "rows": [asdict(row) for row in rows]},
        )

    for name, seed in product(options.jobs, options.seeds):
        measured(attempt(name, JOBS[name], Task(options.peers, options.rounds, seed, model)))
    if options.hivemind:
        measured(*hivemind(Task(options.peers, options.rounds, 0, model)))
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
