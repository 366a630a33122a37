"""A jump of the own loss is told from chance, and from a job that learns nothing."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable

import pytest

from ledger.jobs import RUNNING_MAX
from peer.runtime.audit_scheduler import (
    CHANCE_MAX,
    KNOWN_MIN,
    LOOKBACK_ROUNDS,
    first_spike,
    most_suspect_round,
)
from peer.runtime.round_executor import LOSS_ROUNDS_KEPT, LossHistory

JOB = bytes(32)


def watched(losses: Iterable[float]) -> LossHistory:
    watch = LossHistory()
    for number, loss in enumerate(losses):
        watch.record_loss(JOB, number, loss)
    return watch


@pytest.mark.parametrize(
    ("losses", "first"),
    [
        ([], None),
        ([2.0], None),
        ([2.0] * (KNOWN_MIN - 1) + [9.0], None),
        ([2.0] * KNOWN_MIN + [2.1], None),
        ([2.0] * KNOWN_MIN + [2.3], KNOWN_MIN),
        ([5.0, 4.0, 3.0, 2.0, 4.5], None),  # it falls, and rises to what it was lately
        ([5.0, 4.0, 3.0, 2.0, 1.9, 1.8, 1.8, 1.7, 9.0], 8),  # what it fell by at first hides nothing
        ([1.6, 1.4] * 4 + [1.8], None),  # it differs as much between rounds
        ([1.6, 1.4] * 4 + [2.4], 8),
        ([1.0, 2.0] * 4 + [1.0, 2.1], 9),  # liars make it differ
        ([1.5] * 9 + [1.6, 1.7], 10),  # in two steps
        ([1.5] * 9 + [2.0, 9.0, 3.0], 9),
        ([1.5] * 9 + [9.0, 1.5], None),  # it is over
        ([1.5] * 9 + [9.0] * LOOKBACK_ROUNDS, None),  # it has been so high for long
        ([1.5] * 9 + [math.inf], 9),
        ([1.5] * 9 + [math.inf] * 3, 9),
    ],
)
def test_a_jump_is_far_above_the_rounds_before(losses: list[float], first: int | None) -> None:
    assert first_spike(watched(losses).losses(JOB, ()), len(losses)) == first


def test_a_loss_that_is_a_third_above_the_usual_one_has_jumped_whatever_came_before() -> None:
    chance = random.Random(0)
    for _ in range(100):
        before = [chance.uniform(1, 9) for _ in range(LOOKBACK_ROUNDS)]
        jumped = 1.001 * (1 + CHANCE_MAX) * statistics.median(before)
        assert first_spike(watched([*before, jumped]).losses(JOB, ()), 9) is not None


@pytest.mark.parametrize("deviation", [0.03, 0.07])
def test_honest_losses_hardly_ever_jump(deviation: float) -> None:
    chance, watch, jumps = random.Random(0), LossHistory(), 0
    for number in range(3_000):
        watch.record_loss(JOB, number, (1.5 + 2 / (number + 1)) * chance.gauss(1, deviation))
        jumps += first_spike(watch.losses(JOB, ()), number + 1) is not None
    assert jumps <= 3_000 / 50


def test_a_jump_of_long_ago_says_nothing() -> None:
    losses = watched([1.5] * 9 + [1.8]).losses(JOB, ())
    assert [first_spike(losses, opened) for opened in (9, 10, 11)] == [9, 9, None]


def test_the_round_before_a_jump_is_most_suspect_and_then_its_neighbours() -> None:
    left, order = {3, 4, 5, 6, 7}, list[int]()
    while left:
        order.append(most_suspect_round(left, 6))
        left.remove(order[-1])
    assert order == [5, 4, 6, 3, 7]


def test_losses_of_undone_rounds_do_not_count_and_those_before_them_do() -> None:
    """A lie right after a rollback is seen as any other."""
    watch = watched([1.5] * 9 + [1.8] * 3 + [1.8])
    assert first_spike(watch.losses(JOB, [(9, 11)]), 13) == 12
    assert first_spike(watch.losses(JOB, [(9, 12)]), 13) is None
    assert first_spike(watch.losses(JOB, [(2, 5), (6, 11)]), 13) is None, "two rounds are known"


def test_the_last_losses_of_the_last_jobs_are_kept() -> None:
    watch = watched([1.0] * 100)
    assert [*watch.losses(JOB, ())] == [*range(100 - LOSS_ROUNDS_KEPT, 100)]
    for job in range(1, RUNNING_MAX + 1):
        watch.record_loss(bytes([job]) * 32, 0, 1.0)
    assert not watch.losses(JOB, ()) and watch.losses(bytes([RUNNING_MAX]) * 32, ())
