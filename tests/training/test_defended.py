"""Jobs that tolerate liars start only with settings that were measured to hold."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from training import safe_settings
from training.job_spec import (
    ESTIMATES,
    PRESETS,
    AggregationRule,
    AuditMode,
    InnerOptimizerKind,
    JobSpec,
    OuterOptimizerKind,
    complete_fields,
)
from training.safe_settings import (
    FIELDS_AT_LEAST,
    FIELDS_AT_MOST,
    FIELDS_EQUAL,
    LOST_MAX,
    POISONED_MAX,
    SAFE_WITH_SAMPLED_AUDITS,
    SAFE_WITHOUT_AUDITS,
    SafeNetwork,
    unsafe_reason,
)
from training.transformer import ModelSpec

OFF = JobSpec(name="off", data=bytes(32), audit=AuditMode.OFF, local_steps=1, byzantine_max=1)


@pytest.mark.parametrize(
    ("fields", "trainers", "why"),
    [
        ({}, 4, "1 bit with error feedback fails with 4 dishonest trainers of 13"),
        (PRESETS["local"], 4, "1 bit with error feedback fails"),
        (
            {**PRESETS["per-step"], "audit": AuditMode.OFF},
            13,
            "memory residual, bits 4, beta1 0.9, feedback_decay 0.0, rule centered-clipping was not measured to hold",
        ),
        ({**ESTIMATES, "rule": AggregationRule.MEAN}, 4, "rule mean was not measured to hold"),
        ({**ESTIMATES, "outer": OuterOptimizerKind.NESTEROV}, 4, "outer nesterov was not measured to hold"),
        ({**ESTIMATES, "inner_rate": 0.1}, 4, "inner_rate 0.1 was not measured to hold"),
        ({**ESTIMATES, "compression_warmup_rounds": 3}, 4, "compression_warmup_rounds 3 was not measured to hold"),
        ({**ESTIMATES, "bits": 2}, 4, "bits 2 was not measured to hold"),
        ({**ESTIMATES, "grokfast": 1.0}, 4, "grokfast 1.0 was not measured to hold"),
        ({**ESTIMATES, "model": ModelSpec(linear="ternary")}, 4, "model.linear ternary was not measured to hold"),
        ({"data": None}, 4, "no aggregation rule was measured to hold where each trainer has its own text"),
    ],
)
def test_what_was_not_shown_to_hold_is_refused_with_the_way_out(fields: dict[str, Any], trainers: int, why: str) -> None:
    problem = unsafe_reason(replace(OFF, **fields), trainers)
    assert problem is not None
    assert why in problem and problem.endswith("byzantine_max 0 if no trainer is faulty")
    assert ("audit 'full'" in problem) is (replace(OFF, **fields).data is not None)


def test_of_a_model_of_text_nothing_held_so_far() -> None:
    job = replace(OFF, **ESTIMATES)
    assert "loss of a language model grows to 1.14 times" in str(unsafe_reason(job, 4))
    assert "loss of a language model grows to 1.14 times" in str(unsafe_reason(replace(job, byzantine_max=4), 13))


def test_where_updates_are_reexecuted_before_the_vote_nothing_needs_to_hold() -> None:
    assert unsafe_reason(replace(OFF, audit=AuditMode.FULL), 4) is None


def sampled(preset: str, **fields: Any) -> JobSpec:
    said = PRESETS[preset] | {"audit": AuditMode.SAMPLED, "byzantine_max": 1} | fields
    return JobSpec(name="sampled", data=bytes(32), **complete_fields({"final_full_audit_rounds": 10, **said}))


@pytest.mark.parametrize(
    ("preset", "fields", "why"),
    [
        ("local", {"local_steps": 11}, "local_steps 11 was not measured to hold"),
        ("local", {"inner": InnerOptimizerKind.ADAMW, "bits": 2}, "inner adamw, bits 2 was not measured to hold"),
        ("local", {"rule": AggregationRule.MEAN}, "rule mean was not measured to hold"),
        ("local", {"sam_radius": 0.05, "grokfast": 1.0}, "sam_radius 0.05, grokfast 1.0 was not measured to hold"),
        ("local", {"model": ModelSpec(feed_forward="experts", experts=4)}, "model.feed_forward experts was not measured to hold"),
        ("local", {"model": ModelSpec(attention="sliding-window", window=8)}, "model.attention sliding-window was not measured"),
        ("per-step", {"model": ModelSpec(linear="ternary")}, "model.linear ternary was not measured to hold"),
        ("local", {"final_full_audit_rounds": 9}, "final_full_audit_rounds 9 was not measured to hold"),
        ("local", {"audit_rate": 0.1, "auditors": 1}, "re-executed 0.1 times on average, but at least 0.25 are needed"),
        ("per-step", {"audit_rate": 0.099}, "re-executed 0.198 times on average, but at least 0.25 are needed"),
        ("per-step", {"rule": AggregationRule.MEAN, "bits": 8}, "bits 8, rule mean was not measured to hold"),
        (
            "per-step",
            {"outer": OuterOptimizerKind.NESTEROV},
            "feedback_decay 0.0, rule centered-clipping, initial_norm 1.0 was not",
        ),
    ],
)
def test_sampled_audits_that_find_liars_too_late_are_refused_with_the_way_out(
    preset: str, fields: dict[str, Any], why: str
) -> None:
    late = sampled(preset, **fields)
    problem = str(unsafe_reason(late, 4))
    assert problem.startswith("audit 'sampled' with byzantine_max 1: ") and why in problem
    assert problem.endswith("; use audit 'full', or accept the risk with --accept-risk")
    assert unsafe_reason(replace(late, byzantine_max=0), 4) is None
    assert unsafe_reason(replace(late, objective="scratch"), 4) is None, "of other models nothing was measured"


def test_of_every_field_it_is_known_how_it_may_differ_from_that_of_a_preset() -> None:
    fields = {field.name for field in dataclasses.fields(JobSpec)}
    free = {
        "name",
        "objective",
        "model",
        "tokenizer",
        "base",
        "initial_model",
        "data",
        "held_out_permille",
        "seed",
        "objective_settings",
        "licence",
    }
    free |= {"rounds", "warmup_rounds", "decay_rounds", "inner_rate_floor", "batch", "micro_batch", "accepted_min"}
    free |= {"proposal_seconds", "uplink_mbit_min", "preparation"}
    others = ["byzantine_max", "audit", "audit_rate", "auditors"]
    assert sorted([*free, *FIELDS_EQUAL, *FIELDS_AT_MOST, *FIELDS_AT_LEAST, *others]) == sorted(fields)


@pytest.mark.parametrize("preset", PRESETS)
def test_sampled_audits_as_a_preset_has_them_or_more_of_them_may_be_named_against_as_many_liars_as_held(preset: str) -> None:
    assert unsafe_reason(sampled(preset), 4) is unsafe_reason(sampled(preset, auditors=3, local_steps=1), 7) is None
    assert unsafe_reason(sampled(preset, rounds=12, final_full_audit_rounds=4), 4) is None
    held = ", ".join(f"{row.liars} of {row.trainers}" for row in SAFE_WITH_SAMPLED_AUDITS if row.preset == preset)
    for liars, trainers in ((1, 3), (2, 6), (3, 10)):
        more = f"for {trainers} trainers this is more than was measured to hold ({held})"
        assert more in str(unsafe_reason(sampled(preset, byzantine_max=liars), trainers))
    for row in SAFE_WITH_SAMPLED_AUDITS:
        assert row.preset != preset or unsafe_reason(sampled(preset, byzantine_max=row.liars), row.trainers) is None


def test_no_row_of_sampled_audits_is_worse_than_counts_as_defended() -> None:
    assert SAFE_WITH_SAMPLED_AUDITS and all(row.harm <= POISONED_MAX for row in SAFE_WITH_SAMPLED_AUDITS)


def test_where_nobody_is_said_to_lie_nothing_needs_to_hold() -> None:
    assert unsafe_reason(replace(OFF, byzantine_max=0), 1) is None
    assert unsafe_reason(replace(OFF, byzantine_max=0, data=None), 1) is None


def test_a_measured_row_stands_for_no_more_liars_and_no_fewer_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_settings, "SAFE_WITHOUT_AUDITS", (SafeNetwork(7, 2, 0.5),))
    one = replace(OFF, **ESTIMATES, objective="scratch")  # no setting held for text
    two = replace(one, byzantine_max=2)
    assert unsafe_reason(one, 7) is unsafe_reason(two, 7) is unsafe_reason(two, 8) is None
    for spec, trainers in ((two, 6), (replace(one, byzantine_max=3), 10)):
        assert "trainers this is more than was measured to hold (2 of 7)" in str(unsafe_reason(spec, trainers))


def test_no_row_lost_more_than_counts_as_defended() -> None:
    assert SAFE_WITHOUT_AUDITS and all(row.harm <= LOST_MAX for row in SAFE_WITHOUT_AUDITS)
