"""Runs of chunks of equal length: what numpy takes as a matrix with a row for each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.replicated.tensor_layout import BLOCK, CHUNK, TensorLayout

ROWS: Final = BLOCK // CHUNK  # worked on at once, so that what is computed of them stays in the cache


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """At most `ROWS` consecutive chunks of `length` elements each, of one tensor or of several."""

    elements: slice
    chunks: slice
    length: int

    def as_matrix(self, vector: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(rows, length): these elements of a vector of all."""
        return vector[self.elements].reshape(-1, self.length)


def iter_chunk_rows(layout: TensorLayout) -> Iterator[ChunkRows]:
    """All chunks, in order."""
    lengths = layout.chunk_lengths
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    element = 0
    for start, stop in pairwise(edges):
        length = int(lengths[start])
        for first in range(start, stop, ROWS):
            last = min(first + ROWS, stop)
            end = element + (last - first) * length
            yield ChunkRows(slice(element, end), slice(first, last), length)
            element = end
