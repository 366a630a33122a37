from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger.core.genesis import ModuleVersion
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import BLOB_BYTES_MAX
from training.job_spec import (
    BF16_TOLERANCE,
    ESTIMATES,
    MUON_RATE,
    PRESETS,
    SIGN_RATE,
    AggregationRule,
    AuditMode,
    FeedbackMemory,
    InnerOptimizerKind,
    InnerStatePolicy,
    JobSpec,
    OuterOptimizerKind,
    Precision,
    complete_fields,
)
from training.model_store import JobModelStore
from training.replay.inner_state import inner_bytes
from training.transformer import DenseLinear, ModelSpec

JOB = JobSpec(name="job", data=bytes(32))


def refused(why: str, spec: JobSpec) -> None:
    with pytest.raises(UserError, match=why):
        spec.validated()


def test_a_specification_survives_the_wire() -> None:
    assert JobSpec.decode(JOB.encode()) == JOB
    scratch = JobSpec(name="test", objective="scratch")
    assert JobSpec.decode(scratch.encode()) == scratch
    estimated = replace(JOB, audit=AuditMode.OFF, memory=FeedbackMemory.ESTIMATES)
    assert JobSpec.decode(estimated.encode()) == estimated


def test_bytes_that_each_block_asks_for_are_decoded_once() -> None:
    first = JobSpec.decode(JOB.encode())
    assert JobSpec.decode(JOB.encode()) is first
    bad = replace(JOB, rounds=2, warmup_rounds=9).encode()
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            JobSpec.decode(bad)


def test_several_steps_in_bf16_are_for_jobs_that_nobody_audits() -> None:
    half = replace(JOB, precision=Precision.BF16, audit=AuditMode.OFF)
    assert JobSpec.decode(half.encode()) == half and not half.is_reexecuted_in_bf16
    for audit in (AuditMode.FULL, AuditMode.SAMPLED):
        steps = f"outer 'nesterov', local_steps {JOB.local_steps}"
        why = rf"audit '{audit}' and {steps}: .* 0\.13, .*; use outer 'adamw', or audit 'off'"
        refused(why, replace(half, audit=audit))


HALF = complete_fields(PRESETS["per-step"] | {"precision": Precision.BF16})


@pytest.mark.parametrize("audit", [AuditMode.FULL, AuditMode.SAMPLED])
def test_single_gradients_in_bf16_are_audited_within_a_tolerance_of_their_own(audit: AuditMode) -> None:
    half = replace(JOB, **HALF | {"audit": audit})
    assert half.validated().replay_tolerance == BF16_TOLERANCE and half.is_reexecuted_in_bf16
    for values, why in (
        ({"replay_tolerance": 0.049}, "replay_tolerance 0.049: .* use at least 0.05"),
        ({"bits": 2}, "bits 2: .* use bits 4"),
        ({"feedback_decay": 0.5}, "feedback_decay 0.5: .* use feedback_decay 0"),
        ({"outer": OuterOptimizerKind.NESTEROV}, "outer 'nesterov', local_steps 1: .* use outer 'adamw'"),
    ):
        refused(f"precision 'bf16' with audit '{audit}' and {why}, or audit 'off', or precision 'fp32'", replace(half, **values))
    assert replace(half, replay_tolerance=0.1).validated()


def test_small_batches_memories_and_objectives_that_were_not_measured_in_bf16_are_refused() -> None:
    half = replace(JOB, **HALF)
    refused("batch 7: mean losses .* use at least 8", replace(half, batch=7))
    assert replace(half, batch=7, audit=AuditMode.FULL).validated()
    short = replace(half, model=ModelSpec(context=16))
    refused("batch 8: mean losses of few tokens .* use at least 64", short)
    assert replace(short, batch=64).validated() and replace(short, audit=AuditMode.FULL).validated()
    refused("memory 'estimates': .* use memory 'residual'", replace(half, audit=AuditMode.FULL, memory=FeedbackMemory.ESTIMATES))
    refused("objective 'scratch': .* use objective 'language'", replace(half, objective="scratch"))


def test_layers_that_were_not_measured_in_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseLinear, "is_replayable_in_bf16", False)
    half = replace(JOB, **HALF)
    refused("model.linear 'dense': its gradients were not measured in bf16", half)
    assert replace(half, audit=AuditMode.OFF).validated() and replace(half, precision=Precision.FP32).validated()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"linear": "ternary"}, "model.linear 'ternary'"),
        ({"attention": "sliding-window", "window": 8}, "model.attention 'sliding-window'"),
        ({"feed_forward": "experts", "experts": 4}, "model.feed_forward 'experts'"),
    ],
)
def test_only_the_usual_layers_have_audits_in_bf16(model: dict[str, Any], why: str) -> None:
    half = replace(JOB, **HALF, model=ModelSpec(**model))
    refused(f"{why}: its gradients were not measured in bf16", half)
    assert replace(half, audit=AuditMode.OFF).validated() and replace(half, precision=Precision.FP32).validated()


def test_muon_is_refused_and_no_default_with_audited_experts() -> None:
    experts = {"model": ModelSpec(feed_forward="experts", experts=4)}
    assert "inner" not in complete_fields(experts) and complete_fields({"model": ModelSpec()})["inner"] == InnerOptimizerKind.MUON
    muon = replace(JOB, **experts, inner=InnerOptimizerKind.MUON)
    refused("inner 'muon' with model.feed_forward 'experts' .* use inner 'adamw', or audit 'off'", muon)
    assert replace(muon, inner=InnerOptimizerKind.ADAMW).validated() and replace(muon, audit=AuditMode.OFF).validated()


def test_sam_is_refused_where_its_replays_were_not_measured() -> None:
    refused("sam_radius 0.05: its gradients were not measured in bf16; use sam_radius 0", replace(JOB, **HALF, sam_radius=0.05))
    ternary = replace(JOB, model=ModelSpec(linear="ternary"))
    refused("sam_radius 0.05 with model.linear 'ternary': .* leave one of them out", replace(ternary, sam_radius=0.05))
    assert ternary.validated()


def test_the_tolerance_follows_the_precision_of_audited_jobs_unless_a_person_sets_it() -> None:
    assert complete_fields({"precision": "bf16"})["replay_tolerance"] == BF16_TOLERANCE, "a person's text is not yet converted"
    assert complete_fields({"precision": Precision.BF16, "replay_tolerance": 0.08})["replay_tolerance"] == 0.08
    for fields in ({"precision": Precision.BF16, "audit": AuditMode.OFF}, {"precision": Precision.FP32}, {}):
        assert "replay_tolerance" not in complete_fields(fields)


def test_closing_rounds_are_of_sampled_jobs_and_not_more_than_there_are() -> None:
    refused(
        "final_full_audit_rounds 3 has no effect with audit 'full'", replace(JOB, audit=AuditMode.FULL, final_full_audit_rounds=3)
    )
    sampled = replace(JOB, audit=AuditMode.SAMPLED, final_full_audit_rounds=JOB.rounds)
    assert sampled.validated() == sampled
    refused("is more than rounds", replace(sampled, final_full_audit_rounds=JOB.rounds + 1))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"inner_state": InnerStatePolicy.KEEP},
            "would send all moments to auditors: use inner_state 'reset', or audit 'full'",
        ),
        ({"memory": FeedbackMemory.ESTIMATES}, "was not measured: use memory 'residual', or audit 'full' or 'off'"),
    ],
)
def test_what_sampled_audits_cannot_show_is_refused_with_the_way_out(said: dict[str, Any], why: str) -> None:
    refused(why, replace(JOB, **said, audit=AuditMode.SAMPLED))
    for audit in (AuditMode.FULL, AuditMode.OFF):
        assert replace(JOB, **said, audit=audit).validated()


def test_a_quarter_of_a_round_is_replayed_by_default_however_many_steps_it_has() -> None:
    for steps in (1, 15):
        rate = complete_fields({"audit": AuditMode.SAMPLED, "local_steps": steps})["audit_rate"]
        assert rate * JOB.auditors == 0.25
    assert complete_fields({"audit": AuditMode.SAMPLED, "audit_rate": 0.5})["audit_rate"] == 0.5
    assert "audit_rate" not in complete_fields({"audit": AuditMode.FULL})


@pytest.mark.parametrize("said", [{"tied": False}, {"rope_base": 5e5}, {"norm_epsilon": 1e-5}])
def test_a_model_of_another_form_survives_the_wire(said: dict[str, Any]) -> None:
    other = replace(JOB, model=ModelSpec(**said))
    assert JobSpec.decode(other.encode()) == other and other.encode() != JOB.encode()


def test_a_job_needs_the_module_of_its_objective(tmp_path: Path) -> None:
    assert JobModelStore(tmp_path).terms_of_spec(JOB.encode()).requires == (ModuleVersion("jobs", 1),)
    half = replace(JOB, **HALF)
    assert JobModelStore(tmp_path).terms_of_spec(half.encode()).requires == (ModuleVersion("jobs", 1), ModuleVersion("jobs", 2))
    unaudited = replace(half, audit=AuditMode.OFF, final_full_audit_rounds=0)
    assert JobModelStore(tmp_path).terms_of_spec(unaudited.encode()).requires == (ModuleVersion("jobs", 1),)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"rope_base": 0.5}, r"rope_base must be in 1\.\.1e\+09, not 0\.5"),
        ({"rope_base": float("nan")}, "rope_base must be in .*, not nan"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be in .*, not 0"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon must be in .*, not inf"),
    ],
)
def test_forms_out_of_bounds_are_refused_by_name(said: dict[str, Any], why: str) -> None:
    assert re.match(why, ModelSpec(**said).problem() or "")


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 0},
        {"rounds": 10_000_000},
        {"local_steps": 1_000_000},
        {"batch": 2**31},
        {"inner_rate": 0.0},
        {"inner_rate": -1.0},
        {"inner_rate": 9e-7},
        {"beta1": 1.0},
        {"beta2": 1.5},
        {"outer_momentum": 1.01},
        {"weight_decay": -0.1},
        {"outer_rate": 1e300},
        {"inner_rate": 11.0},
        {"proposal_seconds": 1e9},
        {"held_out_permille": 501},
        {"data": None},
        {"data": None, "audit": AuditMode.SAMPLED},
        {"bits": 3},
        {"bits": 16},
        {"decay_rounds": 59},
        {"warmup_rounds": 61},
        {"accepted_min": 201},
        {"audit_rate": 1.1},
        {"audit": AuditMode.SAMPLED, "audit_rate": 0.0},
        {"audit": AuditMode.SAMPLED, "audit_rate": 1e-300},
        {"outer": OuterOptimizerKind.SIGN},
        {"auditors": 0},
        {"auditors": 9},
        {"audit_window": 0},
        {"replay_tolerance": 0.0},
        {"replay_tolerance": 1.0},
        {"replay_tolerance": 1e-12},
        {"suspension_rounds": 0},
        {"outer": OuterOptimizerKind.ADAMW},
        {"outer": OuterOptimizerKind.ADAMW, "local_steps": 1, "inner": InnerOptimizerKind.MUON},
        {"outer": OuterOptimizerKind.ADAMW, "local_steps": 1, "inner_state": InnerStatePolicy.KEEP},
        {"memory": FeedbackMemory.ESTIMATES, "feedback_decay": 1.0},
        {"memory": FeedbackMemory.ESTIMATES, "byzantine_max": 100},
        {"model": ModelSpec(vocabulary=300)},
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
    refused("beta1 must be at least 0 and below 1", replace(JOB, beta1=1.0))
    refused(r"^job 'job': byzantine_max: 201 is outside 0..200$", replace(JOB, byzantine_max=201))


@pytest.mark.parametrize(
    "name, least, less, words",
    [
        ("replay_tolerance", 1e-3, 9e-4, "replay_tolerance 0.0009 would reject honest updates .*: use at least 0.001"),
        ("inner_rate", 1e-6, 9e-7, "inner_rate 9e-07 would reject honest updates .*: use at least 1e-06"),
        ("gradient_clip", 1e-6, 9e-7, "gradient_clip 9e-07 would reject honest updates .*: use at least 1e-06"),
        ("audit_rate", 1e-9, 9e-10, "audit_rate 9e-10 would audit nothing: use at least 1e-09, or audit 'off'"),
    ],
)
def test_values_so_small_that_honest_trainers_or_audits_would_suffer_are_told_with_the_least(
    name: str, least: float, less: float, words: str
) -> None:
    sampled: dict[str, Any] = {"audit": AuditMode.SAMPLED}
    assert replace(JOB, **sampled, **{name: least}).validated()
    refused(words, replace(JOB, **sampled, **{name: less}))


def test_a_person_is_told_what_goes_together_and_the_way_out() -> None:
    refused(
        r"memory 'estimates' with feedback_decay 1 would never learn from an update: use 0.8",
        replace(JOB, memory=FeedbackMemory.ESTIMATES, feedback_decay=1.0),
    )
    refused(
        r"model.vocabulary 300 needs a tokenizer: use `train --vocabulary 300`, or leave it at",
        replace(JOB, model=ModelSpec(vocabulary=300)),
    )
    refused("outer 'adamw' needs local_steps 1, not 10: use outer 'nesterov'", replace(JOB, outer=OuterOptimizerKind.ADAMW))
    refused(
        "audit 'sampled' needs shared data: give a text, or use audit 'off'", replace(JOB, data=None, audit=AuditMode.SAMPLED)
    )


def test_an_inner_state_that_no_peer_may_send_is_refused_where_audits_need_it() -> None:
    for vocabulary, is_valid in ((210_000, True), (215_000, False)):
        model = ModelSpec(vocabulary=vocabulary, width=16_384, layers=1, hidden=8)
        spec = replace(JOB, tokenizer=bytes(32), model=model, inner_state=InnerStatePolicy.KEEP)
        if is_valid:
            assert inner_bytes(spec.validated()) <= BLOB_BYTES_MAX
        else:
            assert inner_bytes(spec) > BLOB_BYTES_MAX
            refused(r"has \d+ bytes.* at most 34359738368: use a smaller model, or inner_state", spec)
            assert replace(spec, inner_state=InnerStatePolicy.RESET).validated()


FOUR_MILLION = ModelSpec(vocabulary=1024, width=256, layers=5, hidden=768)
LARGE_JOB = replace(JOB, tokenizer=bytes(32), model=FOUR_MILLION)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_audited_by_samples_with_a_model_of_four_million_parameters(name: str) -> None:
    assert FOUR_MILLION.parameters >= 4_000_000
    assert replace(LARGE_JOB, **PRESETS[name] | {"audit": AuditMode.SAMPLED}).validated()


@pytest.mark.parametrize("name, window", [("local", 1000), ("per-step", 1000)])
def test_what_a_jobs_audits_keep_on_disks_is_bounded_with_several_steps_and_with_one(name: str, window: int) -> None:
    spec = replace(LARGE_JOB, **PRESETS[name] | {"audit": AuditMode.SAMPLED, "audit_window": window})
    refused(r"audit 'sampled' would keep \d+ GiB .* more than 64: use a shorter audit_window", spec)
    assert replace(spec, audit_window=window // 4).validated() and replace(spec, audit=AuditMode.FULL).validated()


def test_what_audits_keep_is_all_that_lies_on_a_trainers_disk() -> None:
    """Audits keep a model and a buffer of every round."""
    from training.replicated.model_directory import vector_names

    model = ModelSpec(width=2, heads=1, kv_heads=1, layers=1, hidden=1)
    for outer in OuterOptimizerKind:
        spec = replace(JOB, outer=outer, audit=AuditMode.SAMPLED, audit_window=2, model=model, local_steps=1)
        assert spec.audit_bytes == model.parameters * 5 * (4 * len(vector_names(spec)) + 1)
        assert spec.audit_bytes - replace(spec, feedback_decay=0.0).audit_bytes == model.parameters * 5
    assert replace(spec, outer=OuterOptimizerKind.SGD, local_steps=3).audit_bytes == model.parameters * 5 * (4 + 1)


@pytest.mark.parametrize(
    ("memory", "audit"), [(FeedbackMemory.RESIDUAL, audit) for audit in AuditMode] + [(FeedbackMemory.ESTIMATES, AuditMode.FULL)]
)
def test_payloads_of_eight_bits_carry_nothing_over(memory: FeedbackMemory, audit: AuditMode) -> None:
    """A payload and a buffer with equal bytes would be one file, which is deleted with the buffer."""
    said = {"audit": audit, "memory": memory, "bits": 8, "local_steps": 1}
    refused(r"bits 8 with feedback_decay 0.95 .*: use feedback_decay 0, or fewer bits", replace(JOB, **said))
    for fields in ({"feedback_decay": 0.0}, {"bits": 4}):
        assert replace(JOB, **said | fields).validated().commits_to_buffer is ("feedback_decay" not in fields)


def test_a_person_who_asks_for_eight_bits_need_not_say_that_nothing_is_carried_over() -> None:
    for said in ({}, {"feedback_decay": 0.0}):
        assert replace(JOB, **complete_fields({"bits": 8, **said})).validated().feedback_decay == 0
    for said in ({"feedback_decay": 0.95}, {"memory": FeedbackMemory.ESTIMATES}):
        refused("use feedback_decay 0, or fewer bits", replace(JOB, **complete_fields({"bits": 8, **said})))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_job_that_can_be_started_and_only_names_what_it_changes_or_means(name: str) -> None:
    assert replace(JOB, **PRESETS[name]).validated()
    assert replace(JOB, **PRESETS["local"]) == JOB, "`local` spells out the defaults"


@pytest.mark.parametrize(
    "fields, bits",
    [
        ({"outer": OuterOptimizerKind.ADAMW}, 4),
        ({"outer": OuterOptimizerKind.ADAMW, "bits": 1}, 1),
        ({"outer": OuterOptimizerKind.ADAMW, "bits": 8}, 8),
        ({"outer": OuterOptimizerKind.ADAMW, "memory": FeedbackMemory.ESTIMATES}, 1),
        ({}, 1),
    ],
    ids=str,
)
def test_one_bit_is_what_adamw_gets_only_from_who_asks_for_it(fields: dict[str, Any], bits: int) -> None:
    """With one bit all elements of a chunk have one size, and AdamW's second moment learns nothing. Estimates have more."""
    assert replace(JOB, **complete_fields({"local_steps": 1, **fields})).validated().bits == bits
    for fields in (PRESETS["per-step"], ESTIMATES):
        assert complete_fields(fields) == fields


def test_a_field_that_is_set_to_its_default_changes_no_other_field() -> None:
    """AdamW names both an inner and an outer optimizer, and each of them implies other defaults."""
    for name, default in {name: getattr(JOB, name) for name in ("inner", "outer", "memory", "audit")}.items():
        usual = complete_fields({"inner": JOB.inner}) if name == "inner" else complete_fields({})
        assert complete_fields({name: default}) == usual | {name: default}


@pytest.mark.parametrize(
    "fields, rule",
    [
        ({}, AggregationRule.MEAN),
        ({"outer": OuterOptimizerKind.ADAMW}, AggregationRule.MEAN),
        ({"audit": AuditMode.SAMPLED}, AggregationRule.ARC_NNM_TRIM),
        ({"audit": AuditMode.OFF}, AggregationRule.ARC_NNM_TRIM),
        ({"audit": AuditMode.SAMPLED, "outer": OuterOptimizerKind.ADAMW}, AggregationRule.CENTERED_CLIPPING),
        ({"rule": AggregationRule.ARC_NNM_TRIM}, AggregationRule.ARC_NNM_TRIM),
        ({"outer": OuterOptimizerKind.ADAMW, "rule": AggregationRule.CENTERED_CLIPPING}, AggregationRule.CENTERED_CLIPPING),
    ],
    ids=str,
)
def test_the_plain_mean_is_the_rule_where_all_is_re_executed_before_the_vote_and_nowhere_else(
    fields: dict[str, Any], rule: AggregationRule
) -> None:
    assert replace(JOB, **complete_fields(fields)).rule is rule


@pytest.mark.parametrize("rounds, warmup", [(600, 30), (2_000, 30), (100, 5), (10, 0), (None, 3)])
def test_gradients_of_fewer_rounds_are_warmed_up_for_the_same_share_unless_a_person_says_for_how_many(
    rounds: int | None, warmup: int
) -> None:
    fields = {"outer": OuterOptimizerKind.ADAMW, "local_steps": 1} | ({} if rounds is None else {"rounds": rounds})
    assert replace(JOB, **complete_fields(fields)).validated().warmup_rounds == warmup
    assert complete_fields(fields | {"warmup_rounds": 7})["warmup_rounds"] == 7


def test_a_warm_up_longer_than_the_job_is_refused_but_the_usual_one_never() -> None:
    assert replace(JOB, rounds=1).validated().warmup_rounds == 2
    refused("warmup_rounds 11 are more than the 10 rounds: shorten the warm-up", replace(JOB, rounds=10, warmup_rounds=11))


def test_sign_moves_every_parameter_by_a_rate_of_its_own_unless_a_person_says_another() -> None:
    assert replace(JOB, **complete_fields({"outer": OuterOptimizerKind.SIGN})).validated().outer_rate == SIGN_RATE
    assert replace(JOB, **complete_fields({"outer": OuterOptimizerKind.SIGN, "outer_rate": 0.01})).validated().outer_rate == 0.01
    refused(
        r"would move every parameter by outer_rate 1.4 in each round: use at most 0.1",
        replace(JOB, outer=OuterOptimizerKind.SIGN),
    )


def test_muon_gets_a_rate_of_its_own_unless_a_person_says_another() -> None:
    assert replace(JOB, **complete_fields({"inner": InnerOptimizerKind.MUON})).validated().inner_rate == MUON_RATE
    assert replace(JOB, **complete_fields({"inner": InnerOptimizerKind.MUON, "inner_rate": 0.01})).validated().inner_rate == 0.01
    assert replace(JOB, **complete_fields({"inner": InnerOptimizerKind.ADAMW})).validated().inner_rate == JOB.inner_rate
    for fields, inner in (
        ({}, InnerOptimizerKind.MUON),
        ({"inner_rate": 0.01}, InnerOptimizerKind.MUON),
        ({"outer": OuterOptimizerKind.ADAMW}, InnerOptimizerKind.ADAMW),
        ({"memory": FeedbackMemory.ESTIMATES}, InnerOptimizerKind.ADAMW),
        ({"inner_state": InnerStatePolicy.KEEP}, InnerOptimizerKind.ADAMW),
    ):
        assert replace(JOB, **complete_fields(fields)).inner is inner, fields


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weight_decay", "outer_rate", "beta1", "feedback_decay", "initial_norm"])
def test_what_is_no_number_is_told_to_a_person(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        replace(JOB, **{name: value}).validated()  # type: ignore[arg-type]


def test_the_number_of_parameters_is_that_of_the_layout() -> None:
    from training.replicated.tensor_layout import layout_of

    for model in (ModelSpec(), ModelSpec(vocabulary=300, width=32, layers=1, heads=2, kv_heads=1, hidden=48)):
        assert layout_of(replace(JOB, model=model)).size == model.parameters
