"""Figures of a set of preferences: identical responses, contradictions, and the word-count model beside a reward model."""

from __future__ import annotations

import pytest

from rlhf.data import preference_set_statistics
from rlhf.data.preference_set_statistics import (
    CONTRADICTORY,
    IDENTICAL,
    WORD_COUNT,
    PreferenceSetStatistics,
    evenly_spaced,
    odd_pairs,
)
from rlhf.data.preference_sets import PreferencePair


def pair(number: int, prompt: str, first: str, second: str, p: int = 1000) -> PreferencePair:
    return PreferencePair(number.to_bytes(8, "big"), prompt, first, second, p)


@pytest.mark.parametrize(
    "others, identical, contradictory",
    [
        ([], 0, 0),
        ([("q", "a", "b", 1000)], 0, 0),  # said twice alike
        ([("q", "b", "a", 0)], 0, 0),  # alike, in the other order
        ([("q", "b", "a", 1000)], 0, 2),
        ([("q", "a", "b", 0)], 0, 2),  # the same order, the other response
        ([("q", "a", "b", 400), ("q", "a", "b", 700)], 0, 3),  # two against one: all three are contradicted
        ([("other", "b", "a", 1000)], 0, 0),  # of another prompt
        ([("q", "b", "a", 500)], 0, 0),  # a tie contradicts nobody
        ([("q", "b", "c", 1000), ("q", "c", "a", 1000)], 0, 0),  # a circle of three
        ([("q", "a", "a", 1000), ("r", "b", "b", 0)], 2, 0),
    ],
)
def test_odd_pairs_are_counted(others: list[tuple[str, str, str, int]], identical: int, contradictory: int) -> None:
    assert odd_pairs([pair(number, *said) for number, said in enumerate([("q", "a", "b", 1000), *others])]) == {
        IDENTICAL: identical,
        CONTRADICTORY: contradictory,
    }


def test_the_word_count_model_learns_from_what_is_trained_and_is_measured_on_what_is_held_out() -> None:
    learned = [pair(number, f"q{number}", f"good x{number}", f"bad y{number}") for number in range(50)]
    measured = [pair(number, f"m{number}", "a good film", "a bad film", 1000 if number else 0) for number in range(4)]
    assert PreferenceSetStatistics(learned, measured).figures == {IDENTICAL: 0, CONTRADICTORY: 0, WORD_COUNT: 0.75}
    assert WORD_COUNT not in PreferenceSetStatistics(learned, [pair(0, "m", "a", "b", 500)]).figures
    assert WORD_COUNT not in PreferenceSetStatistics(learned, []).figures


def test_a_large_set_is_learned_from_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_set_statistics, "CHARACTERS_MAX", 40)
    learned = [pair(number, f"q{number}", "good", "bad!") for number in range(50)]
    found = PreferenceSetStatistics(learned, learned)
    assert len(found._trained) == 5 and found._trained[-1] == learned[-1]
    assert evenly_spaced([], 3) == [] and evenly_spaced([1, 2], 3) == [1, 2] and evenly_spaced(range(7), 3) == [0, 3, 6]
