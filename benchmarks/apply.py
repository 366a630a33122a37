"""Costs of a round for a voter after the vote: `python -m benchmarks.apply --json FILE`.

The voter decodes, checks and aggregates payloads, takes the outer step, and hashes and writes the new model. Every case runs in a
process of its own on proposals that another process has made, with one thread unless the case names more. Seconds are processor
time, beside wall-clock time. The output of a run is on the disk before the next run begins, because a disk with a backlog blocks
writers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from protocol.messages import Proposal
from scenarios.trials import Parser
from training.job_spec import BITS, BITS_ROBUST_MAX, AggregationRule, AuditMode, JobSpec, OuterOptimizerKind
from training.replicated import aggregate, codec, model_files, outer_optimizer
from training.replicated.model_directory import model_leaf_hash
from training.replicated.parallel_map import thread_map
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_block
from training.transformer import ModelSpec

JOB = bytes(32)
MODELS = {
    "1M": ModelSpec(vocabulary=256, width=128, layers=5, heads=4, kv_heads=2, hidden=384),
    "4.2M": ModelSpec(vocabulary=1_024, width=256, layers=5, heads=4, kv_heads=2, hidden=768),
    "100M": ModelSpec(vocabulary=5_500, width=1_024, layers=8, heads=16, kv_heads=8, hidden=2_816),
    "300M": ModelSpec(vocabulary=16_384, width=1_024, layers=24, heads=16, kv_heads=8, hidden=2_816),
}
SHARED = 0.5  # share of an honest update's deviation that all updates have in common
RUNS = 3  # of each part, except for the largest model; the median counts


@dataclass(frozen=True)
class Case:
    n: int  # accepted proposals
    liars: int
    size: str
    bits: int  # per level
    rule: AggregationRule = AggregationRule.ARC_NNM_TRIM
    outer: OuterOptimizerKind = OuterOptimizerKind.NESTEROV
    threads: int = 1

    def spec(self) -> JobSpec:
        steps = 1 if self.outer is OuterOptimizerKind.ADAMW else 15
        common: dict[str, Any] = {"name": "apply", "audit": AuditMode.OFF, "local_steps": steps, "bits": self.bits}
        return JobSpec(model=MODELS[self.size], rule=self.rule, outer=self.outer, byzantine_max=self.liars, **common)

    def __str__(self) -> str:
        threads = f", {self.threads} threads" * (self.threads > 1)
        return f"{self.n} × {self.size}, {self.bits} bit, {self.rule.value}, {self.outer.value}{threads}"


CASES = (
    Case(4, 1, "1M", 4, outer=OuterOptimizerKind.ADAMW),
    Case(4, 1, "1M", 1),
    *(Case(13, 4, "4.2M", bits) for bits in BITS if bits <= BITS_ROBUST_MAX),
    *(Case(13, 4, "4.2M", 1, rule) for rule in AggregationRule if rule is not AggregationRule.ARC_NNM_TRIM),
    Case(100, 33, "1M", 1),
)
LARGE = (
    Case(4, 1, "100M", 1),
    Case(4, 1, "300M", 1),
    Case(4, 1, "300M", 1, threads=2),
)


@dataclass
class Row:
    n: int
    parameters: int
    bits: int
    rule: str
    outer: str
    payload_bytes: int  # of one proposal
    total_seconds: float  # from payloads to the new model on disk
    total_wall_seconds: float
    encode_seconds: float  # of one update; not part of the total
    encode_wall_seconds: float
    peak_extra_megabytes: float  # peak of allocated memory, payloads included, without the mapped files of the model
    encode_extra_megabytes: float  # the same while one update is encoded, without its input buffer
    seconds: dict[str, float] = field(default_factory=dict)  # of the parts
    root: str = ""
    threads: int = 1
    anonymous_megabytes: float = 0.0  # largest RssAnon during one application, above its value before


@dataclass(frozen=True)
class Aim:
    text: str
    concerns: Callable[[Row], bool]
    figure: Callable[[Row], float]
    most: float
    beside: Callable[[Row], str] = lambda row: ""  # an additional figure without a bound

    def verdict(self, rows: list[Row]) -> str:
        concerned = [row for row in rows if self.concerns(row)]
        if not concerned:
            return f"not measured  {self.text}"  # only with --only, or without --large
        worst = max(concerned, key=self.figure)
        return verdict(self.figure(worst) <= self.most, f"{self.text}: {self.figure(worst):.3g}{self.beside(worst)}")


def _default_of(row: Row, n: int, least: float) -> bool:
    return row.n == n and row.parameters >= least and row.rule == AggregationRule.ARC_NNM_TRIM.value


def _of_300m(row: Row) -> bool:
    return row.parameters > 2e8


AIMS = (
    Aim(
        "13 proposals on 4.2M parameters: ≤ 1 s (aim 0.5)",
        lambda row: _default_of(row, 13, 4e6),
        lambda row: row.total_wall_seconds,
        1.0,
    ),
    Aim(
        "4 on 100M, and encoding one's own: ≤ 10 s of the processor",
        lambda row: _default_of(row, 4, 1e8) and not _of_300m(row),
        lambda row: row.total_seconds + row.encode_seconds,
        10.0,
        lambda row: f" ({row.total_wall_seconds + row.encode_wall_seconds:.3g} of the clock)",
    ),
    Aim(
        "4 on 100M, and encoding one's own: extra memory ≤ 200 MB",
        lambda row: _default_of(row, 4, 1e8) and not _of_300m(row),
        lambda row: max(row.peak_extra_megabytes, row.encode_extra_megabytes),
        200.0,
    ),
    Aim(
        "100 on 1M: memory beyond the payloads ≤ 25 MB",
        lambda row: _default_of(row, 100, 1e6),
        lambda row: row.peak_extra_megabytes - row.n * row.payload_bytes / 1e6,
        25.0,
    ),
    Aim("4 on 300M: ≤ 8 s of the processor", lambda row: _of_300m(row) and row.threads == 1, lambda row: row.total_seconds, 8.0),
    Aim("4 on 300M: ≤ 200 MB more of anonymous memory", _of_300m, lambda row: row.anonymous_megabytes, 200.0),
    Aim(
        "every step, 4 on 1M: ≤ 0.06 s",
        lambda row: row.outer == OuterOptimizerKind.ADAMW.value,
        lambda row: row.total_seconds,
        0.06,
    ),
)


def beside_one_thread(rows: list[Row]) -> Iterator[str]:
    """Compare cases with several threads to the same cases with one."""
    alone = {(row.n, row.parameters, row.bits, row.rule, row.outer): row for row in rows if row.threads == 1}
    for row in rows:
        one = alone.get((row.n, row.parameters, row.bits, row.rule, row.outer))
        if row.threads > 1 and one is not None:
            ratio, about = one.total_wall_seconds / row.total_wall_seconds, f"{row.n} on {row.parameters / 1e6:.0f}M"
            yield verdict(ratio >= 1.5, f"{about}, {row.threads} threads: ≥ 1.5 × as fast as one: {ratio:.3g}")
            yield verdict(row.root == one.root, f"{about}, {row.threads} threads: the same root as one's")


# In a process of its own ----------------------------------------------------------------------------------------------


def make(case: Case, folder: Path, seed: int) -> None:
    """Make a model in its second round, and honest proposals for it."""
    model = ReplicatedModel.create_from_values(folder / "first", JOB, case.spec(), partial(initial_block, case.spec()))
    model = model.apply_round_into(folder / "model", _proposals(model, case, seed), {})
    for number, accepted in enumerate(_proposals(model, case, seed + 1)):
        (folder / f"{number}.payload").write_bytes(accepted.payload)


def _proposals(model: ReplicatedModel, case: Case, seed: int) -> list[AcceptedProposal]:
    return [_accepted(model, number, _payload(model, number, seed)) for number in range(case.n)]


def _payload(model: ReplicatedModel, number: int, seed: int) -> bytes:
    return codec.encode_payload(model.header(_trainer(number)), _buffer(model, number, seed), model.layout)


def _buffer(model: ReplicatedModel, number: int, seed: int) -> Float32Array:
    m = np.empty(model.layout.size, dtype=np.float32)
    for index, block in enumerate(model.layout.blocks):
        shared = np.random.default_rng((seed, index)).standard_normal(block.size, dtype=np.float32)
        own = np.random.default_rng((seed, index, 1 + number)).standard_normal(block.size, dtype=np.float32)
        m[block.elements] = 1e-3 * (own + SHARED * shared)
    return m


def _trainer(number: int) -> bytes:
    return hashlib.sha256(b"trainer %d" % number).digest()


def _accepted(model: ReplicatedModel, number: int, payload: bytes) -> AcceptedProposal:
    digest = hashlib.sha256(payload).digest()
    proposal = Proposal(model.job, model.round, model.root, digest, len(payload), digest, None)
    return AcceptedProposal(_trainer(number), proposal, payload)


def measure(case: Case, folder: Path) -> Row:
    """Measure memory separately, because tracing costs time; then the whole, then each part."""
    model = ReplicatedModel.open(folder / "model")
    for vector in model.vectors.values():
        np.max(vector)  # a peer has just used its model, which is therefore in the page cache
    own, header = _buffer(model, 0, 0), model.header(_trainer(0))
    encode_peak = _peak(lambda: codec.encode_payload(header, own, model.layout))

    def apply(accepted: list[AcceptedProposal]) -> str:
        """Apply a round as peers usually do: without fsync, over the files of a model that is no longer needed."""
        model_files.recycle_directory(folder / "next")
        with thread_map(case.threads, len(model.layout.stretches)) as each:
            return model.apply_round_into(folder / "next", accepted, {}, durable=False, each=each).root.hex()

    peak = _peak(lambda: apply(_received(model, case, folder)))
    anonymous = _anonymous_peak(lambda: apply(_received(model, case, folder)))
    accepted = _received(model, case, folder)
    total, wall = _seconds(lambda: apply(accepted))
    encode, encode_wall = _seconds(lambda: codec.encode_payload(header, own, model.layout))
    return Row(
        n=case.n,
        parameters=model.layout.size,
        bits=case.bits,
        rule=case.rule.value,
        outer=case.outer.value,
        payload_bytes=max(len(item.payload) for item in accepted),
        total_seconds=total,
        total_wall_seconds=wall,
        encode_seconds=encode,
        encode_wall_seconds=encode_wall,
        peak_extra_megabytes=peak / 1e6,
        encode_extra_megabytes=encode_peak / 1e6,
        seconds=_parts(model, accepted),
        threads=case.threads,
        anonymous_megabytes=anonymous / 1e6,
        root=apply(accepted),
    )


def _received(model: ReplicatedModel, case: Case, folder: Path) -> list[AcceptedProposal]:
    return [_accepted(model, number, (folder / f"{number}.payload").read_bytes()) for number in range(case.n)]


def _peak(work: Callable[[], object]) -> int:
    """Return the peak of allocated bytes."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _anonymous_peak(work: Callable[[], object]) -> int:
    """Return the largest RssAnon in bytes above its first value, sampled a hundred times per second."""
    before, peak, ended = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return max(0, peak - before)


def _anonymous() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def _seconds(work: Callable[[], object], count: int = RUNS) -> tuple[float, float]:
    """Return medians of processor seconds and of wall-clock seconds."""
    runs = []
    for _ in range(count):
        os.sync()
        started, wall = time.process_time(), time.perf_counter()
        work()
        runs.append((time.process_time() - started, time.perf_counter() - wall))
    processor, clock = zip(*runs, strict=True)
    return statistics.median(processor), statistics.median(clock)


def _parts(model: ReplicatedModel, accepted: list[AcceptedProposal]) -> dict[str, float]:
    """Measure the same work again, one part after the other."""
    spec, layout = model.spec, model.layout
    optimizer = outer_optimizer.make_outer_optimizer(
        spec, model.round, outer_optimizer.next_beta_powers(spec, model.state.beta_powers)
    )

    def decode() -> list[codec.QuantizedUpdate]:
        return [codec.decode_payload(item.payload, model.header(item.trainer), layout) for item in accepted]

    updates = decode()
    plan = aggregate.plan_aggregation(updates, spec.rule, spec.byzantine_max)

    def move() -> None:
        for block in layout.blocks:
            parameters, *slots = (np.array(vector[block.elements]) for vector in model.vectors.values())
            optimizer.step(parameters, slots, gradient[: block.size].copy(), block.decayed)

    (gradient,) = plan.iter_aggregate([max(layout.blocks, key=lambda block: block.size)])
    work: dict[str, Callable[[], object]] = {
        "decode": decode,
        "norms": lambda: [update.norm_squared() for update in updates],
        "plan": lambda: aggregate.plan_aggregation(updates, spec.rule, spec.byzantine_max),
        "values": lambda: [len(values) for values in plan.iter_aggregate(layout.blocks)],
        "outer step": move,
        "hash": lambda: [model_leaf_hash(vector[block.elements]) for vector in model.vectors.values() for block in layout.blocks],
    }
    runs = RUNS if layout.size < 2e8 else 1
    return {name: round(_seconds(part, runs)[0], 4) for name, part in work.items()}


# Report ---------------------------------------------------------------------------------------------------------------


def run(cases: Sequence[Case], seed: int, made: Path | None) -> Iterator[Row]:
    """Run cases with the same proposals.

    Each case runs in a process of its own, so that the memory for making proposals does not count.
    """
    with ExitStack() as removed:
        if made is None:
            folder = Path(removed.enter_context(tempfile.TemporaryDirectory(prefix="folkmoot-apply-")))
        else:
            folder = made / hashlib.sha256(f"{cases[0]} {seed}".encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "made").exists():
            _in_process("make", folder, cases[0], seed)
            (folder / "made").touch()
        for case in cases:
            yield Row(**json.loads(_in_process("measure", folder, case, seed)))


def _in_process(step: str, folder: Path, case: Case, seed: int) -> str:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.apply", f"--{step}", str(folder), "--case", str(case), "--seeds", str(seed)]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def show(rows: list[Row]) -> None:
    console = Console(width=170)
    table = Table(title="one round, after the vote: milliseconds of one core's time, and of the clock")
    parts = tuple(rows[0].seconds)
    about_it = ("n", "parameters", "bits", "rule", "outer", "threads", "kB each", "encode one")
    for heading in (*about_it, *parts, "total", "wall", "MB more", "RssAnon"):
        table.add_column(heading, justify="right")
    for row in rows:
        of_job = (str(row.n), f"{row.parameters / 1e6:.2f}M", str(row.bits), row.rule, row.outer)
        about = (*of_job, str(row.threads), f"{row.payload_bytes / 1e3:.0f}")
        times = (row.encode_seconds, *row.seconds.values(), row.total_seconds, row.total_wall_seconds)
        figures = (f"{1e3 * value:.0f}" for value in times)
        memory = max(row.peak_extra_megabytes, row.encode_extra_megabytes), row.anonymous_megabytes
        table.add_row(*about, *figures, *(f"{megabytes:.1f}" for megabytes in memory))
    console.print(table)


def main() -> int:
    parser = Parser("apply", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--large", action="store_true", help="also measure 100M and 300M parameters: minutes, and 9 GB of disk")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="measure only cases whose name contains this text, such as 300M"
    )
    parser.add_argument("--made", type=Path, metavar="FOLDER", help="folder of proposals: reuse those in it, and store new ones")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of the random updates, with a row for each"
    )
    for step in ("make", "measure"):
        parser.add_argument(f"--{step}", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        (case,) = (case for case in (*CASES, *LARGE) if str(case) == options.case)
        if options.make:
            make(case, options.make, options.seeds[0])
        else:
            print(json.dumps(asdict(measure(case, options.measure))))
        return 0
    large = [case for case in LARGE if options.large or case.size in options.only]
    cases = [case for case in (*CASES, *large) if options.only in str(case)]
    if not cases:
        parser.error(f"--only {options.only!r} matches no case: choose from {'; '.join(map(str, CASES))}")
    started, rows = time.time(), []
    same = [list(group) for _, group in groupby(cases, key=lambda case: replace(case, threads=1))]
    for group, seed in product(same, options.seeds):
        for case, row in zip(group, run(group, seed, options.made), strict=True):
            rows.append(row)
            print(f"{case}, seed {seed}: {1e3 * row.total_seconds:.0f} ms", file=sys.stderr, flush=True)
            write(options.json, started, {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude((*(aim.verdict(rows) for aim in AIMS), *beside_one_thread(rows)))


if __name__ == "__main__":
    sys.exit(main())
