"""Statistics of a preference set: odd pairs, and the accuracy of a word-count model. Uses only numpy.

The word-count model is a baseline for reward models: a Bradley–Terry model over hashed counts of words, and of word bigrams if
bigrams make it more accurate. It ignores the prompt, and the order of words beyond bigrams. No vote depends on the statistics.
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

WORD_FEATURES: Final = 1 << 15  # hash buckets for words; collisions are rare among thousands of words
FEATURES: Final = 2 * WORD_FEATURES  # hash buckets of all features: the second half is for bigrams
STEPS: Final = 100  # steps of Nesterov's method, after which the weights hardly change
# Candidates for the penalty per pair; the choice is the most accurate one on pairs not fitted.
PENALTIES: Final = (0.003, 0.01, 0.03, 0.1)
KEPT_BACK_PERMILLE: Final = 200
CHARACTERS_MAX: Final = 1 << 20  # most characters that the word-count model is fitted to: seconds of one processor
T = TypeVar("T")

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _FeatureDifferences:
    """Feature counts of the first response minus those of the second, for each pair: a sparse matrix (pairs, features)."""

    row: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    value: Weights
    p: Weights  # (pairs,): probability that the first response is better

    def __matmul__(self, weights: Weights) -> Weights:
        return np.bincount(self.row, self.value * weights[self.column], len(self.p)).astype(np.float64)

    def transposed(self, of_pairs: Weights) -> Weights:
        return np.bincount(self.column, self.value * of_pairs[self.row], FEATURES).astype(np.float64)

    def part(self, pairs: npt.NDArray[np.bool_], features_used: int) -> _FeatureDifferences:
        """Return the matrix with the rows of the pairs in the mask, and with only the first `features_used` columns."""
        chosen = pairs[self.row] & (self.column < features_used)
        number = np.cumsum(pairs) - 1
        return _FeatureDifferences(number[self.row[chosen]], self.column[chosen], self.value[chosen], self.p[pairs])

    @property
    def largest(self) -> float:
        """Largest eigenvalue of the matrix times its transpose, by power iteration. It bounds the curvature of the loss."""
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
    """Return the weights that minimize the sum over the pairs of −p·log σ(d) − (1 − p)·log σ(−d) + penalty/2·|w|²."""
    weights, decay = np.zeros(FEATURES), penalty * len(of.p)
    # The logistic loss has a curvature of at most 1/4. The factor 1.1 is a margin, because power iteration underestimates.
    rate = 1 / (1.1 * of.largest / 4 + decay)
    ahead, momentum = weights, 1.0
    for _ in range(STEPS):
        slope = 1 / (1 + np.exp(-(of @ ahead))) - of.p
        moved = ahead - rate * (of.transposed(slope) + decay * ahead)
        faster = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead, weights, momentum = moved + (momentum - 1) / faster * (moved - weights), moved, faster
    return weights


def fit_word_counts(pairs: Sequence[PreferencePair]) -> Weights:
    """Return the weights of the word-count model.

    The penalty, and the use of bigrams, are those with the best accuracy on pairs that are not fitted.
    """
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
    """Return the share of pairs whose better response scores higher.

    Pairs with equal scores count half. Pairs that people called a tie are left out.
    """
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
        """The statistics by name.

        The word-count accuracy uses the held-out pairs of the reward model's accuracy. It is missing if all those pairs are ties.
        """
        found = word_count_accuracy(fit_word_counts(self._trained), self._held_out)
        return self.odd | ({} if found is None else {WORD_COUNT: found})


def odd_pairs(pairs: Iterable[PreferencePair]) -> dict[str, float]:
    """Return the number of pairs with identical responses, and of pairs that another pair with the same texts contradicts."""
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
    """Return at most `count_max` items, evenly spaced."""
    count = min(len(items), count_max)
    return [items[number] for number in np.linspace(0, max(0, len(items) - 1), count).astype(np.int64)]


def _sample(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Return all pairs, or if their texts are longer, evenly spaced ones with about `CHARACTERS_MAX` characters."""
    characters = sum(len(pair.first) + len(pair.second) for pair in pairs)
    return evenly_spaced(pairs, len(pairs) * CHARACTERS_MAX // max(characters, CHARACTERS_MAX))
