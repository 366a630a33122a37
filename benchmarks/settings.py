"""Fields of a job as a person types them after `--set`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from features.command_arguments import parse_set_options
from training.api.job_builder import parse_overrides
from training.job_spec import ESTIMATES, PRESETS, JobSpec, complete_fields
from training.transformer import ModelSpec

# Settings by their names in tables. `local` has the inner optimizer that follows from its fields.
_INNER = {name: value for name, value in complete_fields(PRESETS["local"]).items() if name.startswith("inner")}
MEASURED = {**PRESETS, "local": PRESETS["local"] | _INNER, "estimates": ESTIMATES}
OF_THE_MODEL = frozenset(field.name for field in fields(ModelSpec))


def with_settings(spec: JobSpec, settings: Sequence[str]) -> JobSpec:
    """Apply `FIELD=VALUE` settings like `peer train --set`, also without `model.` for fields of the model. Raises `UserError`."""
    said = parse_set_options(settings)
    of_model = [name.removeprefix("model.") for name in said if name in OF_THE_MODEL or name.startswith("model.")]
    typed = parse_overrides({f"model.{name}" if name in OF_THE_MODEL else name: value for name, value in said.items()})
    model = typed.pop("model", spec.model)
    return replace(spec, **typed, model=replace(spec.model, **{name: getattr(model, name) for name in of_model})).validated()
