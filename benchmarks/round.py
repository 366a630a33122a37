"""What a whole round costs beside computing the updates: `python -m benchmarks.round --json FILE`.

Real daemons on loopback, all of which train and vote, with workers that have their updates ready (`benchmarks.free`). What is
left is proposals, the exchange of payloads, judging, ballots, both phases of agreement, aggregation and the outer step, with
every signature and every durable write. The time of a round is from one applied block to the next, as the first peer sees it.

Beside it, what hivemind takes to average one vector of that size in f16, in an environment of its own (`--no-hivemind`: not).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from benchmarks import dispatch
from benchmarks.provenance import provenance
from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from benchmarks.rivals.processes import reports
from benchmarks.rivals.work import Work
from peer.datadir import DataDirectory
from peer.demo import DemoPeer, cast_roles
from protocol.api import PARTS
from scenarios import network as scenario
from scenarios.network import Watch
from scenarios.trials import COUNT, Parser
from training.spec import JobSpec, ModelSpec

TICKS = os.sysconf("SC_CLK_TCK")
ROUND_SECONDS_MAX = 60.0  # on a busy machine; then something hangs
ROUNDS_WARM = 2  # not counted: the job's text is opened, records are new
SECONDS_AIM = 0.5
# 1,022,336 parameters.
MODEL = ModelSpec(width=128, layers=5, heads=4, kv_heads=4, hidden=344)
SETTINGS = {f"model.{name}": str(getattr(MODEL, name)) for name in ("width", "layers", "heads", "kv_heads", "hidden")}
# Each with one inner step: there are no states to keep, and an audit replays the whole update.
JOBS = {
    "dense 1 bit": {"audit": "off"},
    "sparse 64": {"audit": "off", "compression": "sparse", "keep": "64"},
    "4 bits, AdamW": {"audit": "sampled", "bits": "4", "outer": "adamw", "audit_rate": "0.1"},
    "dense 1 bit, all audited": {"audit": "full"},
}
MATCHMAKING_SECONDS = (0.5, 1.0, 3.0)  # the least that forms whole groups counts; hivemind's default is 5
RIVAL_SECONDS_MAX = 600.0


@dataclass
class Row:
    name: str
    peers: int
    parameters: int
    rounds: int
    seconds: float = 0.0  # p50
    seconds_least: float = 0.0
    daemon_seconds: float = 0.0  # processor time of one peer's daemon, and of its worker, for a round
    worker_seconds: float = 0.0
    bytes_per_peer: dict[str, float] = field(default_factory=dict)  # sent in a round, by kind
    heights: float = 0.0  # decided in a round
    fsyncs: float = 0.0  # of one peer in a round, of files and folders
    commits: float = 0.0  # of its database
    reason: str = ""  # why it was not measured


@dataclass
class _Look:
    """Figures of all peers at one moment."""

    at: float
    daemons: list[float]
    workers: list[float]
    sent: list[dict[str, int]]
    commits: list[int]
    heights: int


async def ours(name: str, count: int, rounds: int) -> Row:
    place = Path(tempfile.mkdtemp(prefix="folkmoot-round-"))
    peers = cast_roles(argparse.Namespace(peers=count, malicious=0, seed=0, attack="", mixed=False), place)
    for peer in peers:
        peer.trains, peer.module = True, ("benchmarks.free",)
        peer.environment = {"PYTHONPATH": str(dispatch.REPOSITORY), "FREE_FSYNCS": str(place / f"fsyncs-{peer.number}")}
    options = argparse.Namespace(peers=count, malicious=0, seed=0, attack="", mixed=False)
    network = scenario.Network(scenario.demo.Demo(options, place, peers))
    try:
        await network.start()
        before, after, seconds = await _measure(network, JOBS[name], rounds)
        await trio.to_thread.run_sync(network.stop)
        times = [float(line) for peer in peers for line in (place / f"fsyncs-{peer.number}").read_text().split()]
        return _row(name, before, after, seconds, sum(before.at <= at < after.at for at in times))
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(network.stop)
        shutil.rmtree(place, ignore_errors=True)


async def _measure(network: scenario.Network, settings: dict[str, str], rounds: int) -> tuple[_Look, _Look, list[float]]:
    watch = Watch(network.peers[0])
    with trio.fail_after(ROUND_SECONDS_MAX):
        while (await watch.peer.client.status()).links < len(network.peers) - 1:  # noqa: ASYNC110 - it is another process
            await trio.sleep(0.1)
    await network.train({**SETTINGS, "local_steps": "1", **settings}, rounds + ROUNDS_WARM + 1)
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


def _row(name: str, before: _Look, after: _Look, seconds: list[float], fsyncs: int) -> Row:
    peers, rounds = len(before.daemons), len(seconds)

    def each(first: list[float] | list[int], last: list[float] | list[int]) -> float:
        return (sum(last) - sum(first)) / peers / rounds

    return Row(
        name=name,
        peers=peers,
        parameters=MODEL.parameters,
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


def hivemind(peers: int, rounds: int) -> list[Row]:
    """Its average of one such vector in f16: with finding the group, and the exchange alone."""
    reason = ""
    for seconds in MATCHMAKING_SECONDS:
        try:
            return _averaged(peers, rounds, seconds)
        except Unavailable as error:
            reason = str(error)
    return [Row("hivemind f16", peers, MODEL.parameters, 0, reason=reason)]


def _averaged(peers: int, rounds: int, matchmaking_seconds: float) -> list[Row]:
    python = str(environment.interpreter("hivemind", environment.HIVEMIND))
    spec = JobSpec(name="benchmark", model=MODEL, data=bytes(32), rounds=rounds)
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        work = Work(folder, "", spec.encode().hex(), ROUNDS_WARM, peers, 1, matchmaking_seconds)
        found = reports(python, "hivemind_averager", work, peers, RIVAL_SECONDS_MAX)
    row = Row(f"hivemind f16, {matchmaking_seconds:g} s to meet", peers, MODEL.parameters, rounds)
    row.daemon_seconds = statistics.mean(report["processor_seconds"] for report in found)
    sent = statistics.mean(report["bytes_sent"] for report in found)
    row.bytes_per_peer = {"tensors": sent, "blobs": sent}  # the second is a part of the first, as in our own counters
    whole, exchange = zip(*((sum(times), times[1]) for times in found[0]["times"]), strict=True)
    return [
        replace(row, seconds=statistics.median(whole), seconds_least=min(whole)),
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
        sent = sum(count for kind, count in row.bytes_per_peer.items() if kind not in PARTS)
        seconds = (row.seconds, row.seconds_least, row.daemon_seconds, row.worker_seconds)
        figures = [f"{1e3 * value:.0f}" for value in seconds]
        figures += [f"{value / 1e3:.1f}" for value in (sent, row.bytes_per_peer.get("blobs", 0.0))]
        table.add_row(row.name, *figures, *(f"{value:.1f}" for value in (row.heights, row.fsyncs, row.commits)))
    Console(width=130).print(table)
    own = [row for row in rows if row.name in JOBS and JOBS[row.name]["audit"] != "full"]
    if own:
        worst = max(row.seconds for row in own)
        print(
            f"{'held  ' if worst <= SECONDS_AIM else 'MISSED'} a round, not audited in full: p50 ≤ {SECONDS_AIM:g} s: {worst:.3f}"
        )


def main() -> int:
    parser = Parser("round", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--peers", type=COUNT, default=4, metavar="N", help="of one network, each of which trains and votes")
    parser.add_argument("--rounds", type=COUNT, default=20, metavar="N", help="measured, of each job")
    parser.add_argument("--jobs", nargs="*", choices=tuple(JOBS), default=tuple(JOBS), help="what is measured")
    parser.add_argument("--no-hivemind", dest="hivemind", action="store_false", help="ours alone")
    options = parser.parse_args()
    started, rows = time.time(), []
    for name in options.jobs:
        rows.append(trio.run(partial(ours, name, options.peers, options.rounds)))
        print(f"{name}: {1e3 * rows[-1].seconds:.0f} ms", file=sys.stderr, flush=True)
    rows += hivemind(options.peers, options.rounds) if options.hivemind else []
    if not rows:
        parser.error("nothing is to be measured: --jobs needs a name")
    show(rows)
    if options.json:
        about = {**provenance(started), "processor": dispatch.processor()}
        options.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
