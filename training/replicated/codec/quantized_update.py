"""A decoded payload."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from training.replicated.codec import quantization_levels, quantization_scales
from training.replicated.codec.payload_header import malformed_payload, pack_header
from training.replicated.tensor_layout import BLOCK, CHUNK, ElementRun, Float32Array, TensorLayout

ROWS: Final = BLOCK // CHUNK  # worked on at once, so that what is computed of them stays in the cache

Number = TypeVar("Number", np.int32, np.int64, np.float32)


def chunk_level_bytes(layout: TensorLayout, bits: int) -> npt.NDArray[np.int64]:
    """(chunks,): bytes of each chunk's levels, which are padded to whole bytes with zero bits."""
    return (bits * layout.chunk_lengths + 7) // 8


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """At most `ROWS` consecutive chunks of `length` elements each, of one tensor or of several: rows of a matrix."""

    elements: slice
    chunks: slice
    length: int


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


@dataclass(frozen=True, eq=False)
class QuantizedUpdate:
    """Element = level · scale of its chunk · 2^exponent, exactly."""

    bits: int  # of one level: 1, 2, 4 or 8
    origin: bytes  # digest of what it is said of: another one for each trainer of a round
    layout: TensorLayout
    exponent: int
    codes: quantization_scales.Codes  # (chunks,), of the scales
    packed: quantization_levels.Bytes  # the levels of all chunks, (sum of `chunk_level_bytes`,)
    encoded: quantization_levels.Bytes | None = None  # all of it, where `codes` and `packed` are parts of one array

    def encode(self) -> bytes:
        return pack_header(self.bits, self.origin, self.exponent) + self.codes.tobytes() + self.packed.tobytes()

    @cached_property
    def scales(self) -> quantization_scales.Integers:
        """(chunks,)"""
        return quantization_scales.SCALES[self.codes]

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """(chunks + 1,): where the bytes of each chunk begin."""
        return np.concatenate([[0], np.cumsum(chunk_level_bytes(self.layout, self.bits))])

    def levels_of(self, run: ElementRun) -> quantization_levels.Levels:
        """(elements,): of whole blocks. Levels in a chunk of scale zero mean nothing. Any thread may ask."""
        unpacked = quantization_levels.unpack_levels(self._bytes_of(run.chunks), self.bits)
        lengths = self.layout.chunk_lengths[run.chunks]
        padding = -self.bits * lengths % 8 // self.bits
        if padding[:-1].any():
            is_said = np.tile([True, False], len(lengths))
            return unpacked[np.repeat(is_said, np.stack([lengths, padding], axis=1).ravel())]
        return unpacked[: run.size]

    def scaled_elements(self, run: ElementRun, scales: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Elements of whole blocks, with this update's levels and other `scales` of its chunks (of all of them, any dtype)."""
        values = np.repeat(scales[run.chunks], self.layout.chunk_lengths[run.chunks])
        values *= self.levels_of(run)
        return values

    def norm_squared(self) -> float:
        """‖update‖²: an exact integer, rounded once to the nearest float64."""
        squares = self.layout.chunk_lengths if self.bits == 1 else self._squares_and_tops[0]
        # exact: far below 2^53
        sums = np.bincount(self.codes, weights=squares, minlength=len(quantization_scales.SCALES))
        total = sum(int(level) * int(scale) ** 2 for level, scale in zip(sums, quantization_scales.SCALES, strict=True))
        return math.ldexp(float(total), 2 * self.exponent)

    def dequantize(self) -> Float32Array:
        """The whole update as float32; exact, since a level times a scale has twelve significant bits."""
        values = quantization_scales.scale_values(self.codes, self.exponent)
        elements = np.empty(self.layout.size, dtype=np.float32)
        for block in self.layout.blocks:
            elements[block.elements] = self.scaled_elements(block, values)
        return elements

    def require_canonical(self) -> None:
        """`RemoteProtocolError` if other scales or levels of as many bytes would say the same."""
        quantization_scales.require_normalised(self.codes, self.exponent)
        self._require_padding()
        if not self.codes.all():
            self._require_nothing_in_empty_chunks()
        if self.bits > 1:
            self._require_top_levels()

    def _require_padding(self) -> None:
        unused = -self.bits * self.layout.chunk_lengths % 8
        padded = np.flatnonzero(unused)
        if np.any(self.packed[self._starts[padded + 1] - 1] & ((1 << unused[padded]) - 1)):
            raise malformed_payload("padding bits are set")

    def _require_nothing_in_empty_chunks(self) -> None:
        for rows in iter_chunk_rows(self.layout):
            empty = self.codes[rows.chunks] == 0
            if empty.any() and self._byte_rows(rows)[empty].any():
                raise malformed_payload("levels in a chunk of scale zero")

    def _require_top_levels(self) -> None:
        """Or else other levels with another scale would say the same."""
        top, (_, largest) = quantization_levels.TOP[self.bits], self._squares_and_tops
        if np.any(largest > top) or np.any((largest < top) & (self.codes > 0)):
            raise malformed_payload("a chunk does not use its scale's range")

    @cached_property
    def _squares_and_tops(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Of each chunk the sum of all level² and the largest |level|: a check needs one, a norm the other."""
        squares, largest = np.empty(len(self.codes), dtype=np.int64), np.empty(len(self.codes), dtype=np.uint8)
        for rows in iter_chunk_rows(self.layout):
            unpacked = quantization_levels.unpack_levels(self._byte_rows(rows), self.bits)
            magnitudes = np.abs(unpacked[:, : rows.length]).view(np.uint8)  # −128 is 128
            largest[rows.chunks] = magnitudes.max(axis=1)
            squares[rows.chunks] = np.square(magnitudes, dtype=np.uint16).sum(axis=1, dtype=np.int64)
        return squares, largest

    def _bytes_of(self, chunks: slice) -> quantization_levels.Bytes:
        return self.packed[self._starts[chunks.start] : self._starts[chunks.stop]]

    def _byte_rows(self, rows: ChunkRows) -> quantization_levels.Bytes:
        """(rows, bytes of each)"""
        return self._bytes_of(rows.chunks).reshape(rows.chunks.stop - rows.chunks.start, -1)
