"""The body of a dense payload: the level of every element, every chunk padded to whole bytes with zero bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from training.replicated.codec import levels, scales
from training.replicated.codec.entries import Entries
from training.replicated.codec.header import Mode, malformed
from training.replicated.layout import CHUNK, Block, Float32Array, Layout


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

    def levels_of(self, block: Block) -> levels.Levels:
        unpacked = levels.unpack(self._bytes(block), self.mode.bits)
        return unpacked[: block.size]  # only the last chunk of a block is padded

    def entries(self, block: Block) -> Entries:
        return Entries(None, self.levels_of(block), None)

    def _bytes(self, block: Block) -> levels.Bytes:
        return self.packed[self.starts[block.chunks.start] : self.starts[block.chunks.stop]]

    def squares(self) -> npt.NDArray[np.int64]:
        """(chunks,): the sum of all level² in each chunk."""
        if self.mode.bits == 1:
            return self.layout.chunk_lengths
        sums = np.empty(len(self.scales), dtype=np.int64)
        for block in self.layout.blocks:
            squares = np.square(self.levels_of(block), dtype=np.int16)
            sums[block.chunks] = np.add.reduceat(squares, np.arange(0, block.size, CHUNK), dtype=np.int64)
        return sums

    def require_canonical(self) -> None:
        self._require_length()
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
        for chunk in np.flatnonzero(self.scales == 0):
            if self.packed[self.starts[chunk] : self.starts[chunk + 1]].any():
                raise malformed("levels in a chunk of scale zero")

    def _require_top_levels(self) -> None:
        """Or else other levels with another scale would say the same."""
        top = levels.TOP[self.mode.bits]
        for block in self.layout.blocks:
            unpacked, starts = self.levels_of(block), np.arange(0, block.size, CHUNK)
            high, low = np.maximum.reduceat(unpacked, starts), np.minimum.reduceat(unpacked, starts)
            full = (high == top) | (low == -top)
            if np.any(low < -top) or not np.all(full | (self.scales[block.chunks] == 0)):
                raise malformed("a chunk does not use its scale's range")


def coded(m: Float32Array, layout: Layout, mode: Mode) -> tuple[int, scales.Codes, levels.Bytes]:
    """Exponent, scale codes and body of what can be said of `m`."""
    unit = scales.unit_of(m)
    sums, largest = _magnitudes(m, layout, unit)
    codes, exponent = scales.of_chunks(sums, layout.chunk_lengths, largest, unit, mode.bits)
    return exponent, codes, _pack(m, layout, mode, scales.SCALES[codes], exponent)


def _magnitudes(m: Float32Array, layout: Layout, unit: int) -> tuple[scales.Integers, scales.Integers]:
    """The sum and the largest of |m| / 2^unit, rounded to integers, of every chunk."""
    sums, largest = (np.empty(len(layout.chunk_lengths), dtype=np.int64) for _ in range(2))
    for block in layout.blocks:
        grid, starts = scales.grid(m[block.elements], unit), np.arange(0, block.size, CHUNK)
        sums[block.chunks] = np.add.reduceat(grid, starts)
        largest[block.chunks] = np.maximum.reduceat(grid, starts)
    return sums, largest


def _pack(m: Float32Array, layout: Layout, mode: Mode, chunk_scales: scales.Integers, exponent: int) -> levels.Bytes:
    """The body that says `m` by the scales `chunk_scales` · 2^exponent."""
    body = Dense(layout, mode, chunk_scales, np.zeros(size(layout, mode.bits), dtype=np.uint8))
    for block in layout.blocks:
        of_elements = np.repeat(chunk_scales[block.chunks], layout.chunk_lengths[block.chunks])
        unpacked = levels.quantise(m[block.elements], of_elements, exponent, mode.bits)
        body._bytes(block)[:] = levels.pack(unpacked, mode.bits)
    for chunk in np.flatnonzero(chunk_scales == 0):
        body.packed[body.starts[chunk] : body.starts[chunk + 1]] = 0
    return body.packed
