"""Limits of rollouts, which every voter checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOKEN_BYTES: Final = 2
LENGTH_MAX: Final = 2 ** (8 * TOKEN_BYTES) - 1  # of a response, which is written in as many bytes


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """What responses a job has."""

    responses: int
    tokens_max: int  # of one response
    vocabulary: int
    stop: int | None

    @property
    def bytes_max(self) -> int:
        return TOKEN_BYTES * self.responses * (1 + self.tokens_max)
