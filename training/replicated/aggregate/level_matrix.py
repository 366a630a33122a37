"""The level matrix of a run of elements, with a row for each of a round's updates, and the dot products of all pairs of updates.

The products are exact integers, and float32 matrix products do most of the work. A product of float32 matrices of small integers
is exact while no sum exceeds 2^24, in any order of additions. The levels are therefore multiplied chunk by chunk, and large
levels a few columns at a time. The scales follow in int64. Sums over one stretch of the model fit an int64. Sums over the whole
model are Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.replicated.codec import LEVEL_MAX, SCALE_BITS, QuantizedUpdate
from training.replicated.codec.quantization import TOP, Levels
from training.replicated.parallel_map import ParallelMap, serial_map
from training.replicated.tensor_layout import BLOCK, THREAD_BLOCKS, ElementRun, TensorBlock

# Number of levels, of all updates together, that are expanded to 32 bits at once: 4 MiB for any number of updates.
EXPANDED: Final = 16 * BLOCK
# Number of levels, of all updates together, in the blocks that are processed at once. A numpy call of some microseconds holds the
# interpreter's lock most of the time, so that other threads wait. A call on 64 KiB or more does not.
LEVELS: Final = 1 << 18
FLOAT32_MAX: Final = 1 << 24  # Float32 has all integers up to this one.
# Bits of the lower half of a product of two scales. The product has 40 bits. With either half, the sum over a stretch fits an
# int64.
HALF: Final = SCALE_BITS
FEW: Final = 8  # up to this number of updates, single products are as fast as a matrix product, which blocks other threads

assert THREAD_BLOCKS * BLOCK * LEVEL_MAX**2 << HALF < 1 << 63
assert LEVEL_MAX**2 <= FLOAT32_MAX

Integers = list[list[int]]
Int64Array = npt.NDArray[np.int64]
Row = npt.NDArray[np.signedinteger[Any]]  # of 32 bits, or of 64 for levels of 16 bits


@dataclass(frozen=True, slots=True, eq=False)
class LevelMatrix:
    rows: tuple[Levels, ...]  # levels of each update, shape (columns,)
    lengths: npt.NDArray[np.int64]  # number of columns of each chunk of the run

    @classmethod
    def of_run(cls, updates: Sequence[QuantizedUpdate], run: ElementRun) -> LevelMatrix:
        return cls(tuple(update.levels_of(run) for update in updates), updates[0].layout.chunk_lengths[run.chunks])

    def iter_parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield pairs of ranges that are expanded at once: a range of the run's chunks, and the range of their columns.

        A part has at most `EXPANDED` levels even if all its chunks are as wide as the widest one. With one integer per chunk and
        pair of updates, it also has at most `EXPANDED` integers.
        """
        count, ends = len(self.rows), np.concatenate([[0], np.cumsum(self.lengths)])
        step = max(1, EXPANDED // (count * max(count, int(self.lengths.max()))))
        for first in range(0, len(self.lengths), step):
            last = min(first + step, len(self.lengths))
            yield slice(first, last), slice(int(ends[first]), int(ends[last]))

    def scaled_row(self, number: int, scales: Row, chunks: slice, columns: slice) -> Row:
        """Return the elements of update `number` in these columns, which are those of `chunks` with these scales."""
        values = np.repeat(scales, self.lengths[chunks])
        values *= self.rows[number][columns]
        return values


def group_blocks(blocks: Sequence[ElementRun], updates: int) -> Iterator[Sequence[ElementRun]]:
    """Yield groups of consecutive blocks. A group has about `LEVELS` levels of all updates together, or is one larger block."""
    for _, group in groupby(blocks, lambda block: block.elements.start * updates // LEVELS):
        yield list(group)


def gram_matrix(updates: Sequence[QuantizedUpdate], each: ParallelMap = serial_map) -> Integers:
    """Return the exact dot products of all pairs (i, j) of updates, in units of 2^(exponent_i + exponent_j).

    Each thread needs as much memory as `AggregationPlan`, and 8 bytes for five times as many integers as `LevelMatrix.iter_parts`
    allows.
    """
    return sum_halves(each(partial(_of_stretch, updates), updates[0].layout.stretches))


def sum_halves(parts: Iterable[Int64Array]) -> Integers:
    """Return the dot products from the (low, high) halves of all stretches."""
    sums: npt.NDArray[np.object_] = sum((high.astype(object) << HALF) + low for low, high in parts)
    return sums.tolist()


def _of_stretch(updates: Sequence[QuantizedUpdate], stretch: Sequence[TensorBlock]) -> Int64Array:
    """Return the dot products over one stretch, with the lower and the upper half of scale products: (2, updates, updates)."""
    width = FLOAT32_MAX // TOP[updates[0].bits] ** 2
    sums = np.zeros((2, len(updates), len(updates)), dtype=np.int64)
    for run in map(ElementRun.of_blocks, group_blocks(stretch, len(updates))):
        levels, scales = LevelMatrix.of_run(updates, run), np.stack([update.scales[run.chunks] for update in updates], axis=1)
        for chunks, part in levels.iter_parts():
            products = _level_products([row[part] for row in levels.rows], levels.lengths[chunks], width)
            pairs = scales[chunks, :, np.newaxis] * scales[chunks, np.newaxis, :]
            sums[0] += np.sum(products * (pairs & (1 << HALF) - 1), axis=0)
            sums[1] += np.sum(products * (pairs >> HALF), axis=0)
    return sums


def _level_products(levels: Sequence[Levels], lengths: Int64Array, width: int) -> Int64Array:
    """Return the dot products of the levels in each chunk, shape (chunks, updates, updates).

    At most `width` columns at a time are multiplied in float32. Every chunk is padded with zeros to the same number of columns.
    """
    rows, chunks, widest = len(levels), len(lengths), int(lengths.max())
    pieces = max(1, -(-widest // width))
    piece = -(-widest // pieces)
    filled = np.zeros((rows, chunks * pieces * piece), dtype=np.int8)
    # `at`: positions of the columns after all chunks were padded to the same width.
    starts = np.cumsum(lengths) - lengths
    gaps = pieces * piece * np.arange(chunks) - starts
    at = np.arange(lengths.sum()) + np.repeat(gaps, lengths) if gaps.any() else slice(int(lengths.sum()))
    for row, said in zip(filled, levels, strict=True):
        row[at] = said
    factors = filled.reshape(rows, chunks * pieces, piece).transpose(1, 0, 2).astype(np.float32)
    if rows <= FEW:
        products = np.vecdot(factors[:, :, np.newaxis], factors[:, np.newaxis])
    else:
        products = factors @ factors.transpose(0, 2, 1)
    return products.astype(np.int64).reshape(chunks, pieces, rows, rows).sum(axis=1)
