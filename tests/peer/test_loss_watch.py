"""A jump of the own loss is told from chance, and from a job that learns nothing."""

from __future__ import annotations

import random

import pytest

from peer.driver.loss_watch import JOBS_MAX, JUMP_FACTOR, KNOWN_MIN, LOOKBACK_ROUNDS, LossWatch, has_jumped

JOB = bytes(32)


@pytest.mark.parametrize(
    ("losses", "jumped"),
    [
        ([], False),
        ([2.0], False),
        ([2.0] * (KNOWN_MIN - 1) + [9.0], False),
        ([2.0] * KNOWN_MIN + [2.1], False),
        ([2.0] * KNOWN_MIN + [2.3], True),
        ([5.0, 4.0, 3.0, 2.0, 3.0], False),  # it falls, and rises to what it was lately
        ([1.5] * 9 + [1.6, 1.7], True),  # in two steps
        ([1.5] * 9 + [9.0] * LOOKBACK_ROUNDS, False),  # it has been so high for long
        ([1.5] * 9 + [1e300], True),
    ],
)
def test_a_jump_is_far_above_the_rounds_before(losses: list[float], jumped: bool) -> None:
    assert has_jumped(dict(enumerate(losses)), len(losses) - 1) is jumped
    watch = LossWatch()
    for number, loss in enumerate(losses):
        watch.note(JOB, number, loss)
    assert watch.jumped(JOB, 0) == (len(losses) - 1 if jumped else None)


def test_honest_losses_of_a_thousand_rounds_never_jump() -> None:
    chance, watch = random.Random(0), LossWatch()
    for number in range(1_000):
        watch.note(JOB, number, (1.5 + 2 / (number + 1)) * chance.gauss(1, 0.02))
        assert watch.jumped(JOB, 0) is None, number


def test_losses_of_undone_rounds_do_not_count() -> None:
    watch = LossWatch()
    for number, loss in enumerate([1.5] * 9 + [1.8]):
        watch.note(JOB, number, loss)
    assert watch.jumped(JOB, 0) == 9 and watch.jumped(JOB, 5) == 9
    assert watch.jumped(JOB, 10 - KNOWN_MIN) is None and watch.jumped(JOB, 10) is None


def test_the_last_losses_of_the_last_jobs_are_kept() -> None:
    watch = LossWatch()
    for number in range(100):
        watch.note(JOB, number, JUMP_FACTOR**number)
    assert len(watch._jobs[JOB]) == LOOKBACK_ROUNDS + 1
    for job in range(1, JOBS_MAX + 1):
        watch.note(bytes([job]) * 32, 0, 1.0)
    assert JOB not in watch._jobs and len(watch._jobs) == JOBS_MAX
