"""What one round costs a voter after the vote: `python -m benchmarks.apply --json FILE`.

Payloads are decoded and checked, aggregated, the outer step is taken, and the new model is hashed and written. Every case runs in
a process of its own with one thread, on proposals that another one has made. Seconds are the processor's, beside the clock's.
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
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from protocol.messages import Proposal
from scenarios.trials import Parser
from training.replicated import aggregate, codec, outer
from training.replicated.layout import Float32Array
from training.replicated.model import Accepted, ReplicatedModel
from training.replicated.state import leaf_of
from training.spec import AuditMode, Compression, JobSpec, Outer, Rule
from training.transformer import ModelSpec

JOB = bytes(32)
MODELS = {
    "1M": ModelSpec(vocabulary=256, width=128, layers=5, heads=4, kv_heads=2, hidden=384),
    "4.2M": ModelSpec(vocabulary=1_024, width=256, layers=5, heads=4, kv_heads=2, hidden=768),
    "100M": ModelSpec(vocabulary=5_500, width=1_024, layers=8, heads=16, kv_heads=8, hidden=2_816),
}
MODES = {
    "sparse k=64": {"compression": Compression.SPARSE, "bits": 1, "keep": 64},
    **{f"dense {bits} bit": {"compression": Compression.DENSE, "bits": bits} for bits in (1, 2, 4, 8)},
}
SHARED = 0.5  # of an honest update's deviation, the part that all have in common
RUNS = 3  # of each part; the median counts


@dataclass(frozen=True)
class Case:
    n: int  # accepted proposals
    liars: int
    size: str
    mode: str
    rule: Rule = Rule.ARC_NNM_TRIM
    outer: Outer = Outer.NESTEROV

    def spec(self) -> JobSpec:
        steps = 1 if self.outer is Outer.ADAMW else 15
        common: dict[str, Any] = {"name": "apply", "audit": AuditMode.OFF, "local_steps": steps, **MODES[self.mode]}
        return JobSpec(model=MODELS[self.size], rule=self.rule, outer=self.outer, liars=self.liars, **common)

    def __str__(self) -> str:
        return f"{self.n} × {self.size}, {self.mode}, {self.rule.value}, {self.outer.value}"


CASES = (
    Case(4, 1, "1M", "dense 4 bit", outer=Outer.ADAMW),
    Case(4, 1, "1M", "dense 1 bit"),
    Case(4, 1, "1M", "sparse k=64"),
    *(Case(13, 4, "4.2M", mode) for mode in MODES),
    *(Case(13, 4, "4.2M", "sparse k=64", rule) for rule in Rule if rule is not Rule.ARC_NNM_TRIM),
    *(Case(100, 33, "1M", mode) for mode in ("sparse k=64", "dense 1 bit")),
)
LARGE = (Case(4, 1, "100M", "dense 1 bit"), Case(4, 1, "100M", "sparse k=64"))


@dataclass
class Row:
    n: int
    parameters: int
    mode: str
    rule: str
    outer: str
    payload_bytes: int  # of one proposal
    total_seconds: float  # payloads to the new model on disk
    total_wall_seconds: float
    encode_seconds: float  # of one update, which is no part of the total
    encode_wall_seconds: float
    peak_extra_megabytes: float  # allocated at once, payloads included; the mapped files of the model are not
    encode_extra_megabytes: float  # the same while one update is encoded, the buffer that it is encoded from left out
    seconds: dict[str, float] = field(default_factory=dict)  # of the parts
    root: str = ""


@dataclass(frozen=True)
class Aim:
    text: str
    concerns: Callable[[Row], bool]
    figure: Callable[[Row], float]
    most: float
    beside: Callable[[Row], str] = lambda row: ""  # what is said of it that has no bound

    def verdict(self, rows: list[Row]) -> str:
        concerned = [row for row in rows if self.concerns(row)]
        if not concerned:
            return f"not measured  {self.text}"  # only with --only, or without --large
        worst = max(concerned, key=self.figure)
        return verdict(self.figure(worst) <= self.most, f"{self.text}: {self.figure(worst):.3g}{self.beside(worst)}")


def _default_of(row: Row, n: int, least: float) -> bool:
    return row.n == n and row.parameters >= least and row.rule == Rule.ARC_NNM_TRIM.value


AIMS = (
    Aim(
        "13 proposals on 4.2M parameters: ≤ 1 s (aim .5)",
        lambda row: _default_of(row, 13, 4e6),
        lambda row: row.total_wall_seconds,
        1.0,
    ),
    Aim(
        "4 on 100M, and encoding one's own: ≤ 10 s of the processor",
        lambda row: _default_of(row, 4, 1e8),
        lambda row: row.total_seconds + row.encode_seconds,
        10.0,
        lambda row: f" ({row.total_wall_seconds + row.encode_wall_seconds:.3g} of the clock)",
    ),
    Aim(
        "4 on 100M, and encoding one's own: extra memory ≤ 200 MB",
        lambda row: _default_of(row, 4, 1e8),
        lambda row: max(row.peak_extra_megabytes, row.encode_extra_megabytes),
        200.0,
    ),
    Aim(
        "100 on 1M: memory beyond the payloads ≤ 25 MB",
        lambda row: _default_of(row, 100, 1e6),
        lambda row: row.peak_extra_megabytes - row.n * row.payload_bytes / 1e6,
        25.0,
    ),
    Aim("every step, 4 on 1M: ≤ .06 s", lambda row: row.outer == Outer.ADAMW.value, lambda row: row.total_seconds, 0.06),
)


# In a process of its own ----------------------------------------------------------------------------------------------


def make(case: Case, folder: Path, seed: int) -> None:
    """A model in its second round, and honest proposals for it."""
    model = ReplicatedModel.initial(JOB, case.spec())
    model = model.apply(_proposals(model, case, seed), {})
    model.save(folder / "model")
    for number, accepted in enumerate(_proposals(model, case, seed + 1)):
        (folder / f"{number}.payload").write_bytes(accepted.payload)


def _proposals(model: ReplicatedModel, case: Case, seed: int) -> list[Accepted]:
    return [_accepted(model, number, _payload(model, number, seed)) for number in range(case.n)]


def _payload(model: ReplicatedModel, number: int, seed: int) -> bytes:
    return codec.encode(model.header(_trainer(number)), _buffer(model, number, seed), model.layout)


def _buffer(model: ReplicatedModel, number: int, seed: int) -> Float32Array:
    m = np.empty(model.layout.size, dtype=np.float32)
    for index, block in enumerate(model.layout.blocks):
        shared = np.random.default_rng((seed, index)).standard_normal(block.size, dtype=np.float32)
        own = np.random.default_rng((seed, index, 1 + number)).standard_normal(block.size, dtype=np.float32)
        m[block.elements] = 1e-3 * (own + SHARED * shared)
    return m


def _trainer(number: int) -> bytes:
    return hashlib.sha256(b"trainer %d" % number).digest()


def _accepted(model: ReplicatedModel, number: int, payload: bytes) -> Accepted:
    digest = hashlib.sha256(payload).digest()
    proposal = Proposal(model.job, model.round, model.root, digest, len(payload), digest, None)
    return Accepted(_trainer(number), proposal, payload)


def measure(case: Case, folder: Path) -> Row:
    """Memory first, which is counted apart since counting costs time; then the whole, then part by part."""
    model = ReplicatedModel.open(folder / "model")
    for vector in model.vectors.values():
        np.max(vector)  # a peer has just used its model: it is in the page cache
    own, header = _buffer(model, 0, 0), model.header(_trainer(0))
    encode_peak = _peak(lambda: codec.encode(header, own, model.layout))
    peak = _peak(lambda: model.apply_into(folder / "next", _received(model, case, folder), {}))
    accepted = _received(model, case, folder)
    total, wall = _seconds(lambda: model.apply_into(folder / "next", accepted, {}))
    encode, encode_wall = _seconds(lambda: codec.encode(header, own, model.layout))
    return Row(
        n=case.n,
        parameters=model.layout.size,
        mode=case.mode,
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
        root=ReplicatedModel.open(folder / "next").root.hex(),
    )


def _received(model: ReplicatedModel, case: Case, folder: Path) -> list[Accepted]:
    return [_accepted(model, number, (folder / f"{number}.payload").read_bytes()) for number in range(case.n)]


def _peak(work: Callable[[], object]) -> int:
    """Bytes that it allocates at once."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The processor's seconds, and those of the clock: medians."""
    runs = []
    for _ in range(RUNS):
        started, wall = time.process_time(), time.perf_counter()
        work()
        runs.append((time.process_time() - started, time.perf_counter() - wall))
    processor, clock = zip(*runs, strict=True)
    return statistics.median(processor), statistics.median(clock)


def _parts(model: ReplicatedModel, accepted: list[Accepted]) -> dict[str, float]:
    """The same work once more, one thing after the other."""
    spec, layout = model.spec, model.layout
    optimizer = outer.optimizer_of(spec, model.round, outer.next_powers(spec, model.state.powers))

    def decode() -> list[codec.Update]:
        return [codec.decode(item.payload, model.header(item.trainer), layout) for item in accepted]

    updates = decode()
    plan = aggregate.plan(updates, spec.rule, spec.liars)

    def move() -> None:
        for block in layout.blocks:
            parameters, *slots = (np.array(vector[block.elements]) for vector in model.vectors.values())
            optimizer.step(parameters, slots, gradient[: block.size].copy(), block.decayed)

    gradient = plan.values(max(layout.blocks, key=lambda block: block.size))
    work: dict[str, Callable[[], object]] = {
        "decode": decode,
        "norms": lambda: [update.norm_squared() for update in updates],
        "plan": lambda: aggregate.plan(updates, spec.rule, spec.liars),
        "values": lambda: [plan.values(block)[:0] for block in layout.blocks],
        "outer step": move,
        "hash": lambda: [leaf_of(vector[block.elements]) for vector in model.vectors.values() for block in layout.blocks],
    }
    return {name: round(_seconds(part)[0], 4) for name, part in work.items()}


# Report ---------------------------------------------------------------------------------------------------------------


def run(case: Case, seed: int) -> Row:
    """In two processes: what making the proposals takes in memory must not be counted."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="folkmoot-apply-") as folder:
        for step in ("make", "measure"):
            command = [sys.executable, "-m", "benchmarks.apply", f"--{step}", folder, "--case", str(case), "--seeds", str(seed)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout))


def show(rows: list[Row]) -> None:
    console = Console(width=150)
    table = Table(title="one round, after the vote: milliseconds of one core's time, and of the clock")
    parts = tuple(rows[0].seconds)
    for heading in ("n", "parameters", "mode", "rule", "outer", "kB each", "encode one", *parts, "total", "wall", "MB more"):
        table.add_column(heading, justify="right")
    for row in rows:
        about = (str(row.n), f"{row.parameters / 1e6:.2f}M", row.mode, row.rule, row.outer, f"{row.payload_bytes / 1e3:.0f}")
        times = (row.encode_seconds, *row.seconds.values(), row.total_seconds, row.total_wall_seconds)
        figures = (f"{1e3 * value:.0f}" for value in times)
        table.add_row(*about, *figures, f"{max(row.peak_extra_megabytes, row.encode_extra_megabytes):.1f}")
    console.print(table)


def main() -> int:
    parser = Parser("apply", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--large", action="store_true", help="100M parameters too: minutes, and 3 GB of disk")
    parser.add_argument("--only", metavar="TEXT", default="", help="just the cases whose name contains this")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), metavar="S", help="of the made-up updates: a row each")
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
    cases = [case for case in (*CASES, *(LARGE if options.large else ())) if options.only in str(case)]
    if not cases:
        parser.error(f"no case is called {options.only!r}: {'; '.join(map(str, CASES))}")
    started, rows = time.time(), []
    for case, seed in product(cases, options.seeds):
        rows.append(run(case, seed))
        print(f"{case}, seed {seed}: {1e3 * rows[-1].total_seconds:.0f} ms", file=sys.stderr, flush=True)
        write(options.json, started, {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(aim.verdict(rows) for aim in AIMS)


if __name__ == "__main__":
    sys.exit(main())
