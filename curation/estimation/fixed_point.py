"""Logarithms and powers of two in integers, so that every machine finds the same bits. No float is in it, not even in a table.

Both are read from tables of 4,096 steps and drawn straight between two of them: they are right to 2⁻²² or better.
"""

from __future__ import annotations

from math import isqrt
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ONE: Final = 1 << 20  # a chance of 1; a million tasks of them are 2⁴⁰, and times 16 options 2⁴⁴: far below 2⁶³
LOG_BITS: Final = 24  # of a logarithm, behind the point
LOG_ONE: Final = 1 << LOG_BITS
POWER_BITS: Final = 30  # of a power, behind the point: times ONE it is 2⁵⁰, and a sum of 16 of them 2⁵⁴
STEP_BITS: Final = 12  # a table has 2¹² steps
REST_BITS: Final = 28  # of a mantissa, behind those that choose the step
MANTISSA_BITS: Final = STEP_BITS + REST_BITS


def log2(numbers: Ints) -> Ints:
    """The binary logarithm of integers 1 ≤ n < 2⁶², in units of 2⁻²⁴."""
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
    """2 to the power of −n, n ≥ 0 in units of 2⁻²⁴; the result in units of 2⁻³⁰."""
    rest_bits = LOG_BITS - STEP_BITS
    whole, parts = np.minimum(falls >> LOG_BITS, POWER_BITS + 1), falls & (LOG_ONE - 1)
    steps, rests = parts >> rest_bits, parts & ((1 << rest_bits) - 1)
    between = POWERS[steps] - ((rests * (POWERS[steps] - POWERS[steps + 1])) >> rest_bits)
    return cast(Ints, between >> whole)


def normalize_scores(scores: Ints) -> Ints:
    """Rows of logarithms, in units of 2⁻²⁴, as rows of chances, in units of 1/ONE. A row's sum is ONE, or its length less."""
    weights = negative_power_of_two(scores.max(axis=1, keepdims=True) - scores)
    return cast(Ints, weights * ONE // weights.sum(axis=1, keepdims=True))


def _logs() -> Ints:
    """log₂(1 + i ∕ 4096), bit by bit: the number is squared, and the bit says whether the square is above 2."""
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
    """2 to the power of −i ∕ 4096: the product of square roots, of square roots, … of a half."""
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
