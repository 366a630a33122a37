"""The page of job fields: name, values, default and meaning of each field that a person can set."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from protocol.codec import COUNT_MAX, Between
from protocol.messages import Name
from rlhf.api import tuning_plan_builder
from rlhf.objectives import job_presets, ppo
from rlhf.objectives.ppo import PpoSettings
from rlhf.objectives.supervised_objectives import DpoTerms, InstructTerms, MeanRewardSettings
from tools.reference import table
from training import job_spec
from training.api import job_builder
from training.job_spec import ESTIMATES, PRESETS, AuditMode, JobSpec, complete_fields
from training.transformer import LAYERS, NORM_EPSILON_MAX, NORM_EPSILON_MIN, ROPE_BASE_MAX, ROPE_BASE_MIN, ModelSpec

MEANING = ("field", "values", "default", "meaning")
VALUES_OF_FIELD = {"bits": "1, 2, 4 or 8"}
DPO_BETAS = f"above 0, at most {ppo.WEIGHT_MAX:g}"
MODEL_FLOATS = {
    "rope_base": f"{ROPE_BASE_MIN:g}–{ROPE_BASE_MAX:g}",
    "norm_epsilon": f"{NORM_EPSILON_MIN:g}–{NORM_EPSILON_MAX:g}",
}
DEFAULT_OF_FIELD = {
    "audit": "[by network](../how-to/choose-audits.md#decide)",
    "byzantine_max": "faulty voters that are tolerated, but fewer than half of the trainers",
    "rule": "by `audit`",
}

INTRODUCTION = """\
# Fields of a job

`peer train --set FIELD=VALUE …` sets fields of a job, and `peer rlhf start --set FIELD=VALUE …` those of a policy. Fields never
change. `python -m tools.reference` writes this page, and the [protocol](../protocol/jobs.md) has the encoding.

[Train a model](../how-to/train-a-model.md) names the fields that people change first. `peer rlhf start` has prefixes:

| `--set` | sets |
|---|---|
| `FIELD=VALUE` | a field of the policy, or of a DPO job |
| `reward.FIELD=VALUE` | a field of the reward model |

The default is the value of `peer train` without other options. A preset changes it, and so do [other fields](#derived-defaults).
"""

PRESET_WORDS = """\
## Presets

`--preset NAME` sets several fields at once. `--set` and `--rounds` take precedence.

| preset | for | learns more than one trainer alone |
|---|---|---|
| `local` (default) | most links | from 30 rounds on |
| `per-step` | fast links; the most progress per sample | from 300 rounds on |

`estimates` is no preset: `--preset per-step --set memory=estimates audit=full` sets the fields of its column, with full audits.
[How updates are checked](../explanation/how-updates-are-checked.md) explains estimates. Those of one model take at most 4 GiB on
each peer's disk: 32 trainers of the largest model.

`per-step` asks for sampled audits. Where these were [not measured to hold](../how-to/choose-audits.md#decide), add
`--set audit=full`. The rule follows from the audits.
"""

DERIVED_WORDS = """\
## Derived defaults

A field that nobody sets follows from others. Several conditions may hold at once.
"""

RLHF_WORDS = """\
## Presets of RLHF

`peer rlhf start` and `peer train --from JOB FILE.jsonl` begin with other defaults, by objective. `–` is the default above.
"""


def render() -> str:
    parts = [
        INTRODUCTION,
        "## Training\n",
        *table(MEANING, _field_rows(JobSpec, job_builder.FIELDS_NOT_SET_BY_NAME, _training_defaults())),
        "## Model\n",
        "A job with `--from` has its base's model, and accepts none of these fields. A folder's model accepts `model.context`.\n",
        *table(MEANING, _field_rows(ModelSpec, (), {"vocabulary": "257"}, "model.")),
        PRESET_WORDS,
        *_columns({"local": PRESETS["local"], "per-step": PRESETS["per-step"], "estimates": ESTIMATES}),
        DERIVED_WORDS,
        *table(("condition", "defaults"), _derived_rows()),
        "## Policies\n",
        "Fields of the objective `ppo`, which tunes a policy by PPO or GRPO, beside those of all jobs.\n",
        *table(MEANING, _field_rows(PpoSettings, tuning_plan_builder.FIELDS_NOT_SET_BY_NAME, _policy_defaults())),
        "## Reward models, responses and DPO\n",
        *table(("objective", *MEANING), _own_rows()),
        "`reward.score=last` trains the objective `reward`, which reads a score at the last token of a response. The default is\n"
        "`reward.score=mean`.\n",
        RLHF_WORDS,
        *_columns(
            {
                "`ppo`": job_presets.PPO_JOB,
                "`reward-mean`": job_presets.MEAN_REWARD_JOB,
                "`reward`, or `reward.learns=all`": job_presets.REWARD_JOB,
                "`instruct`": job_presets.INSTRUCT_JOB,
                "`dpo`": job_presets.DPO_JOB,
            }
        ),
    ]
    return "\n".join(parts).rstrip() + "\n"


def format_value(value: object) -> str:
    """Return a value as a person types it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(getattr(value, "value", value))


@cache
def descriptions(kind: type) -> Mapping[str, str]:
    """Return the docstring below each field of a dataclass, by field name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef), kind
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{kind.__name__}.{field.target.id} has no docstring below it"
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split()).replace("None:", "`none`:")
    return found


def _field_rows(kind: type, left_out: Iterable[str], defaults: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.name not in left_out:
            values = _values(field.name, hints[field.name]) if kind is not DpoTerms or field.name != "beta" else DPO_BETAS
            default = defaults.get(field.name) or format_value(field.default)
            yield f"`{prefix}{field.name}`", values, default, descriptions(kind)[field.name]


def _training_defaults() -> Mapping[str, str]:
    usual = JobSpec(name="usual", **complete_fields({}))
    usual = replace(usual, compression_warmup_rounds=usual.usual_compression_warmup_rounds)
    return {field.name: format_value(getattr(usual, field.name)) for field in dataclasses.fields(usual)} | DEFAULT_OF_FIELD


def _policy_defaults() -> Mapping[str, str]:
    """Return the defaults, in words, of a policy with a base and a reward model that differ from `PpoSettings`, by field name."""
    usual = {"prompts": "set", "prompt_tokens": "the longest prompt that fits", "stop_token": "that of the base, or a newline"}
    by_rule = job_presets.RULE_TERMS.items() - job_presets.PPO_TERMS.items()
    own = {field.name: field.default for field in dataclasses.fields(PpoSettings)}
    return (
        {name: f"{format_value(value)}" for name, value in job_presets.PPO_TERMS.items()}
        | {name: f"{format_value(own[name])}; {format_value(value)} by a rule" for name, value in by_rule}
        | {name: f"{value}; {format_value(own[name])} by a rule" for name, value in usual.items() if name != "stop_token"}
        | {"stop_token": usual["stop_token"]}
    )


def _own_rows() -> Iterator[tuple[str, ...]]:
    base = "that of the base, or "
    for objective, kind, prefix, stop in (
        ("reward-mean", MeanRewardSettings, "reward.", ""),
        ("instruct", InstructTerms, "", f"{base}the end of a text, or a newline"),
        ("dpo", DpoTerms, "", f"{base}a newline"),
    ):
        for row in _field_rows(kind, (), {"stop_token": stop}, prefix):
            yield f"`{objective}`", *row


def _derived_rows() -> Iterator[tuple[str, str]]:
    """Yield each condition, such as `audit=full`, with the other fields that `complete_fields` then sets."""
    for given in (
        {"audit": "full"},
        {"audit": "sampled"},
        {"inner": "adamw"},
        {"inner_state": "keep"},
        {"outer": "sgd"},
        {"outer": "sign"},
        {"outer": "adamw"},
        {"memory": "estimates"},
        {"outer": "adamw", "memory": "estimates"},
        {"bits": 8},
    ):
        fields = {name: _typed(name, value) for name, value in given.items()}
        before = JobSpec(name="usual", **complete_fields({"audit": AuditMode.OFF}))
        after = JobSpec(name="usual", **complete_fields({"audit": AuditMode.OFF} | fields))
        names = [field.name for field in dataclasses.fields(JobSpec)]
        changed = {name for name in names if getattr(before, name) != getattr(after, name)}
        defaults = [f"`{name}={format_value(getattr(after, name))}`" for name in sorted(changed - {*fields, "warmup_rounds"})]
        if "warmup_rounds" in changed:
            defaults.append("`warmup_rounds`: a twentieth of the rounds, at most 30")
        if given == {"audit": "sampled"}:
            defaults.append(f"`final_full_audit_rounds={job_spec.CLOSING_ROUNDS}`, or a third of fewer than 30 rounds")
        yield ", ".join(f"`{name}={value}`" for name, value in given.items()), ", ".join(defaults)
    yield "`audit` is not `full`, and no other row names a rule", f"`rule={format_value(before.rule)}`"
    yield "more than one bit, one local step, estimates, another outer optimizer, or a base", "`compression_warmup_rounds=0`"


def _typed(name: str, value: Any) -> Any:
    kind = get_type_hints(JobSpec)[name]
    return kind(value)


def _columns(presets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table with a column for each preset and a row for each field that any preset sets."""
    fields = [field.name for field in dataclasses.fields(JobSpec) if any(field.name in preset for preset in presets.values())]
    rows = [
        (f"`{name}`", *(format_value(preset[name]) if name in preset else "–" for preset in presets.values())) for name in fields
    ]
    return table(("field", *presets), rows)


def _values(name: str, hint: Any) -> str:
    """Return the values that a field accepts, in words."""
    if type(None) in get_args(hint):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
        return f"{_values(name, hint)}, or `none`"
    if name in VALUES_OF_FIELD:
        return VALUES_OF_FIELD[name]
    if hint == Name:
        kinds = [f"`{kind.name}`" for kind in LAYERS if kind.place == name]
        return ", ".join(kinds) or "a name"
    if hint is bool:
        return "`true`, `false`"
    if hint is float:
        return _float_values(name)
    if get_origin(hint) is Annotated:
        (bound,) = (bound for bound in hint.__metadata__ if isinstance(bound, Between))
        if bound.high == COUNT_MAX:
            return f"whole number from {bound.low}"
        return f"{bound.low}–{'2^31' if bound.high == 2**31 else f'{bound.high:,}'}"
    assert issubclass(hint, enum.Enum), (name, hint)
    return ", ".join(f"`{value}`" for value in hint)


def _float_values(name: str) -> str:
    if name in job_spec.SHARES or name == "gae_lambda":
        return "0–1"
    if name in job_spec.DECAYS:
        return "from 0, below 1"
    if name in job_spec.FLOATS_MIN:
        return f"{job_spec.FLOATS_MIN[name]:g}–{job_spec.FLOATS_MAX[name]:g}"
    if name in job_spec.POSITIVE:
        return f"above 0, at most {job_spec.FLOATS_MAX[name]:g}"
    if name in job_spec.FLOATS_MAX:
        return f"0–{job_spec.FLOATS_MAX[name]:g}"
    if name in ppo.DISTANCES:
        return f"{ppo.NATS_MIN:g}–{ppo.WEIGHT_MAX:g}"
    if name in ppo.WEIGHTS:
        return f"0–{ppo.WEIGHT_MAX:g}"
    return MODEL_FLOATS[name]
