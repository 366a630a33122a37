from __future__ import annotations

import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from tests.training.replicated.support import RAGGED, aggregate_updates, buffer, header, update
from training.job_spec import AggregationRule
from training.replicated import codec, error_feedback


def test_an_estimate_is_the_canonical_payload_of_the_sum() -> None:
    held, more = (update(buffer(RAGGED, number), RAGGED) for number in range(2))
    begun = error_feedback.update_estimate(None, held)
    after = error_feedback.update_estimate(begun, more)
    total = begun.dequantize() + more.dequantize()
    assert after.encode() == codec.encode_payload(header(0, error_feedback.ESTIMATE_BITS), total, RAGGED)
    assert codec.read_payload(after.encode(), RAGGED).encode() == after.encode()


@pytest.mark.parametrize(("bits", "least"), [(1, 0.15), (error_feedback.ESTIMATE_BITS, 0.01)])
def test_an_estimate_comes_near_what_is_meant_though_each_payload_says_little(bits: int, least: float) -> None:
    """At one bit the estimate stops once the mean error is less than half of its level."""
    meant, estimate = buffer(RAGGED, "meant"), None
    for _ in range(60):
        estimate = error_feedback.update_estimate(
            estimate, update(error_feedback.residual_of(meant, estimate and estimate.dequantize()), RAGGED, 0, bits)
        )
    assert np.linalg.norm(meant - estimate.dequantize()) < least * np.linalg.norm(meant)


def test_the_next_payload_says_what_eight_bits_could_not_hold() -> None:
    """Otherwise rounding would add up: the trainer sees the estimate as the voters hold it."""
    meant = buffer(RAGGED, "meant")
    estimate = error_feedback.update_estimate(None, update(meant, RAGGED, 0, error_feedback.ESTIMATE_BITS))
    assert np.array_equal(error_feedback.residual_of(meant, estimate.dequantize()), meant - estimate.dequantize())


def test_estimates_are_aggregated_as_updates_are() -> None:
    held = [error_feedback.update_estimate(None, update(buffer(RAGGED, number), RAGGED, number)) for number in range(5)]
    together = aggregate_updates(held, RAGGED, AggregationRule.ARC_NNM_TRIM, 1)
    assert np.array_equal(together, aggregate_updates(held[::-1], RAGGED, AggregationRule.ARC_NNM_TRIM, 1))
    middle = np.median([one.dequantize() for one in held], axis=0)
    assert np.linalg.norm(together - middle) < np.linalg.norm(middle)


def test_a_sum_that_is_too_large_is_no_estimate() -> None:
    large = update(np.full(RAGGED.size, 2.0**38.5, dtype=np.float32), RAGGED, 0, error_feedback.ESTIMATE_BITS)
    with pytest.raises(LocalProtocolError):
        error_feedback.update_estimate(error_feedback.update_estimate(None, large), large)
