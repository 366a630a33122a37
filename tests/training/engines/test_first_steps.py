"""First steps of fresh moments, where honest replays on other processors differ most: parameters move by signs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scenarios.determinism import levels
from tests.training.engines.stepping import inner_step
from training.data.default_text import default_text
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import AuditMode, InnerOptimizerKind, JobSpec
from training.objectives.objective import InnerStep
from training.replay.inner_state import InnerState, inner_error, l2_distance, relative_error
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.transformer import ModelSpec

JOB = bytes(range(32))
BATCHES = 10
MODEL = ModelSpec(context=64, width=32, layers=2, heads=2, kv_heads=1, hidden=96)
SPEC = JobSpec(name="first", data=bytes(32), model=MODEL, batch=4, micro_batch=4, audit=AuditMode.SAMPLED)
ROUNDS = {"text": 8, "runs": 8, "one byte": 16}  # training before: first gradients are large, the last loss is 3e-5
MARGIN = 10  # of the tolerance to the largest honest error; with an epsilon of 1e-8 it is 0.8 here


# In a window of equal tokens, the gradients of queries and keys consist of rounding errors. In a memorized text, the whole
# gradient did (decision 46).
TEXTS = {
    "text": default_text()[:200_000],
    "runs": b"".join(bytes([32 + number % 90]) * 600 for number in range(80)),
    "one byte": b"a" * 60_000,
}


def engine_of(spec: JobSpec, kind: str = "text") -> TorchEngine:
    text = np.frombuffer(TEXTS[kind], dtype=np.uint8)
    tokenizer, held_out = ByteTokenizer(), len(text) * 9 // 10
    return TorchEngine(spec, TokenizedText(text[:held_out], text[held_out:], tokenizer.token_bytes), tokenizer)


def first_steps(engine: TorchEngine, parameters: Float32Array, round: int) -> list[tuple[Float32Array, InnerState]]:
    """Return the results of the trainers' first steps from one model."""
    places = (InnerStep(JOB, round, number.to_bytes(32, "big"), 0) for number in range(BATCHES))
    return [inner_step(engine, parameters, InnerState.fresh(engine.spec), place) for place in places]


def trained(engine: TorchEngine, rounds: int) -> Float32Array:
    parameters = initial_parameters(engine.spec)
    for number in range(rounds):
        delta, _ = engine.local_steps(parameters, JOB, number, bytes(32))
        parameters = parameters - np.float32(0.5) * delta
    return parameters


CASES = [(inner, kind) for inner in InnerOptimizerKind for kind in TEXTS]


def write(folder: str) -> None:
    for inner, kind in CASES:
        engine, place = engine_of(replace(SPEC, inner=inner), kind), Path(folder) / f"{inner}, {kind}"
        steps = first_steps(engine, np.load(f"{place}.npy"), ROUNDS[kind])
        after, moments = [now for now, _ in steps], [state.moments for _, state in steps]
        np.savez(f"{place}.npz", after=after, moments=moments)


@pytest.mark.real("processes")
@pytest.mark.long
def test_no_honest_first_step_comes_near_the_tolerance_on_a_processor_without_vectors(tmp_path: Path) -> None:
    baseline = next(level for level in levels() if level.name == "baseline")
    environment = {**os.environ, **baseline.variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    engines = {(inner, kind): engine_of(replace(SPEC, inner=inner), kind) for inner, kind in CASES}
    models = {(inner, kind): trained(engine, ROUNDS[kind]) for (inner, kind), engine in engines.items()}
    for (inner, kind), parameters in models.items():
        np.save(tmp_path / f"{inner}, {kind}.npy", parameters)
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, check=True)
    for (inner, kind), parameters in models.items():
        engine, spec = engines[inner, kind], engines[inner, kind].spec
        with np.load(tmp_path / f"{inner}, {kind}.npz") as file:
            there, moments = file["after"], file["moments"]
        errors = []
        for number, (here, state) in enumerate(first_steps(engine, parameters, ROUNDS[kind])):
            errors.append(relative_error(l2_distance(there[number], here), l2_distance(here, parameters)))
            errors.append(inner_error(InnerState(1, moments[number]), state, spec))
        assert 0 < max(errors) < spec.replay_tolerance / MARGIN, (inner, kind)


if __name__ == "__main__":
    write(*sys.argv[1:])
