"""Conversion between vectors and payloads.

A payload begins with the bits of its levels, and the digest of its context (job, round, trainer, model).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError, RemoteProtocolError
from training.job_spec import BITS
from training.replicated.codec import quantization
from training.replicated.tensor_layout import BLOCK, CHUNK, ElementRun, Float32Array, TensorBlock, TensorLayout

ROWS: Final = BLOCK // CHUNK  # most chunks that are processed at once: intermediate results stay in the cache

_DOMAIN: Final = b"folkmoot/payload\0"
_ORIGIN: Final = struct.Struct("<32sQ32s32sII")
_STRUCT: Final = struct.Struct("<B32sb")
HEADER_BYTES: Final = _STRUCT.size

Values = Callable[[TensorBlock], Float32Array]
Number = TypeVar("Number", np.int32, np.int64, np.float32)


@dataclass(frozen=True)
class PayloadHeader:
    """The job, round, trainer and model that a payload is bound to.

    Every judge of a payload knows these, so only their digest is sent.
    """

    job: bytes
    round: int
    trainer: bytes
    base: bytes  # root of the model on which the update was computed
    local_steps: int
    batch: int
    bits: int  # bits of one level: 1, 2, 4, 8 or 16

    @cached_property
    def origin(self) -> bytes:
        fields = (self.job, self.round, self.trainer, self.base, self.local_steps, self.batch)
        return hashlib.sha256(_DOMAIN + _ORIGIN.pack(*fields)).digest()


def pack_header(bits: int, origin: bytes, exponent: int) -> bytes:
    return _STRUCT.pack(bits, origin, exponent)


def unpack_header(payload: bytes | memoryview) -> tuple[int, bytes, int]:
    """Return the bits of a level, the origin and the exponent of a payload.

    Raises `RemoteProtocolError` for a malformed header.
    """
    if len(payload) < HEADER_BYTES:
        raise malformed_payload(f"{len(payload)} bytes are too few for a header")
    bits, origin, exponent = _STRUCT.unpack_from(payload)
    if bits not in BITS:
        raise malformed_payload(f"levels have {bits} bits")
    return bits, origin, exponent


def malformed_payload(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("malformed", f"payload: {detail}")


def chunk_level_bytes(layout: TensorLayout, bits: int) -> npt.NDArray[np.int64]:
    """Return how many bytes the levels of each chunk take, with padding to whole bytes, shape (chunks,)."""
    return (bits * layout.chunk_lengths + 7) // 8


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The ranges of at most `ROWS` consecutive chunks of `length` elements each. The chunks are the rows of a matrix."""

    elements: slice
    chunks: slice
    length: int


def iter_chunk_rows(layout: TensorLayout) -> Iterator[ChunkRows]:
    """Yield matrices that together contain all chunks, in order."""
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
    """A quantized update. Each element is exactly its level · the scale of its chunk · 2^exponent."""

    bits: int  # bits of one level: 1, 2, 4, 8 or 16
    origin: bytes  # digest of the header, which differs between the trainers of a round
    layout: TensorLayout
    exponent: int
    codes: quantization.Codes  # codes of the scales, shape (chunks,)
    packed: quantization.Bytes  # packed levels of all chunks, shape (sum of `chunk_level_bytes`,)
    encoded: quantization.Bytes | None = None  # bytes of the whole payload, if `codes` and `packed` are parts of one array

    def encode(self) -> bytes:
        return pack_header(self.bits, self.origin, self.exponent) + self.codes.tobytes() + self.packed.tobytes()

    @cached_property
    def scales(self) -> quantization.Integers:
        """The scales of all chunks as integers, shape (chunks,)."""
        return quantization.SCALES[self.codes]

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """The offset of each chunk's levels in `packed`, and the end, shape (chunks + 1,)."""
        return np.concatenate([[0], np.cumsum(chunk_level_bytes(self.layout, self.bits))])

    def levels_of(self, run: ElementRun) -> quantization.Levels:
        """Return the levels of a run of whole blocks, shape (elements,). Any thread may call this method.

        Levels in a chunk of scale zero have no meaning.
        """
        unpacked = quantization.unpack_levels(self._bytes_of(run.chunks), self.bits)
        lengths = self.layout.chunk_lengths[run.chunks]
        padding = -self.bits * lengths % 8 // self.bits
        if padding[:-1].any():
            is_said = np.tile([True, False], len(lengths))
            return unpacked[np.repeat(is_said, np.stack([lengths, padding], axis=1).ravel())]
        return unpacked[: run.size]

    def scaled_elements(self, run: ElementRun, scales: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the elements of whole blocks for other scales: this update's levels times `scales`, one scale for each chunk."""
        values = np.repeat(scales[run.chunks], self.layout.chunk_lengths[run.chunks])
        values *= self.levels_of(run)
        return values

    def norm_squared(self) -> float:
        """Return ‖update‖²: an exact integer, rounded once to the nearest float64."""
        squares = self.layout.chunk_lengths if self.bits == 1 else self._squares_and_tops[0]
        sums = np.zeros(len(quantization.SCALES), dtype=np.int64)
        np.add.at(sums, self.codes, squares)  # exact: a chunk has less than 2^42, and a model less than 2^20 chunks
        total = sum(int(level) * int(scale) ** 2 for level, scale in zip(sums, quantization.SCALES, strict=True))
        return math.ldexp(float(total), 2 * self.exponent)

    def dequantize(self) -> Float32Array:
        """Return the whole update as float32. The elements are exact, since a level times a scale has at most 20 significant
        bits.
        """
        values = quantization.scale_values(self.codes, self.exponent)
        elements = np.empty(self.layout.size, dtype=np.float32)
        for block in self.layout.blocks:
            elements[block.elements] = self.scaled_elements(block, values)
        return elements

    def require_canonical(self) -> None:
        """Raise `RemoteProtocolError` unless this is the canonical encoding of the update."""
        least, most, largest = quantization.EXPONENT_MIN, quantization.EXPONENT_MAX, int(self.codes.max())
        if not least <= self.exponent <= most:
            raise malformed_payload(f"exponent {self.exponent} is outside {least}..{most}")
        if largest < quantization.FULL and (largest, self.exponent) != (0, least):
            raise malformed_payload(f"largest scale code {largest} with exponent {self.exponent} is not normalised")
        unused = -self.bits * self.layout.chunk_lengths % 8
        padded = np.flatnonzero(unused)
        if np.any(self.packed[self._starts[padded + 1] - 1] & ((1 << unused[padded]) - 1)):
            raise malformed_payload("padding bits are set")
        if not self.codes.all():
            for rows in iter_chunk_rows(self.layout):
                empty = self.codes[rows.chunks] == 0
                if empty.any() and self._byte_rows(rows)[empty].any():
                    raise malformed_payload("a chunk of scale zero has levels")
        if self.bits > 1:  # Without these checks, other levels with another scale could give the same update.
            top, (_, tops) = quantization.TOP[self.bits], self._squares_and_tops
            if np.any(tops > top) or np.any((tops < top) & (self.codes > 0)):
                raise malformed_payload("a chunk does not use its scale's range")

    @cached_property
    def _squares_and_tops(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
        """Return two arrays: the sum of level² of each chunk, for norms, and the largest |level| of each chunk, for checks."""
        squares, largest = np.empty(len(self.codes), dtype=np.int64), np.empty(len(self.codes), dtype=np.uint16)
        for rows in iter_chunk_rows(self.layout):
            unpacked = quantization.unpack_levels(self._byte_rows(rows), self.bits)
            # Signed integers have no absolute value of their least number. The view as unsigned integers makes it right.
            magnitudes = np.abs(unpacked[:, : rows.length])
            magnitudes = magnitudes.view(f"u{magnitudes.itemsize}")
            largest[rows.chunks] = magnitudes.max(axis=1)
            wide = np.uint16 if self.bits <= 8 else np.uint32
            squares[rows.chunks] = np.square(magnitudes, dtype=wide).sum(axis=1, dtype=np.int64)
        return squares, largest

    def _bytes_of(self, chunks: slice) -> quantization.Bytes:
        return self.packed[self._starts[chunks.start] : self._starts[chunks.stop]]

    def _byte_rows(self, rows: ChunkRows) -> quantization.Bytes:
        """Return the packed levels of these chunks as a matrix of shape (chunks, bytes)."""
        return self._bytes_of(rows.chunks).reshape(rows.chunks.stop - rows.chunks.start, -1)


# Vectors and bytes -------------------------------------------------------------------------------------------------


def payload_bytes(layout: TensorLayout, bits: int) -> int:
    """Return how many bytes a payload has if its levels have this many bits."""
    return HEADER_BYTES + len(layout.chunk_lengths) + int(np.sum(chunk_level_bytes(layout, bits)))


def encode_payload(header: PayloadHeader, m: Float32Array, layout: TensorLayout) -> bytes:
    """Return the canonical payload of the vector `m`. Raises as `quantize_vector`."""
    return quantize_vector(header, m, layout).encode()


def decode_payload(payload: bytes, expected: PayloadHeader, layout: TensorLayout) -> QuantizedUpdate:
    """Return the update in a payload. Raises `RemoteProtocolError` unless it is canonical and has the expected header."""
    if unpack_header(payload)[:2] != (expected.bits, expected.origin):
        raise malformed_payload("the header names other bits, or another job, round, trainer, root or batch")
    return read_payload(payload, layout)


def read_payload(payload: bytes | memoryview, layout: TensorLayout) -> QuantizedUpdate:
    """Return the update in a payload with any header and any number of bits.

    Raises `RemoteProtocolError` unless it is canonical.
    """
    bits, origin, exponent = unpack_header(payload)
    if len(payload) != payload_bytes(layout, bits):
        raise malformed_payload(f"it has {len(payload)} bytes, expected {payload_bytes(layout, bits)}")
    codes, packed = np.split(np.frombuffer(payload, np.uint8, offset=HEADER_BYTES), [len(layout.chunk_lengths)])
    update = QuantizedUpdate(bits, origin, layout, exponent, codes, packed)
    update.require_canonical()
    return update


def quantize_vector(header: PayloadHeader, m: Float32Array, layout: TensorLayout) -> QuantizedUpdate:
    """Return the vector `m` as a quantized update, with the same levels on every machine.

    Raises `LocalProtocolError` if m has no encoding.
    """
    if m.shape != (layout.size,) or m.dtype != np.float32:
        raise LocalProtocolError(f"a buffer of {m.shape} {m.dtype} does not fit a layout of {layout.size} elements")
    packed = np.empty(int(np.sum(chunk_level_bytes(layout, header.bits))), dtype=np.uint8)
    exponent, codes = quantize_into(packed, lambda block: m[block.elements], layout, header.bits)
    return QuantizedUpdate(header.bits, header.origin, layout, exponent, codes, packed)


def quantize_into(packed: quantization.Bytes, values: Values, layout: TensorLayout, bits: int) -> tuple[int, quantization.Codes]:
    """Write the levels of a vector into `packed`. Return its exponent and the codes of its scales.

    `values` returns the vector's blocks. It is called three times for each block.
    """
    unit = quantization.grid_exponent(np.array([(part.max(), part.min()) for part in map(values, layout.blocks)]))
    # Sum and largest value of |value| / 2^unit, rounded, in each chunk.
    sums, largest = (np.empty(len(layout.chunk_lengths), dtype=np.int64) for _ in range(2))
    for chunks, rows in _rows(values, layout):
        grid = quantization.round_to_grid(rows, unit)
        sums[chunks] = grid.sum(axis=1, dtype=np.float64)
        largest[chunks] = grid.max(axis=1)
    codes, exponent = quantization.scales_of_chunks(sums, layout.chunk_lengths, largest, unit, bits)
    scales = quantization.scale_values(codes, exponent)
    units, end = quantization.level_units(scales, bits), 0
    for chunks, rows in _rows(values, layout):
        part = quantization.pack_levels(quantization.quantize_levels(rows, units[chunks, None], bits), bits)
        part[scales[chunks] == 0] = 0
        start, end = end, end + part.size
        packed[start:end] = part.ravel()
    assert end == len(packed)
    return exponent, codes


def _rows(values: Values, layout: TensorLayout) -> Iterator[tuple[slice, Float32Array]]:
    """Yield ranges of chunks of equal length in one block, each with the values as a matrix of shape (chunks, length)."""
    for block in layout.blocks:
        part, full = values(block), block.size // CHUNK
        middle = block.chunks.start + full
        if full:
            yield slice(block.chunks.start, middle), part[: full * CHUNK].reshape(full, CHUNK)
        if middle < block.chunks.stop:
            yield slice(middle, block.chunks.stop), part[None, full * CHUNK :]
