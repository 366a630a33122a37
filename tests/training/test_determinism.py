"""Equal bits with all instruction sets of the processor and all numbers of threads.

If a hash was meant to change and differs from `golden.json` everywhere, run `python -m tests.training.golden --write` in the same
change. Never write a hash that differs in some environments only: see `tests.training.golden`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dispatch
from tests.training import golden
from training import replicated

HANDFUL = {environment.name: environment for environment in dispatch.handful()}


def test_every_hash_is_the_golden_one() -> None:
    assert golden.differences(golden.everything(), golden.expected()) == []


@pytest.mark.real("processes")
@pytest.mark.long
def test_no_hash_or_step_depends_on_instructions_threads_or_the_order_of_sets() -> None:
    """One test has all environments, because their processes would otherwise run once in each test process."""
    outputs = {name: environment.run("tests.training.golden", "--torch", "cpu") for name, environment in HANDFUL.items()}
    printed, wanted = {name: dispatch.last_json(output) for name, output in outputs.items()}, golden.expected()
    for name, found in printed.items():
        assert golden.differences(found["hashes"], wanted) == [], name
        assert found["torch"] == {key: wanted[key] for key in found["torch"]} != {}, name
    _assert_each_library_used_something_else([found["seen"] for found in printed.values()])


def _assert_each_library_used_something_else(seen: list[Any]) -> None:
    assert len({tuple(item["units"]) for item in seen}) == min(len(HANDFUL), 1 + len(dispatch.numpy_units())), "numpy"
    assert len({item.get("core") for item in seen}) > 1 or "core" not in seen[0], "OpenBLAS"
    assert len({item["torch_threads"] for item in seen}) > 1, "threads"
    assert len({item["aten"] for item in seen}) > 1, "torch"


# used by auditors, with a wide margin; peers need no equal bits here
OPINIONS = {("error_feedback.py", "einsum"), ("quantization_cells.py", "einsum")}


def test_replicated_arithmetic_calls_no_function_that_libraries_round_as_they_like() -> None:
    """IEEE 754 demands correct rounding of a square root, and not of a power; `math.ldexp` has nothing to round. Sums of floats
    depend on the order of a machine's vector unit. `sum` and `@` add only integers here, which the names do not show.
    """
    free = {
        "pow",
        "power",
        "float_power",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "cbrt",
        "hypot",
        "sin",
        "cos",
        "tan",
        "tanh",
        "arctan",
        "sinh",
        "cosh",
    }
    free |= {"mean", "average", "std", "var", "dot", "vdot", "inner", "norm", "einsum"}
    for path in Path(*replicated.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                of_floats = isinstance(node.left, ast.Constant) and isinstance(node.left.value, float)
                is_integer = isinstance(node.right, ast.Constant) and isinstance(node.right.value, int)
                assert is_integer and not of_floats, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert name not in free or (path.name, name) in OPINIONS, f"{path}:{node.lineno}"
