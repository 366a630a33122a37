"""Jobs without audits start where statistics were measured to hold, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from training import defended
from training.defended import Held, undefended
from training.spec import PRESETS, AuditMode, Compression, JobSpec, Memory, Outer, Rule

OFF = JobSpec(name="off", data=bytes(32), audit=AuditMode.OFF, local_steps=1, liars=1)


@pytest.mark.parametrize(
    ("fields", "trainers", "why"),
    [
        ({}, 4, "one-bit payloads with error feedback fall at 4 liars of 13"),
        (PRESETS["local"], 4, "one-bit payloads with error feedback fall"),
        (PRESETS["sparse"], 7, "sparse payloads with error feedback fall"),
        ({**PRESETS["per-step"], "audit": AuditMode.OFF}, 13, "rule 'centered-clipping' was not measured to hold"),
        ({"rule": Rule.MEAN}, 4, "rule 'mean' was not measured to hold"),
        (
            {"bits": 4},
            4,
            "dense payloads of 4 bits, memory 'residual', local_steps 1, outer 'nesterov', feedback_decay 0.95, were not",
        ),
        (
            {"memory": Memory.ESTIMATES},
            4,
            "dense payloads of 1 bits, memory 'estimates', local_steps 1, outer 'nesterov', feedback_decay 0.95, were not",
        ),
        ({"data": None}, 4, "where each has its own text no rule was measured to hold"),
    ],
)
def test_what_was_not_shown_to_hold_is_refused_with_the_way_out(fields: dict[str, Any], trainers: int, why: str) -> None:
    problem = undefended(replace(OFF, **fields), trainers)
    assert problem is not None
    assert why in problem and problem.endswith("liars 0, which says that nobody lies")
    assert ("audit 'full'" in problem) is (replace(OFF, **fields).data is not None)


@pytest.mark.parametrize("audit", [AuditMode.FULL, AuditMode.SAMPLED])
def test_where_updates_are_reexecuted_no_statistics_need_to_hold(audit: AuditMode) -> None:
    assert undefended(replace(OFF, audit=audit), 4) is None


def test_where_nobody_is_said_to_lie_nothing_needs_to_hold() -> None:
    assert undefended(replace(OFF, liars=0), 1) is None
    assert undefended(replace(OFF, liars=0, data=None), 1) is None


def test_a_measured_row_stands_for_no_more_liars_and_no_fewer_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = (Compression.DENSE, 1, 4096), (Compression.SPARSE, 1, 256)
    rows = [Held(Memory.RESIDUAL, *mode, 1, OFF.outer, 0.95, *lie) for mode, lie in ((dense, (7, 2)), (sparse, (4, 1)))]
    monkeypatch.setattr(defended, "HELD", rows)
    two = replace(OFF, liars=2)
    assert undefended(OFF, 7) is undefended(two, 7) is undefended(two, 8) is None
    for spec, trainers in ((two, 6), (replace(OFF, liars=3), 10)):
        assert "trainers that is more than was measured to hold (2 of 7)" in str(undefended(spec, trainers))
    for other in ({"local_steps": 2}, {"memory": Memory.ESTIMATES}, {"outer": Outer.SGD}, {"feedback_decay": 0.9}, {"bits": 8}):
        assert undefended(replace(OFF, **other), 7) is not None, other
    few = replace(OFF, compression=Compression.SPARSE, keep=256)
    assert undefended(few, 4) is undefended(replace(few, keep=512), 4) is None
    assert undefended(replace(few, keep=255), 4) is not None
