"""A linear model of preferences, the least that a reward model must be as good as. numpy only; no vote depends on it.

Bradley–Terry over which words, and which pairs of neighbouring words, a response has: each is a feature, by a hash. It knows
neither the prompt nor what else stands where.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rlhf.preferences import PERMILLE, Pair, is_held_out

FEATURES: Final = 1 << 16  # few words share one: short texts have some thousands of words
STEPS: Final = 100  # of Nesterov's method; with so many, the weights no longer move
PENALTIES: Final = (0.003, 0.01, 0.03, 0.1)  # for each pair; that one is taken which does best on pairs that are kept back
KEPT_BACK_PERMILLE: Final = 200

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Differences:
    """What the first response of each pair has and the second has not, +1, and the other way round, −1: a sparse matrix."""

    row: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    value: Weights
    p: Weights  # of each pair

    def __matmul__(self, weights: Weights) -> Weights:
        return np.bincount(self.row, self.value * weights[self.column], len(self.p)).astype(np.float64)

    def transposed(self, of_pairs: Weights) -> Weights:
        return np.bincount(self.column, self.value * of_pairs[self.row], FEATURES).astype(np.float64)

    @property
    def largest(self) -> float:
        """The largest eigenvalue of the matrix times its transpose, by its power: how sharp the loss can bend."""
        vector = np.ones(len(self.p))
        for _ in range(10):
            vector = self @ self.transposed(vector / np.linalg.norm(vector))
        return float(np.linalg.norm(vector))


def features(text: str) -> set[int]:
    words = re.findall(r"[\w']+", text.lower())
    return {zlib.crc32(of.encode()) % FEATURES for of in (*words, *map(" ".join, itertools.pairwise(words)))}


def fit(pairs: Sequence[Pair], penalty: float) -> Weights:
    """The weights at which −p·log σ(d) − (1−p)·log σ(−d) + penalty/2·|w|², summed over the pairs, is least."""
    of, weights = _differences(pairs), np.zeros(FEATURES)
    decay = penalty * len(pairs)
    rate = 1 / (1.1 * of.largest / 4 + decay)  # a logistic loss bends by a quarter at most; the power comes from below
    ahead, momentum = weights, 1.0
    for _ in range(STEPS):
        slope = 1 / (1 + np.exp(-(of @ ahead))) - of.p
        moved = ahead - rate * (of.transposed(slope) + decay * ahead)
        faster = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead, weights, momentum = moved + (momentum - 1) / faster * (moved - weights), moved, faster
    return weights


def fitted(pairs: Sequence[Pair]) -> Weights:
    """With the best of the penalties."""
    is_kept = [is_held_out(f"penalty {pair.prompt}", KEPT_BACK_PERMILLE) for pair in pairs]
    kept_back, others = (list(itertools.compress(pairs, of)) for of in (is_kept, np.logical_not(is_kept)))
    return fit(pairs, max(PENALTIES, key=lambda penalty: accuracy(fit(others, penalty), kept_back) or 0.0))


def scores(weights: Weights, texts: Iterable[str]) -> list[float]:
    return [float(weights[list(features(text))].sum()) for text in texts]


def accuracy(weights: Weights, pairs: Sequence[Pair]) -> float | None:
    """The share of the pairs whose better response scores higher; equal scores count half, ties of people not at all."""
    of = _differences(pairs)
    agrees, decided = np.sign(of @ weights) * np.sign(of.p - 0.5), of.p != 0.5
    return float(((1 + agrees) / 2)[decided].mean()) if decided.any() else None


def _differences(pairs: Sequence[Pair]) -> _Differences:
    rows, columns, values = list[int](), list[int](), list[float]()
    for row, pair in enumerate(pairs):
        first, second = features(pair.first), features(pair.second)
        for value, found in ((1.0, first - second), (-1.0, second - first)):
            rows += [row] * len(found)
            columns += found
            values += [value] * len(found)
    p = np.array([pair.p / PERMILLE for pair in pairs])
    return _Differences(np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64), np.array(values, dtype=np.float64), p)
