"""A jump of the own loss is told from chance, and from a job that learns nothing."""

from __future__ import annotations

import random

import pytest

from peer.driver.loss_watch import JOBS_MAX, KNOWN_MIN, LOOKBACK_ROUNDS, LossWatch, first_jump, suspicion

JOB = bytes(32)


@pytest.mark.parametrize(
    ("losses", "first"),
    [
        ([], None),
        ([2.0], None),
        ([2.0] * (KNOWN_MIN - 1) + [9.0], None),
        ([2.0] * KNOWN_MIN + [2.1], None),
        ([2.0] * KNOWN_MIN + [2.3], KNOWN_MIN),
        ([5.0, 4.0, 3.0, 2.0, 5.0], None),  # it falls, and rises to what it was lately
        ([5.0, 4.0, 3.0, 2.0, 1.9, 1.8, 1.8, 1.7, 9.0], 8),  # what it fell by at first hides nothing
        ([1.6, 1.4] * 4 + [1.8], None),  # it differs as much between rounds
        ([1.6, 1.4] * 4 + [2.4], 8),
        ([1.5] * 9 + [1.6, 1.7], 10),  # in two steps
        ([1.5] * 9 + [2.0, 9.0, 3.0], 9),
        ([1.5] * 9 + [9.0, 1.5], None),  # it is over
        ([1.5] * 9 + [9.0] * LOOKBACK_ROUNDS, None),  # it has been so high for long
        ([1.5] * 9 + [1e300], 9),
    ],
)
def test_a_jump_is_far_above_the_rounds_before(losses: list[float], first: int | None) -> None:
    watch = LossWatch()
    for number, loss in enumerate(losses):
        watch.note(JOB, number, loss)
    assert first_jump(watch.losses(JOB, 0)) == first


@pytest.mark.parametrize("deviation", [0.03, 0.07])
def test_honest_losses_hardly_ever_jump(deviation: float) -> None:
    chance, watch, jumps = random.Random(0), LossWatch(), 0
    for number in range(3_000):
        watch.note(JOB, number, (1.5 + 2 / (number + 1)) * chance.gauss(1, deviation))
        jumps += first_jump(watch.losses(JOB, 0)) is not None
    assert jumps <= 3_000 / 50


def test_losses_of_undone_rounds_do_not_count() -> None:
    watch = LossWatch()
    for number, loss in enumerate([1.5] * 9 + [1.8]):
        watch.note(JOB, number, loss)
    assert first_jump(watch.losses(JOB, 0)) == first_jump(watch.losses(JOB, 5)) == 9
    assert first_jump(watch.losses(JOB, 10 - KNOWN_MIN)) is first_jump(watch.losses(JOB, 10)) is None


def test_the_last_losses_of_the_last_jobs_are_kept() -> None:
    watch = LossWatch()
    for number in range(100):
        watch.note(JOB, number, 1.0)
    assert [*watch.losses(JOB, 0)] == [*range(100 - 2 * LOOKBACK_ROUNDS, 100)]
    for job in range(1, JOBS_MAX + 1):
        watch.note(bytes([job]) * 32, 0, 1.0)
    assert not watch.losses(JOB, 0) and watch.losses(bytes([JOBS_MAX]) * 32, 0)


def test_the_round_before_the_jump_is_suspected_first_and_its_trainers_by_each_peer_in_another_order() -> None:
    trainers = [bytes([number]) * 32 for number in range(6)]
    places = [(number, trainer) for number in range(20) for trainer in trainers]
    orders = set[tuple[bytes, ...]]()
    for peer in range(6):
        for jump in (8, 12):
            by_suspicion = sorted(places, key=lambda place: suspicion(bytes([peer]) * 32, jump, *place))
            assert {number for number, _ in by_suspicion[:6]} == {jump - 1}
            assert {number for number, _ in by_suspicion[6:18]} == {jump - 2, jump}
            orders.add(tuple(trainer for _, trainer in by_suspicion[:6]))
    assert len(orders) == 12
