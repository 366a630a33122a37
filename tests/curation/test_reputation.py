"""What an annotator's answers are worth, and who gets which points."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.estimation.dawid_skene import DawidSkene, run_dawid_skene
from curation.estimation.fixed_point import ONE
from curation.estimation.reputation import (
    WEIGHT_ONE,
    Z2_ABOVE,
    Z2_BELOW,
    annotator_weight,
    certainty_of,
    divide_points,
    final_confusions,
    lower_bound,
)
from tests.curation.test_labels import crowd

Z2 = Z2_ABOVE / Z2_BELOW


@given(st.integers(0, 2_000), st.integers(1, 2_000))
def test_wilsons_lower_bound(right: int, more: int) -> None:
    seen = right + more
    share = right / seen
    bound = (share + Z2 / (2 * seen) - sqrt(Z2) * sqrt(share * (1 - share) / seen + Z2 / (4 * seen**2))) / (1 + Z2 / seen)
    assert abs(lower_bound(right * ONE, seen * ONE) / WEIGHT_ONE - bound) < 1e-5
    assert 0 <= lower_bound(right * ONE, seen * ONE) <= WEIGHT_ONE * share


def test_who_was_never_seen_has_no_bound() -> None:
    assert lower_bound(0, 0) == 0 and lower_bound(0, 5 * ONE) == 0


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 500))
def test_more_right_answers_never_lower_it(right: int, wrong: int, more: int) -> None:
    assert lower_bound((right + more) * ONE, (right + wrong + more) * ONE) >= lower_bound(right * ONE, (right + wrong) * ONE)


def test_chance_weighs_nothing() -> None:
    always_first = [(100 * ONE, 100 * ONE), (100 * ONE, 0)]
    a_coin = [(100 * ONE, 50 * ONE)] * 2
    contrary = [(100 * ONE, 0)] * 2
    assert (
        annotator_weight([always_first])
        == annotator_weight([a_coin])
        == annotator_weight([contrary])
        == annotator_weight([])
        == 0
    )
    good = annotator_weight([[(100 * ONE, 90 * ONE)] * 2])
    assert good == (2 * lower_bound(90 * ONE, 100 * ONE) - WEIGHT_ONE) // 2 > 0
    assert annotator_weight([[(100 * ONE, 90 * ONE)] * 2, a_coin]) < good, "of each of many options"


def test_a_task_counts_as_the_others_are_sure() -> None:
    assert certainty_of(np.array([[ONE, 0], [ONE // 2, ONE // 2]])).tolist() == [ONE, 0]
    assert certainty_of(np.array([[3 * ONE // 4, ONE // 4]])).tolist() == [ONE // 4]
    assert certainty_of(np.array([[ONE // 3] * 3])).tolist() == [0]


def weights(votes: np.ndarray, blind: np.ndarray, annotators: int, classes: int = 2) -> list[int]:  # type: ignore[type-arg]
    whole = run_dawid_skene(classes, int(votes[:, 0].max()) + 1, annotators, votes)
    assert (whole.votes == votes).all(), "in order of tasks already"
    return [annotator_weight([[(int(seen), int(good)) for seen, good in rows]]) for rows in final_confusions(whole, blind)]


@pytest.mark.parametrize("classes", [2, 4])
def test_the_better_weighs_more(classes: int) -> None:
    votes, _ = crowd(classes, 1_200, [0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 1 / classes], 5)
    votes = votes[np.lexsort((votes[:, 1], votes[:, 0]))]
    found = weights(votes, np.ones(len(votes), dtype=np.int64), 7, classes)
    assert found == sorted(found, reverse=True) and found[-1] == 0 < found[-2]


def test_only_what_was_committed_blind_counts() -> None:
    votes, _ = crowd(2, 200, [0.9] * 6, 4)
    votes = votes[np.lexsort((votes[:, 1], votes[:, 0]))]
    found = weights(votes, (votes[:, 1] != 3).astype(np.int64), 6)
    assert found[3] == 0 and min(found[:3] + found[4:]) > 0


def test_ones_own_vote_does_not_speak_for_oneself() -> None:
    """Nobody else answered these tasks: what the annotator said of them changes nothing, though one class is the commoner one."""
    votes = np.array([(task, 0, int(task % 5 > 0)) for task in range(50)], dtype=np.int64)
    whole = run_dawid_skene(2, 50, 1, votes)
    assert final_confusions(whole, np.ones(50, dtype=np.int64)).sum() == 0
    assert final_confusions(DawidSkene(2, 1, 1, np.zeros((0, 3), dtype=np.int64)), np.zeros(0, dtype=np.int64)).shape == (1, 2, 2)


# Points ---------------------------------------------------------------------------------------------------------------

shares = st.dictionaries(st.binary(min_size=1, max_size=4), st.integers(0, 1 << 40), min_size=1, max_size=20)


@given(st.integers(0, 10**12), shares)
def test_none_is_lost_or_made(points: int, of: dict[bytes, int]) -> None:
    found = divide_points(points, of)
    total = sum(of.values())
    assert found.keys() == of.keys() and sum(found.values()) == (points if total else 0)
    for key, share in of.items():
        assert not total or abs(found[key] - points * share / total) < 1 + points / 2**50
        assert share or not found[key]


@given(st.integers(0, 10**6), shares, st.randoms(use_true_random=False))
def test_no_order_changes_anything(points: int, of: dict[bytes, int], draw: object) -> None:
    other = dict(draw.sample(list(of.items()), len(of)))  # type: ignore[attr-defined]
    assert divide_points(points, other) == divide_points(points, of)


def test_the_largest_remainders_get_what_is_left_and_of_equal_ones_the_lowest_keys() -> None:
    assert divide_points(10, {b"c": 1, b"b": 1, b"a": 1}) == {b"a": 4, b"b": 3, b"c": 3}
    assert divide_points(2, {b"a": 10, b"b": 45, b"c": 45}) == {b"a": 0, b"b": 1, b"c": 1}
    assert divide_points(7, {b"a": 0, b"b": 0}) == {b"a": 0, b"b": 0}, "nobody's answers are worth anything"
