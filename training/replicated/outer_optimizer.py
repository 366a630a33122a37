"""Outer optimizers, which compute a model's step from the aggregate of a round's updates.

An outer optimizer has slots, which are float32 vectors beside the parameters (`OUTER_SLOTS`):

    nesterov  momentum' = μ·momentum + g;  θ' = θ − η·(g + μ·momentum')        DiLoCo (arXiv:2311.08105)
    sgd       θ' = θ − η·g
    sign      momentum' = μ·momentum + g;  θ' = θ − η·sign(momentum')          Signum (Bernstein 2018, arXiv:1802.04434)
    adamw     AdamW (Loshchilov & Hutter, arXiv:1711.05101) on gradients, weight decay on matrices only

Before the step of any of them, Grokfast may amplify the slow part of the aggregate g. It has a slot of its own:

    slow' = α·slow + (1 − α)·g;  the step gets g + λ·slow'          Grokfast-EMA (Lee et al. 2024, arXiv:2405.20233, algorithm 2)

Every operation is a separate float32 operation, rounded to nearest: never fused or contracted. Results below 2^-100 become zero
at once. No result therefore depends on whether a library made the processor flush subnormal numbers to zero
(`docs/decisions/0029`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from training.job_spec import INNER_RATE_MIN, JobSpec, OuterOptimizerKind
from training.objectives.objective import AdamWTerms
from training.replicated.tensor_layout import Float32Array

# Smaller magnitudes become zero. The last bit of this number is worth 2^-123, so sums and differences of numbers that are not
# smaller are never subnormal.
FLUSH_BELOW: Final = np.float32(math.ldexp(1.0, -100))
# Least power of beta: smaller powers become zero, since 1 minus such a power is already 1.
POWER_LEAST: Final = math.ldexp(1.0, -60)
STEP_MAX: Final = float(1 << 25)  # largest corrected AdamW rate: its product with a quotient below 2^-126 is below `FLUSH_BELOW`
EPSILON: Final = 1e-8  # epsilon of AdamW, unless a brief names another one


# The method `step` of all optimizers updates one block of `parameters` and of every slot in place, and overwrites `gradient`. If
# `decayed` is true, weight decay applies.


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
    """The outer optimizer AdamW. `powers` are beta1^t and beta2^t for the t-th step."""

    terms: AdamWTerms
    powers: tuple[float, float]

    def step(self, parameters: Float32Array, slots: Sequence[Float32Array], gradient: Float32Array, decayed: bool) -> None:
        (first, second), terms = slots, self.terms
        scaled = gradient * np.float32(1 - terms.beta1)
        _remember(first, np.float32(terms.beta1), scaled)
        gradient *= gradient
        gradient *= np.float32(1 - terms.beta2)
        _remember(second, np.float32(terms.beta2), gradient)
        root = np.sqrt(second, out=gradient)
        root *= np.float32(1 / math.sqrt(1 - self.powers[1]))
        root += np.float32(terms.epsilon)
        change = np.divide(first, root, out=root)
        if decayed and terms.weight_decay:
            parameters *= np.float32(max(0.0, 1 - terms.rate * terms.weight_decay))
            _flush(parameters, scaled)
        _descend(parameters, change, min(terms.rate / (1 - self.powers[0]), STEP_MAX))


UnfilteredOptimizer = OuterNesterov | OuterSgd | OuterSignum | OuterAdamW


@dataclass(frozen=True, slots=True)
class Grokfast:
    """A filter that amplifies the slow part of gradients, and an optimizer behind it. The slow gradient is the last slot."""

    optimizer: UnfilteredOptimizer
    factor: float
    decay: float

    def step(self, parameters: Float32Array, slots: Sequence[Float32Array], gradient: Float32Array, decayed: bool) -> None:
        *own, slow = slots
        _remember(slow, np.float32(self.decay), gradient * np.float32(1 - self.decay))
        gradient += np.float32(self.factor) * slow
        _flush(gradient)
        self.optimizer.step(parameters, own, gradient, decayed)


# An optimizer for the step of one round, which is computed block by block.
OuterOptimizer = UnfilteredOptimizer | Grokfast


def initial_beta_powers(spec: JobSpec) -> tuple[float, ...]:
    """Return the first `ModelState.beta_powers`: beta1^0 and beta2^0 for AdamW."""
    return (1.0, 1.0) if spec.outer is OuterOptimizerKind.ADAMW else ()


def next_beta_powers(spec: JobSpec, powers: tuple[float, ...], named: AdamWTerms | None = None) -> tuple[float, ...]:
    """Return the powers of beta after one more step. Each is a multiplication, since the power functions of libraries differ."""
    betas = (named or spec).beta1, (named or spec).beta2
    following = (power * beta for power, beta in zip(powers, betas, strict=False))
    return tuple(power if power >= POWER_LEAST else 0.0 for power in following)


def make_outer_optimizer(spec: JobSpec, taken: int, powers: tuple[float, ...], named: AdamWTerms | None = None) -> OuterOptimizer:
    """Return the optimizer for the round after `taken` applied rounds.

    `powers` are the powers of beta, including this round's step. `named` are the terms of the round's brief.
    """
    optimizer = _make_unfiltered_optimizer(spec, taken, powers, named)
    return Grokfast(optimizer, spec.grokfast, spec.grokfast_decay) if spec.grokfast else optimizer


def _make_unfiltered_optimizer(
    spec: JobSpec, taken: int, powers: tuple[float, ...], named: AdamWTerms | None
) -> UnfilteredOptimizer:
    if spec.outer is OuterOptimizerKind.ADAMW:
        usual = AdamWTerms(inner_rate(spec, taken), spec.beta1, spec.beta2, EPSILON, spec.weight_decay)
        return OuterAdamW(named or usual, (powers[0], powers[1]))
    if spec.outer is OuterOptimizerKind.SGD:
        return OuterSgd(spec.outer_rate)
    kind = OuterNesterov if spec.outer is OuterOptimizerKind.NESTEROV else OuterSignum
    return kind(spec.outer_rate, spec.outer_momentum)


def _remember(average: Float32Array, factor: np.float32, new: Float32Array) -> None:
    """Compute average' = factor · average + new, in place.

    A subnormal product does not change a sum of at least `FLUSH_BELOW`.
    """
    average *= factor
    average += new
    _flush(average)


def _descend(parameters: Float32Array, change: Float32Array, rate: float) -> None:
    """Subtract rate · change from the parameters. The call overwrites `change`."""
    change *= np.float32(rate)
    _flush(change)
    parameters -= change


def _flush(vector: Float32Array, scratch: Float32Array | None = None) -> None:
    """Set magnitudes below `FLUSH_BELOW` to zero, in place."""
    kept = np.abs(vector, out=scratch) >= FLUSH_BELOW
    if not kept.all():
        vector *= kept


# Rates -------------------------------------------------------------------------------------------------------------------


def inner_rate(spec: JobSpec, taken: int) -> float:
    """Return the learning rate of the round after `taken` applied rounds, for inner steps or the outer AdamW step.

    The rate is piecewise linear over a job:

        warm-up: rising to the peak        constant        linear decay to `inner_rate_floor` of the peak in the last round
        round 0 .. warmup_rounds           in between      the last `decay_rounds` rounds

    The rate is zero only at the end of the job, if the floor is zero, and otherwise at least `INNER_RATE_MIN`. Rounds that a
    rollback undid do not count. Additions, multiplications and divisions of float64, each rounded once, give the same number on
    all machines; no library's cosine is used.
    """
    if taken < spec.warmup_rounds:
        rate = spec.inner_rate * (taken + 1) / (spec.warmup_rounds + 1)
    else:
        left = 1.0  # fraction of the decay that is left: 1 before the decay, and 0 in the last round and later
        if spec.decay_rounds != 0:
            decay = spec.rounds - 1 - spec.warmup_rounds if spec.decay_rounds is None else spec.decay_rounds
            left = min(1.0, max(0.0, (spec.rounds - 1 - taken) / max(1, decay)))
        rate = spec.inner_rate * (spec.inner_rate_floor + (1 - spec.inner_rate_floor) * left)
    return max(rate, INNER_RATE_MIN) if rate else 0.0
