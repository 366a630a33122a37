"""Ranked pairs and Bradley–Terry."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

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

# Tideman's method on four cities that choose a capital: the textbook's example of a Condorcet winner that few have first.
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
    """Each expects as many wins as it had, the two against an opponent of strength 1 included: Hunter (2004), equation 3."""
    games = [(a, b, FIRST if (7 * a + 3 * b) % 5 else SECOND) for a, b in combinations(range(50), 2) if (a + b) % 3]
    found = {item: strength / STRENGTH_ONE for item, strength in bradley_terry(games).items()}
    for item, own in found.items():
        mine = [(a, b, how) for a, b, how in games if item in (a, b)]
        won = 1 + sum((a, b)[how] == item for a, b, how in mine)
        expected = 2 * own / (own + 1) + sum(own / (found[a] + found[b]) for a, b, _ in mine)
        assert abs(won - expected) < 0.01
