"""The same bits whatever numpy finds in the processor: it dispatches at import, so each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.training.replicated.golden import final_model, tensors_hash

GOLDEN = (
    "46dc8903ee54b558abb0663e4e663c6aa2df87a395c3106b220cafd3276a0638"  # of the tensors: the root also covers the specification
)
REPOSITORY = Path(__file__).parents[3]
FOUND: list[str] = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])


@pytest.fixture(scope="module")
def expected() -> list[str]:
    model = final_model()
    return [tensors_hash(model), model.root.hex()]


def run(**settings: str) -> tuple[list[str], set[str]]:
    """(hash and root, numpy's vector units) in a process of its own with these environment variables."""
    command = [sys.executable, "-m", "tests.training.replicated.golden"]
    environment = {**os.environ, **settings}
    output = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return output.split()[:2], set(output.split()[2:])


def test_the_tensors_after_several_rounds_have_their_golden_hash(expected: list[str]) -> None:
    assert expected[0] == GOLDEN


@pytest.mark.parametrize("disabled", [FOUND[start:] for start in range(len(FOUND))], ids=" ".join)
@pytest.mark.parametrize("core", ["Haswell", "Nehalem"])
def test_vector_units_switched_off_change_no_bit(expected: list[str], disabled: list[str], core: str) -> None:
    hashes, found = run(NPY_DISABLE_CPU_FEATURES=" ".join(disabled), OPENBLAS_CORETYPE=core)
    assert hashes == expected
    assert not found & set(disabled), "the restriction had no effect"


@pytest.mark.parametrize("threads", ["1", "4"])
def test_the_number_of_threads_changes_no_bit(expected: list[str], threads: str) -> None:
    assert run(OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS=threads)[0] == expected
