from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import RemoteProtocolError, UserError
from training.spec import Audit, JobSpec, ModelSpec, Objective

JOB = JobSpec(name="job", data=bytes(32))


def test_a_specification_survives_the_wire() -> None:
    assert JobSpec.decode(JOB.encode()) == JOB
    scratch = JobSpec(name="test", objective=Objective.SCRATCH)
    assert JobSpec.decode(scratch.encode()) == scratch


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 0},
        {"rounds": 10_000_000},
        {"local_steps": 1_000_000},
        {"batch": 2**31},
        {"inner_rate": 0.0},
        {"inner_rate": -1.0},
        {"beta1": 1.0},
        {"beta2": 1.5},
        {"outer_momentum": 1.01},
        {"weight_decay": -0.1},
        {"outer_rate": 1e300},
        {"inner_rate": 11.0},
        {"proposal_seconds": 1e9},
        {"held_out_permille": 501},
        {"data": None},
        {"audit": Audit.OFF},
        {"model": ModelSpec(width=10, heads=4)},
        {"model": ModelSpec(heads=3, kv_heads=2, width=66)},
        {"model": ModelSpec(layers=2**31)},
    ],
    ids=str,
)
def test_a_foreign_specification_that_no_peer_could_carry_out_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        JobSpec.decode(replace(JOB, **change).encode())  # type: ignore[arg-type]


def test_a_person_is_told_which_value_is_wrong() -> None:
    with pytest.raises(UserError, match="beta1 must be at least 0 and below 1"):
        replace(JOB, beta1=1.0).checked()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weight_decay", "outer_rate", "beta1", "feedback_decay", "norm_start"])
def test_what_is_no_number_is_told_to_a_person(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        replace(JOB, **{name: value}).checked()  # type: ignore[arg-type]


def test_the_number_of_parameters_is_that_of_the_layout() -> None:
    from training.replicated.layout import layout_of

    for model in (ModelSpec(), ModelSpec(vocabulary=300, width=32, layers=1, heads=2, kv_heads=1, hidden=48)):
        assert layout_of(replace(JOB, model=model)).size == model.parameters
