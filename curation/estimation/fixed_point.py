"""Logarithms and powers of two in integers, so that every machine computes the same bits. Even the tables are computed without
floats. `log2` and `negative_power_of_two` interpolate linearly in tables of 4,096 steps, with an error of at most 2⁻²².
"""

from __future__ import annotations

from math import isqrt
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ONE: Final = 1 << 20  # a probability of 1: sums over a million tasks reach 2⁴⁰, and over their 16 options 2⁴⁴, far below 2⁶³
LOG_BITS: Final = 24  # fractional bits of a logarithm
LOG_ONE: Final = 1 << LOG_BITS
POWER_BITS: Final = 30  # fractional bits of a power: a product with ONE has 2⁵⁰, and a sum of 16 products 2⁵⁴, far below 2⁶³
STEP_BITS: Final = 12  # bits of an index into a table: it has 2¹² steps
REST_BITS: Final = 28  # lower bits of a mantissa, which interpolate between two steps
MANTISSA_BITS: Final = STEP_BITS + REST_BITS


def log2(numbers: Ints) -> Ints:
    """Return the binary logarithms of integers 1 ≤ n < 2⁶², in units of 2⁻²⁴."""
    exponents, left = np.zeros_like(numbers), numbers.copy()
    for bits in (32, 16, 8, 4, 2, 1):
        high = left >> bits
        larger = high > 0
        exponents += bits * larger
        left = np.where(larger, high, left)
    up = np.maximum(MANTISSA_BITS - exponents, 0)
    mantissas = ((numbers << up) >> np.maximum(exponents - MANTISSA_BITS, 0)) - (1 << MANTISSA_BITS)
    steps, rests = mantissas >> REST_BITS, mantissas & ((1 << REST_BITS) - 1)
    return cast(Ints, (exponents << LOG_BITS) + LOGS[steps] + ((rests * (LOGS[steps + 1] - LOGS[steps])) >> REST_BITS))


def negative_power_of_two(falls: Ints) -> Ints:
    """Return 2 to the power of −n in units of 2⁻³⁰, for n ≥ 0 in units of 2⁻²⁴."""
    rest_bits = LOG_BITS - STEP_BITS
    whole, parts = np.minimum(falls >> LOG_BITS, POWER_BITS + 1), falls & (LOG_ONE - 1)
    steps, rests = parts >> rest_bits, parts & ((1 << rest_bits) - 1)
    between = POWERS[steps] - ((rests * (POWERS[steps] - POWERS[steps + 1])) >> rest_bits)
    return cast(Ints, between >> whole)


def normalize_scores(scores: Ints) -> Ints:
    """Return rows of probabilities in units of 1/ONE, from logarithms in units of 2⁻²⁴.

    Each row sums up to ONE, less a rounding error below one unit per column.
    """
    weights = negative_power_of_two(scores.max(axis=1, keepdims=True) - scores)
    return cast(Ints, weights * ONE // weights.sum(axis=1, keepdims=True))


def _logs() -> Ints:
    """Return the table of log₂(1 + i ∕ 4096).

    It is computed bit by bit: the number is squared, and the bit is 1 if the square is at least 2.
    """
    bits = 30
    numbers = (1 << bits) + (np.arange(1 << STEP_BITS, dtype=np.int64) << (bits - STEP_BITS))
    found = np.zeros_like(numbers)
    for _ in range(LOG_BITS):
        squares = (numbers * numbers) >> bits
        above = squares >> (bits + 1)
        found = (found << 1) | above
        numbers = squares >> above
    return np.append(found, np.int64(LOG_ONE))


def _powers() -> Ints:
    """Return the table of 2 to the power of −i ∕ 4096 in units of 2⁻³⁰.

    It is computed as products of repeated square roots of a half.
    """
    bits = 60
    roots = [1 << (bits - 1)]
    for _ in range(STEP_BITS):
        roots.append(isqrt(roots[-1] << bits))
    found = [1 << bits]
    for step in range(1, 1 << STEP_BITS):
        lowest = step & -step
        found.append(found[step - lowest] * roots[STEP_BITS + 1 - lowest.bit_length()] >> bits)
    found.append(1 << (bits - 1))
    return np.array([number >> (bits - POWER_BITS) for number in found], dtype=np.int64)


LOGS: Final = _logs()
POWERS: Final = _powers()
