"""Two objectives of the feature: everybody adds the same, and which share each byte has in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from protocol.codec import Count, Digest
from training.objectives.objective import Declaration, Float32Array, Job, Objective, Reason, Shape
from training.sequences import Tokens
from training.transformer import BYTES


@dataclass(frozen=True, slots=True)
class Sizes:
    size: Count


class Ones(Objective):
    name = "ones"
    about = "adds one to everything"
    module, version = "notes", 1
    settings = Sizes
    needs_worker = reads_text = makes_text = False

    def problem(self, job: Job, settings: Any) -> str | None:
        return None if 0 < settings.size <= 8192 else f"size {settings.size} is outside 1..8192"

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("ones", (settings.size,))]

    def known_update(self, job: bytes, round: int, trainer: bytes, size: int) -> Float32Array:
        return np.ones(size, dtype=np.float32)


COUNTED_BYTES = 8 * BYTES


@dataclass(frozen=True, slots=True)
class Counted:
    """The declaration of a proposal: how often each byte was met."""

    counts: Digest  # of a blob: int64, little-endian, by byte
    bytes: Count


class Letters(Objective):
    name = "letters"
    about = "the share of each byte in a text"
    module, version = "notes", 1
    role = "clerk"
    makes_text = False
    losses: ClassVar[Mapping[str, str]] = {"slate": "tests.notes.engine:distance"}
    measures: ClassVar[Mapping[str, str]] = {"slate": "tests.notes.engine:distance_from_all"}
    figure = "distance_from_all"
    declaration = Counted
    reasons = (Reason("miscounted", "it met other letters than it says"),)

    def declaration_problem(self, job: Job, record: Any) -> str | None:
        return None if record.bytes else "nothing was counted"

    def blobs(self, job: Job, record: Any) -> Mapping[bytes, int]:
        return {record.counts: COUNTED_BYTES}

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("shares", (BYTES,))]

    def examples(
        self, job: Job, drawn: npt.NDArray[np.int64], data: Tokens, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """The bytes of sequences, of which nothing is predicted."""
        seen, _ = super().examples(job, drawn, data)
        return (seen,)


OBJECTIVES = (Ones(), Letters())
