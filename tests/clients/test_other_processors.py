"""Gradients of a run differ little between processors, numbers of threads and sizes of micro-batches."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.pytorch.adapted_model import AdaptedModel
from clients.records import ClientLoss
from tests.clients.runs import BASE, base_model, body, client_spec
from training.engines.pytorch.device import CPU
from training.job_spec import TOLERANCE_MIN
from training.replicated.tensor_layout import Float32Array, layout_of

# Sizes at which matrix products use threads and wide instructions.
LARGER = replace(BASE, model=replace(BASE.model, width=64, hidden=160))
BATCHES, EXAMPLES = 3, 24
DIFFERENCE_MAX = 2e-5  # norm of the difference, divided by that of the gradient
THREADS, MICRO_BATCHES = (1, 2), (1, 24)
LIBRARIES = {
    "plain instructions": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
SCRIPT = "import sys; from tests.clients.test_other_processors import save_gradients; save_gradients(sys.argv[1])"


def gradients(micro_batch: int) -> list[Float32Array]:
    """Return the gradient of the adapters for each of some batches."""
    spec = replace(client_spec(LARGER), micro_batch=micro_batch)
    model, found = AdaptedModel(spec, base_model(LARGER), CPU), []
    model.load_adapters(np.random.default_rng(0).normal(0, 0.05, layout_of(spec).size).astype(np.float32))
    for seed, loss in zip(range(BATCHES), (ClientLoss.CROSS_ENTROPY, ClientLoss.PPO, ClientLoss.GSPO), strict=True):
        model.clear_gradient()
        model.run_pass(body(loss, EXAMPLES, seed), backward=True)
        found.append(model.read_gradient())
    return found


def save_gradients(folder: str) -> None:
    for threads, micro_batch in product(THREADS, MICRO_BATCHES):
        torch.set_num_threads(threads)
        np.save(Path(folder, f"{threads}-{micro_batch}.npy"), np.stack(gradients(micro_batch)))


def difference(found: Float32Array, wanted: Float32Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.real("processes")
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_gradients_of_three_batches_differ_little_elsewhere(tmp_path: Path, library: str) -> None:
    environment = {**os.environ, "PYTHONPATH": ".", **LIBRARIES[library]}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, env=environment)
    here, found = gradients(8), list[float]()
    for threads, micro_batch in product(THREADS, MICRO_BATCHES):
        there = np.load(tmp_path / f"{threads}-{micro_batch}.npy")
        found += [difference(*pair) for pair in zip(there, here, strict=True)]
    assert 0 < max(found) <= DIFFERENCE_MAX < TOLERANCE_MIN
