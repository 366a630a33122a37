"""The same training by ours and by rivals, side by side: `python -m benchmarks.training --json FILE`.

All have one model, text, schedule and global batch, and four peers with one torch thread each.

- Ours are real daemons with every signature, vote and durable write.
- gloo is `torch.distributed` without any safety.
- hivemind is `hivemind.Optimizer` with small synchronous updates, in an environment of its own.
- single is one process with the whole batch.

Steps are optimizer steps of the global batch; H of them make one of our rounds.

Bytes are those that a peer sends for one update (a round of ours), measured for all by the kernel's counters of TCP sockets.
Audit reveals, which our daemon counts, are subtracted and have a column of their own. A run that was stopped after `--seconds`
has no loss, because it has seen fewer samples than the others. Sampled audits are a fifth of a replay per proposal, or a tenth of
one with 15 steps; `audit-full` re-executes every proposal, and `audit-off` none. Rows that a bound compares take turns, of which
the median counts, and are compared seed by seed. `--resume` keeps the complete seeds in the file of an interrupted run with the
same commit and settings, so all rows of a seed are from one run. It searches again for hivemind's fastest variant.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import earlier, write
from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from benchmarks.rivals.processes import pin, reports
from benchmarks.rivals.sockets import Traffic
from benchmarks.rivals.work import LOCAL, SETUPS, Result, Work
from benchmarks.settings import with_settings
from benchmarks.simulated import engine_of, held_out_nats, text_file
from benchmarks.verdicts import conclude, verdict
from demo.demo_peers import Demo, DemoPeer, PeerDisk
from demo.network_demo import assign_roles
from demo.shutdown_signals import map_signals_to_interrupt
from peer.settings.data_directory import DataDirectory
from protocol.api import BULK_TRAFFIC_KINDS, TrainRequest
from protocol.errors import FolkmootError, UserError
from scenarios import network as scenario
from scenarios.emulation.link_profiles import steady_profile
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import COUNT, Parser, duration
from training.job_spec import PRESETS, AuditMode, InnerOptimizerKind, JobSpec
from training.model_store import JobModelStore
from training.transformer import ModelSpec

MODEL = ModelSpec(width=128, layers=4, heads=4, kv_heads=4, hidden=348, context=64)  # 0.83M parameters
BASE = JobSpec(name="benchmark", data=bytes(32), model=MODEL)
PEERS = 4  # by default
GLOBAL_BATCH = 128  # sequences
LOCAL_STEPS = 15  # of ours-h15-1bit
WARMUP = 0.05  # share of all steps
WARM_UPDATES = 2  # not timed: first calls are slow everywhere
# Variants of hivemind: seconds of matchmaking, and setup. The one with most updates per second in short trials counts.
VARIANTS = tuple(product((1.0, 3.0), SETUPS))
TRIAL_STEPS = 20
LEAVE_SECONDS = 300.0  # beyond `--seconds`: imports, the current average, and waits for each other at the end
REVEALS = "reveals"  # traffic of audits only, in a peer's own counters
MATCHMAKING_H15 = 1.0  # of hivemind with local steps, whose averages run in the background
FAR = 0.1  # seconds of a round trip between continents; these links are not slow otherwise
WARM_SECONDS_MAX = 120.0  # for our first rounds, which start with empty caches
LAPSED_MAX = 0.05  # of the completed audits; beyond it a speed would be that of a job without audits
RATIOS_MIN = {("ours-h1", "gloo"): 0.6, ("ours-h15-1bit-audit-off", "without-network"): 0.9}  # the second without audits
PINNED_MIN = RATIOS_MIN | {("ours-h1", "gloo"): 0.5}  # gloo has only its one process on a core
COMPARED = (
    *RATIOS_MIN,
    ("ours-h1-audit-full", "gloo"),
    ("hivemind", "gloo"),
    ("hivemind-h15", "without-network"),
    ("ours-h15-1bit", "without-network"),
    ("ours-h15-1bit", "ours-h15-1bit-audit-off"),
    ("ours-h15-1bit-audit-full", "without-network"),
)
TURNS = 3  # of the pairs of RATIOS_MIN in each seed, in turn, because the speed of a shared machine changes within minutes
MEGABYTES_MAX = {"ours-h1": 1.5}
AUDITED_MEGABYTES_MAX = {"ours-h1": 2.0, "ours-h15-1bit": 1.0}  # with the traffic of audits
WORSE_MAX = 1.02  # held-out loss of 4-bit gradients relative to gloo's float32 ones
HEADINGS = ("", "samples/s", "kB/peer/update", "audit kB", "audits (lapsed)", "held-out nats", "roots", "updates")


@dataclass
class Row:
    """Medians over the seeds. None: not measured, for the reason in `reason`."""

    name: str
    samples_per_second: float | None = None
    bytes_per_peer_per_update: float | None = None  # sent, without audit reveals
    heldout_nats: float | None = None  # per token; None also if the run did not reach its last step
    distinct_roots: int | None = None  # among the replicas at the end; the most of any seed
    audit_bytes_per_peer_per_update: float | None = None
    audits: int | None = None  # drawn audits, reported or not by the end; None: not sampled
    lapsed: int | None = None  # those without a timely report
    kernel_bytes_per_peer_per_update: float | None = None  # all traffic together
    updates: int | None = None
    samples: int | None = None
    seconds: float | None = None  # timed
    roots: list[str] = field(default_factory=list)  # of the model's whole state; for rivals the SHA-256 of parameters
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    failed: list[str] = field(default_factory=list)  # seeds without measurements, with reasons


@dataclass(frozen=True)
class Task:
    text: Path
    steps: int
    seed: int
    rate: float
    seconds_max: float
    model: ModelSpec = MODEL
    peers: int = PEERS
    pinned: bool = False  # each peer with its child processes on a core of its own

    @property
    def cores(self) -> list[int]:
        """The core of each peer, or none if the system chooses."""
        return sorted(os.sched_getaffinity(0))[: self.peers] if self.pinned else []

    def spec(self, **settings: Any) -> JobSpec:
        """Return the specification of a job that ends after `steps` optimizer steps; H of them are a round."""
        values = {**PRESETS["per-step"], **settings}
        rounds = max(1, self.steps // values["local_steps"])
        return JobSpec(
            name="benchmark",
            model=self.model,
            data=bytes(32),
            seed=self.seed,
            batch=GLOBAL_BATCH // self.peers,
            micro_batch=GLOBAL_BATCH // self.peers,
            inner_rate=self.rate,
            **{**values, "rounds": rounds, "warmup_rounds": max(1, round(WARMUP * rounds))},
        ).validated()


# The rivals -----------------------------------------------------------------------------------------------------------


def rival(module: str, processes: int, threads: int, task: Task, python: str = sys.executable, **settings: Any) -> list[Result]:
    """Return the reports of all processes of `benchmarks.rivals.MODULE`.

    Raises `Unavailable` with the last output of a process that fails.
    """
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        spec = task.spec()
        warm = min(WARM_UPDATES, spec.rounds - 1)
        most = task.seconds_max
        work = Work(folder, str(task.text), spec.encode().hex(), warm, task.peers, threads, seconds_max=most, **settings)
        cores = task.cores if processes > 1 else []
        return [Result(**report) for report in reports(python, module, work, processes, most + LEAVE_SECONDS, cores)]


def row_of(name: str, task: Task, results: list[Result], **settings: Any) -> Row:
    """Make a row. Speeds are summed: a process that waits for a missing one at the end only delays itself."""
    spec = task.spec()
    whole = (spec.rounds - min(WARM_UPDATES, spec.rounds - 1)) * task.peers * spec.batch
    updates = statistics.median_low(result.updates for result in results)
    seconds = max(result.seconds for result in results)
    samples = sum(result.samples for result in results)
    sent = statistics.mean(result.bytes_sent for result in results) / max(1, updates)
    return Row(
        name,
        samples_per_second=sum(result.samples / result.seconds for result in results),
        bytes_per_peer_per_update=sent,
        heldout_nats=statistics.mean(result.heldout_nats for result in results) if samples == whole else None,
        distinct_roots=len({result.root for result in results}),
        roots=sorted({result.root for result in results}),
        kernel_bytes_per_peer_per_update=sent,
        updates=updates,
        samples=samples,
        seconds=seconds,
        settings=settings,
    )


def single(task: Task) -> Row:
    threads = os.cpu_count() or 1
    return row_of("single", task, rival("single", 1, threads, task), threads=threads)


def alone(task: Task) -> Row:
    return row_of("without-network", task, rival("alone", task.peers, 1, task))


def gloo(task: Task) -> Row:
    return row_of("gloo", task, rival("gloo", task.peers, 1, task))


def hivemind(task: Task) -> Row:
    """Measure the fastest variant, which trials of a few steps determine once for all seeds.

    A variant that fails does not stop the others.
    """
    environment.hivemind()  # without hivemind no variant is tried
    chosen, tried, failed = _variant(replace(task, steps=min(task.steps, TRIAL_STEPS), seed=0))
    row = _hivemind("hivemind", task, *chosen)
    row.settings |= {"tried": tried, "failed": failed}
    return row


@lru_cache(maxsize=1)
def _variant(task: Task) -> tuple[tuple[float, str], list[dict[str, Any]], list[str]]:
    speeds, failed = dict[tuple[float, str], float](), list[str]()
    for seconds, setup in VARIANTS:
        try:
            row = _hivemind("", task, seconds, setup)  # by updates, since samples are also computed while a peer finds no group
            speeds[seconds, setup] = (row.updates or 0) / (row.seconds or math.inf)
        except Unavailable as error:
            failed.append(f"{seconds:g} s to meet, {setup}: {error}")
    if not speeds:
        raise Unavailable("; ".join(failed))
    tried = [
        {"matchmaking_seconds": seconds, "setup": setup, "updates_per_second": speed}
        for (seconds, setup), speed in speeds.items()
    ]
    return max(speeds, key=lambda variant: speeds[variant]), tried, failed


def hivemind_h15(task: Task) -> Row:
    """Measure fifteen separate steps between means of all parameters, hivemind's closest equivalent of our local steps."""
    return _hivemind("hivemind-h15", task, MATCHMAKING_H15, LOCAL)


def _hivemind(name: str, task: Task, seconds: float, setup: str) -> Row:
    python = str(environment.hivemind())
    each = LOCAL_STEPS if setup == LOCAL else 1
    settings = {"matchmaking_seconds": seconds, "setup": setup, "local_steps": each}
    return row_of(name, task, rival("hivemind_peer", task.peers, 1, task, python, **settings), **settings)


# Ours -----------------------------------------------------------------------------------------------------------------


class Trainers(Demo):
    """A demo in which all peers train and none evaluates, because evaluations would take processor time."""

    @property
    def watched(self) -> DemoPeer:
        return replace(self.peers[0])  # equal, but not the one that would be started with --evaluate


def ours(name: str, task: Task, round_trip: float = 0.0, **settings: Any) -> Row:
    """Measure our daemons. `round_trip` applies to every link between two peers, in seconds."""
    return trio.run(partial(_ours, name, task, task.spec(**settings), settings, round_trip))


async def _ours(name: str, task: Task, spec: JobSpec, settings: dict[str, Any], round_trip: float) -> Row:
    profile = steady_profile("far", math.inf, math.inf, 1e3 * round_trip)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(profile)) if round_trip else None
        row = await _trained(name, task, spec, settings, proxy)
    row.settings |= {"round_trip": round_trip}
    return row


async def _trained(name: str, task: Task, spec: JobSpec, settings: dict[str, Any], proxy: Proxy | None) -> Row:
    place = Path(tempfile.mkdtemp(prefix="folkmoot-bench-"))
    options = argparse.Namespace(peers=task.peers, malicious=0, seed=task.seed, attack="", mixed=False)
    peers = assign_roles(options, place)
    for peer in peers:
        peer.trains = True
        if proxy:
            proxy.dress(peer)
    network = scenario.Network(Trainers(options, place, peers))
    try:
        await network.start()
        for peer, core in zip(network.peers, task.cores, strict=False):
            if peer.process:
                pin(peer.process.pid, core)
        row = await _timed(name, network, task, spec)
        row.settings = {key: getattr(value, "value", value) for key, value in settings.items()}
        await trio.to_thread.run_sync(network.stop)
        return await trio.to_thread.run_sync(_read, row, network, task, spec)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(network.stop)
        shutil.rmtree(place, ignore_errors=True)


async def _timed(name: str, network: scenario.Network, task: Task, spec: JobSpec) -> Row:
    """Follow the job to its end, or for `seconds_max`. Time and bytes count from the end of its first rounds."""
    first = network.peers[0]
    watch, warm = scenario.Watch(first), min(WARM_UPDATES, spec.rounds - 1)
    with ExitStack() as stack:
        traffic = [stack.enter_context(closing(Traffic(peer.process.pid))) for peer in network.peers if peer.process]
        request = TrainRequest("benchmark", str(task.text), spec.rounds, 0, overrides(spec), accept_risk=True)
        await first.client.start_job(request)
        with trio.move_on_after(WARM_SECONDS_MAX) as scope:
            await watch.until_round(warm - 1) if warm else None
            before = await sent(network, traffic)
        if scope.cancelled_caught:
            raise Unavailable(f"{warm} rounds were not done after {WARM_SECONDS_MAX:.0f} s")
        with trio.move_on_after(task.seconds_max):
            await watch.until_round(spec.rounds - 1)
            await _everybody_at(network, spec.rounds)
        closed = dict(watch.rounds())
        spent = await sent(network, traffic)
        spent.subtract(before)
        audits = await first.client.audits(1)
    last = max(closed, default=-1)
    if last < max(warm, 1):
        raise Unavailable(f"no round was closed in {task.seconds_max:.0f} s")
    seconds = closed[last] - (closed[warm - 1] if warm else min(closed.values()))
    views = [view for view in await first.client.rounds(spec.rounds) if warm <= view.round <= last]
    accepted = sum(verdict == "accept" for view in views for verdict in view.verdicts.values())
    samples, each = accepted * spec.batch * spec.local_steps, task.peers * (last + 1 - warm)
    lapsed = sum(standing.reports_lapsed for standing in audits.records)
    sampled = spec.audit is AuditMode.SAMPLED
    return Row(
        name,
        samples_per_second=samples / seconds,
        bytes_per_peer_per_update=(spent["kernel"] - spent["reveals"]) / each,
        audit_bytes_per_peer_per_update=spent["reveals"] / each,
        audits=lapsed + sum(standing.reports for standing in audits.records) if sampled else None,
        lapsed=lapsed if sampled else None,
        kernel_bytes_per_peer_per_update=spent["kernel"] / each,
        updates=last + 1 - warm,
        samples=samples,
        seconds=seconds,
    )


def overrides(spec: JobSpec) -> dict[str, str]:
    """Return the fields of a job that differ from the defaults, as a person would type them."""
    base = JobSpec(name=spec.name, data=spec.data)
    fields = {name: value for name, value in vars_of(spec).items() if value != vars_of(base)[name]}
    model = {f"model.{name}": str(value) for name, value in asdict(spec.model).items()}
    free = {name: str(value) for name, value in fields.items() if name not in ("name", "data", "model", "rounds", "tokenizer")}
    # Only rounds before the closing ones are measured. The closing ones would be a third of a job as short as this.
    usual = {name: str(getattr(spec, name)) for name in ("byzantine_max", "compression_warmup_rounds", "final_full_audit_rounds")}
    return free | model | usual


def vars_of(spec: JobSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


async def _everybody_at(network: scenario.Network, number: int) -> None:
    """Wait until every peer has applied the last round."""
    for peer in network.peers:
        while not all(view.round >= number for view in await peer.client.jobs()):  # noqa: ASYNC110 - it is another process
            await trio.sleep(0.05)


async def sent(network: scenario.Network, traffic: Sequence[Traffic]) -> Counter[str]:
    """Return the bytes that all peers have sent by the kernel's count, and the audit reveals by their own.

    Both counts of one peer are read together, because it may show an auditor another megabyte in between.
    """
    counts = Counter[str]()
    for peer, kernel in zip(network.peers, traffic, strict=True):
        by_kind = (await peer.client.stats()).bytes_sent  # first the peer's count: the kernel's can only be larger afterwards
        counts["kernel"] += kernel.sent()
        counts["reveals"] += by_kind.get(REVEALS, 0)
        counts["own"] += sum(count for kind, count in by_kind.items() if kind not in BULK_TRAFFIC_KINDS)
    if counts["kernel"] < counts.pop("own"):
        raise Unavailable("the kernel's counters of TCP sockets are below the bytes that the peers sent")
    return counts


def _read(row: Row, network: scenario.Network, task: Task, spec: JobSpec) -> Row:
    """Read the last round that the disks of all stopped peers hold."""
    held = [model_roots(peer) for peer in network.peers]
    common = set(held[0]).intersection(*held)
    if not common:
        raise Unavailable("no round was applied by all peers")
    job, last = max(common, key=lambda place: place[1])
    row.roots = sorted({roots[job, last] for roots in held})
    row.distinct_roots = len(row.roots)
    if last == spec.rounds - 1:
        model = JobModelStore(DataDirectory(network.peers[0].directory).models).open_model(bytes.fromhex(job), spec.rounds)
        row.heldout_nats = held_out_nats(engine_of(spec, task.text), np.array(model.parameters))
    return row


def model_roots(peer: DemoPeer) -> dict[tuple[str, int], str]:
    """Return the root of every model that a peer has reached: (job, round) → root."""
    with closing(PeerDisk(peer.directory)) as disk:
        return disk.model_roots()


DEFAULT = JobSpec(name="default")
# Default values of the fields that the preset `per-step` sets, without those of its audits.
OF_AUDITS = {"audit", "audit_rate", "auditors", "audit_window"}
OF_UPDATES = {name: getattr(DEFAULT, name) for name in PRESETS["per-step"] if name not in OF_AUDITS}
# Rivals have AdamW. One of ten updates is replayed.
ONE_BIT_H15 = {
    **OF_UPDATES,
    **PRESETS["local"],
    "inner": InnerOptimizerKind.ADAMW,
    "local_steps": LOCAL_STEPS,
    "audit_rate": 0.05,
}
MEASURED: dict[str, Callable[[Task], Row]] = {
    "single": single,
    "without-network": alone,
    "gloo": gloo,
    "hivemind": hivemind,
    "hivemind-h15": hivemind_h15,
    "ours-h1": lambda task: ours("ours-h1", task),
    "ours-h1-100ms": lambda task: ours("ours-h1-100ms", task, round_trip=FAR),
    "ours-h15-1bit": lambda task: ours("ours-h15-1bit", task, **ONE_BIT_H15),
    "ours-h15-1bit-audit-off": lambda task: ours("ours-h15-1bit-audit-off", task, **ONE_BIT_H15, audit="off", byzantine_max=0),
    "ours-h1-audit-full": lambda task: ours("ours-h1-audit-full", task, audit="full"),
    "ours-h15-1bit-audit-full": lambda task: ours("ours-h15-1bit-audit-full", task, **ONE_BIT_H15, audit="full"),
}


# Report ---------------------------------------------------------------------------------------------------------------


def middle(rows: list[Row]) -> Row:
    """Merge the rows of several seeds: medians, the most distinct roots, and the reasons of missing ones.

    A figure that one of them lacks is not measured, because a median of the others would hide this.
    """
    measured = [row for row in rows if not row.reason]
    if not measured:
        return rows[0]
    merged = replace(measured[0], failed=[row.reason for row in rows if row.reason])
    for key in Row.__dataclass_fields__:
        values = [getattr(row, key) for row in measured]
        if None in values:
            setattr(merged, key, None)
        elif isinstance(values[0], (int, float)):
            setattr(merged, key, (statistics.median_low if isinstance(values[0], int) else statistics.median)(values))
    merged.distinct_roots = max(row.distinct_roots or 0 for row in measured)
    return merged


def ratios(runs: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Return the ratios of throughputs in one run: medians over the seeds."""
    found = {
        f"{left} / {right}": [
            one.samples_per_second / other.samples_per_second
            for one, other in zip(runs.get(left, ()), runs.get(right, ()), strict=False)
            if one.samples_per_second and other.samples_per_second
        ]
        for left, right in COMPARED
    }
    return {name: statistics.median(values) for name, values in found.items() if values}


def verdicts(rows: Sequence[Row], compared: dict[str, float], wanted: Collection[str], *, pinned: bool = False) -> Iterator[str]:
    """Check all bounds. A bound with a missing row that was `wanted` is missed."""
    found = {row.name: row for row in rows if not row.reason}
    for row in rows:
        if row.name.startswith("ours") and (reasons := row.failed + [row.reason] * bool(row.reason)):
            yield verdict(False, f"{row.name}: not measured: {'; '.join(reasons)}")
    for pair, least in (PINNED_MIN if pinned else RATIOS_MIN).items():
        if set(pair) <= set(wanted):
            seen = compared.get(name := " / ".join(pair))
            yield verdict(seen is not None and seen >= least, f"{name} ≥ {least}: {_said(seen)}")
    for name, most in MEGABYTES_MAX.items():
        if name in found:
            megabytes = (found[name].bytes_per_peer_per_update or math.inf) / 1e6
            yield verdict(0 < megabytes <= most, f"{name} sends at most {most} MB per peer and update: {megabytes:.3f}")
    for name, most in AUDITED_MEGABYTES_MAX.items():
        sent = found[name].kernel_bytes_per_peer_per_update if name in found else None
        if sent is not None:
            yield verdict(0 < sent <= 1e6 * most, f"{name} sends at most {most} MB with audits: {sent / 1e6:.3f}")
    for name, row in found.items():
        if name.startswith("ours"):
            yield verdict(row.distinct_roots == 1, f"{name}: one root at all peers: {row.distinct_roots}")
            if row.audits is not None and row.lapsed is not None:
                made = row.audits > 0 and row.lapsed <= LAPSED_MAX * row.audits
                yield verdict(made, f"{name}: at most {LAPSED_MAX:.0%} of the audits drawn lapsed: {row.lapsed} of {row.audits}")
    if {"ours-h1", "gloo"} <= set(wanted):
        own, floats = (found[name].heldout_nats if name in found else None for name in ("ours-h1", "gloo"))
        worse = own / floats if own and floats else None
        text = f"ours-h1, 4 bit: held-out ≤ {WORSE_MAX} × that of gloo, float32"
        yield verdict(worse is not None and worse <= WORSE_MAX, f"{text}: {_said(worse)}")


def _said(ratio: float | None) -> str:
    return "not measured" if ratio is None else f"{ratio:.3f}"


def show(rows: list[Row], compared: dict[str, float], parameters: int, peers: int) -> None:
    console = Console(width=130)
    table = Table(title=f"{parameters} parameters, {peers} peers, {GLOBAL_BATCH} sequences a step")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        if row.reason:
            table.add_row(row.name, row.reason)
            continue
        kilobytes = [value and value / 1e3 for value in (row.bytes_per_peer_per_update, row.audit_bytes_per_peer_per_update)]
        audits = "" if row.audits is None else f"{row.audits} ({row.lapsed})"
        nats = "" if row.heldout_nats is None else f"{row.heldout_nats:.3f}"
        shown = ["" if value is None else f"{value:.1f}" for value in (row.samples_per_second, *kilobytes)]
        table.add_row(row.name, *shown, audits, nats, str(row.distinct_roots), str(row.updates))
    console.print(table)
    for name, value in compared.items():
        console.print(f"       {name}: {value:.3f}")


def attempt(name: str, task: Task) -> Row:
    """Measure a row. If it fails, it has the reason, and the others still run."""
    expected = (Unavailable, FolkmootError, OSError, trio.TooSlowError)
    try:
        return MEASURED[name](task)
    except expected as error:
        return Row(name, reason=str(error))
    except BaseExceptionGroup as group:  # of a network whose peers share a nursery
        known, others = group.split(expected)
        if known is None or others is not None:
            raise
        return Row(name, reason="; ".join(map(str, known.exceptions)))


def groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return the groups that take turns: pairs that a bound compares if both are wanted, and each of the others alone."""
    pairs = [pair for pair in RATIOS_MIN if set(pair) <= set(names)]
    return [*pairs, *((name,) for name in names if not any(name in pair for pair in pairs))]


def of_turns(rows: list[Row]) -> Row:
    """Return the row of a seed: the median of its turns, or the first failed one."""
    return next((row for row in rows if row.reason), None) or middle(rows)


def main() -> int:
    parser = Parser("training", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--steps", type=COUNT, default=150, metavar="N", help="optimizer steps of the global batch")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of model and batches; medians are shown"
    )
    parser.add_argument(
        "--only", nargs="+", choices=MEASURED, default=tuple(MEASURED), metavar="NAME", help="measure only these rows"
    )
    parser.add_argument(
        "--peers",
        type=COUNT,
        default=PEERS,
        metavar="N",
        help=f"number of peers that share the {GLOBAL_BATCH} sequences of a step",
    )
    parser.add_argument("--pinned", action="store_true", help="pin each peer of ours and of the rivals to one core")
    parser.add_argument(
        "--turns", type=COUNT, default=TURNS, metavar="N", help="turns of each pair of rows that a bound compares, for each seed"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to train on; default: the text inside every Python")
    parser.add_argument("--rate", type=duration, default=3e-3, help="peak learning rate of all rows")
    parser.add_argument("--seconds", type=duration, default=900.0, metavar="S", help="most seconds of one row with one seed")
    parser.add_argument("--resume", action="store_true", help="keep complete seeds in the file of --json")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the model: width, layers, context, …"
    )
    options = parser.parse_args()
    if options.steps % LOCAL_STEPS or options.steps == LOCAL_STEPS:
        parser.error(f"--steps {options.steps} is not a multiple of {LOCAL_STEPS}, at least {2 * LOCAL_STEPS}")
    try:
        model = with_settings(BASE, options.set).model
    except UserError as error:
        parser.error(str(error))
    if GLOBAL_BATCH % options.peers:
        parser.error(f"--peers {options.peers}: {GLOBAL_BATCH} sequences cannot be divided equally")
    cores = len(os.sched_getaffinity(0))
    if options.pinned and options.peers > cores:
        parser.error(f"--pinned: {options.peers} peers need as many cores, this machine has {cores}")
    map_signals_to_interrupt()
    torch.set_num_threads(1)
    about = {"set": options.set, "parameters": model.parameters, "steps": options.steps, "rate": options.rate}
    about |= {"seeds": list(options.seeds), "turns": options.turns, "seconds": options.seconds}
    about |= {"peers": options.peers, "pinned": options.pinned, "text": str(options.text or "built-in")}
    try:
        done = earlier(options.json, about) if options.resume else {}
    except UserError as error:
        parser.error(str(error))
    started = time.time()
    runs = {name: [Row(**row) for row in done.get("by_seed", {}).get(name, ())] for name in options.only}
    whole = min(map(len, runs.values()))  # seeds without a missing row
    runs = {name: found[:whole] for name, found in runs.items()}

    def summary() -> list[Row]:
        """Write the rows measured so far, and return them."""
        rows = [middle(found) for found in runs.values() if found]
        by_seed = {name: [asdict(row) for row in found] for name, found in runs.items()}
        write(options.json, started, {**about, "rows": [asdict(row) for row in rows], "ratios": ratios(runs), "by_seed": by_seed})
        return rows

    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        text = text_file(options.text, Path(folder))
        rows = summary()
        for seed in options.seeds[whole:]:
            task = Task(text, options.steps, seed, options.rate, options.seconds, model, options.peers, options.pinned)
            for names in groups(options.only):
                turns: dict[str, list[Row]] = {name: [] for name in names}
                for name in names * (options.turns if len(names) > 1 else 1):
                    turns[name].append(row := attempt(name, task))
                    said = row.reason or f"{row.samples_per_second or 0:.1f} samples/s"
                    print(f"seed {seed} {name}: {said}", file=sys.stderr, flush=True)
                for name, found in turns.items():
                    runs[name].append(of_turns(found))
                rows = summary()
    show(rows, ratios(runs), model.parameters, options.peers)
    return conclude(verdicts(rows, ratios(runs), options.only, pinned=options.pinned))


if __name__ == "__main__":
    sys.exit(main())
