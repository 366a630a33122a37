"""A decoded payload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from training.replicated.codec import levels, scales
from training.replicated.codec.dense import Dense
from training.replicated.codec.entries import Entries
from training.replicated.codec.header import Mode, pack
from training.replicated.codec.sparse import Sparse
from training.replicated.layout import Float32Array, Layout, Run

Number = TypeVar("Number", np.int32, np.int64, np.float32)


@dataclass(frozen=True, eq=False)
class Update:
    """Element = level · scale of its chunk · 2^exponent, exactly."""

    mode: Mode
    origin: bytes  # digest of what it is said of: another one for each trainer of a round
    layout: Layout
    exponent: int
    codes: scales.Codes  # (chunks,), of the scales
    packed: levels.Bytes  # the body, see `dense` and `sparse`
    encoded: levels.Bytes | None = None  # all of it, where `codes` and `packed` are parts of one array

    def encode(self) -> bytes:
        return pack(self.mode, self.origin, self.exponent) + self.codes.tobytes() + self.packed.tobytes()

    @cached_property
    def scales(self) -> scales.Integers:
        """(chunks,)"""
        return scales.SCALES[self.codes]

    @cached_property
    def body(self) -> Dense | Sparse:
        kind = Sparse if self.mode.sparse else Dense
        return kind(self.layout, self.mode, self.scales, self.packed)

    def entries(self, run: Run) -> Entries:
        """Of whole blocks. Any thread may ask."""
        return self.body.entries(run)

    def signed(self, run: Run, scales: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Elements of whole blocks, with this update's levels and other `scales` of its chunks (of all of them, any dtype)."""
        entries = self.entries(run)
        said = np.repeat(scales[run.chunks], entries.counts)
        said *= entries.levels
        if entries.positions is None:
            return said
        values = np.zeros(run.size, dtype=scales.dtype)
        values[entries.positions] = said
        return values

    def norm_squared(self) -> float:
        """‖update‖²: an exact integer, rounded once to the nearest float64."""
        sums = np.bincount(self.codes, weights=self.body.squares(), minlength=len(scales.SCALES))  # exact: far below 2^53
        total = sum(int(level) * int(scale) ** 2 for level, scale in zip(sums, scales.SCALES, strict=True))
        return math.ldexp(float(total), 2 * self.exponent)

    def dense(self) -> Float32Array:
        """The whole update as float32; exact, since a level times a scale has twelve significant bits."""
        values = scales.values(self.codes, self.exponent)
        dense = np.empty(self.layout.size, dtype=np.float32)
        for run in self.body.runs():
            dense[run.elements] = self.signed(run, values)
        return dense
