"""Figures of a set of preferences itself: odd pairs, and the accuracy of a word-count model. numpy only; no vote depends on it.

The model is the least that a reward model must be as good as: Bradley–Terry over the counts of words, and of neighbouring words
where these help: each is a feature, by a hash. It knows neither the prompt nor the order of words.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from rlhf.data.preference_sets import PERMILLE, PreferencePair, is_held_out
from rlhf.pair_accuracy import CONTRADICTORY, IDENTICAL, MEASURED_PAIRS_MAX, WORD_COUNT

WORD_FEATURES: Final = 1 << 15  # features of words; few share one: short texts have some thousands of words
FEATURES: Final = 2 * WORD_FEATURES  # the others are of neighbours
STEPS: Final = 100  # of Nesterov's method; with so many, the weights no longer move
PENALTIES: Final = (0.003, 0.01, 0.03, 0.1)  # for each pair; that one is taken which does best on pairs that are kept back
KEPT_BACK_PERMILLE: Final = 200
CHARACTERS_MAX: Final = 1 << 20  # that the word-count model learns from: some seconds of one processor
T = TypeVar("T")

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _FeatureDifferences:
    """Counts of the first response of each pair less those of the second: a sparse matrix."""

    row: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    value: Weights
    p: Weights  # of each pair

    def __matmul__(self, weights: Weights) -> Weights:
        return np.bincount(self.row, self.value * weights[self.column], len(self.p)).astype(np.float64)

    def transposed(self, of_pairs: Weights) -> Weights:
        return np.bincount(self.column, self.value * of_pairs[self.row], FEATURES).astype(np.float64)

    def part(self, pairs: npt.NDArray[np.bool_], features_used: int) -> _FeatureDifferences:
        """Some of the pairs, and of the features the first ones."""
        chosen = pairs[self.row] & (self.column < features_used)
        number = np.cumsum(pairs) - 1
        return _FeatureDifferences(number[self.row[chosen]], self.column[chosen], self.value[chosen], self.p[pairs])

    @property
    def largest(self) -> float:
        """The largest eigenvalue of the matrix times its transpose, by its power: how sharp the loss can bend."""
        vector = np.ones(len(self.p))
        for _ in range(10):
            vector = self @ self.transposed(vector / max(np.linalg.norm(vector), np.finfo(np.float64).tiny))
        return float(np.linalg.norm(vector))


def hash_features(text: str) -> Counter[int]:
    words = re.findall(r"[\w']+", text.lower())
    neighbours = map(" ".join, itertools.pairwise(words))
    found = Counter(zlib.crc32(word.encode()) % WORD_FEATURES for word in words)
    return found + Counter(WORD_FEATURES + zlib.crc32(pair.encode()) % WORD_FEATURES for pair in neighbours)


def _fit(of: _FeatureDifferences, penalty: float) -> Weights:
    """The weights at which −p·log σ(d) − (1−p)·log σ(−d) + penalty/2·|w|², summed over the pairs, is least."""
    weights, decay = np.zeros(FEATURES), penalty * len(of.p)
    rate = 1 / (1.1 * of.largest / 4 + decay)  # a logistic loss bends by a quarter at most; the power comes from below
    ahead, momentum = weights, 1.0
    for _ in range(STEPS):
        slope = 1 / (1 + np.exp(-(of @ ahead))) - of.p
        moved = ahead - rate * (of.transposed(slope) + decay * ahead)
        faster = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead, weights, momentum = moved + (momentum - 1) / faster * (moved - weights), moved, faster
    return weights


def fit_word_counts(pairs: Sequence[PreferencePair]) -> Weights:
    """With the best of the penalties, and neighbours where they help."""
    whole = _differences(pairs)
    is_kept = np.array([is_held_out(f"penalty {pair.id.hex()}", KEPT_BACK_PERMILLE) for pair in pairs])
    kept_back, others = whole.part(is_kept, FEATURES), whole.part(~is_kept, FEATURES)
    ways = [(penalty, used) for penalty in PENALTIES for used in (WORD_FEATURES, FEATURES)]
    everywhere, everything = np.ones(len(others.p), dtype=np.bool_), np.ones(len(pairs), dtype=np.bool_)
    found = [_accuracy(_fit(others.part(everywhere, used), penalty), kept_back) or 0.0 for penalty, used in ways]
    penalty, used = ways[int(np.argmax(found))]
    return _fit(whole.part(everything, used), penalty)


def score_texts(weights: Weights, texts: Iterable[str]) -> list[float]:
    return [sum(count * float(weights[feature]) for feature, count in hash_features(text).items()) for text in texts]


def word_count_accuracy(weights: Weights, pairs: Sequence[PreferencePair]) -> float | None:
    """The share of the pairs whose better response scores higher; equal scores count half, ties of people not at all."""
    return _accuracy(weights, _differences(pairs))


def _accuracy(weights: Weights, of: _FeatureDifferences) -> float | None:
    agrees, decided = np.sign(of @ weights) * np.sign(of.p - 0.5), of.p != 0.5
    return float(((1 + agrees) / 2)[decided].mean()) if decided.any() else None


def _differences(pairs: Sequence[PreferencePair]) -> _FeatureDifferences:
    rows, columns, values = list[int](), list[int](), list[float]()
    for row, pair in enumerate(pairs):
        found = hash_features(pair.first)
        found.subtract(hash_features(pair.second))
        rows += [row] * len(found)
        columns += found.keys()
        values += map(float, found.values())
    p = np.array([pair.p / PERMILLE for pair in pairs])
    return _FeatureDifferences(
        np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64), np.array(values, dtype=np.float64), p
    )


class PreferenceSetStatistics:
    def __init__(self, trained: Sequence[PreferencePair], held_out: Sequence[PreferencePair]) -> None:
        self.odd = odd_pairs([*trained, *held_out])
        self._trained = _sample(trained)
        self._held_out = evenly_spaced(held_out, MEASURED_PAIRS_MAX)

    @cached_property
    def figures(self) -> dict[str, float]:
        """The word-count accuracy is of the same pairs as a model's. It is left out if none of them has a better response."""
        found = word_count_accuracy(fit_word_counts(self._trained), self._held_out)
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
