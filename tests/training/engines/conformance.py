"""Models, batches and a reference in float64, for the conformance of engines.

`test_conformance.py` executes the suite for each engine of `peer.features.engines()` that this machine can start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from features.lazy_import import import_object
from peer import features
from training.data.default_text import default_text
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import EngineResources
from training.engines.local_training import LocalTraining
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import FINAL_NORM, ModelSpec

JOB, TRAINER = bytes(range(32)), b"t" * 32
STEPS = 10
# The last micro-batch of a batch has another size than the others.
SPEC = JobSpec(name="conformance", data=bytes(32), local_steps=STEPS, batch=4, micro_batch=3, rounds=10, warmup_rounds=0)
MODELS = {
    "tied": ModelSpec(context=24, width=32, layers=2, heads=4, kv_heads=2, hidden=48),
    "untied": ModelSpec(context=16, width=32, layers=2, heads=2, kv_heads=1, hidden=80, tied=False, rope_base=500.0),
    "million": ModelSpec(vocabulary=257, context=32, width=128, layers=4, heads=4, kv_heads=2, hidden=384),
}
assert MODELS["million"].parameters > 700_000
TEXT = np.frombuffer(default_text()[:40_000], dtype=np.uint8)
BATCH = np.array([17, 4_001, 9_000], dtype=np.int64)  # offsets of the sequences of one micro-batch
HEART_STEPS_MAX = 400  # most steps until a batch is learned by heart
HEART_LOSS = 0.05  # nats per token of such a batch
# Factor of the last norm, and so of all logits: the model becomes so sure that a gradient p − 1 would consist of rounding errors.
CERTAINTY = 2


def spec_of(model: str) -> JobSpec:
    return replace(SPEC, model=MODELS[model])


def tokens_of(spec: JobSpec) -> TokenizedText:
    held_out = len(TEXT) - 1_000
    return TokenizedText(TEXT[:held_out], TEXT[held_out:], ByteTokenizer().token_bytes)


def open_engine(engine: str, spec: JobSpec) -> Any:
    """Return an engine for a job. Its backend has been started."""
    backend = import_object(features.engines()[engine].backend)
    opened = backend.open_engine(spec, tokens_of(spec), ByteTokenizer(), None)
    assert isinstance(opened, LocalTraining)
    return opened


def start_engine(engine: str, folder: Path) -> None:
    import_object(features.engines()[engine].backend).start_backend(EngineResources(threads=1, cache_folder=str(folder)), [])


def gradient_of(engine: LocalTraining, parameters: Float32Array) -> Float32Array:
    """Return the gradient of `BATCH`."""
    engine.load_parameters(parameters)
    # The clipping of the job has no effect on directions, and a large limit none on lengths.
    engine.spec = replace(engine.spec, gradient_clip=1e6)
    engine.accumulate_gradient(BATCH)
    return engine.clipped_gradient()


@contextmanager
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def reference_gradient(spec: JobSpec, parameters: Float32Array) -> npt.NDArray[np.float64]:
    """Return the gradient of `BATCH` that torch computes in float64, up to the softmax."""
    with double_precision():
        model = GPT(spec)
        model.load_parameters(parameters)
        arrays = spec.resolved_objective.batch_arrays(spec, BATCH, tokens_of(spec))
        model.loss(*map(torch.from_numpy, arrays)).backward()
        return model.gradients.numpy()


def worst_tensor_error(found: Float32Array, reference: npt.NDArray[Any], spec: JobSpec) -> float:
    """Return the largest relative error, ‖found − reference‖ / ‖reference‖, of a tensor's gradient."""
    pairs = ((found[tensor.elements], reference[tensor.elements]) for tensor in layout_of(spec).tensors)
    return max(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs)


@cache
def torch_engine(model: str) -> TorchEngine:
    spec = spec_of(model)
    return TorchEngine(spec, tokens_of(spec), ByteTokenizer())


@cache
def parameters_by_heart(model: str) -> Float32Array:
    """Return parameters that predict the tokens of `BATCH` with near certainty."""
    engine = torch_engine(model)
    engine.load_parameters(initial_parameters(engine.spec))
    optimizer = engine.make_optimizer()
    for _ in range(HEART_STEPS_MAX):
        if engine.accumulate_gradient(BATCH) < HEART_LOSS:
            parameters = engine.read_parameters().copy()
            layout_of(engine.spec).tensor_views(parameters)[FINAL_NORM] *= CERTAINTY
            return parameters
        optimizer.step(1e-3)
    raise AssertionError("the model does not learn a batch by heart")
