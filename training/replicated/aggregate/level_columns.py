"""What a round's updates say of a run of elements: a matrix of levels, one row per update, one column per element that any of
them says.

Updates that say every element have every element as a column. Sparse ones have the union of their supports, so that everything
after this costs what they say and not what the model is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.codec import LevelEntries, QuantizedUpdate
from training.replicated.codec.quantization_levels import TOP
from training.replicated.tensor_layout import BLOCK, ElementRun, Float32Array, group_blocks

ELEMENTS: Final = 16 * BLOCK  # of all updates, expanded to 32 bits at once: 4 MiB however many there are
# Of all updates, in the blocks that are worked on together. A call of numpy that takes microseconds holds the interpreter for
# most of them, so that another thread waits; one on 64 KiB and more does not.
ENTRIES: Final = 1 << 18

Row = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LevelColumns:
    levels: tuple[npt.NDArray[np.int8], ...]  # of each update, (columns,); 0 where it says nothing
    counts: npt.NDArray[np.int64]  # columns of each of the run's chunks
    positions: npt.NDArray[np.int64] | None  # in the run, ascending; None: every element is a column

    def iter_parts(self) -> Iterator[tuple[slice, slice]]:
        """What is expanded at once: chunks of the run, and their columns. Chunks as wide as the widest of them would fit, and so
        would an integer for each pair of updates.
        """
        rows, ends = len(self.levels), np.concatenate([[0], np.cumsum(self.counts)])
        step = max(1, ELEMENTS // (rows * max(rows, int(self.counts.max()))))
        for first in range(0, len(self.counts), step):
            last = min(first + step, len(self.counts))
            yield slice(first, last), slice(int(ends[first]), int(ends[last]))

    def scaled_levels(self, row: int, scales: npt.NDArray[np.int32], chunks: slice, columns: slice) -> Row:
        """One update's elements in these columns, with these scales of their chunks."""
        values = np.repeat(scales, self.counts[chunks])
        values *= self.levels[row][columns]
        return values

    def scatter_values(self, values: npt.NDArray[np.float64], blocks: Sequence[ElementRun]) -> Iterator[Float32Array]:
        """Each of the run's blocks with `values` in its columns and zero elsewhere."""
        first = blocks[0].elements.start
        for block in blocks:
            start, stop = block.elements.start - first, block.elements.stop - first
            if self.positions is None:
                yield values[start:stop].astype(np.float32)
                continue
            part, spread = slice(*np.searchsorted(self.positions, (start, stop))), np.zeros(block.size, dtype=np.float32)
            spread[self.positions[part] - start] = values[part]
            yield spread


def level_max(update: QuantizedUpdate) -> int:
    """The largest level that its mode has."""
    return TOP[update.mode.bits]


def group_runs(updates: Sequence[QuantizedUpdate], blocks: Sequence[ElementRun]) -> Iterator[Sequence[ElementRun]]:
    """Consecutive blocks in which these updates have about `ENTRIES` entries, or one with more."""
    edges = [block.chunks.start for block in blocks]
    return group_blocks(blocks, np.sum([update.body.before[edges] for update in updates], axis=0), ENTRIES)


def columns_of(updates: Sequence[QuantizedUpdate], run: ElementRun) -> LevelColumns:
    entries = [update.entries(run) for update in updates]
    if any(said.positions is None for said in entries):
        return LevelColumns(tuple(said.levels for said in entries), entries[0].counts, None)
    ends = updates[0].layout.chunk_starts[run.chunks.start + 1 : run.chunks.stop + 1] - run.elements.start
    return _union(entries, ends)


def _union(entries: Sequence[LevelEntries], ends: npt.NDArray[np.int64]) -> LevelColumns:
    """`ends`: of the run's chunks."""
    merged = np.sort(np.concatenate([said.positions for said in entries]), kind="stable")  # merges what is in order already
    positions = merged[np.diff(merged, prepend=np.int32(-1)) > 0].astype(np.intp)
    row, levels = np.zeros(ends[-1], dtype=np.int8), []
    for said in entries:
        at = np.asarray(said.positions, dtype=np.intp)  # numpy indexes with nothing else, and would convert it twice
        row[at] = said.levels
        levels.append(row[positions])
        row[at] = 0
    return LevelColumns(tuple(levels), np.diff(np.searchsorted(positions, ends), prepend=0), positions)
