"""The body of a dense payload: the level of every element, every chunk padded to whole bytes with zero bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from training.replicated.codec import quantization_levels, quantization_scales
from training.replicated.codec.chunk_rows import ChunkRows, iter_chunk_rows
from training.replicated.codec.level_entries import LevelEntries
from training.replicated.codec.payload_header import PayloadMode, malformed_payload
from training.replicated.tensor_layout import CHUNK, ElementRun, Float32Array, TensorBlock, TensorLayout

Values = Callable[[TensorBlock], Float32Array]


def chunk_bytes(layout: TensorLayout, bits: int) -> npt.NDArray[np.int64]:
    return (bits * layout.chunk_lengths + 7) // 8


def dense_body_bytes(layout: TensorLayout, bits: int) -> int:
    """Bytes of a body, which depend on nothing else."""
    return int(np.sum(chunk_bytes(layout, bits)))


@dataclass(frozen=True, eq=False)
class DenseBody:
    layout: TensorLayout
    mode: PayloadMode
    scales: quantization_scales.Integers  # (chunks,)
    packed: quantization_levels.Bytes  # (size(layout, bits),)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """(chunks + 1,): where the bytes of each chunk begin."""
        return np.concatenate([[0], np.cumsum(chunk_bytes(self.layout, self.mode.bits))])

    @property
    def before(self) -> npt.NDArray[np.int64]:
        """(chunks + 1,): entries before each chunk."""
        return self.layout.chunk_starts

    def runs(self) -> Sequence[ElementRun]:
        """All elements, as many at a time as stay in the cache."""
        return self.layout.blocks

    def levels_of(self, run: ElementRun) -> quantization_levels.Levels:
        unpacked, lengths = (
            quantization_levels.unpack_levels(self._bytes(run.chunks), self.mode.bits),
            self.layout.chunk_lengths[run.chunks],
        )
        padding = -self.mode.bits * lengths % 8 // self.mode.bits
        if padding[:-1].any():
            is_said = np.tile([True, False], len(lengths))
            return unpacked[np.repeat(is_said, np.stack([lengths, padding], axis=1).ravel())]
        return unpacked[: run.size]

    def entries(self, run: ElementRun) -> LevelEntries:
        return LevelEntries(None, self.levels_of(run), self.layout.chunk_lengths[run.chunks])

    def _bytes(self, chunks: slice) -> quantization_levels.Bytes:
        return self.packed[self.starts[chunks.start] : self.starts[chunks.stop]]

    def _bytes_of(self, rows: ChunkRows) -> quantization_levels.Bytes:
        """(rows, bytes of each)"""
        return self._bytes(rows.chunks).reshape(rows.chunks.stop - rows.chunks.start, -1)

    def squared_level_sums(self) -> npt.NDArray[np.int64]:
        """(chunks,): the sum of all level² in each chunk."""
        return self.layout.chunk_lengths if self.mode.bits == 1 else self._sums[0]

    @cached_property
    def _sums(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Of each chunk the sum of all level² and the largest |level|: a check needs one, a norm the other."""
        squares, largest = np.empty(len(self.scales), dtype=np.int64), np.empty(len(self.scales), dtype=np.uint8)
        for rows in iter_chunk_rows(self.layout):
            unpacked = quantization_levels.unpack_levels(self._bytes_of(rows), self.mode.bits)
            magnitudes = np.abs(unpacked[:, : rows.length]).view(np.uint8)  # −128 is 128
            largest[rows.chunks] = magnitudes.max(axis=1)
            squares[rows.chunks] = np.square(magnitudes, dtype=np.uint16).sum(axis=1, dtype=np.int64)
        return squares, largest

    def require_canonical(self) -> None:
        self._require_length()
        if not self.scales.all():
            self._require_nothing_in_empty_chunks()
        if self.mode.bits > 1:
            self._require_top_levels()

    def _require_length(self) -> None:
        unused = -self.mode.bits * self.layout.chunk_lengths % 8
        padded = np.flatnonzero(unused)
        if len(self.packed) != dense_body_bytes(self.layout, self.mode.bits):
            raise malformed_payload(f"{len(self.packed)} bytes of levels")
        if np.any(self.packed[self.starts[padded + 1] - 1] & ((1 << unused[padded]) - 1)):
            raise malformed_payload("padding bits are set")

    def _require_nothing_in_empty_chunks(self) -> None:
        for rows in iter_chunk_rows(self.layout):
            empty = self.scales[rows.chunks] == 0
            if empty.any() and self._bytes_of(rows)[empty].any():
                raise malformed_payload("levels in a chunk of scale zero")

    def _require_top_levels(self) -> None:
        """Or else other levels with another scale would say the same."""
        _, largest = self._sums
        if np.any(largest > quantization_levels.TOP[self.mode.bits]) or np.any(
            (largest < quantization_levels.TOP[self.mode.bits]) & (self.scales > 0)
        ):
            raise malformed_payload("a chunk does not use its scale's range")


def encode_dense(
    m: Float32Array, layout: TensorLayout, mode: PayloadMode
) -> tuple[int, quantization_scales.Codes, quantization_levels.Bytes]:
    """Exponent, scale codes and body of what can be said of `m`."""
    packed = np.empty(dense_body_bytes(layout, mode.bits), dtype=np.uint8)
    return *encode_dense_into(packed, lambda block: m[block.elements], layout, mode), packed


def encode_dense_into(
    packed: quantization_levels.Bytes, values: Values, layout: TensorLayout, mode: PayloadMode
) -> tuple[int, quantization_scales.Codes]:
    """The same of a vector of which `values` gives each block three times; its body is written into `packed`."""
    unit = quantization_scales.grid_exponent(np.array([(part.max(), part.min()) for part in map(values, layout.blocks)]))
    sums, largest = _magnitudes(values, layout, unit)
    codes, exponent = quantization_scales.scales_of_chunks(sums, layout.chunk_lengths, largest, unit, mode.bits)
    _pack(packed, values, layout, mode, quantization_scales.scale_values(codes, exponent))
    return exponent, codes


def _rows(values: Values, layout: TensorLayout) -> Iterator[tuple[slice, Float32Array]]:
    """Chunks of equal length of one block, and the block's values as a matrix with a row for each of them."""
    for block in layout.blocks:
        part, full = values(block), block.size // CHUNK
        middle = block.chunks.start + full
        if full:
            yield slice(block.chunks.start, middle), part[: full * CHUNK].reshape(full, CHUNK)
        if middle < block.chunks.stop:
            yield slice(middle, block.chunks.stop), part[None, full * CHUNK :]


def _magnitudes(
    values: Values, layout: TensorLayout, unit: int
) -> tuple[quantization_scales.Integers, quantization_scales.Integers]:
    """The sum and the largest of |value| / 2^unit, rounded to integers, of every chunk."""
    sums, largest = (np.empty(len(layout.chunk_lengths), dtype=np.int64) for _ in range(2))
    for chunks, rows in _rows(values, layout):
        grid = quantization_scales.round_to_grid(rows, unit)
        sums[chunks] = grid.sum(axis=1, dtype=np.float64)
        largest[chunks] = grid.max(axis=1)
    return sums, largest


def _pack(
    packed: quantization_levels.Bytes, values: Values, layout: TensorLayout, mode: PayloadMode, chunk_scales: Float32Array
) -> None:
    """Writes the body that says the values by the scales of chunks."""
    units, end = quantization_levels.level_units(chunk_scales, mode.bits), 0
    for chunks, rows in _rows(values, layout):
        part = quantization_levels.pack_levels(
            quantization_levels.quantize_levels(rows, units[chunks, None], mode.bits), mode.bits
        )
        part[chunk_scales[chunks] == 0] = 0
        start, end = end, end + part.size
        packed[start:end] = part.ravel()
    assert end == len(packed)
