"""The levels of a round's updates in a run of elements: a matrix with a row for each update and a column for each element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.codec import QuantizedUpdate
from training.replicated.codec.quantization_levels import Levels
from training.replicated.tensor_layout import BLOCK, ElementRun

EXPANDED: Final = 16 * BLOCK  # levels of all updates, expanded to 32 bits at once: 4 MiB however many there are
# Levels of all updates in the blocks that are worked on together. A call of numpy that takes microseconds holds the interpreter
# for most of them, so that another thread waits; one on 64 KiB and more does not.
LEVELS: Final = 1 << 18

Row = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LevelMatrix:
    rows: tuple[Levels, ...]  # of each update, (columns,)
    lengths: npt.NDArray[np.int64]  # columns of each of the run's chunks

    @classmethod
    def of_run(cls, updates: Sequence[QuantizedUpdate], run: ElementRun) -> LevelMatrix:
        return cls(tuple(update.levels_of(run) for update in updates), updates[0].layout.chunk_lengths[run.chunks])

    def iter_parts(self) -> Iterator[tuple[slice, slice]]:
        """What is expanded at once: chunks of the run, and their columns. Chunks as wide as the widest of them would fit, and so
        would an integer for each pair of updates.
        """
        count, ends = len(self.rows), np.concatenate([[0], np.cumsum(self.lengths)])
        step = max(1, EXPANDED // (count * max(count, int(self.lengths.max()))))
        for first in range(0, len(self.lengths), step):
            last = min(first + step, len(self.lengths))
            yield slice(first, last), slice(int(ends[first]), int(ends[last]))

    def scaled_row(self, number: int, scales: npt.NDArray[np.int32], chunks: slice, columns: slice) -> Row:
        """One update's elements in these columns, with these scales of their chunks."""
        values = np.repeat(scales, self.lengths[chunks])
        values *= self.rows[number][columns]
        return values


def group_blocks(blocks: Sequence[ElementRun], updates: int) -> Iterator[Sequence[ElementRun]]:
    """Consecutive blocks in which so many updates have about `LEVELS` levels, or one with more."""
    for _, group in groupby(blocks, lambda block: block.elements.start * updates // LEVELS):
        yield list(group)
