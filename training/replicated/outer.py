"""The outer step of DiLoCo (arXiv:2311.08105): SGD with Nesterov momentum on the aggregated pseudo-gradient.

    momentum'   = μ · momentum + g
    parameters' = parameters − η · (g + μ · momentum')

Each multiplication and each addition is a float32 operation of its own, rounded to nearest: never fused, never contracted.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from training.replicated.layout import Float32Array

# Momentum below this is zero: decaying for many rounds it would become subnormal, and a library that switches the processor
# to flush-to-zero would then round differently from one that does not.
MOMENTUM_LEAST: Final = np.float32(2.0**-100)


def step(
    parameters: Float32Array, momentum: Float32Array, gradient: Float32Array, rate: float, factor: float
) -> tuple[Float32Array, Float32Array]:
    """(parameters', momentum') of one block; the arguments are left as they are."""
    eta, mu = np.float32(rate), np.float32(factor)
    following = mu * momentum
    following += gradient
    following[np.abs(following) < MOMENTUM_LEAST] = 0
    change = mu * following
    change += gradient
    change *= eta
    return parameters - change, following
