"""The learning rate over a job: piecewise linear, so that it is the same number everywhere.

    warm-up: rising to the peak        constant        linear decay to `inner_rate_floor` of the peak in the last round
    round 0 .. warmup_rounds           in between      the last `decay_rounds` rounds

Rounds are counted along the model's own line: those that a rollback undid do not count.

Additions, multiplications and divisions of float64, each rounded once: no library's cosine takes part.
"""

from __future__ import annotations

from training.job_spec import INNER_RATE_MIN, JobSpec


def inner_rate(spec: JobSpec, taken: int) -> float:
    """The rate of every inner step, or of the one outer AdamW step, of the round after so many; zero only in the last one, if the
    floor is, and otherwise never below `INNER_RATE_MIN`.
    """
    if taken < spec.warmup_rounds:
        rate = spec.inner_rate * (taken + 1) / (spec.warmup_rounds + 1)
    else:
        rate = spec.inner_rate * (spec.inner_rate_floor + (1 - spec.inner_rate_floor) * _left(spec, taken))
    return max(rate, INNER_RATE_MIN) if rate else 0.0


def _left(spec: JobSpec, taken: int) -> float:
    """1 before the decay, 0 in the last round and, for who asks, after it."""
    if spec.decay_rounds == 0:
        return 1.0
    decay = spec.rounds - 1 - spec.warmup_rounds if spec.decay_rounds is None else spec.decay_rounds
    return min(1.0, max(0.0, (spec.rounds - 1 - taken) / max(1, decay)))
