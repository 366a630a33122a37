"""Sums of the middle ones of every coordinate's values, by a selection network: minima and maxima of whole rows, in place.

Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2 M) sorts any number of rows by O(n log² n) comparators.
Only the sum of the middle ranks is wanted, so a comparator between two rows that end in the same part (below, middle or above)
falls away, and so does the half of one whose result ends outside the middle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from training.replicated.aggregate.level_matrix import Row


@dataclass(frozen=True, slots=True)
class Comparator:
    low: int
    high: int
    keeps_low: bool  # the minimum is used afterwards
    keeps_high: bool


def select_middle(rows: Sequence[Row], f: int) -> list[Row]:
    """Rows that hold, in every column, all values but the f smallest and f largest, in some order; overwrites `rows`."""
    rows, spare = list(rows), np.empty_like(rows[0])
    for comparator in selection_network(len(rows), f):
        low, high = rows[comparator.low], rows[comparator.high]
        if comparator.keeps_low and comparator.keeps_high:
            np.minimum(low, high, out=spare)
            np.maximum(low, high, out=high)
            rows[comparator.low], spare = spare, low
        elif comparator.keeps_low:
            np.minimum(low, high, out=low)
        else:
            np.maximum(low, high, out=high)
    return rows[f : len(rows) - f]


@functools.lru_cache(maxsize=64)
def selection_network(count: int, f: int) -> tuple[Comparator, ...]:
    """The comparators that move the f smallest of `count` values below place f and the f largest to the last f places."""
    # What matters of what stands at each place after a comparator: its value (None), that it is summed (True), nothing (False).
    matters: list[bool | None] = [f <= place < count - f for place in range(count)]
    kept = []
    for low, high in reversed(list(_merge_exchange(count))):
        if matters[low] is not None and matters[low] == matters[high]:
            continue
        kept.append(Comparator(low, high, matters[low] is not False, matters[high] is not False))
        matters[low] = matters[high] = None
    return tuple(reversed(kept))


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    p = top = 1 << max(0, (count - 1).bit_length() - 1)
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            for i in range(count - d):
                if i & p == r:
                    yield i, i + d
            d, q, r = q - p, q // 2, p
        p //= 2
