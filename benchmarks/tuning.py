"""A search for the default hyper-parameters: `python -m benchmarks.tuning --json FILE [--set field=value …]`.

One process trains without a network: the proposals of every accepted trainer pass the real engine, codec, error feedback,
aggregation and outer step. The rivals are one process each with plain AdamW, the same model and text, and the best of several
rates. One has as many samples as the network accepts, in the same global batch. The other is one trainer alone with its own share
of them. All are measured on the same held-out windows.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import write
from benchmarks.settings import with_settings
from protocol.errors import UserError
from protocol.messages import Proposal
from scenarios.trials import Parser
from training import rate_sweep
from training.corpus import open_tokens
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.single_process_baseline import train_baseline
from training.job_spec import JobSpec
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import layout_of

ACCEPTED = 2  # trainers accepted in each round of the default demo: three, one of which lies
TRAINERS = 3
CORES = 2
RIVALS = {"all samples, one process": ACCEPTED, "one trainer alone": 1}  # number of trainers whose samples each has
BASELINE_RATES = (3e-3, 5e-3, 8e-3, 1.2e-2)
EVALUATIONS = 8


def run_sweep(
    values: Iterable[float], measure: Callable[[float], float], beyond: int = rate_sweep.BEYOND_MAX
) -> dict[float, float]:
    """Sweep the values, and return value → loss, ascending by value."""
    line = rate_sweep.RateSweep(values, beyond)
    while (value := line.next_value()) is not None:
        line.losses[value] = measure(value)
    return dict(sorted(line.losses.items()))


class Network:
    """The accepted trainers and the replicated model, without a network."""

    def __init__(self, spec: JobSpec, text: Path, trainers: int) -> None:
        self.engine = TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer())
        self.job = hashlib.sha256(b"tuning").digest()
        self.model = ReplicatedModel.initial(self.job, spec)
        self.trainers = [hashlib.sha256(b"trainer %d" % number).digest() for number in range(trainers)]
        self.local_seconds: list[float] = []
        self._last: dict[bytes, tuple[codec.QuantizedUpdate | None, bytes]] = {}

    def round(self) -> None:
        self.model = self.model.apply_round([self._propose(trainer) for trainer in self.trainers], {})

    def held_out(self) -> float:
        bits = self.engine.compute_main_metric(self.model.parameters)
        assert bits is not None
        return bits

    def _propose(self, trainer: bytes) -> AcceptedProposal:
        model = self.model
        spec, e = model.spec, model.feedback_of(trainer, *self._last.get(trainer, (None, None)))
        started = time.process_time()
        delta, _ = self.engine.local_steps(np.array(model.parameters), self.job, model.round, trainer)
        self.local_seconds.append(time.process_time() - started)
        m = error_feedback.accumulate_feedback(e, delta, spec.feedback_decay, spec.update_weight)
        buffer = error_feedback.make_buffer(m, model.header(trainer), spec)
        payload = model.encode_payload(trainer, m if buffer is None else buffer.dequantize())
        self._last[trainer] = buffer, payload
        digest, record = hashlib.sha256(payload).digest(), model.records.get(trainer)
        previous = record.buffer if record else None
        committed = None if buffer is None else error_feedback.buffer_digest(buffer)
        proposal = Proposal(self.job, model.round, model.root, digest, len(payload), committed, previous)
        return AcceptedProposal(trainer, proposal, payload)


def train_network(spec: JobSpec, text: Path) -> dict[str, Any]:
    network = Network(spec, text, ACCEPTED)
    measured = [network.held_out()]
    for number in range(1, spec.rounds + 1):
        network.round()
        if number * EVALUATIONS // spec.rounds > (number - 1) * EVALUATIONS // spec.rounds:
            measured.append(network.held_out())
            print(f"round {number}: {measured[-1]:.3f} bits per byte", file=sys.stderr, flush=True)
    step = statistics.median(network.local_seconds) / spec.local_steps
    runs = TRAINERS * TRAINERS  # each trainer's own steps, and its replays of all the others'
    return {
        "heldout_bits_per_byte": measured,
        "step_ms": 1000 * step,
        "demo_compute_seconds": spec.rounds * spec.local_steps * runs * step / CORES,
        "payload_bytes": codec.payload_bytes(layout_of(spec), spec.bits),
    }


def train_rival(spec: JobSpec, text: Path, rates: list[float], name: str, shares: int) -> dict[str, Any]:
    """Train one process with the samples of `shares` trainers, at the best of these rates or of further ones beyond an edge."""
    steps, batch = spec.rounds * spec.local_steps, shares * spec.batch
    runs = dict[float, list[float]]()

    def last(rate: float) -> float:
        runs[rate] = train_baseline(spec, text, steps, batch, rate, evaluations=EVALUATIONS)
        print(f"{name}, {rate:g}: {runs[rate][-1]:.3f} bits per byte", file=sys.stderr, flush=True)
        return runs[rate][-1]

    losses = run_sweep(rates, last)
    best = rate_sweep.best_value(losses)
    return {
        "rates": {str(rate): bits for rate, bits in losses.items()},
        "rate": best,
        "at_edge": rate_sweep.is_best_at_edge(losses),
        "heldout_bits_per_byte": runs[best],
    }


def table(spec: JobSpec, network: dict[str, Any], rivals: dict[str, dict[str, Any]]) -> str:
    ours, seconds = network["heldout_bits_per_byte"], network["demo_compute_seconds"]
    lines = [
        f"{layout_of(spec).size} parameters, {network['payload_bytes']} bytes per proposal",
        f"{spec.rounds} rounds of {spec.local_steps} steps of {spec.batch} sequences, {ACCEPTED} accepted trainers",
        f"{network['step_ms']:.1f} ms per step on one thread; a demo computes {seconds:.0f} s on {CORES} cores",
        "held-out bits/byte: " + row(ours),
    ]
    for name, rival in rivals.items():
        theirs = rival["heldout_bits_per_byte"]
        lines.append(f"{name}, {rival['rate']:g}:  " + row(theirs))
        lines.append("  at the end, by rate: " + ", ".join(f"{rate} {bits:.3f}" for rate, bits in rival["rates"].items()))
        if rival["at_edge"]:
            lines.append("  a better rate may lie beyond those tried")
        lines.append(f"ratio at the end: {ours[-1] / theirs[-1]:.3f}")
    return "\n".join(lines)


def row(measured: list[float]) -> str:
    return "  ".join(f"{bits:5.3f}" for bits in measured)


def main() -> None:
    parser = Parser("tuning", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change fields of the job or its model")
    parser.add_argument(
        "--baseline-rates", nargs="*", type=float, default=list(BASELINE_RATES), help="rates of the baseline; empty: no baseline"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of initialisation and batches")
    arguments = parser.parse_args()
    try:
        base = with_settings(JobSpec(name="tuning", data=bytes(32)), arguments.set)
    except UserError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    started, runs = time.time(), list[dict[str, Any]]()
    settings = {name: value for name, value in asdict(base).items() if name not in ("data", "tokenizer", "seed")}

    def keep() -> None:
        write(arguments.json, started, {"spec": settings, "seeds": list(arguments.seeds), "runs": runs})

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(default_text())
        for seed in arguments.seeds:
            spec = replace(base, seed=seed)
            network, rivals = train_network(spec, text), dict[str, dict[str, Any]]()
            runs.append({"seed": seed, "network": network, "rivals": rivals})
            keep()
            for name, shares in RIVALS.items() if arguments.baseline_rates else ():
                rivals[name] = train_rival(spec, text, arguments.baseline_rates, name, shares)
                keep()
            print(table(spec, network, rivals), flush=True)


if __name__ == "__main__":
    main()
