"""Outer optimizers: how a round's aggregate moves the model. Each keeps slots, float32 vectors beside the parameters
(`OUTER_SLOTS`).

    nesterov  momentum' = μ·momentum + g;  θ' = θ − η·(g + μ·momentum')        DiLoCo (arXiv:2311.08105)
    sgd       θ' = θ − η·g
    sign      momentum' = μ·momentum + g;  θ' = θ − η·sign(momentum')          Signum (Bernstein 2018, arXiv:1802.04434)
    adamw     AdamW (Loshchilov & Hutter, arXiv:1711.05101) on gradients, weight decay on matrices only

Every operation is a float32 operation of its own, rounded to nearest: never fused, never contracted. What would be smaller than
2^-100 becomes zero before anything else sees it, so that no result depends on whether a library has switched the processor to
flush subnormal numbers to zero (`docs/decisions/0029`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from training.job_spec import INNER_RATE_MIN, JobSpec, OuterOptimizerKind
from training.replicated.tensor_layout import Float32Array

# its last bit is worth 2^-123: sums and differences of such are never subnormal
FLUSH_BELOW: Final = np.float32(math.ldexp(1.0, -100))
POWER_LEAST: Final = math.ldexp(1.0, -60)  # a power of beta below this is zero: 1 minus it is 1 already
STEP_MAX: Final = float(1 << 25)  # of a corrected AdamW rate: a quotient below 2^-126 is still below `FLUSH_BELOW` after it
EPSILON: Final = np.float32(1e-8)  # of AdamW


# `step` moves one block of `parameters` and of every slot in place and uses `gradient` up; `decayed`: weight decay applies.


@dataclass(frozen=True, slots=True)
class OuterNesterov:
    rate: float
    momentum: float

    def step(self, parameters: Float32Array, slots: Sequence[Float32Array], gradient: Float32Array, decayed: bool) -> None:
        (momentum,) = slots
        _remember(momentum, np.float32(self.momentum), gradient)
        change = np.float32(self.momentum) * momentum
        change += gradient
        _descend(parameters, change, self.rate)


@dataclass(frozen=True, slots=True)
class OuterSgd:
    rate: float

    def step(self, parameters: Float32Array, slots: Sequence[Float32Array], gradient: Float32Array, decayed: bool) -> None:
        _descend(parameters, gradient, self.rate)


@dataclass(frozen=True, slots=True)
class OuterSignum:
    rate: float
    momentum: float

    def step(self, parameters: Float32Array, slots: Sequence[Float32Array], gradient: Float32Array, decayed: bool) -> None:
        (momentum,) = slots
        _remember(momentum, np.float32(self.momentum), gradient)
        _descend(parameters, np.sign(momentum, out=gradient), self.rate)


@dataclass(frozen=True, slots=True)
class OuterAdamW:
    """`powers` are beta1^t and beta2^t of the step that is taken, the t-th."""

    rate: float
    betas: tuple[float, float]
    powers: tuple[float, float]
    weight_decay: float

    def step(self, parameters: Float32Array, slots: Sequence[Float32Array], gradient: Float32Array, decayed: bool) -> None:
        first, second = slots
        scaled = gradient * np.float32(1 - self.betas[0])
        _remember(first, np.float32(self.betas[0]), scaled)
        gradient *= gradient
        gradient *= np.float32(1 - self.betas[1])
        _remember(second, np.float32(self.betas[1]), gradient)
        root = np.sqrt(second, out=gradient)
        root *= np.float32(1 / math.sqrt(1 - self.powers[1]))
        root += EPSILON
        change = np.divide(first, root, out=root)
        if decayed and self.weight_decay:
            parameters *= np.float32(max(0.0, 1 - self.rate * self.weight_decay))
            _flush(parameters, scaled)
        _descend(parameters, change, min(self.rate / (1 - self.powers[0]), STEP_MAX))


OuterOptimizer = OuterNesterov | OuterSgd | OuterSignum | OuterAdamW  # one round's step, block by block


def initial_beta_powers(spec: JobSpec) -> tuple[float, ...]:
    """What `ModelState.beta_powers` begins with: beta1^0 and beta2^0 for AdamW."""
    return (1.0, 1.0) if spec.outer is OuterOptimizerKind.ADAMW else ()


def next_beta_powers(spec: JobSpec, powers: tuple[float, ...]) -> tuple[float, ...]:
    """After one more step, by one multiplication each: no library's power function takes part."""
    following = (power * beta for power, beta in zip(powers, (spec.beta1, spec.beta2), strict=False))
    return tuple(power if power >= POWER_LEAST else 0.0 for power in following)


def make_outer_optimizer(spec: JobSpec, taken: int, powers: tuple[float, ...]) -> OuterOptimizer:
    """For the step of `round`, with the powers that count it."""
    if spec.outer is OuterOptimizerKind.ADAMW:
        return OuterAdamW(inner_rate(spec, taken), (spec.beta1, spec.beta2), (powers[0], powers[1]), spec.weight_decay)
    if spec.outer is OuterOptimizerKind.SGD:
        return OuterSgd(spec.outer_rate)
    kind = OuterNesterov if spec.outer is OuterOptimizerKind.NESTEROV else OuterSignum
    return kind(spec.outer_rate, spec.outer_momentum)


def _remember(average: Float32Array, factor: np.float32, new: Float32Array) -> None:
    """average' = factor · average + new, in place. A subnormal term is below half the last place of any sum that is kept."""
    average *= factor
    average += new
    _flush(average)


def _descend(parameters: Float32Array, change: Float32Array, rate: float) -> None:
    """Uses `change` up."""
    change *= np.float32(rate)
    _flush(change)
    parameters -= change


def _flush(vector: Float32Array, scratch: Float32Array | None = None) -> None:
    """Everything below `FLUSH_BELOW` becomes zero."""
    kept = np.abs(vector, out=scratch) >= FLUSH_BELOW
    if not kept.all():
        vector *= kept


# Rates -------------------------------------------------------------------------------------------------------------------


def inner_rate(spec: JobSpec, taken: int) -> float:
    """The rate of every inner step, or of the one outer AdamW step, of the round after so many; zero only in the last one, if the
    floor is, and otherwise never below `INNER_RATE_MIN`. It is piecewise linear over a job:

        warm-up: rising to the peak        constant        linear decay to `inner_rate_floor` of the peak in the last round
        round 0 .. warmup_rounds           in between      the last `decay_rounds` rounds

    Rounds are counted along the model's own line: those that a rollback undid do not count. Additions, multiplications and
    divisions of float64, each rounded once, make the same number everywhere: no library's cosine takes part.
    """
    if taken < spec.warmup_rounds:
        rate = spec.inner_rate * (taken + 1) / (spec.warmup_rounds + 1)
    else:
        left = 1.0  # before the decay; 0 in the last round and, for who asks, after it
        if spec.decay_rounds != 0:
            decay = spec.rounds - 1 - spec.warmup_rounds if spec.decay_rounds is None else spec.decay_rounds
            left = min(1.0, max(0.0, (spec.rounds - 1 - taken) / max(1, decay)))
        rate = spec.inner_rate * (spec.inner_rate_floor + (1 - spec.inner_rate_floor) * left)
    return max(rate, INNER_RATE_MIN) if rate else 0.0
