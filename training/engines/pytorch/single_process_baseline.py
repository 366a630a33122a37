"""The baseline of a job: one process with the same model and text, and an inner optimizer's step after each batch."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from training.corpus import open_tokens
from training.data.tokenizer import load_tokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters

WARMUP = 0.05  # fraction of all steps in which the rate rises linearly
FLOOR = 0.1  # rate of the last step, after a linear decay, as a fraction of the peak rate
# AdamW's decay rates: the moments are never reset, so they average over more steps than a job's inner steps.
BETA1, BETA2 = 0.9, 0.95


def train_baseline(
    spec: JobSpec,
    text: Path,
    steps: int,
    batch: int,
    rate: float,
    tokenizer: bytes | None = None,
    evaluations: int = 10,
) -> list[float]:
    """Return held-out bits per byte before the first step, and then at equal intervals of `steps` steps.

    A step has `batch` sequences.
    """
    loaded = load_tokenizer(tokenizer, spec.model.vocabulary)
    engine = TorchEngine(replace(spec, beta1=BETA1, beta2=BETA2), open_tokens(spec, text, loaded), loaded)
    engine.load_parameters(initial_parameters(spec))
    optimizer = engine.make_optimizer()
    job, nobody = bytes(32), bytes(32)
    measured = [_held_out(engine)]
    for step in range(steps):
        engine.accumulate_gradient(engine.draw_batch(job, 0, nobody, step, batch))
        optimizer.step(baseline_rate(step, steps, rate))
        if (step + 1) * evaluations // steps > step * evaluations // steps:
            measured.append(_held_out(engine))
    return measured


def baseline_rate(step: int, steps: int, peak: float) -> float:
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (FLOOR + (1 - FLOOR) * (steps - 1 - step) / max(1, steps - 1 - warmup))


def _held_out(engine: TorchEngine) -> float:
    bits: float | None = engine.compute_main_metric(engine.read_parameters().copy())
    assert bits is not None, "a baseline needs a held-out part"
    return bits


def main() -> None:
    """Train a baseline in a process of its own, and print the held-out bits per byte as JSON."""
    parser = argparse.ArgumentParser(prog="training.engines.pytorch.single_process_baseline", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="file with an encoded job specification")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="JSON of a byte-level BPE; default: bytes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences per step, of all accepted trainers together")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = arguments.tokenizer.read_bytes() if arguments.tokenizer else None
    spec = JobSpec.decode(arguments.spec.read_bytes())
    measured = train_baseline(spec, arguments.text, arguments.steps, arguments.batch, arguments.rate, tokenizer)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
