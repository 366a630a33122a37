"""Accuracy of a reward model, its interval, and the reports of voters."""

from __future__ import annotations

import pytest

from rlhf.pair_accuracy import MEASURED_PAIRS_MAX, PairAccuracy, agreed_accuracy, can_beat_chance


def test_an_accuracy_says_of_how_many_pairs_it_is() -> None:
    assert str(PairAccuracy(136, 96)) == "0.71 of 96 pairs, interval 0.61–0.79"
    assert str(PairAccuracy(0, 0)) == "0.50 of 0 pairs, interval 0.00–1.00"
    assert PairAccuracy.from_share(0.75, 2) == PairAccuracy(3, 2), "equal scores count half"


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 5, 10, 33, 96, 600, MEASURED_PAIRS_MAX])
def test_a_model_is_better_than_chance_where_its_interval_lies_above_a_half(pairs: int) -> None:
    for halves in range(2 * pairs + 1):
        found = PairAccuracy(halves, pairs)
        low, high = found.interval
        assert found.is_better_than_chance is (low > 0.5) and 0 <= low <= found.share <= high <= 1


def test_few_pairs_can_show_nothing() -> None:
    assert [pairs for pairs in range(8) if can_beat_chance(pairs)] == [4, 5, 6, 7] and can_beat_chance(10**6)


def test_one_liar_of_four_voters_decides_nothing_and_moves_no_median() -> None:
    voters, good, bad = [bytes([n]) for n in range(4)], PairAccuracy(150, 100), PairAccuracy(110, 100)
    assert agreed_accuracy({voters[0]: bad}, voters) is None
    assert agreed_accuracy({voters[0]: bad, voters[1]: good}, voters) is None
    assert agreed_accuracy({voters[0]: bad, voters[1]: good, voters[2]: good}, voters) == good
    assert agreed_accuracy({voters[0]: PairAccuracy(200, 100), voters[1]: good}, voters) == good
    assert agreed_accuracy({bytes([9]): good, voters[1]: good}, voters) is None, "one that votes no more"
    assert agreed_accuracy({b"a": good}, [b"a"]) == good
