"""Next-token prediction on text, by a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from training.objectives.objective import Job, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, BYTES, BYTES_WITH_END, shapes


class Language(Objective):
    name = "language"
    about = "next-token prediction on text"
    starts_from_parameters = True
    losses: ClassVar[Mapping[str, str]] = {"pytorch": "training.engines.pytorch.losses:next_token"}
    measures: ClassVar[Mapping[str, str]] = {"pytorch": "training.engines.pytorch.losses:held_out_bits"}

    def problem(self, job: Job, settings: Any) -> str | None:
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            least = max(BYTES_WITH_END + 1, job.model.vocabulary)
            needs = f"model.vocabulary {job.model.vocabulary} needs a tokenizer"
            return f"{needs}: use `train --vocabulary {least}`, or leave it at the {BYTES} bytes"
        if job.data is None and job.is_reexecuted:
            return f"audit {job.audit.value!r} needs shared data: name a text, or take audit 'off' for local data"
        return None

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        return shapes(job.model)
