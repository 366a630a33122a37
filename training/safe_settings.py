"""Settings of jobs that were measured under attack. A peer starts jobs with audit 'off' or 'sampled' only with these settings.

Without audits, only statistics protect the model. Jobs with the settings `training.job_spec.ESTIMATES` were measured under the
worst attacks of `python -m benchmarks.attacks`: on handwritten digits (`--only digits`) and on a language model (`--only gpt`).
With sampled audits, liars move the model until they are found. The presets were measured on a language model (`--only gpt
--audits sampled`): `per-step` before convictions undid anything, `local` afterwards (decision 126). Each network in which the
model was protected has a row in the tables. A peer starts jobs with other settings only if a person requests it (`--accept-risk`,
or byzantine_max 0). Jobs in the ledger continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from training.job_spec import (
    ESTIMATES,
    PRESETS,
    AuditMode,
    FeedbackMemory,
    JobSpec,
    OuterOptimizerKind,
    complete_fields,
)
from training.transformer import LayerPlace, ModelSpec

LOST_MAX: Final = 2.0  # largest accepted loss of accuracy, in percentage points
# Largest accepted factor by which an attack raises the held-out loss of a language model, in jobs without audits.
WORSE_MAX: Final = 1.05
# Largest accepted factor in jobs with sampled audits, which find a dishonest trainer only after its update was applied.
POISONED_MAX: Final = 1.03
OFF: Final = "audit 'off'"
NOBODY_LIES: Final = "byzantine_max 0 if no trainer is faulty"
ACCEPTED: Final = "accept the risk with --accept-risk"
# Fields that must have the values of `ESTIMATES` in a job without audits.
MEASURED_FIELDS: Final = (
    "memory",
    "bits",
    "local_steps",
    "outer",
    "inner_state",
    "beta1",
    "feedback_decay",
    "rule",
    "compression_warmup_rounds",
    "sam_radius",
    "grokfast",
)


@dataclass(frozen=True, slots=True)
class SafeNetwork:
    """A network in which the model was protected: on seeds 0 to 2 without audits, on seed 0 with sampled audits (`preset`).

    Networks with more liars or fewer trainers are not covered.
    """

    trainers: int
    liars: int
    # The largest harm of any attack on any seed. Without audits, it is the loss of accuracy on digits in percentage points. With
    # 13 trainers this includes runs in which 30 % of the honest trainers are absent in each round. With sampled audits, it is a
    # factor of the held-out loss without attack.
    harm: float
    preset: str = ""  # preset of the measured jobs with sampled audits; empty: the jobs had no audits


SAFE_WITHOUT_AUDITS: Final = (
    SafeNetwork(4, 1, 0.55),
    SafeNetwork(13, 4, 0.83),
)
TEXT_FELL: Final = "with 1 dishonest trainer of 4 the loss of a language model grows to 1.14 times, and the limit is 1.05"
ONE_BIT_FELL: Final = (
    "1 bit with error feedback fails with 4 dishonest trainers of 13: the model recognizes 8 % of the digits, not 97 %"
)

SAFE_WITH_SAMPLED_AUDITS: Final = (
    SafeNetwork(4, 1, 1.015, "local"),
    SafeNetwork(4, 1, 1.023, "per-step"),
    SafeNetwork(7, 2, 1.027, "per-step"),
)
# Fields of a job with sampled audits that must be equal to those of a preset, at most as large, or at least as large. All other
# fields are free, but a model must have the usual kinds of layers (`_other_layers`).
FIELDS_EQUAL: Final = (
    *(
        "inner",
        "inner_state",
        "beta1",
        "beta2",
        "weight_decay",
        "gradient_clip",
        "bits",
        "outer",
        "outer_momentum",
    ),
    *("feedback_decay", "rule", "replay_tolerance", "initial_norm", "memory", "precision"),
    *("sam_radius", "grokfast", "grokfast_decay"),
)
FIELDS_AT_MOST: Final = ("local_steps", "inner_rate", "outer_rate", "compression_warmup_rounds")
FIELDS_AT_LEAST: Final = ("audit_window", "suspension_rounds", "final_full_audit_rounds")


def unsafe_reason(spec: JobSpec, trainers: int) -> str | None:
    """Return why a job that starts with this many trainers is unsafe, and the remedy; None if it is safe."""
    if not spec.byzantine_max or spec.audit is AuditMode.FULL:
        return None
    if spec.audit is AuditMode.SAMPLED:
        why = _found_late(spec, trainers) if spec.resolved_objective.makes_text else None
        return (
            None
            if why is None
            else f"audit 'sampled' with byzantine_max {spec.byzantine_max}: {why}; use audit 'full', or {ACCEPTED}"
        )
    if spec.data is None and spec.resolved_objective.reads_text:
        return (
            f"{OFF} with byzantine_max {spec.byzantine_max}: no aggregation rule was measured to hold "
            f"where each trainer has its own text; use {NOBODY_LIES}"
        )
    why = _why(spec, trainers)
    return None if why is None else f"{OFF} with byzantine_max {spec.byzantine_max}: {why}; use audit 'full', or {NOBODY_LIES}"


def _why(spec: JobSpec, trainers: int) -> str | None:
    if spec.memory is FeedbackMemory.RESIDUAL and spec.bits == 1:
        return ONE_BIT_FELL
    measured = JobSpec(name="measured", **ESTIMATES)
    others = [f"{name} {getattr(spec, name)}" for name in MEASURED_FIELDS if getattr(spec, name) != getattr(measured, name)]
    others += _other_layers(spec)
    if others or spec.inner_rate > measured.inner_rate:
        return f"{', '.join(others) or f'inner_rate {spec.inner_rate:g}'} was not measured to hold"
    if spec.resolved_objective.makes_text:
        return TEXT_FELL
    return None if _is_measured(SAFE_WITHOUT_AUDITS, spec, trainers) else _more(SAFE_WITHOUT_AUDITS, trainers)


def _other_layers(spec: JobSpec) -> list[str]:
    """Return the kinds of layers with which no attack was measured, for people."""
    usual = ModelSpec()
    places = [place.value for place in LayerPlace if getattr(spec.model, place.value) != getattr(usual, place.value)]
    return [f"model.{place} {getattr(spec.model, place)}" for place in places]


def _is_measured(rows: Sequence[SafeNetwork], spec: JobSpec, trainers: int) -> bool:
    return any(spec.byzantine_max <= row.liars and trainers >= row.trainers for row in rows)


def _more(rows: Sequence[SafeNetwork], trainers: int) -> str:
    measured = ", ".join(f"{row.liars} of {row.trainers}" for row in rows)
    return f"for {trainers} trainers this is more than was measured to hold ({measured})"


def _found_late(spec: JobSpec, trainers: int) -> str | None:
    preset = "per-step" if spec.outer is OuterOptimizerKind.ADAMW else "local"
    fields = complete_fields(PRESETS[preset] | {"audit": AuditMode.SAMPLED, "rounds": spec.rounds})
    usual = JobSpec(name="measured", data=bytes(32), **fields)
    measured = replace(
        usual,
        compression_warmup_rounds=usual.usual_compression_warmup_rounds,
        final_full_audit_rounds=usual.usual_final_full_audit_rounds,
    )
    others = [name for name in FIELDS_EQUAL if getattr(spec, name) != getattr(measured, name)]
    others += [name for name in FIELDS_AT_MOST if getattr(spec, name) > getattr(measured, name)]
    others += [name for name in FIELDS_AT_LEAST if getattr(spec, name) < getattr(measured, name)]
    unmeasured = [*(f"{name} {getattr(spec, name)}" for name in others), *_other_layers(spec)]
    if unmeasured:
        return f"{', '.join(unmeasured)} was not measured to hold"
    replays, least = (job.audit_rate * job.auditors for job in (spec, measured))
    if replays < least:
        return f"each update would be re-executed {replays:g} times on average, but at least {least:g} are needed"
    rows = [row for row in SAFE_WITH_SAMPLED_AUDITS if row.preset == preset]
    return None if _is_measured(rows, spec, trainers) else _more(rows, trainers)
