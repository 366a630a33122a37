"""Hashes of everything that must have the same bits on every machine, by name: `python -m tests.training.golden` prints them.

    --check   compares them with `golden.json`
    --matrix  compares them in a process for every choice that numpy, OpenBLAS, torch and the C library leave (a minute or two)
    --write   writes `golden.json` anew, if the whole matrix agrees

Write new hashes only after a change that is *meant* to change these bits: another format of payloads, another initialization,
another rule or rounding. The change states this, and its decision record gives the reason. Never write them to make a test pass.
Honest peers disagree about a hash that differs in one environment only, and an unintended change of a hash is a fork between
peers of two versions.

All inputs are made of integers of a SHA-256 stream. `--torch DEVICE` computes a part of them with torch as well, on that device
(`cpu`, `cuda`): they must be equal, since IEEE 754 rounds each of these operations correctly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import dispatch
from tests.training.replicated.support import (
    JOB,
    ODD,
    RAGGED,
    RATE,
    SMALL,
    aggregate_updates,
    buffer,
    committed,
    header,
    proposed,
    trainer,
    update,
)
from training import random_stream
from training.data.token_sequences import batch_offsets
from training.job_spec import (
    BITS,
    ESTIMATES,
    OUTER_SLOTS,
    PRESETS,
    AggregationRule,
    JobSpec,
    OuterOptimizerKind,
)
from training.objectives.registry import ScratchObjective
from training.replicated import aggregate, codec, error_feedback, outer_optimizer
from training.replicated.outer_optimizer import inner_rate
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec

GOLDEN = Path(__file__).with_name("golden.json")
ROUNDS = 4  # from the second one on, error feedback, momentum and the median norm have an effect
SPECS = {
    "small": SMALL,
    "odd": ODD,
    "default": JobSpec(name="default", data=bytes(32)),
    "one head": JobSpec(name="wide", data=bytes(32), seed=7, model=ModelSpec(width=32, layers=2, heads=1, kv_heads=1, hidden=40)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "local": PRESETS["local"] | {"outer_rate": RATE},
    "per-step": PRESETS["per-step"],
    "estimates": ESTIMATES | {"outer_rate": RATE},
}
AGGREGATED_BITS = (1, 4)

Named = Iterator[tuple[str, bytes]]


def everything() -> dict[str, str]:
    """Return SHA-256 digests by name, in the order of computation."""
    parts = (streams, initialisation, sampling, schedules, payloads, feedback_steps, estimated, aggregates, outer_steps, models)
    return {name: hashlib.sha256(data).hexdigest() for part in parts for name, data in part()}


def streams() -> Named:
    yield "stream", random_stream.random_bytes(1000, "golden", b"\x00\xff", 3)
    yield "irwin-hall", _little(random_stream.irwin_hall_integers(1001, "golden"))
    yield "scratch update", _little(ScratchObjective().deterministic_update(JOB, 1, trainer(1), layout_of(_scratch()).size))


def initialisation() -> Named:
    for name, spec in SPECS.items():
        yield f"initial parameters, {name}", _little(initial_parameters(spec))


def sampling() -> Named:
    for tokens, context, batch in ((300, 64, 5), (1_000_003, 128, 16), (2**36, 1024, 64)):
        drawn = [
            batch_offsets(JOB, round, trainer(number), step, batch=batch, tokens=tokens, context=context, seed=seed)
            for round, number, step, seed in ((0, 0, 0, 0), (7, 1, 9, 0), (999_999, 2, 3, 2**40))
        ]
        yield f"batch offsets of {tokens} tokens", _little(np.concatenate(drawn))
    text, context = random_stream.random_bytes(5000, "text"), 64
    offsets = batch_offsets(JOB, 3, trainer(1), 2, batch=7, tokens=len(text), context=context, seed=1)
    taken = np.stack([np.frombuffer(text, np.uint8, context + 1, start) for start in offsets]).astype("<i8")
    yield "sequences", taken[:, :-1].tobytes() + taken[:, 1:].tobytes()


def schedules() -> Named:
    shaped = replace(SMALL, warmup_rounds=7, decay_rounds=20, inner_rate_floor=0.03)
    for name, spec in (("default", SMALL), ("with a plateau", shaped)):
        rates = [inner_rate(spec, number) for number in range(spec.rounds)]
        yield f"inner rates, {name}", struct.pack(f"<{len(rates)}d", *rates)


def payloads() -> Named:
    for bits in BITS:
        expected = header(bits=bits)
        for name, layout in (("ragged", RAGGED), ("small", layout_of(SMALL)), ("odd", layout_of(ODD))):
            for number, deviation in enumerate((1e-2, 3e4, 1e-20)):
                m = buffer(layout, "payload", number, deviation=deviation)
                m[: layout.chunk_lengths[0]] *= np.float32(0.37 * number)  # the first chunk is zero once
                payload = codec.encode_payload(expected, m, layout)
                update = codec.decode_payload(payload, expected, layout)
                yield f"payload of {name} at {deviation}, {bits} bit", payload
                said = _little(update.dequantize()) + struct.pack("<d", update.norm_squared())
                yield f"decoded {name} at {deviation}, {bits} bit", said


def feedback_steps() -> Named:
    levels = committed(buffer(RAGGED, "feedback"))
    payload = codec.encode_payload(header(), levels.dequantize(), RAGGED)
    for stepped, halvings in ((True, 0), (False, 0), (True, 3)):
        digests = error_feedback.buffer_digest(levels), hashlib.sha256(payload).digest()
        e = error_feedback.next_feedback(error_feedback.FeedbackRecord(*digests, 3, stepped, halvings), levels, payload, RAGGED)
        accumulated = error_feedback.accumulate_feedback(e, buffer(RAGGED, "delta"), 0.95)
        yield f"feedback, stepped {stepped}, halved {halvings}", _little(e) + _little(accumulated)


def estimated() -> Named:
    """Return estimates after a few payloads, each of which encodes a part of another vector."""
    for bits in BITS:
        estimate = None
        for number in range(ROUNDS):
            said = error_feedback.residual_of(buffer(RAGGED, "meant", number), estimate and estimate.dequantize())
            estimate = error_feedback.update_estimate(estimate, update(said, RAGGED, number, bits))
            yield f"estimate {number}, {bits} bit", estimate.encode()


def aggregates() -> Named:
    for bits in AGGREGATED_BITS:
        for count, liars in ((1, 1), (2, 1), (5, 1), (13, 4)):
            updates = [_update(number, bits) for number in range(count)]
            yield f"gram of {count}, {bits} bit", str(aggregate.gram_matrix(updates)).encode()
            for rule in AggregationRule:
                aggregated = aggregate_updates(updates, RAGGED, rule, liars)
                yield f"{rule} of {count}, {liars} lie, {bits} bit", _little(aggregated)


def _update(number: int, bits: int) -> codec.QuantizedUpdate:
    """Return an update whose norm depends on `number`, so that some are clipped and no single one sets the grid."""
    return update(buffer(RAGGED, "aggregate", number, deviation=0.01 * (1 + number % 5) ** 2), RAGGED, number, bits)


def outer_steps() -> Named:
    for kind in OuterOptimizerKind:
        spec = replace(SMALL, outer=kind, local_steps=1)
        vectors = [buffer(RAGGED, "parameters", deviation=1.0)]
        vectors += [np.zeros(RAGGED.size, dtype=np.float32) for _ in OUTER_SLOTS[spec.outer]]
        powers = outer_optimizer.initial_beta_powers(spec)
        for number in range(ROUNDS):
            powers = outer_optimizer.next_beta_powers(spec, powers)
            step = outer_optimizer.make_outer_optimizer(spec, number, powers).step
            step(vectors[0], vectors[1:], buffer(RAGGED, "gradient", number), True)
        yield f"{kind} steps", b"".join(map(_little, vectors))


def by_torch(device: str) -> dict[str, str]:
    """Compute some digests with torch on a device: loaded parameters, sequences that are read, one outer optimizer."""
    import torch

    from training.engines.pytorch.implementations import window_batch

    def on_device(array: Float32Array) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def parts() -> Named:
        for name, spec in SPECS.items():
            yield f"initial parameters, {name}", _little((on_device(initial_parameters(spec)) * 1.0).cpu().numpy())
        parameters, momentum = on_device(buffer(RAGGED, "parameters", deviation=1.0)), torch.zeros(RAGGED.size, device=device)
        mu, eta = (float(np.float32(value)) for value in (SMALL.outer_momentum, SMALL.outer_rate))
        for number in range(ROUNDS):
            gradient = on_device(buffer(RAGGED, "gradient", number))
            momentum = _flushed(momentum * mu + gradient)
            parameters = parameters - _flushed((momentum * mu + gradient) * eta)
        yield "nesterov steps", _little(parameters.cpu().numpy()) + _little(momentum.cpu().numpy())
        tokens = np.frombuffer(random_stream.random_bytes(5000, "text"), dtype=np.uint8)
        offsets = batch_offsets(JOB, 3, trainer(1), 2, batch=7, tokens=len(tokens), context=64, seed=1)
        yield "sequences", b"".join(_little((part.to(device) + 0).cpu().numpy()) for part in window_batch(tokens, offsets, 64))

    return {name: hashlib.sha256(data).hexdigest() for name, data in parts()}


def _flushed(vector: Any) -> Any:
    return vector.where(vector.abs() >= float(outer_optimizer.FLUSH_BELOW), 0.0)


def models() -> Named:
    for name, settings in SETTINGS.items():
        yield from _model(name, replace(SMALL, **settings))
    yield from _model("scratch", _scratch())


def _scratch() -> JobSpec:
    return JobSpec(name="scratch", objective="scratch", rounds=ROUNDS, outer_rate=RATE)


def _model(name: str, spec: JobSpec) -> Named:
    """Return hashes of the root, which covers the specification, and of the vectors after several rounds of five trainers."""
    model = ReplicatedModel.initial(JOB, spec)
    sent: dict[bytes, tuple[codec.QuantizedUpdate | None, bytes | None]] = {}
    for number in range(ROUNDS):
        items = []
        for key in map(trainer, range(5)):
            e = model.feedback_of(key, *sent.get(key, (None, None)))
            m = error_feedback.accumulate_feedback(
                e, buffer(model.layout, "golden", number, key), spec.feedback_decay, spec.update_weight
            )
            items.append(proposed(model, key, m))
            sent[key] = error_feedback.make_buffer(m, model.header(key), spec), items[-1].payload
        model = model.apply_round(items, {})
    yield f"vectors after {ROUNDS} rounds, {name}", b"".join(map(_little, model.vectors.values()))
    yield f"model root after {ROUNDS} rounds, {name}", model.root


def _little(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


# Comparing -----------------------------------------------------------------------------------------------------------


def expected() -> dict[str, str]:
    golden: dict[str, str] = json.loads(GOLDEN.read_text())
    return golden


def differences(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    return [name for name in (*wanted, *(found.keys() - wanted.keys())) if found.get(name) != wanted.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.training.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    for option in ("check", "matrix", "write"):
        what.add_argument(f"--{option}", action="store_true")
    parser.add_argument("--torch", metavar="DEVICE")
    options = parser.parse_args()
    if options.matrix:
        return 1 if compare_matrix(expected()) else 0
    hashes = everything()
    if options.write:
        return write(hashes)
    computed = by_torch(options.torch) if options.torch else {}
    if options.check:
        wrong = differences(hashes, expected()) + [f"torch: {name}" for name in computed if computed[name] != hashes[name]]
        print("\n".join(wrong) or f"{len(hashes)} hashes are as they must be, {len(computed)} of them also with torch")
        return 1 if wrong else 0
    print(json.dumps({"seen": dispatch.seen(), "hashes": hashes, "torch": computed}))
    return 0


def write(hashes: dict[str, str]) -> int:
    if compare_matrix(hashes):
        print(f"{GOLDEN} is left as it is: a computation that depends on the machine is to be mended first", file=sys.stderr)
        return 1
    GOLDEN.write_text(json.dumps(hashes, indent=1) + "\n")
    return 0


def compare_matrix(wanted: dict[str, str]) -> int:
    """Return the number of environments with other hashes. Prints these, and the settings of each."""
    failed = 0
    for environment in dispatch.matrix():
        try:
            found = dispatch.last_json(environment.run("tests.training.golden", "--torch", "cpu"))
        except subprocess.CalledProcessError as error:
            if error.returncode != -signal.SIGILL:
                raise
            print(f"{'not here':8}{environment.name}: this processor lacks what it computes with", flush=True)
            continue
        wrong = differences(found["hashes"], wanted) + [f"torch: {n}" for n, hash in found["torch"].items() if hash != wanted[n]]
        failed += bool(wrong)
        print(f"{'DIFFERS' if wrong else 'same':8}{environment.name}: {found['seen']}", *wrong, sep="\n        ", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
