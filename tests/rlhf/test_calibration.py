from __future__ import annotations

import numpy as np
import pytest

from rlhf.pytorch.supervised_objectives import BINS, calibration_error


def error(chances: list[float], p: list[float]) -> float:
    return calibration_error(np.array(chances), np.array(p))


@pytest.mark.parametrize(
    ("chances", "p", "expected"),
    [
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], [1.0] * 9 + [0.0], 0.0),  # nine in ten, and it says so
        ([0.95, 0.95], [1.0, 0.0], 0.45),  # surer than right
        ([0.55], [1.0], 0.45),  # less sure than right
        ([0.5, 0.5], [1.0, 1.0], 0.0),  # it says nothing, and the order of the responses says nothing either
        ([0.7], [0.7], 0.0),  # people are not sure either
        ([0.95, 0.65], [1.0, 0.0], (0.05 + 0.65) / 2),  # bins of their own
        ([1.0, 0.0], [1.0, 0.0], 0.0),
    ],
)
def test_the_error_is_how_far_what_is_said_is_from_what_is_right(chances: list[float], p: list[float], expected: float) -> None:
    assert error(chances, p) == pytest.approx(expected)


def test_the_order_of_responses_changes_nothing() -> None:
    draw = np.random.default_rng(0)
    chances, p, turned = draw.random(100), draw.random(100), draw.random(100) < 0.5
    swapped = calibration_error(np.where(turned, 1 - chances, chances), np.where(turned, 1 - p, p))
    assert calibration_error(chances, p) == pytest.approx(swapped)


def test_bins_are_the_usual_ones_where_both_orders_are_written_out() -> None:
    """By the definition: the weighted mean of the gaps of ten bins."""
    draw = np.random.default_rng(1)
    chances, p = draw.random(200), draw.random(200)
    said, right = np.concatenate([chances, 1 - chances]), np.concatenate([p, 1 - p])
    expected = 0.0
    for number in range(BINS):
        inside = (said >= number / BINS) & (said < (number + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(said[inside].mean() - right[inside].mean())
    assert calibration_error(chances, p) == pytest.approx(expected)
