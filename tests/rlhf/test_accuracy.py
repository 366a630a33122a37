"""Accuracy of a reward model, its interval, and the reports of voters."""

from __future__ import annotations

import pytest

from rlhf.accuracy import MEASURED_PAIRS_MAX, Accuracy, could_be_better, decided


def test_an_accuracy_says_of_how_many_pairs_it_is() -> None:
    assert str(Accuracy(136, 96)) == "0.71 of 96 pairs, interval 0.61–0.79"
    assert str(Accuracy(0, 0)) == "0.50 of 0 pairs, interval 0.00–1.00"
    assert Accuracy.of(0.75, 2) == Accuracy(3, 2), "equal scores count half"


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 5, 10, 33, 96, 600, MEASURED_PAIRS_MAX])
def test_a_model_is_better_than_chance_where_its_interval_lies_above_a_half(pairs: int) -> None:
    for halves in range(2 * pairs + 1):
        found = Accuracy(halves, pairs)
        low, high = found.interval
        assert found.is_better_than_chance is (low > 0.5) and 0 <= low <= found.share <= high <= 1


def test_few_pairs_can_show_nothing() -> None:
    assert [pairs for pairs in range(8) if could_be_better(pairs)] == [4, 5, 6, 7] and could_be_better(10**6)


def test_one_liar_of_four_voters_decides_nothing_and_moves_no_median() -> None:
    voters, good, bad = [bytes([n]) for n in range(4)], Accuracy(150, 100), Accuracy(110, 100)
    assert decided({voters[0]: bad}, voters) is None
    assert decided({voters[0]: bad, voters[1]: good}, voters) is None
    assert decided({voters[0]: bad, voters[1]: good, voters[2]: good}, voters) == good
    assert decided({voters[0]: Accuracy(200, 100), voters[1]: good}, voters) == good
    assert decided({bytes([9]): good, voters[1]: good}, voters) is None, "one that votes no more"
    assert decided({b"a": good}, [b"a"]) == good
