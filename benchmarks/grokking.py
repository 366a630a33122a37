"""Effects of SAM and Grokfast at equal weight decay: `python -m benchmarks.grokking --json FILE`.

The first part is the task of papers about grokking: a + b modulo 97, with half of all pairs as examples. A model soon knows its
examples, and much later also the other pairs. A row gives the steps until 95 % of the held-out pairs are right, or that this
did not happen within the limit. Rows are compared at equal weight decay: with the smaller one, the other pairs come far later.
Each step has all examples. A small perceptron gives gradients, with the clipping, the second
pass and the exact outer AdamW of a job that sends gradients; nothing but the option differs between rows of a seed.

The second part is the default job on text, with four honest trainers in one process: held-out bits per byte after its last round.
A step of SAM takes two passes, so it has a row with as many steps and one with as many passes as `plain`, which has no option.

No row has a bound: the figures are published as they are.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.parallel import JOBS, side_by_side
from benchmarks.provenance import write
from benchmarks.simulated import Rounds, engine_of, text_file, trainer_key
from scenarios.trials import COUNT, Parser
from training import random_stream
from training.engines.pytorch.engine import no_subnormal_numbers
from training.engines.pytorch.inner_optimizers import clip_gradients, sam_perturbation
from training.job_spec import PRESETS, JobSpec, OuterOptimizerKind, complete_fields
from training.replicated import outer_optimizer
from training.replicated.tensor_layout import layout_from_shapes

MODULUS = 97
FEATURES, HIDDEN = 64, 128  # of each number's embedding, and of the hidden layer
RIGHT_MIN = 0.95
STEPS = 5_000
EVALUATED_STEPS = 10  # steps between two counts of right answers
# The decays of the moments and the weight decay 1 are those of Power et al. 2022 (arXiv:2201.02177). The rate is the best
# of 1e-3, 3e-3 and 1e-2 for `plain` and `grokfast`, with this weight decay and another seed.
ADDITION = JobSpec(
    name="addition",
    data=bytes(32),
    outer=OuterOptimizerKind.ADAMW,
    local_steps=1,
    inner_rate=1e-2,
    warmup_rounds=10,
    decay_rounds=0,
    beta1=0.9,
    beta2=0.98,
)
WEIGHT_DECAYS = (1.0, 0.1)
RADIUS = 0.05  # of SAM, as in its paper
# Options of a row. Grokfast's are those of its paper for this task (arXiv:2405.20233, figure 4).
ADDITION_ARMS: Mapping[str, Mapping[str, float]] = {
    "plain": {},
    "grokfast": {"grokfast": 2.0, "grokfast_decay": 0.98},
    "sam": {"sam_radius": RADIUS},
}
TRAINERS = 4
TEXT_ARMS: Mapping[str, Mapping[str, float]] = {
    "plain": {},
    "grokfast 0.5": {"grokfast": 0.5},
    "grokfast 2": {"grokfast": 2.0},
    "sam, equal steps": {"sam_radius": RADIUS},
    "sam, equal passes": {"sam_radius": RADIUS, "local_steps": 0.5},
}
ADDITION_TASK, TEXT_TASK = "addition", "text"
TASKS = ADDITION_TASK, TEXT_TASK


@dataclass
class Row:
    task: str
    arm: str
    seed: int
    weight_decay: float
    steps: int  # number of taken steps; on text, of one trainer
    passes: int  # number of passes over a batch
    learned: int | None = None  # steps until the examples are known
    generalized: int | None = None  # steps until the held-out pairs are known; None: not within the limit
    bits: float | None = None  # held-out bits per byte
    seconds: float = 0.0


# Addition --------------------------------------------------------------------------------------------------------------

LAYOUT = layout_from_shapes(
    [("embedding", (MODULUS, FEATURES)), ("hidden", (HIDDEN, 2 * FEATURES)), ("bias", (HIDDEN,)), ("output", (MODULUS, HIDDEN))]
)


def pairs(seed: int) -> tuple[Tensor, Tensor]:
    """Return the examples and the held-out pairs, half each, of shape (pairs, 2)."""
    every = np.stack(np.divmod(np.arange(MODULUS**2), MODULUS), axis=1)
    mixed = torch.from_numpy(np.random.default_rng(seed).permutation(every))
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


def first_parameters(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return parameters with the deviation 1 / √inputs. Biases are zero."""
    found = np.zeros(LAYOUT.size, dtype=np.float32)
    for tensor in LAYOUT.tensors:
        if len(tensor.shape) > 1:
            drawn = random_stream.irwin_hall_integers(tensor.size, "grokking", seed, tensor.name)
            scale = 1 / (random_stream.IRWIN_HALL_DEVIATION * math.sqrt(tensor.shape[1]))
            found[tensor.elements] = drawn.astype(np.float32) * np.float32(scale)
    return found


def logits(views: Sequence[Tensor], pairs_N2: Tensor) -> Tensor:
    embedding, hidden, bias, output = views
    return F.linear(F.relu(F.linear(embedding[pairs_N2].flatten(1), hidden, bias)), output)


def share_right(views: Sequence[Tensor], pairs_N2: Tensor) -> float:
    with torch.no_grad():
        return float((logits(views, pairs_N2).argmax(1) == pairs_N2.sum(1) % MODULUS).float().mean())


def addition(arm: str, seed: int, weight_decay: float, limit: int) -> Row:
    """Train until 95 % of the held-out pairs are right."""
    started, spec = time.perf_counter(), replace(ADDITION, weight_decay=weight_decay, **ADDITION_ARMS[arm])  # type: ignore[arg-type]
    examples, held_out = pairs(seed)
    vectors = [first_parameters(seed), *(np.zeros(LAYOUT.size, dtype=np.float32) for _ in spec.outer_slots)]
    parameters, gradients = torch.from_numpy(vectors[0]), torch.zeros(LAYOUT.size)
    views = []
    for tensor in LAYOUT.tensors:
        view = parameters[tensor.elements].view(tensor.shape).requires_grad_()
        view.grad = gradients[tensor.elements].view(tensor.shape)
        views.append(view)

    def accumulate() -> None:
        gradients.zero_()
        F.cross_entropy(logits(views, examples), examples.sum(1) % MODULUS).backward()

    row, powers = Row(ADDITION_TASK, arm, seed, weight_decay, 0, 0), outer_optimizer.initial_beta_powers(spec)
    for step in range(limit):
        with no_subnormal_numbers():
            accumulate()
            if spec.sam_radius:
                with sam_perturbation(parameters, gradients, spec.sam_radius):
                    accumulate()
            clip_gradients(gradients, spec.gradient_clip)
        powers = outer_optimizer.next_beta_powers(spec, powers)
        optimizer = outer_optimizer.make_outer_optimizer(spec, step, powers)
        for tensor in LAYOUT.tensors:
            own, *slots = (vector[tensor.elements] for vector in vectors)
            optimizer.step(own, slots, gradients[tensor.elements].numpy(), tensor.decayed)
        row.steps, row.passes = step + 1, row.passes + (2 if spec.sam_radius else 1)
        if row.steps % EVALUATED_STEPS == 0:
            if row.learned is None and share_right(views, examples) >= RIGHT_MIN:
                row.learned = row.steps
            if share_right(views, held_out) >= RIGHT_MIN:
                row.generalized = row.steps
                break
    row.seconds = time.perf_counter() - started
    return row


# Text ------------------------------------------------------------------------------------------------------------------


def on_text(arm: str, seed: int, weight_decay: float, rounds: int) -> Row:
    """Train the default job with the options of a row. `local_steps` of a row is a factor."""
    usual, options = complete_fields(PRESETS["local"] | {"rounds": rounds}), dict(TEXT_ARMS[arm])
    usual["local_steps"] = int(usual["local_steps"] * options.pop("local_steps", 1))
    spec = JobSpec(name="text", data=bytes(32), seed=seed, weight_decay=weight_decay, **usual, **options)  # type: ignore[arg-type]
    spec, started = replace(spec, compression_warmup_rounds=spec.usual_compression_warmup_rounds), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="folkmoot-grokking-") as folder:
        trained = Rounds(spec, engine_of(spec, text_file(None, Path(folder))))
        trained.run([trainer_key(number) for number in range(TRAINERS)])
        bits = trained.held_out() / math.log(2)
    steps = spec.rounds * spec.local_steps
    passes = steps * (2 if spec.sam_radius else 1)
    seconds = time.perf_counter() - started
    return Row(TEXT_TASK, arm, seed, weight_decay, steps, passes, bits=bits, seconds=seconds)


Run = tuple[str, str, int, float]  # task, row, seed and weight decay


def measured(limit: int, rounds: int, run: Run) -> Row:
    task, arm, seed, weight_decay = run
    part, most = (addition, limit) if task == ADDITION_TASK else (on_text, rounds)
    return part(arm, seed, weight_decay, most)


def planned(tasks: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    if ADDITION_TASK in tasks:
        for decay, seed in itertools.product(WEIGHT_DECAYS, seeds):
            yield from ((ADDITION_TASK, arm, seed, decay) for arm in ADDITION_ARMS)
    if TEXT_TASK in tasks:
        yield from ((TEXT_TASK, arm, seed, JobSpec(name="usual").weight_decay) for seed in seeds for arm in TEXT_ARMS)


# Report ----------------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    common = ("row", "weight decay", "seed")
    shown = (
        (ADDITION_TASK, (*common, "steps until examples are known", "steps until held-out pairs are known", "passes")),
        (TEXT_TASK, (*common, "steps", "passes", "held-out bits per byte")),
    )
    for task, headings in shown:
        if not any(row.task == task for row in rows):
            continue
        table = Table(title=task)
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in rows:
            if row.task == task:
                table.add_row(row.arm, f"{row.weight_decay:g}", str(row.seed), *cells(row))
        for arm, bits in means([row for row in rows if row.task == task]):
            table.add_row(arm, "", "mean", "", "", f"{bits:.3f}")
        Console(width=130).print(table)


def cells(row: Row) -> tuple[str, str, str]:
    if row.task == TEXT_TASK:
        return str(row.steps), str(row.passes), f"{row.bits:.3f}"
    learned, generalized = (f"{n:,}" if n else f"not within {row.steps:,}" for n in (row.learned, row.generalized))
    return learned, generalized, f"{row.passes:,}"


def means(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for arm in dict.fromkeys(row.arm for row in rows):
        found = [row.bits for row in rows if row.arm == arm and row.bits is not None]
        if found:
            yield arm, statistics.mean(found)


def main() -> int:
    parser = Parser("grokking", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of pairs and parameters")
    parser.add_argument("--limit", type=COUNT, default=STEPS, metavar="N", help="most steps of a row of the addition")
    parser.add_argument("--rounds", type=COUNT, default=60, metavar="N", help="rounds of the job on text")
    parser.add_argument("--only", choices=TASKS, nargs="+", default=TASKS, metavar="TASK", help=" or ".join(TASKS))
    parser.add_argument("--jobs", type=COUNT, default=JOBS, metavar="N", help=f"number of parallel processes, here {JOBS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, runs = time.time(), list(planned(options.only, options.seeds))
    about = {"modulus": MODULUS, "limit": options.limit, "rounds": options.rounds, "trainers": TRAINERS, "seeds": options.seeds}
    found: dict[int, Row] = {}
    for number, row in side_by_side(partial(measured, options.limit, options.rounds), runs, options.jobs):
        found[number] = row
        rows = [found[number] for number in sorted(found)]
        write(options.json, started, {**about, "rows": [asdict(row) for row in rows]})
        place = f"{row.task}, {row.arm}, weight decay {row.weight_decay:g}, seed {row.seed}"
        print(f"{place}: {', '.join(cells(row))}", file=sys.stderr, flush=True)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
