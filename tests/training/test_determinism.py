"""The same bits whatever the libraries find in the processor, and however many threads they use.

A hash that differs from `golden.json` everywhere: was it meant to change? Then `python -m tests.training.golden --write`, in the
change that means it. One that differs in some environment only is never to be written anew: see `tests.training.golden`.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import dispatch
from tests.training import golden

HANDFUL = {environment.name: environment for environment in dispatch.handful()}


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """What a process in each environment printed."""
    outputs = {name: environment.run("tests.training.golden", "--torch", "cpu") for name, environment in HANDFUL.items()}
    return {name: dispatch.last_json(output) for name, output in outputs.items()}


def test_every_hash_is_the_golden_one() -> None:
    assert golden.differences(golden.everything(), golden.expected()) == []


@pytest.mark.parametrize("name", HANDFUL)
def test_no_hash_depends_on_instructions_threads_or_the_order_of_sets(printed: dict[str, Any], name: str) -> None:
    assert golden.differences(printed[name]["hashes"], golden.expected()) == []


@pytest.mark.parametrize("name", HANDFUL)
def test_torch_reads_the_same_sequences_and_computes_the_same_step(printed: dict[str, Any], name: str) -> None:
    computed, wanted = printed[name]["torch"], golden.expected()
    assert computed == {key: wanted[key] for key in computed} != {}


def test_the_environments_differ_in_what_each_library_uses(printed: dict[str, Any]) -> None:
    seen = [item["seen"] for item in printed.values()]
    assert len({tuple(item["units"]) for item in seen}) == min(len(HANDFUL), 1 + len(dispatch.numpy_units())), "numpy"
    assert len({item.get("core") for item in seen}) == len(HANDFUL) or "core" not in seen[0], "OpenBLAS"
    assert len({item["torch_threads"] for item in seen}) > 1, "threads"
    assert len({item["aten"] for item in seen}) > 1, "torch"
