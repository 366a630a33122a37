from __future__ import annotations

import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from tests.training.replicated.support import RAGGED, buffer, header, update
from training.replicated import aggregate, codec, estimates
from training.replicated.layout import CHUNK
from training.spec import Compression, Rule

MODES = (codec.Mode(Compression.DENSE, 1, CHUNK), codec.Mode(Compression.SPARSE, 1, 256), estimates.MODE)


def test_an_estimate_is_the_canonical_payload_of_the_sum() -> None:
    held, more = (update(buffer(RAGGED, number), RAGGED, 0, MODES[0]) for number in range(2))
    begun = estimates.moved(None, held)
    after = estimates.moved(begun, more)
    total = begun.dense() + more.dense()
    assert after.encode() == codec.encode(header(0, estimates.MODE), total, RAGGED)
    assert codec.read(after.encode(), RAGGED).encode() == after.encode()


@pytest.mark.parametrize(("mode", "least"), [*zip(MODES, (0.15, 0.01, 0.01), strict=True)], ids=str)
def test_an_estimate_comes_near_what_is_meant_though_each_payload_says_little(mode: codec.Mode, least: float) -> None:
    """At one bit it stands still once the mean of what is missing is less than half of an estimate's level."""
    meant, estimate = buffer(RAGGED, "meant"), None
    for _ in range(60):
        estimate = estimates.moved(estimate, update(estimates.said(meant, estimate), RAGGED, 0, mode))
    assert np.linalg.norm(meant - estimate.dense()) < least * np.linalg.norm(meant)


def test_the_next_payload_says_what_eight_bits_could_not_hold() -> None:
    """Otherwise rounding would add up: the trainer sees the estimate as the voters hold it."""
    meant = buffer(RAGGED, "meant")
    estimate = estimates.moved(None, update(meant, RAGGED, 0, estimates.MODE))
    assert np.array_equal(estimates.said(meant, estimate), meant - estimate.dense())


def test_estimates_are_aggregated_as_updates_are() -> None:
    held = [estimates.moved(None, update(buffer(RAGGED, number), RAGGED, number)) for number in range(5)]
    together = aggregate.aggregate(held, RAGGED, Rule.ARC_NNM_TRIM, 1)
    assert np.array_equal(together, aggregate.aggregate(held[::-1], RAGGED, Rule.ARC_NNM_TRIM, 1))
    middle = np.median([one.dense() for one in held], axis=0)
    assert np.linalg.norm(together - middle) < np.linalg.norm(middle)


def test_a_sum_that_is_too_large_is_no_estimate() -> None:
    large = update(np.full(RAGGED.size, 2.0**38.5, dtype=np.float32), RAGGED, 0, estimates.MODE)
    with pytest.raises(LocalProtocolError):
        estimates.moved(estimates.moved(None, large), large)
