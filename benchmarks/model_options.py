"""Gains and costs of options of a model and of its training: `python -m benchmarks.model_options --json FILE`.

One trainer trains each option without a network, with its real payloads and outer steps, for the same number of steps. Each
option has the best of the same rates, which are multiples of its job's own rate, by the mean over the seeds. The replays are
those of `benchmarks.replay`. Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import replay
from benchmarks.provenance import write
from benchmarks.simulated import JOB, Rounds, engine_of, text_file, trainer_key
from peer import features
from scenarios.trials import COUNT, Parser
from training.formats import packed_model
from training.job_spec import JobSpec
from training.rate_sweep import best_value
from training.replicated.tensor_layout import initial_parameters
from training.transformer import model_tensors

RATES = (0.25, 0.5, 1.0, 2.0)  # factors of the job's own rate
STEPS = 150
TIMED = 3  # rounds that are timed after one that warms up
TRAINER = trainer_key(0)


def float_bytes(spec: JobSpec) -> int:
    """Return the bytes of the model's parameters as float32."""
    return 4 * spec.model.parameters


def packed_bytes(spec: JobSpec) -> int:
    """Return the bytes of the tensors in a packed file, with a scale for each ternary matrix."""
    parameters = [tensor.parameter for tensor in model_tensors(spec.model).values()]
    codes = (packed_model.codes_bytes(parameter.shape) + 4 for parameter in parameters if parameter.is_ternary)
    return sum(codes) + sum(4 * math.prod(parameter.shape) for parameter in parameters if not parameter.is_ternary)


@dataclass(frozen=True)
class Option:
    job: str  # name of the job in `benchmarks.replay.JOBS`
    file_bytes: Callable[[JobSpec], int] = float_bytes  # bytes of the parameters in the smallest file of the model


OPTIONS = {
    "dense": Option("local"),
    "window": Option("window"),
    "sam": Option("sam"),
    "grokfast": Option("grokfast"),
    "dense-adamw": Option("adamw"),
    "experts": Option("experts"),  # with AdamW
    "ternary": Option("ternary", packed_bytes),
}


@dataclass
class Row:
    option: str
    rate: float  # best rate
    bits: list[float]  # held-out bits per byte at the best rate, of each seed
    bits_by_rate: dict[float, float]  # means over the seeds
    step_seconds: float
    honest_error: float  # largest error of an honest replay
    false_error: float  # smallest error of a false update
    bytes: int
    parameters: int
    pass_parameters: int  # parameters that compute each token


def held_out_bits(spec: JobSpec, text: Path) -> float:
    """Return held-out bits per byte after all rounds of a job with one honest trainer."""
    rounds = Rounds(spec, engine_of(spec, text))
    rounds.run([TRAINER])
    bits = rounds.engine.compute_main_metric(np.array(rounds.model.parameters))
    assert bits is not None, "these jobs hold text out"
    return bits


def step_seconds(spec: JobSpec, text: Path) -> float:
    engine, parameters, taken = engine_of(spec, text), initial_parameters(spec), list[float]()
    for number in range(1 + TIMED):
        began = time.process_time()
        engine.local_steps(parameters, JOB, number, TRAINER)
        taken.append((time.process_time() - began) / spec.local_steps)
    return statistics.median(taken[1:])


def replay_errors(job: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the largest error of honest replays, and the smallest of false updates in the same precision."""
    replays = argparse.Namespace(seeds=options.seeds, rounds=options.replayed, device="cpu")
    with tempfile.TemporaryDirectory(prefix="folkmoot-replay-") as folder:
        rows = [row for more in replay.measure(replays, job, Path(folder)) for row in more]
    honest = [row for row in rows if row.kind == replay.HONEST]
    false = [row.round for row in rows if row.kind in (replay.LIE, replay.SMALL_LIE) and row.precision == honest[0].precision]
    return max(row.round for row in honest), min(false)


def measure(name: str, options: argparse.Namespace, text: Path) -> Row:
    option, bits = OPTIONS[name], dict[float, list[float]]()
    usual = replay.JOBS[option.job]
    spec = replace(usual, byzantine_max=0, rounds=options.steps // usual.local_steps)
    for factor in RATES:
        rate = factor * usual.inner_rate
        trained = (replace(spec, seed=seed, inner_rate=rate).validated() for seed in options.seeds)
        bits[rate] = [held_out_bits(each, text) for each in trained]
        print(f"{name}, rate {rate:g}: {bits[rate]}", file=sys.stderr, flush=True)
    means = {rate: statistics.mean(of_seeds) for rate, of_seeds in bits.items()}
    best = best_value(means)
    return Row(
        name,
        best,
        bits[best],
        means,
        step_seconds(spec, text),
        *replay_errors(option.job, options),
        option.file_bytes(spec),
        spec.model.parameters,
        spec.model.pass_parameters,
    )


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the table in docs/benchmarks.md."""
    columns = ("option", "bits a byte (seeds)", "best rate", "seconds a step", "honest replay", "least false", "bytes")
    yield f"| {' | '.join(columns)} | parameters, of a token |"
    yield "|---" * 8 + "|"
    for row in rows:
        bits = f"{statistics.mean(row.bits):.3f} ({', '.join(f'{each:.3f}' for each in row.bits)})"
        errors = f"{row.honest_error:.1e} | {row.false_error:.1e}"
        sizes = f"{row.bytes:,} | {row.parameters:,}, {row.pass_parameters:,}"
        yield f"| `{row.option}` | {bits} | {row.rate:g} | {row.step_seconds:.3f} | {errors} | {sizes} |"


def main() -> int:
    parser = Parser("model_options", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S")
    parser.add_argument("--steps", type=COUNT, default=STEPS, metavar="N", help=f"steps of each option ({STEPS})")
    parser.add_argument("--replayed", type=COUNT, default=4, metavar="N", help="rounds before the round that is replayed (4)")
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=OPTIONS, metavar="NAME", help=", ".join(OPTIONS))
    options = parser.parse_args()
    features.register_features()
    torch.set_num_threads(1)
    started, rows = time.time(), list[Row]()
    about = {"seeds": options.seeds, "steps": options.steps, "rates": f"{RATES} of the job's own rate"}
    with tempfile.TemporaryDirectory(prefix="folkmoot-options-") as folder:
        text = text_file(None, Path(folder))
        for name in options.options:
            rows.append(measure(name, options, text))
            write(options.json, started, {**about, "rows": [asdict(row) for row in rows]})
    print(f"rates: {about['rates']}; {options.steps} steps")
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
