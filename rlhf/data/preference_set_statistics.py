"""Figures of a set of preferences itself: odd pairs, and the accuracy of a word-count model of it. numpy only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final, TypeVar

import numpy as np

from rlhf.data import word_count_baseline
from rlhf.data.preference_sets import PERMILLE, PreferencePair
from rlhf.pair_accuracy import MEASURED_PAIRS_MAX

IDENTICAL: Final = "identical_pairs"
CONTRADICTORY: Final = "contradictory_pairs"
WORD_COUNT: Final = "word_count_accuracy"
PAIRS: Final = "held_out_pairs"  # with a better response
CHARACTERS_MAX: Final = 1 << 20  # that the word-count model learns from: some seconds of one processor
T = TypeVar("T")


class PreferenceSetStatistics:
    def __init__(self, trained: Sequence[PreferencePair], held_out: Sequence[PreferencePair]) -> None:
        self.odd = odd_pairs([*trained, *held_out])
        self._trained = _sample(trained)
        self._held_out = evenly_spaced(held_out, MEASURED_PAIRS_MAX)

    @cached_property
    def figures(self) -> dict[str, float]:
        """The word-count accuracy is of the same pairs as a model's. It is left out if none of them has a better response."""
        found = word_count_baseline.pair_accuracy(word_count_baseline.fit_best(self._trained), self._held_out)
        return self.odd | ({} if found is None else {WORD_COUNT: found})


def odd_pairs(pairs: Iterable[PreferencePair]) -> dict[str, float]:
    """Pairs of two identical responses, and pairs that others contradict: the other response to the same prompt is better."""
    identical, opinions = 0, defaultdict[tuple[str, ...], list[bool]](list)
    for pair in pairs:
        if pair.first == pair.second:
            identical += 1
        elif 2 * pair.p != PERMILLE:
            is_sorted = pair.first < pair.second
            texts = (pair.first, pair.second) if is_sorted else (pair.second, pair.first)
            opinions[pair.prompt, *texts].append((2 * pair.p > PERMILLE) is is_sorted)
    contradictory = sum(len(found) for found in opinions.values() if len(set(found)) > 1)
    return {IDENTICAL: float(identical), CONTRADICTORY: float(contradictory)}


def evenly_spaced(items: Sequence[T], count_max: int) -> list[T]:
    """At most `count_max` of the items, evenly spaced."""
    count = min(len(items), count_max)
    return [items[number] for number in np.linspace(0, max(0, len(items) - 1), count).astype(np.int64)]


def _sample(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """At most `CHARACTERS_MAX` of them."""
    characters = sum(len(pair.first) + len(pair.second) for pair in pairs)
    return evenly_spaced(pairs, len(pairs) * CHARACTERS_MAX // max(characters, CHARACTERS_MAX))
