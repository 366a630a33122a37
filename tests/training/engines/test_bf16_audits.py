"""Audits of gradients in bf16: other processors replay an honest one within the tolerance, and false ones lie far beyond it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from protocol.verdicts import Verdict
from tests.training.engines.test_sampled import JOB, TRAINER
from tests.waiting import run_process
from training.corpus import open_tokens
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import (
    BF16_TOLERANCE,
    PRESETS,
    AuditMode,
    InnerOptimizerKind,
    JobSpec,
    OuterOptimizerKind,
    Precision,
    complete_fields,
)
from training.replay.proposal_replay import compare_update
from training.replicated import codec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.transformer import ModelSpec

MODEL = ModelSpec(context=64, width=64, layers=2, heads=4, kv_heads=2, hidden=160)
HALF = complete_fields(PRESETS["per-step"] | {"precision": Precision.BF16, "audit": AuditMode.FULL})
SPEC = JobSpec(name="t", data=bytes(32), model=MODEL, **HALF).validated()
ROUND = 7
MODELS = ("new", "trained", "learned by heart")
TRAINED_STEPS = 150  # gradients of trained models are smaller, so the same rounding is a larger part of them
# A difference of replays, and that of a false update, must be this many times below and above the tolerance.
MARGIN = 3
LIBRARIES = {
    "plain instructions": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
SCRIPT = "import sys; from tests.training.engines.test_bf16_audits import save_gradients; save_gradients(sys.argv[1])"


class ChangedEngine(TorchEngine):
    """An engine that draws the examples of other places, or a part of a batch several times."""

    always: int | None = None  # the same step's examples in all steps
    parts = 1

    def draw_batch(
        self, job: bytes, round: int, trainer: bytes, step: int, size: int, declaration: Any = None
    ) -> npt.NDArray[np.int64]:
        drawn = super().draw_batch(job, round, trainer, step if self.always is None else self.always, size, declaration)
        return np.concatenate([drawn[: size // self.parts]] * self.parts)


def engine_of(text: Path, spec: JobSpec = SPEC) -> ChangedEngine:
    return ChangedEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer())


def gradient(engine: TorchEngine, parameters: Float32Array, round: int = ROUND, trainer: bytes = TRAINER) -> Float32Array:
    return engine.local_steps(parameters, JOB, round, trainer)[0]


def models(text: Path) -> Iterator[Float32Array]:
    """Yield the parameters of MODELS."""
    first = initial_parameters(SPEC)
    yield first
    steps = {"local_steps": TRAINED_STEPS, "outer": OuterOptimizerKind.NESTEROV, "inner": InnerOptimizerKind.ADAMW, "beta1": 0.9}
    for always in (None, 0):
        engine = engine_of(text, replace(SPEC, precision=Precision.FP32, warmup_rounds=0, **steps))
        engine.always = always
        yield first - engine.local_steps(first, JOB, ROUND, TRAINER)[0]


def save_gradients(folder: str) -> None:
    """Save the gradients of all models, with numbers of threads and sizes of micro-batches, in this process's environment."""
    for name, threads, micro_batch in product(MODELS, (1, 2), (1, 8)):
        torch.set_num_threads(threads)
        engine = engine_of(Path(folder) / "text")
        engine.micro_batch = micro_batch
        np.save(Path(folder, f"{name} {threads} {micro_batch}.npy"), gradient(engine, np.load(Path(folder, f"{name}.npy"))))


def judged(sent: Float32Array, replayed: Float32Array) -> tuple[Verdict, float]:
    """Return an auditor's verdict on the payload of `sent`, and its error."""
    model = ReplicatedModel.initial(JOB, SPEC)
    payload = codec.encode_payload(model.header(TRAINER), sent, model.layout)
    return compare_update(model, TRAINER, replayed, payload, np.zeros_like(sent), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and the parameters of MODELS."""
    made = tmp_path_factory.mktemp("bf16")
    (made / "text").write_bytes(default_text()[:50_000])
    for name, parameters in zip(MODELS, models(made / "text"), strict=True):
        np.save(made / f"{name}.npy", parameters)
    return made


@pytest.mark.real("processes")
@pytest.mark.parametrize("library", LIBRARIES)
def test_honest_gradients_are_accepted_on_other_processors(folder: Path, library: str) -> None:
    run_process([sys.executable, "-c", SCRIPT, folder], check=True, env={**os.environ, "PYTHONPATH": ".", **LIBRARIES[library]})
    errors = list[float]()
    for name in MODELS:
        sent = gradient(engine_of(folder / "text"), np.load(folder / f"{name}.npy"))
        for threads, micro_batch in product((1, 2), (1, 8)):
            verdict, error = judged(sent, np.load(folder / f"{name} {threads} {micro_batch}.npy"))
            if name == "learned by heart":  # its gradient is a hundredth of a new model's (decision 152)
                assert error <= 2 * BF16_TOLERANCE, (threads, micro_batch)  # voters are at most unsure
            else:
                assert verdict is Verdict.ACCEPT, (name, threads, micro_batch, error)
                errors.append(error)
    assert 0 < max(errors) <= BF16_TOLERANCE / MARGIN


@pytest.mark.parametrize("lie", ["half of the work", "data of another round", "data of another trainer", "half of it", "no work"])
@pytest.mark.parametrize("name", MODELS)
def test_false_gradients_are_found(folder: Path, name: str, lie: str) -> None:
    parameters, engine = np.load(folder / f"{name}.npy"), engine_of(folder / "text")
    honest = gradient(engine, parameters)
    engine.parts = 2 if lie == "half of the work" else 1
    round, trainer = ROUND + (lie == "data of another round"), b"o" * 32 if lie == "data of another trainer" else TRAINER
    sent = gradient(engine, parameters, round, trainer) * np.float32({"half of it": 0.5, "no work": 1e-6}.get(lie, 1.0))
    verdict, error = judged(sent, honest)
    assert verdict is Verdict.REPLAY and error >= MARGIN * BF16_TOLERANCE
