"""What a demo that tunes a policy has measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RlhfResult:
    """What was tuned. A value is J = E r − β·KL; null is what has no meaning for this demo."""

    algorithm: str
    beta: float
    rounds: int
    reference_value: float
    value: float
    kl: float  # nats
    score: float
    optimum: float | None = None
    gap_closed: float | None = None  # (value − reference_value) / (optimum − reference_value)
    distinct_2: float | None = None  # of the last round, as its trainers declared it; as the next two
    response_tokens: float | None = None  # of a response
    length_correlation: float | None = None  # with the score
    pair_accuracy: float | None = None
    linear_accuracy: float | None = None
