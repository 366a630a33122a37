"""How far a policy may go from its reference. Exact: every peer finds the same bits.

| a job's term | after a round, with the median k1 of its accepted proposals as nats a response |
|---|---|
| `kl_target` | β of the next round is β · (1 + e), where e = K · (nats / target − 1), within ±1/5 |
| `kl_stop` | at so many nats or more the job ends |

This is the controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2), whose bound of 1/5 is on nats / target − 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Between

BILLIONTHS: Final = 10**9  # of one β, in score a nat
# K. They have 1/10, for thousands of iterations, where a job here has tens. With 1 the distance swings by half of the target.
GAIN: Final = Fraction(1, 4)
CHANGE_MAX: Final = Fraction(1, 5)  # of β, in a round: one round's sample of responses says little
# The least β is so large that a fifth of it is not lost where it is rounded down; the largest is the largest that a job may say.
BETA_MIN, BETA_MAX = 1_000, 1_000 * BILLIONTHS


@dataclass(frozen=True, slots=True)
class KlControllerState:
    """What the rounds of a job with `kl_target` go by, once one has accepted something."""

    beta: Annotated[int, Between(BETA_MIN, BETA_MAX)]  # in billionths


def nats_per_response(k1: int, responses: int) -> Fraction:
    """A response's, of a sum in millionths."""
    return Fraction(k1, 1_000_000 * responses)


def next_beta(beta: int, of_round: Fraction, target: float) -> int:
    """In billionths, as `beta`. `of_round` is in nats, as the target."""
    change = GAIN * (of_round / Fraction(target) - 1)
    return _bounded(math.floor(beta * (1 + max(-CHANGE_MAX, min(CHANGE_MAX, change)))))


def first_beta(said: float) -> int:
    return _bounded(round(Fraction(said) * BILLIONTHS))


def current_beta(steering: bytes, said: float) -> float:
    """In score a nat; `said` is what the job says, for rounds before the first that accepted something."""
    return codec.decode(KlControllerState, steering).beta / BILLIONTHS if steering else said


def exceeds_kl_stop(of_round: Fraction, stop: float | None) -> bool:
    return stop is not None and of_round >= Fraction(stop)


def lower_median(values: Sequence[int]) -> int:
    """Of an even number the lower one."""
    return sorted(values)[(len(values) - 1) // 2]


def _bounded(beta: int) -> int:
    return max(BETA_MIN, min(BETA_MAX, beta))
