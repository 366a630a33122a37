"""The objectives of this package: text, and updates that everybody can compute from a hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.objectives.objective import JobSpecProtocol, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, BYTES, BYTES_WITH_END, tensor_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SIZE = 4096  # parameters of the scratch objective


class LanguageObjective(Objective):
    """Next-token prediction by a decoder-only transformer."""

    name = "language"
    description = "next-token prediction on text"
    starts_from_parameters = True

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


class ScratchObjective(Objective):
    """An update that everybody can compute from a hash, to test a live network without a model."""

    name = "scratch"
    description = "a known update on one small tensor: tests a live network"
    needs_worker = False
    reads_text = False
    makes_text = False

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("scratch", (SIZE,))]

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> npt.NDArray[np.float32]:
        """Multiples of 1/256 in −1/2..1/2."""
        import numpy as np

        from training import random_stream

        integers = np.frombuffer(random_stream.random_bytes(size, "scratch", job, round, trainer), dtype=np.int8)
        return integers.astype(np.float32) * np.float32(1 / 256)
