"""Logarithms and powers in integers, against those of the library, which has floats."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from curation.estimation.fixed_point import LOG_ONE, ONE, log2, negative_power_of_two, normalize_scores

WITHIN = 2**-20
BITS = ([26591258, 334396230, 1023410176], [1073741780, 852229465, 33554325])


@given(st.lists(st.integers(1, 2**62 - 1), min_size=1, max_size=20))
def test_logarithms(numbers: list[int]) -> None:
    found = log2(np.array(numbers, dtype=np.int64))
    assert all(abs(value / LOG_ONE - math.log2(number)) < WITHIN for value, number in zip(found, numbers, strict=True))


def test_powers_of_two_have_whole_logarithms() -> None:
    assert (log2(1 << np.arange(62, dtype=np.int64)) == LOG_ONE * np.arange(62)).all()


@given(st.lists(st.integers(0, 80 * LOG_ONE), min_size=1, max_size=20))
def test_powers(falls: list[int]) -> None:
    found = negative_power_of_two(np.array(falls, dtype=np.int64))
    assert all(abs(value / 2**30 - 2 ** (-fall / LOG_ONE)) < WITHIN for value, fall in zip(found, falls, strict=True))


def test_logarithms_ascend_and_powers_descend() -> None:
    assert (np.diff(log2(np.arange(1, 200_000, dtype=np.int64))) >= 0).all()
    assert (np.diff(negative_power_of_two(np.arange(0, 40 * LOG_ONE, 997, dtype=np.int64))) <= 0).all()


def test_chances_are_those_of_the_weights() -> None:
    found = normalize_scores(log2(np.array([[1, 3, 12], [5, 5, 5]], dtype=np.int64)))
    assert abs(found[0] - np.array([ONE // 16, 3 * ONE // 16, 12 * ONE // 16])).max() <= 4
    assert found[1].tolist() == [ONE // 3] * 3


def test_the_bits_are_these() -> None:
    """Whatever machine and version of numpy: another number here is another state root."""
    assert log2(np.array([3, 10**6, 2**61 + 12345], dtype=np.int64)).tolist() == BITS[0]
    assert negative_power_of_two(np.array([1, LOG_ONE // 3, 5 * LOG_ONE + 77], dtype=np.int64)).tolist() == BITS[1]
