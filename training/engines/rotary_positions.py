"""Rotary positions (Su et al. 2021, section 3.2.2) in numpy."""

from __future__ import annotations

import numpy as np

from training.replicated.tensor_layout import Float32Array
from training.transformer import ModelSpec


def rotary_tables(spec: ModelSpec) -> tuple[Float32Array, Float32Array]:
    """Return cosines and signed sines of shape (T, D) for the whole context.

    A vector x of features D at position t becomes x · cos[t] + roll(x, D/2) · sin[t].
    """
    half = spec.width // spec.heads // 2
    frequency_D = spec.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    angle_TD = np.arange(spec.context, dtype=np.float64)[:, None] * frequency_D
    cos_TD, sin_TD = np.cos(angle_TD), np.sin(angle_TD)
    cosines, sines = np.concatenate((cos_TD, cos_TD), axis=1), np.concatenate((-sin_TD, sin_TD), axis=1)
    return cosines.astype(np.float32), sines.astype(np.float32)
