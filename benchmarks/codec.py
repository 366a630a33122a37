"""Bytes and loss of every encoding of updates: `python -m benchmarks.codec --json FILE`.

One process trains for all trainers in turn. Model, text, batches and number of samples are equal in all rows. The rates of a
tuned row are the best of a grid, on a seed that is not reported. A grid is extended if its best value is at an edge and then
refined at half its distances; values that remain at an edge are named. Rows of a preset are not tuned, because they are the jobs
that `train --preset` starts. Rows with opening rounds are not tuned either, and use `BEST_OF_ONE_BIT`.

Our rows with local steps aggregate by a plain mean, like the rivals and like jobs with full audits. The exceptions are the rows
in which one trainer may lie, which also pay for the robust rule of a job with byzantine_max=1. All our rows with one gradient per
round pay for their robust rule, too.

The rivals are:

- fp32 DiLoCo (arXiv:2311.08105), also with Muon as its inner optimizer (MuLoCo, arXiv:2505.23725).
- The format of SparseLoCo (arXiv:2508.15706: top 64 of 4096, 2-bit values, 12-bit indices), and FedAvg.
- One process with every batch: fp32 with H=1.
- One trainer alone with its own batches. A row with a worse loss gains nothing from training with others.

Bytes are those of one payload per parameter and round, with the header for our formats. `--resume` continues an interrupted run
of the same commit and settings from its file.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parallel import JOBS, side_by_side
from benchmarks.provenance import earlier, write
from benchmarks.settings import MEASURED, with_settings
from benchmarks.simulated import JOB, InnerStates, Rounds, engine_of, held_out_nats, text_file, trainer_key
from benchmarks.tuning import run_sweep
from benchmarks.verdicts import conclude, verdict
from demo.shutdown_signals import map_signals_to_interrupt
from protocol.errors import UserError
from scenarios.trials import COUNT, Parser
from training import rate_sweep
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import PRESETS, AuditMode, InnerOptimizerKind, JobSpec, complete_fields
from training.replay.inner_state import InnerState
from training.replicated.outer_optimizer import inner_rate
from training.replicated.tensor_layout import CHUNK, Float32Array, initial_parameters, layout_of

WARMUP = 0.05  # share of all rounds
TUNING_SEED = 1_000  # no row comes from it
STEPS_MULTIPLE = 30  # every H divides it
INNER_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
MUON_RATES = (1.2e-2, 2.4e-2, 4.8e-2)
OUTER_RATES = (0.5, 0.7, 1.0)
OUTER_MOMENTA = (0.0, 0.5, 0.8, 0.9)
RATES = ("inner_rate", "outer_rate")  # grids that extend beyond an edge; a momentum of one and more has no meaning
KEEP = (0.0, 1.0)  # whether the inner optimizer's moments outlive a round; otherwise they average over less
SPARSELOCO_KEEP = 64
SPARSELOCO_DECAY = 0.95
FP32_EVERY_STEP, DILOCO, ONE_BIT, FOUR_BIT = "all samples, one process", "DiLoCo fp32", "ours 1-bit", "ours per-step 4-bit"
ALONE = "one trainer alone"
PRESET = "preset"
MUON = ", Muon"  # inside a round, instead of AdamW
# Our rows under the robust rule of a job with byzantine_max=1, which is the default of jobs. Centered clipping takes no such
# number.
ONE_MAY_LIE = ", one may lie"
OPENED = ", opening"  # the first rounds encode every element in four bits
# (inner optimizer, one may lie): inner rate, outer rate and outer momentum of one bit, tuned: docs/results/codec.json. The last
# are from a trial with an opening on the tuning seed: there the momentum of 0.8 that was tuned without one loses 0.08.
BEST_OF_ONE_BIT = {
    ("", ""): (0.00424, 1.64, 0.5),
    ("", ONE_MAY_LIE): (0.003, 1.39, 0.5),
    (MUON, ""): (0.0339, 1.16, 0.5),
    (MUON, ONE_MAY_LIE): (0.024, 1.39, 0.5),
}
NATS_MORE_MAX, NATS_MORE_AIM = 0.05, 0.01  # one bit every H=15 steps above fp32 DiLoCo
OPENED_MORE_MAX = 0.03  # with opening rounds, without liars
WORSE_MAX = 1.02  # four bits every step, relative to fp32 every step
HEADINGS = ("", "H", "B/parameter/round", "B/parameter/step", "nats", "least", "most", "tuned")


@dataclass
class Row:
    name: str
    local_steps: int
    bytes_per_parameter: float  # of one trainer's update
    steps: int  # inner steps of every trainer, over all rounds
    heldout_nats: float  # mean over the seeds
    by_seed: list[float]
    settings: dict[str, float]
    grid: dict[str, float]  # "rate=… momentum=…" -> held-out nats on the tuning seed
    edges: list[str] = field(default_factory=list)  # settings whose best value is the last of its grid


@dataclass(frozen=True)
class Budget:
    text: Path
    steps: int  # inner steps of every trainer
    trainers: int
    changes: tuple[str, ...]  # "field=value" of the job or its model

    def spec(self, local_steps: int, seed: int, **settings: Any) -> JobSpec:
        rounds = max(1, self.steps // local_steps)
        values = {**settings, "local_steps": local_steps, "rounds": rounds, "warmup_rounds": round(WARMUP * rounds), "seed": seed}
        return with_settings(JobSpec(name="codec", data=bytes(32), **{"byzantine_max": 0, **values}), list(self.changes))


Tuned = Mapping[str, float]
Run = Callable[[Budget, int, Tuned], tuple[float, float]]  # (budget, seed, rates) → (held-out nats, bytes per parameter)


@dataclass(frozen=True)
class Method:
    name: str
    local_steps: int
    run: Run
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: {"inner_rate": INNER_RATES})


# Ours -----------------------------------------------------------------------------------------------------------------


def train(budget: Budget, spec: JobSpec) -> tuple[float, float]:
    rounds = Rounds(spec, engine_of(spec, budget.text))
    rounds.run([trainer_key(number) for number in range(budget.trainers)])
    return rounds.held_out(), statistics.mean(rounds.payload_bytes) / rounds.model.layout.size


def ours(
    name: str,
    local_steps: int,
    preset: str,
    outer: bool = True,
    inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW,
    **settings: Any,
) -> Method:
    """Return the preset with these settings. Methods like DiLoCo are tuned like DiLoCo."""

    def run(budget: Budget, seed: int, tuned: Tuned) -> tuple[float, float]:
        return train(budget, budget.spec(local_steps, seed, **{**without(PRESETS[preset]), "inner": inner, **settings, **tuned}))

    grid = {"inner_rate": MUON_RATES if inner is InnerOptimizerKind.MUON else INNER_RATES}
    if outer:
        grid |= {"outer_rate": OUTER_RATES, "outer_momentum": OUTER_MOMENTA}
    return Method(name, local_steps, run, grid)


def opened(inner: str, lied: str) -> Method:
    """Return one dense bit after opening rounds."""
    rates = dict(zip(("inner_rate", "outer_rate", "outer_momentum"), BEST_OF_ONE_BIT[inner, lied], strict=True))
    settings = (
        without(PRESETS["local"])
        | {"inner": InnerOptimizerKind.MUON if inner else InnerOptimizerKind.ADAMW, "byzantine_max": int(bool(lied))}
        | rates
    )

    def run(budget: Budget, seed: int, tuned: Tuned) -> tuple[float, float]:
        return train(budget, as_usual(budget.spec(15, seed, **settings)))

    return Method(f"{ONE_BIT}{inner}{OPENED}{lied}", 15, run, {})


def as_usual(spec: JobSpec) -> JobSpec:
    return replace(spec, compression_warmup_rounds=spec.usual_compression_warmup_rounds)


def shipped(preset: str, name: str = "", **settings: Any) -> Method:
    """Return the preset as in a job with full audits and byzantine_max=1, and only these other settings."""
    spec = complete_fields({**MEASURED[preset], **settings})

    def run(budget: Budget, seed: int, tuned: Tuned) -> tuple[float, float]:
        made = budget.spec(spec["local_steps"], seed, **{**without(spec), "byzantine_max": 1})
        return train(budget, made if "compression_warmup_rounds" in settings else as_usual(made))

    return Method(f"{PRESET} {preset}{name}", spec["local_steps"], run, {})


def without(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset without the fields that the budget sets, and without audits, which do not occur here."""
    said = ("local_steps", "rounds", "warmup_rounds", "audit", "audit_rate", "auditors")
    return {name: value for name, value in preset.items() if name not in said}


# Rivals ---------------------------------------------------------------------------------------------------------------


class FloatTrainers:
    """Trainers that exchange their pseudo-gradients in float32, without any checks."""

    def __init__(self, spec: JobSpec, engine: TorchEngine, count: int, keep: bool = True) -> None:
        self.spec, self.engine, self.keep = spec, engine, keep
        self.parameters = initial_parameters(spec)
        self.keys = [trainer_key(number) for number in range(count)]
        self._inner: dict[bytes, InnerState] = {}

    def deltas(self, round: int) -> Iterable[Float32Array]:
        for key in self.keys:
            last = InnerStates()
            delta, _ = self.engine.local_steps(
                self.parameters.copy(), JOB, round, key, inner=self._inner.get(key), on_state=last.take
            )
            if self.keep and last.inner is not None:
                self._inner[key] = last.inner
            yield delta


def diloco(
    budget: Budget,
    local_steps: int,
    seed: int,
    tuned: Tuned,
    outer_rate: float,
    momentum: float,
    inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW,
) -> tuple[float, float]:
    keep = bool(tuned["keep"])
    spec = budget.spec(local_steps, seed, inner=inner, beta1=0.9 if keep else 0.6, inner_rate=tuned["inner_rate"])
    trainers = FloatTrainers(spec, engine_of(spec, budget.text), budget.trainers, keep)
    velocity = np.zeros_like(trainers.parameters)
    for number in range(spec.rounds):
        gradient = np.mean(list(trainers.deltas(number)), axis=0, dtype=np.float32)
        velocity = np.float32(momentum) * velocity + gradient
        step = gradient + np.float32(momentum) * velocity if momentum else gradient
        trainers.parameters = trainers.parameters - np.float32(outer_rate) * step
    return held_out_nats(trainers.engine, trainers.parameters), 4.0


def run_diloco(local_steps: int, inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW) -> Run:
    def run(budget: Budget, seed: int, tuned: Tuned) -> tuple[float, float]:
        return diloco(budget, local_steps, seed, tuned, tuned["outer_rate"], tuned["outer_momentum"], inner)

    return run


def run_fedavg(local_steps: int) -> Run:
    """Average the trainers' models: DiLoCo with outer rate 1 and no momentum."""
    return lambda budget, seed, tuned: diloco(budget, local_steps, seed, tuned, 1.0, 0.0)


def run_sparseloco(local_steps: int) -> Run:
    def run(budget: Budget, seed: int, tuned: Tuned) -> tuple[float, float]:
        spec = budget.spec(local_steps, seed, beta1=0.9, inner_rate=tuned["inner_rate"])
        trainers = FloatTrainers(spec, engine_of(spec, budget.text), budget.trainers)
        left = {key: np.zeros_like(trainers.parameters) for key in trainers.keys}
        for number in range(spec.rounds):
            said = []
            for key, delta in zip(trainers.keys, trainers.deltas(number), strict=True):
                buffer = np.float32(SPARSELOCO_DECAY) * left[key] + delta
                said.append(sparseloco(buffer, spec))
                left[key] = buffer - said[-1]
            step = np.mean(said, axis=0, dtype=np.float32)
            trainers.parameters = trainers.parameters - np.float32(tuned["outer_rate"]) * step
        return held_out_nats(trainers.engine, trainers.parameters), sparseloco_bytes(spec) / layout_of(spec).size

    return run


def sparseloco(buffer: Float32Array, spec: JobSpec) -> Float32Array:
    """Keep the largest 64 of each 4096 elements, as one of four values: ± the largest magnitude, and ± a third of it."""
    said = np.zeros_like(buffer)
    for start, length in _chunks(spec):
        part, keep = buffer[start : start + length], _kept(length)
        chosen = np.argpartition(-np.abs(part), keep - 1)[:keep]
        values = part[chosen]
        largest = np.max(np.abs(values))
        magnitude = np.where(np.abs(values) > largest * np.float32(2 / 3), largest, largest / np.float32(3))
        said[start + chosen] = np.sign(values) * magnitude
    return said


def sparseloco_bytes(spec: JobSpec) -> float:
    """Count 12 bits of index and 2 of value per element, without scales, as in the paper."""
    return sum(_kept(length) * (12 + 2) / 8 for _, length in _chunks(spec))


def _kept(length: int) -> int:
    """Return the number of kept elements, in proportion for a shorter chunk, as in our format."""
    return max(1, length * SPARSELOCO_KEEP // CHUNK)


def _chunks(spec: JobSpec) -> Iterable[tuple[int, int]]:
    start = 0
    for length in layout_of(spec).chunk_lengths.tolist():
        assert length <= CHUNK
        yield start, length
        start += length


def single(budget: Budget, seed: int, tuned: Tuned, inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW) -> tuple[float, float]:
    """Train one process with the batches of all trainers at every step."""
    spec = budget.spec(1, seed, beta1=0.9, inner=inner, inner_rate=tuned["inner_rate"])
    engine = engine_of(spec, budget.text)
    engine.load_parameters(initial_parameters(spec))
    optimizer = engine.make_optimizer()
    for step in range(spec.rounds):
        shares = [engine.draw_batch(JOB, step, trainer_key(number), 0, spec.batch) for number in range(budget.trainers)]
        engine.accumulate_gradient(np.concatenate(shares))
        optimizer.step(inner_rate(spec, step))
    return held_out_nats(engine, engine.read_parameters().copy()), 0.0


def one_trainer(inner: InnerOptimizerKind) -> Run:
    """Train one trainer with its share of the samples and the same number of steps. It sends nothing."""
    return lambda budget, seed, tuned: single(replace(budget, trainers=1), seed, tuned, inner)


FEDAVG_GRID = {"keep": KEEP, "inner_rate": INNER_RATES}
DILOCO_GRID = {**FEDAVG_GRID, "outer_rate": OUTER_RATES, "outer_momentum": OUTER_MOMENTA}
MULOCO_GRID = {**DILOCO_GRID, "inner_rate": MUON_RATES}
METHODS = (
    Method(FP32_EVERY_STEP, 1, single),
    Method(ALONE, 1, one_trainer(InnerOptimizerKind.ADAMW)),
    Method(f"{ALONE}{MUON}", 1, one_trainer(InnerOptimizerKind.MUON), {"inner_rate": MUON_RATES}),
    *map(shipped, MEASURED),
    shipped("local", ", no opening", compression_warmup_rounds=0),
    shipped("local", ", audits sampled", audit=AuditMode.SAMPLED),
    ours("ours per-step 8-bit", 1, "per-step", outer=False, bits=8),
    ours(FOUR_BIT, 1, "per-step", outer=False, bits=4),
    Method(DILOCO, 15, run_diloco(15), DILOCO_GRID),
    ours(ONE_BIT, 15, "local"),
    ours(f"{ONE_BIT}{ONE_MAY_LIE}", 15, "local", byzantine_max=1),
    Method(f"{DILOCO}{MUON}", 15, run_diloco(15, InnerOptimizerKind.MUON), MULOCO_GRID),
    ours(f"{ONE_BIT}{MUON}", 15, "local", inner=InnerOptimizerKind.MUON),
    ours(f"{ONE_BIT}{MUON}{ONE_MAY_LIE}", 15, "local", inner=InnerOptimizerKind.MUON, byzantine_max=1),
    *itertools.starmap(opened, BEST_OF_ONE_BIT),
    Method("FedAvg", 15, run_fedavg(15), FEDAVG_GRID),
    Method(DILOCO, 30, run_diloco(30), DILOCO_GRID),
    Method("SparseLoCo format", 30, run_sparseloco(30), {"inner_rate": INNER_RATES, "outer_rate": OUTER_RATES}),
)


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """The best values on the tuning seed.

    Settings are tuned one after another. Then come the rates of the inner optimizer again, and both rates on a finer grid.
    """

    best: dict[str, float]
    tried: dict[str, float] = field(default_factory=dict)
    edges: list[str] = field(default_factory=list)


def tune(method: Method, budget: Budget) -> Tuning:
    tuning = untuned(method)

    def settle(name: str, values: Sequence[float]) -> None:
        def nats(value: float) -> float:
            settings = {**tuning.best, name: value}
            label = " ".join(f"{key}={number:g}" for key, number in settings.items())
            if label not in tuning.tried:
                tuning.tried[label] = method.run(budget, TUNING_SEED, settings)[0]
                said = f"{method.name} H={method.local_steps}, {label}: {tuning.tried[label]:.3f} nats"
                print(f"  {said}", file=sys.stderr, flush=True)
            return tuning.tried[label]

        losses = run_sweep(values, nats, beyond=rate_sweep.BEYOND_MAX if name in RATES else 0)
        tuning.best[name] = best = rate_sweep.best_value(losses)
        whole = name == "keep" or best == 0  # no larger grid is possible
        tuning.edges[:] = [edge for edge in tuning.edges if edge != name]
        if rate_sweep.is_best_at_edge(losses) and not whole:
            tuning.edges.append(name)

    order = list(method.grid)
    again = [name for name in ("keep", "inner_rate") if name in order[:-1]]  # the settings that were chosen before the others
    for name in (*order, *again):
        settle(name, method.grid[name])
    for name in (name for name in RATES if name in method.grid):
        settle(name, finer(tuning.best[name], method.grid[name]))
    return tuning


def finer(best: float, line: Sequence[float]) -> tuple[float, ...]:
    """Return the best rate with neighbours at half the logarithmic distance of the grid."""
    half = math.sqrt(line[1] / line[0])
    return float(f"{best / half:.3g}"), best, float(f"{best * half:.3g}")


def untuned(method: Method) -> Tuning:
    return Tuning({name: values[len(values) // 2] for name, values in method.grid.items()})


def numbered(budget: Budget, seeds: Sequence[int], tuned: bool, place: tuple[int, int]) -> Row:
    """Measure the row of a number of steps and a method, given by its index in `METHODS`: methods cannot be sent to processes."""
    steps, number = place
    row = measure(METHODS[number], replace(budget, steps=steps), seeds, tuned)
    print(f"{row.name} H={row.local_steps}, {steps} steps: {row.heldout_nats:.3f} nats", file=sys.stderr, flush=True)
    return row


def measure(method: Method, budget: Budget, seeds: Iterable[int], tuned: bool) -> Row:
    tuning = tune(method, budget) if tuned else untuned(method)
    runs = [method.run(budget, seed, tuning.best) for seed in seeds]
    losses = [nats for nats, _ in runs]
    each = statistics.mean(size for _, size in runs)
    mean = statistics.mean(losses)
    return Row(method.name, method.local_steps, each, budget.steps, mean, losses, tuning.best, tuning.tried, tuning.edges)


def show(rows: list[Row], trainers: int, parameters: int) -> None:
    """Print the rows with one number of steps."""
    table = Table(title=f"{parameters} parameters, {trainers} trainers, {rows[0].steps} steps each")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        rates = " ".join(f"{value:g}" for value in row.settings.values())
        sizes = (row.bytes_per_parameter, row.bytes_per_parameter / row.local_steps)
        losses = (row.heldout_nats, min(row.by_seed), max(row.by_seed))
        numbers = [f"{value:.4f}" for value in sizes] + [f"{value:.3f}" for value in losses]
        table.add_row(row.name, str(row.local_steps), *numbers, rates)
    Console(width=130).print(table)
    for row in rows:
        for name in row.edges:
            print(
                f"{row.name} H={row.local_steps}: the best {name}, {row.settings[name]:g}, is at the edge of its grid", flush=True
            )


def verdicts(rows: list[Row], tuned: bool) -> Iterator[str]:
    """Check the bounds of the rows with one number of steps, by means over the seeds, and yield a line for each."""
    found = {(row.name, row.local_steps): row.heldout_nats for row in rows}
    rates = "tuned" if tuned else "untuned"
    for inner, opening, lied in itertools.product(("", MUON), ("", OPENED), ("", ONE_MAY_LIE)):
        name, rival = f"{ONE_BIT}{inner}{opening}{lied}", f"{DILOCO}{inner}"
        if {(name, 15), (rival, 15)} <= found.keys():
            more, most = found[name, 15] - found[rival, 15], OPENED_MORE_MAX if opening and not lied else NATS_MORE_MAX
            text = f"{name}, H=15: within +{most} nat of {rates} {rival} (aim +{NATS_MORE_AIM}): {more:+.3f}"
            yield verdict(more <= most, text)
    if {(FOUR_BIT, 1), (FP32_EVERY_STEP, 1)} <= found.keys():
        worse = found[FOUR_BIT, 1] / found[FP32_EVERY_STEP, 1]
        yield verdict(worse <= WORSE_MAX, f"{FOUR_BIT}, H=1: ≤ {WORSE_MAX} × {rates} fp32 H=1: {worse:.3f}")
    alone = [nats for (name, _), nats in found.items() if name.startswith(ALONE)]
    if alone:
        for row in rows:
            if row.name.startswith(("ours", PRESET)):
                more = row.heldout_nats - min(alone)
                text = f"{row.name}, H={row.local_steps}, {row.steps} steps: better than {rates} {ALONE}: {more:+.3f}"
                yield verdict(more < 0, text)


def named(word: str) -> list[int]:
    """Return the indexes of the methods with this name or, if there is none, with this word in their names."""
    exact = [i for i, method in enumerate(METHODS) if method.name == word]
    return exact or [i for i, method in enumerate(METHODS) if word in method.name]


def main() -> int:
    parser = Parser("codec", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    what = f"steps of each trainer: multiples of {STEPS_MULTIPLE}"
    parser.add_argument("--steps", type=COUNT, nargs="+", default=(300,), metavar="N", help=what)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of initialisation and batches"
    )
    parser.add_argument("--trainers", type=COUNT, default=4, metavar="N", help="number of trainers that share the work")
    parser.add_argument("--no-tuning", dest="tuned", action="store_false", help="use the middle of each grid without a search")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="measure only methods with one of these words in their names")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to train on; default: the text inside every Python")
    parser.add_argument("--jobs", type=COUNT, default=JOBS, metavar="N", help=f"number of parallel processes, here {JOBS}")
    parser.add_argument("--resume", action="store_true", help="keep the results in the file of --json")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change fields of all jobs or of their model")
    options = parser.parse_args()
    if odd := [steps for steps in options.steps if steps % STEPS_MULTIPLE]:
        parser.error(f"--steps {odd[0]} is not a multiple of {STEPS_MULTIPLE}")
    methods = sorted({i for word in options.only or [""] for i in named(word)})
    if not methods:
        parser.error(f"--only {' '.join(options.only)} matches no method: choose from {', '.join(m.name for m in METHODS)}")
    map_signals_to_interrupt()
    torch.set_num_threads(1)
    started = time.time()
    try:
        with_settings(JobSpec(name="codec", data=bytes(32)), options.set)
    except UserError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        budget = Budget(text_file(options.text, Path(folder)), STEPS_MULTIPLE, options.trainers, tuple(options.set))
        parameters = layout_of(budget.spec(1, 0)).size
        about = {"parameters": parameters, "seeds": list(options.seeds), "steps": list(options.steps)}
        about |= {"trainers": options.trainers, "tuned": options.tuned, "set": options.set}
        about["text"] = str(options.text or "built-in")
        try:
            done = earlier(options.json, about) if options.resume else {}
        except UserError as error:
            parser.error(str(error))
        names = [(method.name, method.local_steps) for method in METHODS]
        rows = [Row(**row) for row in done.get("rows", ())]
        known = {(row.steps, names.index((row.name, row.local_steps))) for row in rows}
        places = [place for place in itertools.product(options.steps, methods) if place not in known]
        for _, row in side_by_side(partial(numbered, budget, options.seeds, options.tuned), places, options.jobs):
            rows.append(row)
            rows.sort(key=lambda row: (row.steps, names.index((row.name, row.local_steps))))
            write(options.json, started, {**about, "rows": [asdict(row) for row in rows]})
    tables = [list(table) for _, table in itertools.groupby(rows, key=lambda row: row.steps)]
    for table in tables:
        show(table, options.trainers, parameters)
    return conclude(itertools.chain.from_iterable(verdicts(table, options.tuned) for table in tables))


if __name__ == "__main__":
    sys.exit(main())
