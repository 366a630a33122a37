"""A decoded payload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from training.replicated.codec import quantization_levels, quantization_scales
from training.replicated.codec.dense_body import DenseBody
from training.replicated.codec.level_entries import LevelEntries
from training.replicated.codec.payload_header import PayloadMode, pack_header
from training.replicated.codec.sparse_body import SparseBody
from training.replicated.tensor_layout import ElementRun, Float32Array, TensorLayout

Number = TypeVar("Number", np.int32, np.int64, np.float32)


@dataclass(frozen=True, eq=False)
class QuantizedUpdate:
    """Element = level · scale of its chunk · 2^exponent, exactly."""

    mode: PayloadMode
    origin: bytes  # digest of what it is said of: another one for each trainer of a round
    layout: TensorLayout
    exponent: int
    codes: quantization_scales.Codes  # (chunks,), of the scales
    packed: quantization_levels.Bytes  # the body, see `dense` and `sparse`
    encoded: quantization_levels.Bytes | None = None  # all of it, where `codes` and `packed` are parts of one array

    def encode(self) -> bytes:
        return pack_header(self.mode, self.origin, self.exponent) + self.codes.tobytes() + self.packed.tobytes()

    @cached_property
    def scales(self) -> quantization_scales.Integers:
        """(chunks,)"""
        return quantization_scales.SCALES[self.codes]

    @cached_property
    def body(self) -> DenseBody | SparseBody:
        kind = SparseBody if self.mode.sparse else DenseBody
        return kind(self.layout, self.mode, self.scales, self.packed)

    def entries(self, run: ElementRun) -> LevelEntries:
        """Of whole blocks. Any thread may ask."""
        return self.body.entries(run)

    def scaled_elements(self, run: ElementRun, scales: npt.NDArray[Number]) -> npt.NDArray[Number]:
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
        # exact: far below 2^53
        sums = np.bincount(self.codes, weights=self.body.squared_level_sums(), minlength=len(quantization_scales.SCALES))
        total = sum(int(level) * int(scale) ** 2 for level, scale in zip(sums, quantization_scales.SCALES, strict=True))
        return math.ldexp(float(total), 2 * self.exponent)

    def to_dense(self) -> Float32Array:
        """The whole update as float32; exact, since a level times a scale has twelve significant bits."""
        values = quantization_scales.scale_values(self.codes, self.exponent)
        dense = np.empty(self.layout.size, dtype=np.float32)
        for run in self.body.runs():
            dense[run.elements] = self.scaled_elements(run, values)
        return dense
