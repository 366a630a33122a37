"""The body of a sparse payload: three streams that run through all chunks of a scale above zero, each padded to whole bytes.

    remainders  of the gaps between elements, p bits each
    levels      one for each element, none of them zero
    quotients   of the gaps, in unary; it ends with the last one

Only the number of quotient bits depends on where the elements are; it is what the payload's length leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.replicated.codec import bit_packing, quantization_levels, quantization_scales, top_k_support
from training.replicated.codec.level_entries import LevelEntries
from training.replicated.codec.payload_header import PayloadMode, malformed_payload
from training.replicated.codec.top_k_support import Positions
from training.replicated.tensor_layout import ElementRun, Float32Array, TensorLayout, group_blocks

SPAN: Final = 1 << 17  # entries decoded at once: a few MiB, and few calls between which threads wait for the interpreter


def sparse_body_bytes_max(layout: TensorLayout, mode: PayloadMode) -> int:
    kept, p = top_k_support.kept_counts(layout, mode.keep), top_k_support.rice_parameter(mode.keep)
    entries = int(np.sum(kept))
    quotients = bit_packing.packed_bytes(top_k_support.quotient_bits_max(layout.chunk_lengths, kept, p), 1)
    return bit_packing.packed_bytes(entries, p) + bit_packing.packed_bytes(entries, mode.bits) + quotients


class SparseBody:
    """A body as it was received. Its entries are decoded whenever they are asked for, and only after `require_canonical`."""

    def __init__(
        self,
        layout: TensorLayout,
        mode: PayloadMode,
        chunk_scales: quantization_scales.Integers,
        packed: quantization_levels.Bytes,
    ) -> None:
        self.layout, self.mode, self.scales = layout, mode, chunk_scales
        self.counts = np.where(chunk_scales > 0, top_k_support.kept_counts(layout, mode.keep), 0)  # (chunks,): entries of each
        self.before = np.concatenate([[0], np.cumsum(self.counts)])  # (chunks + 1,): entries before each chunk
        entries, self._p = int(self.before[-1]), top_k_support.rice_parameter(mode.keep)
        ends = np.cumsum([bit_packing.packed_bytes(entries, self._p), bit_packing.packed_bytes(entries, mode.bits)])
        self._remainders, self._levels, self._quotients = np.split(packed, ends)
        self._edges = layout.block_edges
        self._starts = np.zeros(len(self._edges), dtype=np.int64)  # the first bit of each block's quotients: `_require_inside`

    def runs(self) -> Iterator[ElementRun]:
        """All elements, as many at a time as have about `SPAN` entries."""
        return map(ElementRun.of_blocks, group_blocks(self.layout.blocks, self.before[self._edges[:-1]], SPAN))

    def entries(self, run: ElementRun) -> LevelEntries:
        """Of whole blocks."""
        chunks = run.chunks
        positions, first = self._sums(chunks, self._quotient_ends(chunks)), int(self.before[chunks.start])
        bases = self._bases(positions, chunks) - (self.layout.chunk_starts[chunks] - run.elements.start) + 1
        positions -= np.repeat(bases.astype(np.int32), self.counts[chunks])
        return LevelEntries(positions, self._levels_of(first, len(positions)), self.counts[chunks])

    def _sums(self, chunks: slice, ends: Positions) -> Positions:
        """Running sums over the gaps, each plus one: positions, if there were one chunk that began at 1."""
        first, count = int(self.before[chunks.start]), len(ends)
        if self._p == 0:  # quotients are all there is: a map of bits
            return ends + np.int32(1)
        gaps = np.diff(ends, prepend=np.int32(-1)) - np.int32(1) << self._p
        gaps += bit_packing.unpack_numbers(self._remainders, first, count, self._p)
        gaps += 1
        return np.cumsum(gaps, dtype=np.int32)

    def _quotient_ends(self, chunks: slice) -> Positions:
        """The last bit of each quotient of whole blocks, counted from their first bit, which is known."""
        start = int(self._starts[np.searchsorted(self._edges, chunks.start)])
        count = int(self.before[chunks.stop] - self.before[chunks.start])
        lengths, counts = self.layout.chunk_lengths[chunks], self.counts[chunks]
        most = start + top_k_support.quotient_bits_max(lengths[counts > 0], counts[counts > 0], self._p)
        unpacked = np.unpackbits(self._quotients[start // 8 : (most + 7) // 8])[start % 8 :]
        ends = np.flatnonzero(unpacked.view(np.bool_))[:count].astype(np.int32)
        if len(ends) < count:
            raise malformed_payload("quotients of a support end beyond its chunk")
        return ends

    def _bases(self, sums: Positions, chunks: slice) -> npt.NDArray[np.int64]:
        """What the sums are at the beginning of each chunk."""
        padded = np.concatenate([np.zeros(1, np.int32), sums])
        return padded[self.before[chunks] - self.before[chunks.start]].astype(np.int64)

    def _require_inside(self, chunks: slice) -> None:
        """And finds the first bits of the blocks after the first."""
        ends = self._quotient_ends(chunks)
        first, last = np.searchsorted(self._edges, (chunks.start, chunks.stop))
        before = self.before[self._edges[first : last + 1]] - self.before[chunks.start]
        self._starts[first : last + 1] = self._starts[first] + np.concatenate([np.full(1, -1, np.int32), ends])[before] + 1
        sums = self._sums(chunks, ends)
        bases = self._bases(sums, chunks)
        if np.any(np.diff(bases, append=sums[-1:] if len(sums) else 0) > self.layout.chunk_lengths[chunks]):
            raise malformed_payload("a support ends beyond its chunk")

    def _levels_of(self, first: int, count: int) -> quantization_levels.Levels:
        each = 8 // self.mode.bits
        unpacked = quantization_levels.unpack_levels(self._levels[first // each : -(-(first + count) // each)], self.mode.bits)
        return unpacked[first % each :][:count]

    def squared_level_sums(self) -> npt.NDArray[np.int64]:
        """(chunks,): the sum of all level² in each chunk."""
        if self.mode.bits == 1:
            return self.counts
        sums = np.zeros(len(self.scales), dtype=np.int64)
        for chunks, part in self._level_parts():
            starts = self._filled_starts(chunks)
            squares = np.square(part, dtype=np.int16)
            sums[chunks][self.counts[chunks] > 0] = np.add.reduceat(squares, starts, dtype=np.int64) if len(starts) else 0
        return sums

    def _level_parts(self) -> Iterator[tuple[slice, quantization_levels.Levels]]:
        """The levels of every run, with its chunks."""
        for run in self.runs():
            first, end = self.before[run.chunks.start], self.before[run.chunks.stop]
            yield run.chunks, self._levels_of(int(first), int(end - first))

    def _filled_starts(self, chunks: slice) -> npt.NDArray[np.int64]:
        """Where in a run the entries of each chunk that has any begin."""
        return (self.before[chunks] - self.before[chunks.start])[self.counts[chunks] > 0]

    def require_canonical(self) -> None:
        self._require_lengths()
        for run in self.runs():
            self._require_inside(run.chunks)
        if self.mode.bits > 1:
            self._require_levels()

    def _require_lengths(self) -> None:
        """Every stream has as many numbers as there are entries, and nothing else."""
        entries = int(self.before[-1])
        for stream, width in ((self._remainders, self._p), (self._levels, self.mode.bits)):
            if len(stream) != bit_packing.packed_bytes(entries, width):
                raise malformed_payload(f"too short for {entries} entries")
            if bit_packing.padding_bits(stream, entries, width):
                raise malformed_payload("padding bits are set")
        ends = int(np.sum(np.bitwise_count(self._quotients), dtype=np.int64))
        if ends != entries or (len(self._quotients) and not self._quotients[-1]):
            raise malformed_payload(f"{ends} quotients of {entries}, or bytes after the last")

    def _require_levels(self) -> None:
        top = quantization_levels.TOP[self.mode.bits]
        for chunks, part in self._level_parts():
            if not part.all() or part.min(initial=0) < -top:
                raise malformed_payload("a level is none of this mode")
            starts = self._filled_starts(chunks)
            if len(starts) and np.any(np.maximum.reduceat(np.abs(part), starts) < top):
                raise malformed_payload("a chunk does not use its scale's range")


def encode_sparse(
    m: Float32Array, layout: TensorLayout, mode: PayloadMode
) -> tuple[int, quantization_scales.Codes, quantization_levels.Bytes]:
    """Exponent, scale codes and body of what can be said of `m`."""
    unit = quantization_scales.grid_exponent(m)
    chosen, sums, largest = _magnitudes(m, layout, mode, unit)
    codes, exponent = quantization_scales.scales_of_chunks(
        sums, top_k_support.kept_counts(layout, mode.keep), largest, unit, mode.bits
    )
    return exponent, codes, _pack(m, layout, mode, chosen, quantization_scales.scale_values(codes, exponent))


def _pack(
    m: Float32Array,
    layout: TensorLayout,
    mode: PayloadMode,
    chosen: Sequence[top_k_support.Positions],
    chunk_scales: Float32Array,
) -> quantization_levels.Bytes:
    """The body that says `m` at the positions `chosen` in each block, by the scales of chunks."""
    kept, p = top_k_support.kept_counts(layout, mode.keep), top_k_support.rice_parameter(mode.keep)
    said: tuple[list[Any], ...] = ([], [], [])  # of each block: remainders, levels, quotients
    for block, positions in zip(layout.blocks, chosen, strict=True):
        of_entries = np.repeat(chunk_scales[block.chunks], kept[block.chunks])
        counts = np.where(chunk_scales[block.chunks] > 0, kept[block.chunks], 0)
        positions = positions[of_entries > 0]
        quotients, remainders = top_k_support.rice_encode(positions, counts, p)
        units = quantization_levels.level_units(of_entries[of_entries > 0], mode.bits)
        part = quantization_levels.quantize_levels(m[block.elements][positions], units, mode.bits, least=1)
        for stream, item in zip(said, (remainders, part, quotients), strict=True):
            stream.append(item)
    remainders, part, quotients = (np.concatenate(stream) for stream in said)
    return np.concatenate(
        [bit_packing.pack_numbers(remainders, p), quantization_levels.pack_levels(part, mode.bits), np.packbits(quotients)]
    )


def _magnitudes(
    m: Float32Array, layout: TensorLayout, mode: PayloadMode, unit: int
) -> tuple[list[top_k_support.Positions], quantization_scales.Integers, quantization_scales.Integers]:
    """The positions to be said of every block; the sum and the largest of |m| / 2^unit there, rounded, of every chunk."""
    kept = top_k_support.kept_counts(layout, mode.keep)
    chosen, (sums, largest) = [], (np.empty(len(kept), dtype=np.int64) for _ in range(2))
    for block in layout.blocks:
        part, counts = m[block.elements], kept[block.chunks]
        chosen.append(top_k_support.choose_top_k(part, counts))
        grid, starts = quantization_scales.round_to_grid(part[chosen[-1]], unit), np.cumsum(counts) - counts
        sums[block.chunks] = np.add.reduceat(grid, starts, dtype=np.float64)
        largest[block.chunks] = np.maximum.reduceat(grid, starts)
    return chosen, sums, largest
