"""Two objectives of the feature: a constant update of all trainers, and the share of each byte in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.codec import Count, Digest
from training.data.token_sequences import TokenizedText
from training.objectives.objective import Declaration, JobSpecProtocol, Objective, RejectionReason, Shape
from training.replicated.tensor_layout import Float32Array
from training.transformer import BYTES


@dataclass(frozen=True, slots=True)
class Sizes:
    size: Count


class Ones(Objective):
    name = "ones"
    description = "adds one to everything"
    module, version = "notes", 1
    settings_type = Sizes
    needs_worker = reads_text = makes_text = False

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        return None if 0 < settings.size <= 8192 else f"size {settings.size} is outside 1..8192"

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("ones", (settings.size,))]

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> Float32Array:
        return np.ones(size, dtype=np.float32)


COUNTED_BYTES = 8 * BYTES


@dataclass(frozen=True, slots=True)
class Counted:
    """The declaration of a proposal: the count of each byte."""

    counts: Digest  # of a blob: int64, little-endian, by byte
    bytes: Count


class Letters(Objective):
    name = "letters"
    description = "the share of each byte in a text"
    module, version = "notes", 1
    role = "clerk"
    makes_text = False
    main_metric = "distance_from_all"
    declaration_type = Counted
    rejection_reasons = (RejectionReason("miscounted", "it met other letters than it says"),)

    def declaration_problem(self, job: JobSpecProtocol, record: Any) -> str | None:
        return None if record.bytes else "nothing was counted"

    def declared_blobs(self, job: JobSpecProtocol, record: Any) -> Mapping[bytes, int]:
        return {record.counts: COUNTED_BYTES}

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("shares", (BYTES,))]

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the bytes of sequences, without targets of prediction."""
        seen, _ = super().batch_arrays(job, drawn, data)
        return (seen,)


OBJECTIVES = (Ones(), Letters())
