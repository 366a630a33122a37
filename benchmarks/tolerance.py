"""Harm by a trainer that lies within the tolerance of audited bf16: `python -m benchmarks.tolerance --json FILE`.

The default model learns with the preset `per-step`. One of four trainers moves elements of its payload to the next level, against
the descent. It chooses the elements that raise the loss most for their distance by `payload_distances`, up to a multiple of the
tolerance. Audits accept a distance up to the tolerance, and sampled audits challenge nothing up to twice of it. All other
trainers are honest, and nobody is suspended.

No row has a bound: the figures are published as they are.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parallel import JOBS, side_by_side
from benchmarks.provenance import write
from benchmarks.simulated import Rounds, engine_of, text_file, trainer_key
from scenarios.trials import COUNT, Parser
from training.job_spec import BF16_BITS, PRESETS, AuditMode, JobSpec, Precision, complete_fields
from training.replicated import codec, error_feedback
from training.replicated.codec import quantization
from training.replicated.codec.payload import iter_chunk_rows
from training.replicated.tensor_layout import Float32Array

TRAINERS = 4
TOP = quantization.TOP[BF16_BITS]
WITHIN = 0.995  # share of the allowed distance that a lie takes, for rounding
SECOND_LEAST = 0.05  # share of the mean gradient below which AdamW's root does not raise the harm of an element
# Rows by name: precision, and the distance of the lie in multiples of the tolerance; 0: all trainers are honest.
ROWS = {
    "honest, fp32": (Precision.FP32, 0),
    "honest, bf16": (Precision.BF16, 0),
    "a lie within the tolerance": (Precision.BF16, 1),
    "a lie of twice the tolerance": (Precision.BF16, 2),
}


@dataclass(frozen=True)
class Row:
    audit: AuditMode
    name: str
    seed: int
    heldout_nats: float
    moved: float  # mean distance between the false and the honest payload, in norms of the gradient


def spec_of(audit: AuditMode, precision: Precision, seed: int, rounds: int) -> JobSpec:
    fields = complete_fields(PRESETS["per-step"] | {"precision": precision, "rounds": rounds, "seed": seed})
    if audit is AuditMode.FULL:  # The rule is the mean.
        fields |= {"audit": audit, "rule": complete_fields({"audit": audit})["rule"]}
    return replace(JobSpec(name="tolerance", data=bytes(32)), **fields | {"warmup_rounds": rounds // 20}).validated()


def false_payload(rounds: Rounds, trainer: bytes, delta: Float32Array, mean: Float32Array, times: float) -> tuple[bytes, float]:
    """Return a payload whose distance from `delta` is `times` the tolerance, and its distance from the honest payload.

    `mean` is the mean gradient of all trainers. The second distance is relative to the norm of `delta`.
    """
    layout = rounds.model.layout
    honest = codec.quantize_vector(rounds.model.header(trainer), delta, layout)
    scales = np.repeat(honest.scales * math.ldexp(1, honest.exponent), layout.chunk_lengths).astype(np.float64)
    levels = np.concatenate([honest.levels_of(block) for block in layout.blocks]).astype(np.int64)
    moved = levels - 2 * np.sign(mean).astype(np.int64)  # Levels of four bits are odd.
    values, sizes = delta.astype(np.float64) * np.sign(moved), np.abs(moved)
    most = np.where(sizes == TOP, np.inf, (sizes + 1) * scales)
    distances = np.maximum(np.maximum((sizes - 1) * scales - values, values - most), 0)
    # AdamW divides a gradient by the root of its second moment.
    roots = np.sqrt(rounds.model.vectors["second"]) + np.float32(SECOND_LEAST) * np.abs(mean)
    harm = scales * np.abs(mean) / np.maximum(roots, np.float32(1e-30))
    # A chunk keeps its largest levels, without which its scale would be another one.
    (free,) = np.nonzero((np.abs(levels) < TOP) & (sizes <= TOP) & (harm > 0))
    cheapest = free[np.argsort(distances[free] ** 2 / harm[free])]
    allowed = WITHIN * times * rounds.spec.replay_tolerance * np.linalg.norm(delta) / error_feedback.EDGES
    chosen = cheapest[: np.searchsorted(np.cumsum(distances[cheapest] ** 2), allowed**2)]
    change = np.zeros(len(levels))
    change[chosen] = (moved - levels)[chosen] * scales[chosen]
    levels[chosen] = moved[chosen]
    payload = replace(honest, packed=_pack(rounds, levels)).encode()
    return payload, float(np.linalg.norm(change) / np.linalg.norm(delta))


def _pack(rounds: Rounds, levels: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    codes = ((np.abs(levels) - 1) // 2 | (levels < 0).astype(np.int64) << BF16_BITS - 1).astype(np.uint8)
    chunks = ((codes[rows.elements].reshape(-1, rows.length)) for rows in iter_chunk_rows(rounds.model.layout))
    return np.concatenate([quantization.pack_levels(chunk, BF16_BITS).ravel() for chunk in chunks])


def measured(rounds: int, run: tuple[AuditMode, str, int]) -> Row:
    audit, name, seed = run
    precision, times = ROWS[name]
    spec, moved = spec_of(audit, precision, seed, rounds), list[float]()
    with tempfile.TemporaryDirectory(prefix="folkmoot-tolerance-") as folder:
        trained = Rounds(spec, engine_of(spec, text_file(None, Path(folder))))
        trainers = [trainer_key(number) for number in range(TRAINERS)]
        while trained.model.round < spec.rounds:
            made = [trained.honest(trainer) for trainer in trainers]
            if times:
                _, own = made.pop()
                mean = np.mean([update.delta for _, update in (*made, (None, own))], axis=0)
                payload, distance = false_payload(trained, trainers[-1], own.delta, mean, times)
                made.append((trained.proposal(trainers[-1], own.m, payload, own.inner), own))
                moved.append(distance)
            trained.close(made, {})
        return Row(audit, name, seed, trained.held_out(), float(np.mean(moved)) if moved else 0.0)


def main() -> int:
    parser = Parser("tolerance", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of parameters and draws")
    parser.add_argument("--rounds", type=COUNT, default=60, metavar="N", help="rounds of each job")
    parser.add_argument("--jobs", type=COUNT, default=JOBS, metavar="N", help=f"number of parallel processes, here {JOBS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, found = time.time(), dict[int, Row]()
    runs = list(itertools.product((AuditMode.FULL, AuditMode.SAMPLED), ROWS, options.seeds))
    for number, row in side_by_side(partial(measured, options.rounds), runs, options.jobs):
        found[number] = row
        write(options.json, started, {"rounds": options.rounds, "rows": [asdict(found[place]) for place in sorted(found)]})
        print(f"audit {row.audit}, {row.name}, seed {row.seed}: {row.heldout_nats:.4f} nats", file=sys.stderr, flush=True)
    table = Table()
    for heading in ("audit", "row", "seed", "held-out nats", "payload moved"):
        table.add_column(heading, justify="right")
    for _, row in sorted(found.items()):
        table.add_row(row.audit.value, row.name, str(row.seed), f"{row.heldout_nats:.4f}", f"{row.moved:.3f}")
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
