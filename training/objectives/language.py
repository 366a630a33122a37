"""Next-token prediction on text, by a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from training.objectives.objective import JobSpecProtocol, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, BYTES, BYTES_WITH_END, tensor_shapes


class LanguageObjective(Objective):
    name = "language"
    description = "next-token prediction on text"
    starts_from_parameters = True
    loss_functions: ClassVar[Mapping[str, str]] = {"pytorch": "training.engines.pytorch.losses:next_token_loss"}
    metric_functions: ClassVar[Mapping[str, str]] = {"pytorch": "training.engines.pytorch.losses:held_out_bits"}

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            least = max(BYTES_WITH_END + 1, job.model.vocabulary)
            needs = f"model.vocabulary {job.model.vocabulary} needs a tokenizer"
            return f"{needs}: use `train --vocabulary {least}`, or leave it at the {BYTES} bytes"
        if job.data is None and job.is_reexecuted:
            return f"audit {job.audit.value!r} needs shared data: name a text, or take audit 'off' for local data"
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return tensor_shapes(job.model)
