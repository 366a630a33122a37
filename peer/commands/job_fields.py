"""What a person says of a job: its fields, the presets, and what is possible but seldom meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from features.command_arguments import Argument, parse_set_options
from peer.runtime.telemetry.risk_warnings import (
    NO_AUDITS_WITHOUT_TOLERANCE_RISK,
    SAMPLED_AUDITS_RISK,
    SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK,
)
from protocol.api import TrainRequest
from protocol.errors import UserError

# Of `training.job_spec`, which is imported only where they are used: name -> what for.
PRESETS = {
    "local": "one bit of every element after ten steps of one's own; for most links, from 30 rounds on (default)",
    "per-step": "four bits of every gradient; most progress a sample, for fast links, from 300 rounds on",
}
PRESET = Argument(
    "--preset",
    choices=tuple(PRESETS),
    metavar="NAME",
    help="settings that go together. " + ". ".join(f"{name}: {about}" for name, about in PRESETS.items()),
)
SET = Argument("--set", action="extend", nargs="+", default=[], metavar="FIELD=VALUE", help="other fields of the job")

DERIVED_FIELDS_OF_PRESETS = ("warmup_rounds", "rule")  # the first from how many rounds there are, the second from who re-executes
# Fields of a job that `train` or `peer demo` have an argument for.
ARGUMENTS = {"rounds": "rounds", "vocabulary": "model.vocabulary", "audit": "audit", "seed": "seed"}

# A field, the field that decides whether it counts, and with which of its values.
USED_ONLY_WITH = (
    ("outer_rate", "outer", ("nesterov", "sgd", "sign")),
    ("outer_momentum", "outer", ("nesterov", "sign")),
    ("audit_rate", "audit", ("sampled",)),
    ("auditors", "audit", ("sampled",)),
    ("audit_window", "audit", ("sampled",)),
    ("uplink_mbit_min", "audit", ("sampled",)),
    ("final_full_audit_rounds", "audit", ("sampled",)),
)

RULES_WITH_BYZANTINE_MAX = ("arc-nnm-trim", "trimmed-mean", "krum")  # they ask for the number; the others get along without it


def build_train_request(options: argparse.Namespace) -> TrainRequest:
    said = job_overrides(options)
    overrides = preset_overrides(options.preset, said) | said
    if options.data == "":
        raise UserError("--data '' names no text: give a file or folder, or leave --data out for the built-in text")
    data = options.data or ""
    if data not in ("", "local"):
        data = str(Path(data).expanduser().absolute())  # the daemon may have another working directory
    examples = str(Path(options.examples).expanduser().absolute()) if options.examples else ""
    said_of_text = options.name, data, options.rounds, options.vocabulary, overrides
    if (options.skip_bad or options.truncate) and not examples:
        raise UserError("--skip-bad and --truncate are about a file with responses: train --from JOB FILE.jsonl")
    if options.column and data in ("", "local"):
        raise UserError(f"--column {options.column} is about a file or folder: name it by --data PATH")
    of_file = options.skip_bad, options.truncate, options.column
    return TrainRequest(*said_of_text, options.base, examples, _folder(options.base), options.accept_risk, *of_file)


def _folder(base: str) -> str:
    """What is typed with a slash is a path; any other text may also be the name of a folder that is here."""
    path = Path(base).expanduser().absolute()
    return str(path) if "/" in base or (base and path.is_dir()) else ""


def preset_overrides(preset: str | None, said: Mapping[str, str]) -> dict[str, str]:
    """A preset's fields as a person would type them, but for those that follow from other fields
    (`training.job_spec.complete_fields`).

    Beside `memory=estimates` that are bits, momentum and rates as well: those of the preset were not measured with it.
    """
    from training.job_spec import PRESETS, fields_set_by_estimates

    fields = PRESETS[preset] if preset else {}
    follow: tuple[str, ...] = DERIVED_FIELDS_OF_PRESETS
    if said.get("memory") == "estimates":
        follow += fields_set_by_estimates({**fields, **said})
    return {name: str(value) for name, value in fields.items() if name not in follow}


def job_overrides(options: argparse.Namespace) -> dict[str, str]:
    """The values that `--set` gives, by field. Raises `UserError`, too, where another argument contradicts."""
    said = parse_set_options(options.set)
    for argument, name in ARGUMENTS.items():
        value = getattr(options, argument, None)
        if value and said.get(name, str(value)) != str(value):
            raise UserError(f"both --{argument} {value} and --set {name}={said[name]}: say one")
    return said


def aggregation_rule(overrides: Mapping[str, str]) -> str:
    """The rule that a job with these fields has."""
    from training.job_spec import JobSpec, complete_fields

    named = {name: overrides[name] for name in ("outer", "audit", "memory", "rule") if name in overrides}
    return str(JobSpec(name="rule", **complete_fields(named)).rule)


def setting_warnings(request: TrainRequest, said: Mapping[str, str], audit: str) -> Iterator[str]:
    """Warns of settings that are possible, but seldom meant. `said` are the fields that the person named, without a preset;
    `audit` is the job's audit mode.
    """
    overrides, local = {"outer": "nesterov", **request.overrides, "audit": audit}, request.data == "local"
    for name, other, users in USED_ONLY_WITH:
        value = overrides[other]
        if name in said and value not in users:
            yield f"{name}={said[name]} does nothing with {other}={value}: it counts with {' or '.join(users)}"
    rule = aggregation_rule(overrides)
    if "byzantine_max" in said and rule not in RULES_WITH_BYZANTINE_MAX:
        yield (
            f"byzantine_max={said['byzantine_max']} does nothing with rule={rule}: it counts with "
            f"{' or '.join(RULES_WITH_BYZANTINE_MAX)}"
        )
    if local:
        yield "each trainer uses its own text, so nobody can re-execute: audits are off, and votes check the form of updates only"
    elif audit == "sampled":
        yield SAMPLED_AUDITS_RISK
        if overrides.get("byzantine_max") == "0":
            yield SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK
    if audit == "off" and overrides.get("byzantine_max", "0") == "0":  # any other is refused
        yield NO_AUDITS_WITHOUT_TOLERANCE_RISK
    if overrides.get("outer") != "adamw":
        return
    if overrides.get("bits") == "1" and overrides.get("memory") != "estimates":
        yield (
            "bits=1 with outer=adamw trains badly: one bit gives all elements of a chunk one size, and AdamW divides by sizes; "
            "take bits=4 (the default with adamw), or outer=nesterov"
        )
