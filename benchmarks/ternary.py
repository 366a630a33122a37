"""Ternary matrices beside dense ones at equal steps: held-out bits, activations of eight bits, and bytes.

`python -m benchmarks.ternary --json FILE` trains the model of the default job on the built-in text, in one process. Each side is
shown at the best of its rates. *ternary* makes new levels in each step, as a job with one step a round does. *ternary, rounds*
makes new levels in every tenth step, and its weights move along ramps between them, as in a job with ten steps a round.

The control has no straight-through estimator: its matrices get no gradient.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np
import torch

from benchmarks.dispatch import processor
from benchmarks.provenance import write
from benchmarks.replay import tokens_of
from benchmarks.verdicts import conclude, verdict
from peer import features
from scenarios.trials import COUNT, Parser
from training.engines.pytorch.engine import TorchEngine, start_torch_threads
from training.engines.pytorch.implementations import held_out_bits
from training.engines.pytorch.model import GPT
from training.engines.pytorch.single_process_baseline import baseline_rate
from training.formats import packed_model
from training.formats.huggingface_model import llama_tensor_names
from training.job_spec import PRESETS, InnerOptimizerKind, JobSpec, complete_fields
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.ternary import ternary_weights
from training.transformer import ModelSpec, model_tensors

STEPS: Final = 150
ROUND_STEPS: Final = 10
# Rates by inner optimizer: the default of a job, and factors of two around it. Best rates must not be at the end of a list.
RATES: Final = {
    InnerOptimizerKind.ADAMW: (3e-3, 6e-3, 1.2e-2, 2.4e-2),
    InnerOptimizerKind.MUON: (1.5e-2, 3e-2, 6e-2, 1.2e-1),
}
RATIO_MAX: Final = 1.10  # largest ratio of held-out bits to those of dense matrices
INT8_BITS_MAX: Final = 0.005  # most bits a byte that activations of eight bits cost
DENSE, TERNARY, ROUNDS, CONTROL = "dense", "ternary", "ternary, rounds", "without the estimator"
SIDES: Final = (DENSE, TERNARY, ROUNDS, CONTROL)
JOB, TRAINER = bytes(32), bytes(32)


@dataclass(frozen=True)
class Row:
    side: str
    seed: int
    rate: float
    bits: float  # held-out bits a byte
    int8_bits: float | None  # the same with activations of eight bits
    gradient: float  # norm of the last step's gradient of the layers' matrices
    levels_changed: float | None  # share of the levels that differ from the first ones
    seconds_a_step: float


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's matrices in the layers, in float32 and packed."""

    elements: int
    float32_bytes: int
    codes_bytes: int
    scales_bytes: int
    file_bytes: int  # packed file with embedding and norms in float32
    is_exact: bool  # whether unpacked weights have the bits of the packed ones


def spec_of(side: str, seed: int, steps: int, inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW) -> JobSpec:
    model = ModelSpec(linear="dense" if side == DENSE else "ternary")
    terms = complete_fields(PRESETS["local"] | {"local_steps": steps, "inner": inner})
    return JobSpec(name="ternary", data=bytes(32), model=model, seed=seed, **terms)


class _WithoutEstimator(GPT):
    """A model whose ternary weights pass no gradient to latent weights."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job)
        made = self._linear.make_weights
        assert made is not None
        self._linear = replace(self._linear, make_weights=lambda latent, rows: made(latent.detach(), rows))


def train(
    side: str, seed: int, rate: float, steps: int, inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW
) -> tuple[Row, Float32Array]:
    spec = spec_of(side, seed, steps, inner)
    tokens, tokenizer = tokens_of(spec)
    engine = TorchEngine(spec, tokens, tokenizer)
    if side == CONTROL:
        engine.model = _WithoutEstimator(spec)
    first = initial_parameters(spec)
    engine.load_parameters(first)
    optimizer, started = engine.make_optimizer(), time.perf_counter()
    for start in range(0, steps, ROUND_STEPS):
        with engine.model.local_steps() if side == ROUNDS else nullcontext():
            for step in range(start, min(steps, start + ROUND_STEPS)):
                engine.accumulate_gradient(engine.draw_batch(JOB, 0, TRAINER, step, spec.batch))
                optimizer.step(baseline_rate(step, steps, rate))
    seconds = (time.perf_counter() - started) / steps
    last, metric = engine.read_parameters().copy(), spec.resolved_objective.main_metric
    matrices = ternary_tensors(spec)
    gradient = layout_of(spec).tensor_views(engine.model.gradients.numpy())
    with torch.no_grad():
        bits = held_out_bits(engine.model, spec, tokens, lambda: None)[metric]
        int8_bits = None
        if side != DENSE:
            int8_bits = held_out_bits(engine.model.with_int8_activations(), spec, tokens, lambda: None)[metric]
    row = Row(
        side,
        seed,
        rate,
        bits,
        int8_bits,
        math.sqrt(sum(float(np.square(gradient[name], dtype=np.float64).sum()) for name in matrices)),
        None if side == DENSE else changed_levels(spec, first, last),
        seconds,
    )
    return row, last


def ternary_tensors(spec: JobSpec) -> list[str]:
    """Return the names of the matrices that are ternary in a ternary model, also of a dense model."""
    known = model_tensors(replace(spec.model, linear="ternary"))
    return [name for name, tensor in known.items() if tensor.parameter.is_ternary]


def changed_levels(spec: JobSpec, first: Float32Array, last: Float32Array) -> float:
    before, after = (layout_of(spec).tensor_views(vector) for vector in (first, last))
    differing = [
        np.sign(ternary_weights(before[name])) != np.sign(ternary_weights(after[name])) for name in ternary_tensors(spec)
    ]
    return float(np.concatenate([part.ravel() for part in differing]).mean())


def measure_sizes(spec: JobSpec, parameters: Float32Array) -> Sizes:
    """Pack a model into a file and read it again."""
    views, names, matrices = layout_of(spec).tensor_views(parameters), llama_tensor_names(spec.model), ternary_tensors(spec)
    weights = {name: ternary_weights(view) if name in matrices else view for name, view in views.items()}
    stream = io.BytesIO()
    packed_model.write_packed(stream, spec.model, names, weights)
    with tempfile.TemporaryDirectory(prefix="folkmoot-ternary-") as folder:
        path = Path(folder) / packed_model.PACKED
        path.write_bytes(stream.getvalue())
        found = packed_model.read_packed(path, spec.model, names)
        read = {name: np.concatenate(list(tensor.iter_blocks())).reshape(views[name].shape) for name, tensor in found.items()}
    exact = [
        (ternary_weights(values) if name in matrices else values).tobytes() == weights[name].tobytes()
        for name, values in read.items()
    ]
    elements = sum(views[name].size for name in matrices)
    codes = sum(packed_model.codes_bytes(views[name].shape) for name in matrices)
    return Sizes(
        elements, 4 * elements, codes, 4 * len(matrices), len(stream.getvalue()), len(exact) == len(views) and all(exact)
    )


def best(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each side at its best rate: the least mean of the held-out bits."""
    found = dict[str, list[Row]]()
    for side in dict.fromkeys(row.side for row in rows):
        rates = {row.rate for row in rows if row.side == side}
        of_rate = [[row for row in rows if row.side == side and row.rate == rate] for rate in rates]
        most = max(map(len, of_rate))
        found[side] = min(
            (each for each in of_rate if len(each) == most),
            key=lambda each: mean(row.bits if math.isfinite(row.bits) else math.inf for row in each),
        )
    return found


def verdicts(rows: Sequence[Row], sizes: Sizes) -> Iterator[str]:
    known = best(rows)
    for side in (TERNARY, ROUNDS):
        if not {DENSE, side} <= known.keys():
            continue
        ratio = mean(row.bits for row in known[side]) / mean(row.bits for row in known[DENSE])
        yield verdict(ratio <= RATIO_MAX, f"{side}: held-out bits ≤ {RATIO_MAX:g} × dense: {ratio:.3f}")
        more = max(row.int8_bits - row.bits for row in known[side] if row.int8_bits is not None)
        yield verdict(more <= INT8_BITS_MAX, f"{side}: activations of eight bits cost ≤ {INT8_BITS_MAX:g} bits: {more:.4f}")
    if {CONTROL, TERNARY} <= known.keys():
        control, learns = known[CONTROL], known[TERNARY]
        held = not any(row.gradient for row in control) and min(row.bits for row in control) > max(row.bits for row in learns)
        yield verdict(held, f"{CONTROL}: no gradient, {mean(row.bits for row in control):.3f} bits")
    share = sizes.codes_bytes / sizes.float32_bytes
    yield verdict(share <= 1 / 16 and sizes.is_exact, f"packed matrices ≤ 1/16 of their bytes in float32, exact: {share:.4f}")


def show(rows: Sequence[Row], sizes: Sizes) -> None:
    print(f"{'side':24}{'rate':>7}{'bits':>8}{'least':>8}{'most':>8}{'int8':>9}{'levels changed':>16}{'ms a step':>11}")
    for side, of_side in best(rows).items():
        bits = [row.bits for row in of_side]
        int8 = [row.int8_bits - row.bits for row in of_side if row.int8_bits is not None]
        changed = [row.levels_changed for row in of_side if row.levels_changed is not None]
        print(
            f"{side:24}{of_side[0].rate:7g}{mean(bits):8.3f}{min(bits):8.3f}{max(bits):8.3f}"
            f"{f'{max(int8):+.4f}' if int8 else '':>9}{f'{mean(changed):.3f}' if changed else '':>16}"
            f"{1000 * mean(row.seconds_a_step for row in of_side):11.1f}"
        )
    print("\nheld-out bits a byte at each rate, mean over the seeds")
    for side in dict.fromkeys(row.side for row in rows):
        rates = sorted({row.rate for row in rows if row.side == side})
        means = ((rate, mean(row.bits for row in rows if (row.side, row.rate) == (side, rate))) for rate in rates)
        print(f"{side:24}" + "".join(f"  {rate:g}: {bits:.3f}" for rate, bits in means))
    print(
        f"\n{sizes.elements} elements: {sizes.float32_bytes} bytes in float32; {sizes.codes_bytes} of codes and "
        f"{sizes.scales_bytes} of scales; the whole file has {sizes.file_bytes}"
    )


def main() -> int:
    parser = Parser("ternary", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S")
    parser.add_argument(
        "--inner", type=InnerOptimizerKind, choices=InnerOptimizerKind, default=InnerOptimizerKind.ADAMW, help="inner optimizer"
    )
    parser.add_argument(
        "--sides", nargs="+", default=list(SIDES), choices=SIDES, metavar="SIDE", help=f"sides: {', '.join(SIDES)}"
    )
    parser.add_argument("--steps", type=COUNT, default=STEPS, metavar="N")
    options = parser.parse_args()
    features.register_features()
    start_torch_threads(1)
    started, rows, rates = time.time(), list[Row](), RATES[options.inner]
    about = {
        "processor": processor(),
        "seeds": options.seeds,
        "inner": options.inner.value,
        "rates": rates,
        "steps": options.steps,
    }
    sizes = measure_sizes(spec := spec_of(TERNARY, 0, options.steps), initial_parameters(spec))
    for seed in options.seeds:
        for side in options.sides:
            # Only embedding and norms of the control learn, so one rate is enough.
            for rate in rates if side != CONTROL else rates[1:2]:
                row, last = train(side, seed, rate, options.steps, options.inner)
                if side == TERNARY:
                    sizes = measure_sizes(spec_of(side, seed, options.steps), last)
                rows.append(row)
                print(f"{side}, seed {seed}, rate {rate:g}: {row.bits:.3f} bits", file=sys.stderr, flush=True)
                write(options.json, started, {**about, "sizes": asdict(sizes), "rows": [asdict(each) for each in rows]})
    show(rows, sizes)
    return conclude(verdicts(rows, sizes))


if __name__ == "__main__":
    sys.exit(main())
