"""The body of a dense payload: the level of every element, every chunk padded to whole bytes with zero bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from training.replicated.codec import levels, scales
from training.replicated.codec.entries import Entries
from training.replicated.codec.header import Mode, malformed
from training.replicated.codec.rows import Rows, rows_of
from training.replicated.layout import CHUNK, Block, Float32Array, Layout, Run

Values = Callable[[Block], Float32Array]


def chunk_bytes(layout: Layout, bits: int) -> npt.NDArray[np.int64]:
    return (bits * layout.chunk_lengths + 7) // 8


def size(layout: Layout, bits: int) -> int:
    """Bytes of a body, which depend on nothing else."""
    return int(np.sum(chunk_bytes(layout, bits)))


@dataclass(frozen=True, eq=False)
class Dense:
    layout: Layout
    mode: Mode
    scales: scales.Integers  # (chunks,)
    packed: levels.Bytes  # (size(layout, bits),)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """(chunks + 1,): where the bytes of each chunk begin."""
        return np.concatenate([[0], np.cumsum(chunk_bytes(self.layout, self.mode.bits))])

    @property
    def before(self) -> npt.NDArray[np.int64]:
        """(chunks + 1,): entries before each chunk."""
        return self.layout.chunk_starts

    def runs(self) -> Sequence[Run]:
        """All elements, as many at a time as stay in the cache."""
        return self.layout.blocks

    def levels_of(self, run: Run) -> levels.Levels:
        unpacked, lengths = levels.unpack(self._bytes(run.chunks), self.mode.bits), self.layout.chunk_lengths[run.chunks]
        padding = -self.mode.bits * lengths % 8 // self.mode.bits
        if padding[:-1].any():
            is_said = np.tile([True, False], len(lengths))
            return unpacked[np.repeat(is_said, np.stack([lengths, padding], axis=1).ravel())]
        return unpacked[: run.size]

    def entries(self, run: Run) -> Entries:
        return Entries(None, self.levels_of(run), self.layout.chunk_lengths[run.chunks])

    def _bytes(self, chunks: slice) -> levels.Bytes:
        return self.packed[self.starts[chunks.start] : self.starts[chunks.stop]]

    def _bytes_of(self, rows: Rows) -> levels.Bytes:
        """(rows, bytes of each)"""
        return self._bytes(rows.chunks).reshape(rows.chunks.stop - rows.chunks.start, -1)

    def squares(self) -> npt.NDArray[np.int64]:
        """(chunks,): the sum of all level² in each chunk."""
        return self.layout.chunk_lengths if self.mode.bits == 1 else self._sums[0]

    @cached_property
    def _sums(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Of each chunk the sum of all level² and the largest |level|: a check needs one, a norm the other."""
        squares, largest = np.empty(len(self.scales), dtype=np.int64), np.empty(len(self.scales), dtype=np.uint8)
        for rows in rows_of(self.layout):
            unpacked = levels.unpack(self._bytes_of(rows), self.mode.bits)
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
        if len(self.packed) != size(self.layout, self.mode.bits):
            raise malformed(f"{len(self.packed)} bytes of levels")
        if np.any(self.packed[self.starts[padded + 1] - 1] & ((1 << unused[padded]) - 1)):
            raise malformed("padding bits are set")

    def _require_nothing_in_empty_chunks(self) -> None:
        for rows in rows_of(self.layout):
            empty = self.scales[rows.chunks] == 0
            if empty.any() and self._bytes_of(rows)[empty].any():
                raise malformed("levels in a chunk of scale zero")

    def _require_top_levels(self) -> None:
        """Or else other levels with another scale would say the same."""
        _, largest = self._sums
        if np.any(largest > levels.TOP[self.mode.bits]) or np.any((largest < levels.TOP[self.mode.bits]) & (self.scales > 0)):
            raise malformed("a chunk does not use its scale's range")


def coded(m: Float32Array, layout: Layout, mode: Mode) -> tuple[int, scales.Codes, levels.Bytes]:
    """Exponent, scale codes and body of what can be said of `m`."""
    packed = np.empty(size(layout, mode.bits), dtype=np.uint8)
    return *coded_into(packed, lambda block: m[block.elements], layout, mode), packed


def coded_into(packed: levels.Bytes, values: Values, layout: Layout, mode: Mode) -> tuple[int, scales.Codes]:
    """The same of a vector of which `values` gives each block three times; its body is written into `packed`."""
    unit = scales.unit_of(np.array([(part.max(), part.min()) for part in map(values, layout.blocks)]))
    sums, largest = _magnitudes(values, layout, unit)
    codes, exponent = scales.of_chunks(sums, layout.chunk_lengths, largest, unit, mode.bits)
    _pack(packed, values, layout, mode, scales.values(codes, exponent))
    return exponent, codes


def _rows(values: Values, layout: Layout) -> Iterator[tuple[slice, Float32Array]]:
    """Chunks of equal length of one block, and the block's values as a matrix with a row for each of them."""
    for block in layout.blocks:
        part, full = values(block), block.size // CHUNK
        middle = block.chunks.start + full
        if full:
            yield slice(block.chunks.start, middle), part[: full * CHUNK].reshape(full, CHUNK)
        if middle < block.chunks.stop:
            yield slice(middle, block.chunks.stop), part[None, full * CHUNK :]


def _magnitudes(values: Values, layout: Layout, unit: int) -> tuple[scales.Integers, scales.Integers]:
    """The sum and the largest of |value| / 2^unit, rounded to integers, of every chunk."""
    sums, largest = (np.empty(len(layout.chunk_lengths), dtype=np.int64) for _ in range(2))
    for chunks, rows in _rows(values, layout):
        grid = scales.grid(rows, unit)
        sums[chunks] = grid.sum(axis=1, dtype=np.float64)
        largest[chunks] = grid.max(axis=1)
    return sums, largest


def _pack(packed: levels.Bytes, values: Values, layout: Layout, mode: Mode, chunk_scales: Float32Array) -> None:
    """Writes the body that says the values by the scales of chunks."""
    units, end = levels.units_of(chunk_scales, mode.bits), 0
    for chunks, rows in _rows(values, layout):
        part = levels.pack(levels.quantise(rows, units[chunks, None], mode.bits), mode.bits)
        part[chunk_scales[chunks] == 0] = 0
        start, end = end, end + part.size
        packed[start:end] = part.ravel()
    assert end == len(packed)
