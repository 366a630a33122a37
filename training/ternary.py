"""Ternary weights of a matrix: one scale, and the elements −1, 0 and 1 (BitNet b1.58, Ma et al. 2024, arXiv:2402.17764).

A matrix W of float32 numbers, its latent weights, has the scale γ = mean|W| + 1e-5 and the levels clip(round(W / γ), −1, 1). A
model computes with the ternary weights: γ times the levels. Their gradients count as those of the latent weights.

The mean is computed exactly: all |W| are rounded to multiples of one power of two and added as whole numbers. So scale and levels
have the same bits on every machine, in every order of summation, and in every library.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.tensor_layout import Float32Array

Int8Array = npt.NDArray[np.int8]

SCALE_MIN: Final = 1e-5  # term added to the mean, so that a matrix of zeros has a scale
FLOAT32_BITS: Final = 24  # bits of the whole number in a float32
FLOAT64_BITS: Final = 53  # Whole numbers of at most this many bits have exact sums in float64.
MANTISSA_BITS: Final = 23  # stored bits of a float32 below its exponent
EXPONENT_BIAS: Final = 127  # stored exponent of the float32 1.0
# Stored exponent from which the largest |W| counts. A mean below 2^-60 does not change the scale.
EXPONENT_MIN: Final = EXPONENT_BIAS - 60


def exponents_sum(size: int) -> int:
    """Return the sum of the stored exponents of the largest |W| and of the factor, for a matrix of `size` elements.

    The factor is a power of two by which all |W| are multiplied before they are rounded and added. The largest whole number then
    has as many bits as a float32 has, or fewer if `size` such numbers have a sum of more bits than a float64 has.
    """
    bits = min(FLOAT32_BITS, FLOAT64_BITS - size.bit_length())
    return 2 * EXPONENT_BIAS + bits - 1


def _summation_factor(largest: np.float32, size: int) -> np.float32:
    """Return the factor of `exponents_sum` for a matrix of `size` elements whose largest |W| is `largest`."""
    exponent = max(int(largest.view(np.uint32)) >> MANTISSA_BITS, EXPONENT_MIN)
    return np.uint32((exponents_sum(size) - exponent) << MANTISSA_BITS).view(np.float32)


def ternary_scale(latent: Float32Array) -> np.float32:
    """Return γ of a matrix, bit for bit as engines compute it; NaN or infinity if the matrix has a number that is not finite."""
    sizes = np.abs(latent)
    with np.errstate(invalid="ignore", over="ignore"):
        factor = _summation_factor(sizes.max(), latent.size)
        total = float(np.rint(sizes * factor).sum(dtype=np.float64))
        return np.float32(total / latent.size / float(factor) + SCALE_MIN)


def ternary_levels(latent: Float32Array, scale: np.float32) -> Int8Array:
    """Return clip(round(W / γ), −1, 1), which is 0 up to exactly γ / 2, since halves are rounded to even numbers."""
    half = scale / np.float32(2)
    return (latent > half).astype(np.int8) - (latent < -half).astype(np.int8)


def ternary_weights(latent: Float32Array) -> Float32Array:
    """Return the weights with which a model computes, in the shape of the matrix. A zero is never negative."""
    scale = ternary_scale(latent)
    return ternary_levels(latent, scale).astype(np.float32) * scale


def latent_weights(scale: np.float32, levels: Int8Array) -> Float32Array | None:
    """Return latent weights with exactly this scale and these levels; None if no matrix has both.

    All weights of a level other than 0 have nearly the same size, (γ − 1e-5) / their share of the matrix, and weights of level 0
    are zero. So the mean is γ − 1e-5. Two neighbouring float32 sizes are mixed, so that it is exact.
    """
    sizes = np.abs(levels).ravel()
    count = int(sizes.sum())
    if not count:
        # A matrix of zeros computes the same with every finite scale.
        return np.zeros(levels.shape, dtype=np.float32) if np.isfinite(scale) else None
    mean = float(scale) - SCALE_MIN
    size = mean * levels.size / count
    if not 0 < size <= float(np.finfo(np.float32).max):
        return None
    factor = float(_summation_factor(np.float32(size), levels.size))
    total = round(mean * factor * levels.size)
    least, larger = divmod(total, count)
    whole = np.where(np.cumsum(sizes, dtype=np.int64) <= larger, least + 1, least)
    found = (levels.ravel() * whole).astype(np.float32) * np.float32(1 / factor)
    latent: Float32Array = found.reshape(levels.shape)
    fits = ternary_scale(latent) == scale and np.array_equal(ternary_levels(latent, scale), levels)
    return latent if fits else None


def split_ternary(weights: Float32Array) -> tuple[np.float32, Int8Array] | None:
    """Return scale and levels of ternary weights; None if the elements have more than one size beside zero."""
    scale = np.abs(weights).max()
    levels = np.sign(weights).astype(np.int8)
    is_ternary = bool(scale < np.inf) and np.array_equal(levels.astype(np.float32) * scale, weights)
    return (scale, levels) if is_ternary else None
