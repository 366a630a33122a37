"""The engine JAX, beside the suite that all engines pass."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.lazy_import import import_object
from peer import features
from protocol.errors import UserError
from training.corpus import open_tokens
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import EngineResources, ParallelMode
from training.engines.jax.backend import BACKEND
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters
from training.transformer import ModelSpec

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: run `pip install 'folkmoot[jax]'`")

MODEL = ModelSpec(context=32, width=32, layers=1, heads=4, kv_heads=2, hidden=48)
SPEC = JobSpec(name="t", data=bytes(32), model=MODEL, local_steps=2, batch=6, micro_batch=4)
JOB, TRAINER = hashlib.sha256(b"job").digest(), b"t" * 32

# A worker's computations in a process where an import of torch fails. It prints a digest of the results.
WORKER = """
import hashlib, sys
sys.modules["torch"] = None
import peer.worker.main
from pathlib import Path
from protocol.sampling import SamplingOptions
from tests.training.engines import test_jax
from training.replicated.tensor_layout import initial_parameters

test_jax.features.register_features()
test_jax.BACKEND.start_backend(test_jax.EngineResources(threads=int(sys.argv[2])), ())
engine, start = test_jax.open_engine(Path(sys.argv[1])), initial_parameters(test_jax.SPEC)
engine.compile_programs(lambda: None)
delta, losses = engine.local_steps(start, test_jax.JOB, 3, test_jax.TRAINER)
pieces = engine.generate_text(start - delta, b"the", SamplingOptions(max_tokens=8))
print(hashlib.sha256(delta.tobytes() + repr((losses, engine.compute_metrics(start), list(pieces))).encode()).hexdigest())
"""


@pytest.fixture(scope="module", autouse=True)
def _started() -> Iterator[None]:
    """Start JAX in this process. Other tests keep their environment."""
    before = dict(os.environ)
    features.register_features()
    BACKEND.start_backend(EngineResources(threads=1), ())
    yield
    os.environ.clear()
    os.environ.update(before)


def open_engine(text: Path) -> Any:
    return BACKEND.open_engine(SPEC, open_tokens(SPEC, text, ByteTokenizer()), ByteTokenizer(), None)


@pytest.mark.real("processes")
def test_two_processes_without_torch_compute_the_same_bits(text: Path) -> None:
    words = [sys.executable, "-c", WORKER, str(text), "2"]
    first, second = (subprocess.run(words, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert len(first.strip()) == 64 and first == second


def test_the_gradient_of_a_certain_model_is_exact_to_rounding() -> None:
    loss = import_object("training.engines.jax.layers:next_token_loss")
    logits_V = np.array([20.0, 3.0, -1.0, 0.5], dtype=np.float32)

    def loss_of(logits: Any) -> Any:
        return loss(lambda x_BT: logits[None, None], None, np.zeros((1, 1), dtype=np.int32))[0]

    found, gradient_V = import_object("jax:value_and_grad")(loss_of)(logits_V)
    exact_V = np.exp(logits_V.astype(np.float64) - 20)
    exact_V /= exact_V.sum()
    exact_V[0] = -exact_V[1:].sum()
    np.testing.assert_allclose(gradient_V, exact_V, rtol=1e-6)
    np.testing.assert_allclose(found, -np.log1p(exact_V[0]), rtol=1e-6)


def test_a_larger_batch_than_memory_allows_is_computed_in_smaller_parts(text: Path) -> None:
    engine, start = open_engine(text), initial_parameters(SPEC)
    whole, _ = engine.local_steps(start, JOB, 3, TRAINER)
    gradients, sizes = engine._gradients, list[int]()

    class OfTwoSequences:
        """The program of a machine whose memory is full with more than two sequences."""

        clear_cache = gradients.clear_cache

        def __call__(self, parameters: Any, weights_B: Any, *arrays: Any) -> Any:
            sizes.append(len(weights_B))
            if len(weights_B) > 2:
                import_object("jax.numpy:ones")((1 << 30, 1 << 20))
            return gradients(parameters, weights_B, *arrays)

    engine._gradients = OfTwoSequences()
    parts, _ = engine.local_steps(start, JOB, 3, TRAINER)
    assert sizes == [4] + [2] * 6 and engine.micro_batch == 2
    assert 0 < np.linalg.norm(parts - whole) < 1e-4 * np.linalg.norm(whole)


def test_subnormal_numbers_are_zero_in_all_threads() -> None:
    """A processor takes twenty times as long with them, and a liar could choose parameters that have them."""
    halve = import_object("jax:jit")(lambda x: x * np.float32(0.5))
    assert not np.asarray(halve(np.full(1 << 20, 2.0**-126, dtype=np.float32))).any()


def test_a_closed_job_leaves_no_memory_behind(text: Path) -> None:
    engine = open_engine(text)
    engine.local_steps(initial_parameters(SPEC), JOB, 3, TRAINER)
    left = weakref.ref(engine)
    del engine
    gc.collect()
    assert left() is None


@pytest.mark.real("processes")
def test_a_worker_describes_itself() -> None:
    info = BACKEND.describe_worker()
    assert info.engine == f"jax {info.versions['jax']}" and info.threads == 1
    assert [(device.name, device.is_used) for device in info.devices] == [("cpu", True)]


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        (
            EngineResources(device="cuda:7"),
            "the engine 'jax' finds no device 'cuda:7', only cpu: start this peer with one of them",
        ),
        (EngineResources(compile=True), "the engine 'jax' does not support compile"),
        (EngineResources(gpus=2, parallel=ParallelMode.DDP), "the engine 'jax' does not support parallel ddp"),
    ],
)
def test_settings_of_other_engines_are_refused(resources: EngineResources, why: str) -> None:
    with pytest.raises(UserError, match=f"^{why}"):
        BACKEND.start_backend(resources, ())
