"""What a round's updates say of one block: a matrix of levels, one row per update, one column per element that any of them says.

Updates that say every element have every element as a column. Sparse ones have the union of their supports, so that everything
after this costs what they say and not what the model is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.codec import Entries, Update
from training.replicated.codec.levels import TOP
from training.replicated.layout import BLOCK, CHUNK, Block, Float32Array

ELEMENTS: Final = 16 * BLOCK  # of all updates, expanded to 32 bits at once: 4 MiB however many there are

Row = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    levels: tuple[npt.NDArray[np.int8], ...]  # of each update, (columns,); 0 where it says nothing
    counts: npt.NDArray[np.int64]  # columns of each of the block's chunks
    positions: npt.NDArray[np.int64] | None  # in the block, ascending; None: every element is a column

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """What is expanded at once: chunks of the block, and their columns."""
        width = max(CHUNK, ELEMENTS // len(self.levels))
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        first, count = 0, len(self.counts)
        while first < count:
            last = int(np.searchsorted(ends, ends[first] + width, side="right")) - 1
            yield slice(first, last), slice(int(ends[first]), int(ends[last]))
            first = last

    def scaled(self, row: int, scales: npt.NDArray[np.int32], chunks: slice, columns: slice) -> Row:
        """One update's elements in these columns, with these scales of their chunks."""
        values = np.repeat(scales, self.counts[chunks])
        values *= self.levels[row][columns]
        return values

    def spread(self, values: npt.NDArray[np.float64], block: Block) -> Float32Array:
        """The block with `values` in its columns and zero elsewhere."""
        if self.positions is None:
            return values.astype(np.float32)
        spread = np.zeros(block.size, dtype=np.float32)
        spread[self.positions] = values
        return spread


def level_max(update: Update) -> int:
    """The largest level that its mode has."""
    return TOP[update.mode.bits]


def columns_of(updates: Sequence[Update], block: Block) -> Columns:
    entries = [update.entries(block) for update in updates]
    if any(said.positions is None for said in entries):
        return Columns(tuple(said.levels for said in entries), entries[0].counts, None)
    return _union(entries, block)


def _union(entries: Sequence[Entries], block: Block) -> Columns:
    any_says = np.zeros(block.size, dtype=bool)
    for said in entries:
        any_says[said.positions] = True
    positions = np.flatnonzero(any_says)
    column_of = np.empty(block.size, dtype=np.int32)  # is read only where it was written
    column_of[positions] = np.arange(len(positions), dtype=np.int32)
    levels = []
    for said in entries:
        row = np.zeros(len(positions), dtype=np.int8)
        row[column_of[said.positions]] = said.levels
        levels.append(row)
    counts = np.bincount(positions // CHUNK, minlength=block.chunks.stop - block.chunks.start)
    return Columns(tuple(levels), counts, positions)
