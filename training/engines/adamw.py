"""AdamW (Loshchilov & Hutter 2019) on one flat float32 vector in numpy, for engines without a faster one."""

from __future__ import annotations

import math

import numpy as np

from training.job_spec import JobSpec
from training.replay.inner_state import ADAMW_EPSILON, InnerState, l2_distance
from training.replicated.tensor_layout import Float32Array, layout_of

LEAST_NORMAL = np.float32(np.finfo(np.float32).tiny)  # 2^-126


def weight_decay_mask(spec: JobSpec) -> Float32Array:
    """Return a vector of shape (parameters,): 1 where weight decay applies, and 0 elsewhere."""
    layout = layout_of(spec)
    found = np.zeros(layout.size, dtype=np.float32)
    for tensor in layout.tensors:
        found[tensor.elements] = float(tensor.decayed)
    return found


def clip_gradient(gradient: Float32Array, limit: float) -> float:
    """Scale the gradient down to a norm of at most `limit`, in place. Return its norm before scaling."""
    norm = l2_distance(gradient, np.float32(0))
    if norm > limit:
        gradient *= np.float32(limit / norm)
    return norm


class FlatAdamW:
    """The AdamW optimizer of a job. A step changes `parameters` in place, and clips `gradient` in place."""

    def __init__(
        self, spec: JobSpec, parameters: Float32Array, gradient: Float32Array, decayed: Float32Array, inner: InnerState
    ) -> None:
        """Continue from a copy of `inner`. `decayed` is 1 where weight decay applies and 0 elsewhere."""
        self.spec, self.steps = spec, inner.steps
        self.moments = _without_subnormal_numbers(inner.moments)
        self._parameters, self._gradient, self._decayed = parameters, gradient, decayed
        self._first, self._second = np.split(self.moments, 2)

    def step(self, rate: float) -> float:
        """Clip the gradient and take a step. Return the gradient's norm before clipping."""
        norm = clip_gradient(self._gradient, self.spec.gradient_clip)
        self.steps += 1
        beta1, beta2 = self.spec.beta1, self.spec.beta2
        scratch = self._gradient - self._first
        scratch *= np.float32(1 - beta1)
        self._first += scratch
        np.square(self._gradient, out=scratch)
        scratch *= np.float32(1 - beta2)
        self._second *= np.float32(beta2)
        self._second += scratch
        if self.spec.weight_decay:
            np.multiply(self._parameters, self._decayed, out=scratch)
            scratch *= np.float32(rate * self.spec.weight_decay)
            self._parameters -= scratch
        # Bias corrections are applied to the rate and the root instead of the moments, which saves two passes over the vector.
        np.sqrt(self._second, out=scratch)
        scratch /= np.float32(math.sqrt(1 - beta2**self.steps))
        scratch += np.float32(ADAMW_EPSILON)
        np.divide(self._first, scratch, out=scratch)
        scratch *= np.float32(rate / (1 - beta1**self.steps))
        self._parameters -= scratch
        return norm


def _without_subnormal_numbers(vector: Float32Array) -> Float32Array:
    """Return a copy in which numbers below 2^-126 are zero.

    A processor takes twenty times as long with such numbers, and a liar could choose an initial state of a replay that has them.
    """
    return np.where(np.abs(vector) < LEAST_NORMAL, np.float32(0), vector)
