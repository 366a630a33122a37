"""Dot products of all pairs of updates: exact integers, most of the work in float32 matrix products.

A product of float32 matrices of small integers is exact as long as no sum exceeds 2^24, in whatever order a library adds. So the
levels are multiplied chunk by chunk, and a few columns at a time where they are large; the scales come in afterwards, in int64.
Sums over one stretch of the model fit an int64, those over all of it do not: they are Python's integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.aggregate.columns import Columns, columns_of, level_max
from training.replicated.codec import LEVEL_MAX, SCALE_BITS, Update
from training.replicated.each import Each, one_by_one
from training.replicated.layout import BLOCK, STRETCH, Block

FLOAT32_MAX: Final = 1 << 24  # of integers that are exact together with all smaller ones
# A product of two scales has 40 bits, and is taken in two halves: with either of them the sum over a stretch fits an int64.
HALF: Final = SCALE_BITS

assert STRETCH * BLOCK * LEVEL_MAX**2 << HALF < 1 << 63
assert LEVEL_MAX**2 <= FLOAT32_MAX

Integers = list[list[int]]
Int64Array = npt.NDArray[np.int64]


def gram(updates: Sequence[Update], each: Each = one_by_one) -> Integers:
    """Dot products of all pairs in units of 2^(exponent_i + exponent_j), exactly. Memory, of each thread: as `Plan.values`, and
    five matrices of n × n integers of 8 bytes for each of a block's chunks.
    """
    return total(each(partial(_of_stretch, updates), updates[0].layout.stretches))


def total(parts: Iterable[Int64Array]) -> Integers:
    """The sum over stretches of their (low, high) halves."""
    sums: npt.NDArray[np.object_] = sum((high.astype(object) << HALF) + low for low, high in parts)
    return sums.tolist()


def _of_stretch(updates: Sequence[Update], stretch: Sequence[Block]) -> Int64Array:
    """(2, updates, updates): the sums of products with the lower and with the upper half of the scales'."""
    updates = [update.apart() for update in updates]
    scales = np.stack([update.scales[stretch[0].chunks.start : stretch[-1].chunks.stop] for update in updates], axis=1)
    width = FLOAT32_MAX // level_max(updates[0]) ** 2
    sums, first = np.zeros((2, len(updates), len(updates)), dtype=np.int64), stretch[0].chunks.start
    for block in stretch:
        products = _level_products(columns_of(updates, block), width)
        of_chunks = scales[block.chunks.start - first : block.chunks.stop - first]
        pairs = of_chunks[:, :, np.newaxis] * of_chunks[:, np.newaxis, :]
        sums[0] += np.sum(products * (pairs & (1 << HALF) - 1), axis=0)
        sums[1] += np.sum(products * (pairs >> HALF), axis=0)
    return sums


def _level_products(columns: Columns, width: int) -> Int64Array:
    """(chunks, updates, updates): of the levels alone. At most `width` columns at a time are multiplied in float32."""
    count = len(columns.levels)
    products = np.zeros((len(columns.counts), count, count))
    for chunks, of_chunks in columns.parts():
        levels = np.stack([row[of_chunks] for row in columns.levels], dtype=np.float32)
        end = 0
        for chunk in range(chunks.start, chunks.stop):
            start, end = end, end + int(columns.counts[chunk])
            for first in range(start, end, width):
                part = levels[:, first : min(first + width, end)]
                products[chunk] += part @ part.T
    return products.astype(np.int64)
