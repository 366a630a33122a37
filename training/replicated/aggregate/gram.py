"""Dot products of all pairs of updates: exact integers, most of the work in float32 matrix products.

A product of float32 matrices of small integers is exact as long as no sum exceeds 2^24, in whatever order a library adds. So the
levels are multiplied chunk by chunk, and a few columns at a time where they are large; the scales come in afterwards, in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.aggregate.columns import Columns, columns_of, level_max
from training.replicated.codec import LEVEL_MAX, SCALE_BITS, Update
from training.transformer import PARAMETERS_MAX

FLOAT32_MAX: Final = 1 << 24  # of integers that are exact together with all smaller ones
# A product of two scales has 40 bits, and is taken in two halves: with either of them the sum over a whole model fits an int64.
HALF: Final = SCALE_BITS

assert PARAMETERS_MAX * LEVEL_MAX**2 << HALF < 1 << 63
assert LEVEL_MAX**2 <= FLOAT32_MAX

Integers = list[list[int]]
Int64Array = npt.NDArray[np.int64]


def gram(updates: Sequence[Update]) -> Integers:
    """Dot products of all pairs in units of 2^(exponent_i + exponent_j), exactly. Memory: as `Plan.values`, and five
    matrices of n × n integers of 8 bytes for each of a block's chunks.
    """
    scales = np.stack([update.scales for update in updates])
    width = FLOAT32_MAX // level_max(updates[0]) ** 2
    low, high = np.zeros((2, len(updates), len(updates)), dtype=np.int64)
    for block in updates[0].layout.blocks:
        products = _level_products(columns_of(updates, block), width)
        of_chunks = scales[:, block.chunks].T
        pairs = of_chunks[:, :, np.newaxis] * of_chunks[:, np.newaxis, :]
        low += np.sum(products * (pairs & (1 << HALF) - 1), axis=0)
        high += np.sum(products * (pairs >> HALF), axis=0)
    return [[(int(h) << HALF) + int(x) for h, x in zip(*rows, strict=True)] for rows in zip(high, low, strict=True)]


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
