"""Weights of annotators; Krippendorff's α and Cohen's κ on published examples; ranked pairs and Bradley–Terry."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.estimation.annotator_agreement import (
    MeasurementLevel,
    agreement_units,
    alpha_from_coincidences,
    cohen_kappa,
    count_coincidences,
    measurement_level,
    pairwise_kappas,
)
from curation.estimation.dawid_skene import DawidSkene
from curation.estimation.fixed_point import ONE
from curation.estimation.rank_aggregation import (
    FIRST,
    SECOND,
    STRENGTH_ONE,
    TIE,
    bradley_terry,
    order_confidence,
    preference_margin,
    ranked_pairs_order,
)
from curation.estimation.reputation import (
    WEIGHT_ONE,
    Z2_ABOVE,
    Z2_BELOW,
    annotator_weight,
    certainty_of,
    divide_points,
    lower_bound,
)
from curation.tasks.answers import QuestionKind
from tests.curation.test_labels import crowd
from tests.curation.whole_estimates import final_confusions, run_dawid_skene

Z2 = Z2_ABOVE / Z2_BELOW


def krippendorff_alpha(units: list[list[int]], metric: MeasurementLevel = MeasurementLevel.NOMINAL) -> Fraction | None:
    return alpha_from_coincidences(count_coincidences(units), metric)


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
    """Nobody else answered these tasks, so the annotator's answers change nothing, though one class is more frequent."""
    assert (
        final_confusions(
            run_dawid_skene(2, 50, 1, np.array([(task, 0, int(task % 5 > 0)) for task in range(50)], dtype=np.int64)),
            np.ones(50, dtype=np.int64),
        ).sum()
        == 0
    )
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


# From Krippendorff (2011), section D: four observers, twelve units; 0 is missing.
OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3),
    (0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0),
)
UNITS = [[value for value in unit if value] for unit in zip(*OBSERVERS, strict=True)]


@pytest.mark.parametrize(("metric", "value"), [("nominal", 0.7434), ("ordinal", 0.8154), ("interval", 0.8491)])
def test_krippendorffs_example(metric: str, value: float) -> None:
    found = krippendorff_alpha(UNITS, MeasurementLevel(metric))
    assert isinstance(found, Fraction) and round(float(found), 4) == value


def test_without_two_values_there_is_no_alpha() -> None:
    assert (
        krippendorff_alpha([]) is None and krippendorff_alpha([[1], [2]]) is None and krippendorff_alpha([[1, 1], [1, 1]]) is None
    )


units = st.lists(st.lists(st.integers(0, 4), max_size=7), max_size=12)


@given(units)
def test_alpha_is_what_its_definition_says(data: list[list[int]]) -> None:
    """α compares the disagreement within units with that of all pairs: Krippendorff (2011), equation 1, without coincidences."""
    pairable = [unit for unit in data if len(unit) > 1]
    values = [value for unit in pairable for value in unit]
    within = sum((Fraction((a - b) ** 2, len(unit) - 1) for unit in pairable for a in unit for b in unit), Fraction(0))
    among = sum((a - b) ** 2 for a in values for b in values)
    expected = 1 - (len(values) - 1) * within / among if among else None
    assert krippendorff_alpha(data, MeasurementLevel.INTERVAL) == expected


@given(units, st.randoms(use_true_random=False), st.sampled_from(MeasurementLevel))
def test_alpha_does_not_depend_on_any_order(data: list[list[int]], draw: object, metric: MeasurementLevel) -> None:
    other = [draw.sample(unit, len(unit)) for unit in data]  # type: ignore[attr-defined]
    draw.shuffle(other)  # type: ignore[attr-defined]
    assert krippendorff_alpha(other, metric) == krippendorff_alpha(data, metric)


def test_of_two_values_all_metrics_are_the_same() -> None:
    data = [[0, 1, 0], [1, 1], [0, 0, 0, 1], [1, 1, 1]]
    assert len({krippendorff_alpha(data, metric) for metric in MeasurementLevel}) == 1


def test_cohens_kappa() -> None:
    assert cohen_kappa([(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15) == Fraction(2, 5)
    assert cohen_kappa([(0, 1), (1, 0)]) == -1 and cohen_kappa([(0, 0), (1, 1)]) == 1
    assert cohen_kappa([]) is None and cohen_kappa([(1, 1)] * 9) is None


def test_kappa_of_each_two() -> None:
    units = [{b"c": 0, b"a": 0}, {b"c": 1, b"a": 1}, {b"c": 1, b"b": 1}, {b"b": 1}, {b"b": 0, b"c": 1}, {b"c": 1, b"b": 1}]
    agreed, alike = (b"a", b"c", 2, Fraction(1)), (b"b", b"c", 3, Fraction(0))
    assert pairwise_kappas(units, 2, 9) == [alike, agreed], "the most common answers first"
    assert pairwise_kappas(units, 3, 9) == pairwise_kappas(units, 2, 1) == [alike]


def test_what_is_a_unit() -> None:
    assert (
        agreement_units(QuestionKind.RATING, 5, False, [(5,), (1,)]) == [[5, 1]]
        and measurement_level(QuestionKind.RATING) is MeasurementLevel.ORDINAL
    )
    assert agreement_units(QuestionKind.LABEL, 3, True, [(0, 2), (2,)]) == [[1, 0], [0, 0], [1, 1]]
    assert agreement_units(QuestionKind.RANKING, 0, False, [(0, 1, 2), (2, 0, 1)]) == [[1, 1], [1, 0], [1, 0]]
    assert agreement_units(QuestionKind.RANKING, 0, False, []) == []


# Tideman's textbook example: four cities choose a capital. The Condorcet winner has few first ranks.
MEMPHIS, NASHVILLE, CHATTANOOGA, KNOXVILLE = range(4)
CITIES = (
    [(MEMPHIS, NASHVILLE, CHATTANOOGA, KNOXVILLE)] * 42
    + [(NASHVILLE, CHATTANOOGA, KNOXVILLE, MEMPHIS)] * 26
    + [(CHATTANOOGA, KNOXVILLE, NASHVILLE, MEMPHIS)] * 15
    + [(KNOXVILLE, CHATTANOOGA, NASHVILLE, MEMPHIS)] * 17
)


def test_the_four_cities() -> None:
    assert ranked_pairs_order(CITIES) == (NASHVILLE, CHATTANOOGA, KNOXVILLE, MEMPHIS)


def test_a_circle_is_cut_at_its_weakest_pair() -> None:
    votes = [(0, 1, 2)] * 4 + [(1, 2, 0)] * 3 + [(2, 0, 1)] * 2
    assert [preference_margin(votes, *pair) for pair in ((0, 1), (1, 2), (2, 0))] == [3, 5, 1]
    assert ranked_pairs_order(votes) == (0, 1, 2)


def test_ties_are_broken_by_number() -> None:
    assert ranked_pairs_order([(2, 1, 0), (0, 1, 2)]) == (0, 1, 2)
    assert ranked_pairs_order([(2, 0, 1)]) == (2, 0, 1)
    assert ranked_pairs_order([(0, 1, 2), (1, 2, 0), (2, 0, 1)]) == (0, 1, 2), (
        "three equal margins in a circle: (0, 1), (1, 2), not (2, 0)"
    )


orders = st.lists(st.sampled_from(list(permutations(range(5)))), min_size=1, max_size=7)


@given(orders, st.randoms(use_true_random=False))
def test_an_order_of_votes_changes_nothing(votes: list[tuple[int, ...]], draw: object) -> None:
    assert ranked_pairs_order(draw.sample(votes, len(votes))) == ranked_pairs_order(votes)  # type: ignore[attr-defined]


@given(orders)
def test_who_beats_all_others_is_first_and_whom_all_beat_is_last(votes: list[tuple[int, ...]]) -> None:
    order = ranked_pairs_order(votes)
    assert sorted(order) == list(range(5))
    for item in range(5):
        margins = [preference_margin(votes, item, other) for other in range(5) if other != item]
        assert min(margins) <= 0 or order[0] == item
        assert max(margins) >= 0 or order[-1] == item


def test_an_order_is_as_clear_as_its_closest_neighbours() -> None:
    odds = Fraction(3)
    assert order_confidence([(0, 1, 2), (0, 1, 2)], (0, 1, 2), odds) == Fraction(9, 10)
    assert order_confidence([(0, 1, 2), (0, 2, 1)], (0, 1, 2), odds) == Fraction(1, 2)


# Pairs ----------------------------------------------------------------------------------------------------------------


def test_strengths_are_as_the_games_were() -> None:
    games = [("a", "b", FIRST)] * 300 + [("a", "b", SECOND)] * 100 + [("b", "c", TIE)] * 400
    found = bradley_terry(games)
    assert 2.9 < found["a"] / found["b"] < 3.1 and 0.95 < found["b"] / found["c"] < 1.05
    assert bradley_terry(games[::-1]) == found == bradley_terry([(b, a, (SECOND, FIRST, TIE)[how]) for a, b, how in games])


def test_who_never_lost_is_finite_and_both_bad_is_no_game() -> None:
    found = bradley_terry([("a", "b", FIRST)] * 50 + [("a", "c", 3)])
    assert set(found) == {"a", "b"} and found["b"] < STRENGTH_ONE < found["a"] < 1_000 * STRENGTH_ONE
    assert bradley_terry([]) == {}


def test_after_its_turns_nothing_changes_any_more() -> None:
    """Each item expects as many wins as it had, including two against an opponent of strength 1: Hunter (2004), equation 3."""
    games = [(a, b, FIRST if (7 * a + 3 * b) % 5 else SECOND) for a, b in combinations(range(50), 2) if (a + b) % 3]
    found = {item: strength / STRENGTH_ONE for item, strength in bradley_terry(games).items()}
    for item, own in found.items():
        mine = [(a, b, how) for a, b, how in games if item in (a, b)]
        won = 1 + sum((a, b)[how] == item for a, b, how in mine)
        expected = 2 * own / (own + 1) + sum(own / (found[a] + found[b]) for a, b, _ in mine)
        assert abs(won - expected) < 0.01
