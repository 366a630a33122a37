"""The payload of a trainer's update: one sign per element, one scale per chunk (the scaled sign of EF-signSGD, Karimireddy
2019, arXiv:1901.09847), in exactly one canonical byte string.

    header    see `_HEADER`: binds version, mode, job, round, trainer, model root, local steps and batch; then the exponent
    mantissas one unsigned 16-bit integer per chunk; chunk scale = mantissa · 2^exponent = mean |m| over the chunk, rounded
    signs     one bit per element, 1 = negative, from the highest bit down, every chunk padded to whole bytes with zeros

Canonical: the largest mantissa has its top bit set, or all are zero and the exponent is the least one; a chunk with mantissa
zero has no sign bits. All integers little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError, RemoteProtocolError
from training.replicated.layout import CHUNK, Block, Float32Array, Layout
from training.spec import JobSpec

VERSION: Final = 1
DENSE_1BIT: Final = 1  # mode
MANTISSA_BITS: Final = 16  # scales of one update spread over far more than an octave, and 2 bytes per 4096 elements cost 0.4 %
EXPONENT_MIN: Final = -80  # the least scale is 2^-80 and everything derived stays far from float32's subnormal numbers
EXPONENT_MAX: Final = 16  # elements below 2^32: beyond any update that training can use
GRID_BITS: Final = 40  # |m| is summed as integers below 2^40: 4096 of them stay below 2^53, where float64 adds exactly

Number = TypeVar("Number", np.int32, np.float32)

_HEADER: Final = struct.Struct("<BB32sQ32s32sIIb")

assert CHUNK << GRID_BITS < 1 << 53
assert _HEADER.size == 115


@dataclass(frozen=True, slots=True)
class Header:
    job: bytes
    round: int
    trainer: bytes
    base: bytes  # root of the model it was computed on
    local_steps: int
    batch: int

    @classmethod
    def of(cls, spec: JobSpec, job: bytes, round: int, trainer: bytes, base: bytes) -> Header:
        return cls(job, round, trainer, base, spec.local_steps, spec.batch)

    def pack(self, exponent: int) -> bytes:
        fields = (self.job, self.round, self.trainer, self.base, self.local_steps, self.batch)
        return _HEADER.pack(VERSION, DENSE_1BIT, *fields, exponent)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A decoded payload: element = ±mantissa of its chunk · 2^exponent, exactly."""

    header: Header
    layout: Layout
    exponent: int
    mantissas: npt.NDArray[np.uint16]  # (chunks,)
    signs: npt.NDArray[np.uint8]  # (layout.sign_bytes,), packed

    def encode(self) -> bytes:
        return self.header.pack(self.exponent) + self.mantissas.astype("<u2").tobytes() + self.signs.tobytes()

    def dense(self) -> Float32Array:
        """The whole update as float32; exact, since a mantissa has 16 bits."""
        scales = self.mantissas.astype(np.float32) * np.float32(2.0**self.exponent)
        dense = np.empty(self.layout.size, dtype=np.float32)
        for block in self.layout.blocks:
            dense[block.elements] = self.signed(block, scales)
        return dense

    def signed(self, block: Block, scales: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """One block of elements whose chunks have other `scales` (of the whole update, any dtype), with this update's signs."""
        negative = np.unpackbits(self.signs[block.signs], count=block.size)
        values = np.repeat(scales[block.chunks], self.layout.chunk_lengths[block.chunks])
        values *= 1 - 2 * negative.view(np.int8)
        return values

    def norm_squared(self) -> float:
        """‖update‖²: an exact integer, rounded once to the nearest float64."""
        mantissas = self.mantissas.astype(np.int64)
        return float(int(np.sum(mantissas * mantissas * self.layout.chunk_lengths))) * 2.0 ** (2 * self.exponent)


def payload_bytes_max(layout: Layout) -> int:
    """No payload is longer; a dense one is exactly this long."""
    return _HEADER.size + 2 * len(layout.chunk_lengths) + layout.sign_bytes


def encode(header: Header, m: Float32Array, layout: Layout) -> bytes:
    """The canonical payload of buffer `m`; the same bytes on every machine. `LocalProtocolError` if m has no encoding."""
    if m.shape != (layout.size,) or m.dtype != np.float32:
        raise LocalProtocolError(f"a buffer of {m.shape} {m.dtype} does not fit a layout of {layout.size} elements")
    means, grid = _chunk_means(m, layout)
    mantissas, exponent = _normalise(means, grid)
    return Update(header, layout, exponent, mantissas, _pack_signs(m, mantissas, layout)).encode()


def decode(payload: bytes, expected: Header, layout: Layout) -> Update:
    """The update in `payload`; `RemoteProtocolError("malformed", …)` unless it is canonical and has the expected header."""
    update = read(payload, layout)
    if update.header != expected:
        raise _malformed("the header names another job, round, trainer, root or batch")
    return update


def read(payload: bytes, layout: Layout) -> Update:
    """As `decode`, with whatever header the payload has."""
    if len(payload) != payload_bytes_max(layout):
        raise _malformed(f"{len(payload)} bytes instead of {payload_bytes_max(layout)}")
    version, mode, *fields, exponent = _HEADER.unpack_from(payload)
    if (version, mode) != (VERSION, DENSE_1BIT):
        raise _malformed(f"version {version}, mode {mode}")
    chunks = len(layout.chunk_lengths)
    mantissas = np.frombuffer(payload, "<u2", chunks, _HEADER.size).astype(np.uint16, copy=False)
    signs = np.frombuffer(payload, np.uint8, offset=_HEADER.size + 2 * chunks)
    _require_normalised(mantissas, exponent)
    _require_no_idle_bits(mantissas, signs, layout)
    return Update(Header(*fields), layout, exponent, mantissas, signs)


def _malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("malformed", f"payload: {detail}")


def _require_normalised(mantissas: npt.NDArray[np.uint16], exponent: int) -> None:
    if not EXPONENT_MIN <= exponent <= EXPONENT_MAX:
        raise _malformed(f"exponent {exponent} is outside {EXPONENT_MIN}..{EXPONENT_MAX}")
    largest = int(mantissas.max())
    if largest.bit_length() != MANTISSA_BITS and (largest, exponent) != (0, EXPONENT_MIN):
        raise _malformed(f"largest mantissa {largest} with exponent {exponent} is not normalised")


def _require_no_idle_bits(mantissas: npt.NDArray[np.uint16], signs: npt.NDArray[np.uint8], layout: Layout) -> None:
    last, mask = layout.padding
    if np.any(signs[last] & mask):
        raise _malformed("padding bits are set")
    empty = mantissas == 0
    if np.any(empty) and np.any(np.bitwise_or.reduceat(signs, layout.sign_starts)[empty]):
        raise _malformed("signs in a chunk of scale zero")


def _chunk_means(m: Float32Array, layout: Layout) -> tuple[npt.NDArray[np.int64], int]:
    """Mean |m| of every chunk as integers below 2^40, and the exponent of their unit.

    A float sum would depend on the order that a machine's vector unit adds in; sums of integers do not.
    """
    extremes = (float(m.max()), -float(m.min()))
    if not all(math.isfinite(value) for value in extremes):
        raise LocalProtocolError("a buffer with non-finite elements has no encoding")
    unit = math.frexp(max(extremes))[1] - GRID_BITS
    sums = np.empty(len(layout.chunk_lengths))
    for block in layout.blocks:
        grid = np.abs(m[block.elements]).astype(np.float64)
        grid *= 2.0**-unit
        np.rint(grid, out=grid)
        sums[block.chunks] = np.add.reduceat(grid, np.arange(0, block.size, CHUNK))
    return sums.astype(np.int64) // layout.chunk_lengths, unit


def _normalise(means: npt.NDArray[np.int64], unit: int) -> tuple[npt.NDArray[np.uint16], int]:
    """Means rounded half up to 16 bits under one exponent, so that the largest has its top bit set."""
    largest = int(means.max())
    shift = largest.bit_length() - MANTISSA_BITS
    if largest and _round_shift(largest, shift) >> MANTISSA_BITS:
        shift += 1
    if largest == 0 or unit + shift < EXPONENT_MIN:
        return np.zeros(len(means), dtype=np.uint16), EXPONENT_MIN
    if unit + shift > EXPONENT_MAX:
        raise LocalProtocolError(f"a buffer with chunk scales of 2^{unit + shift + MANTISSA_BITS} has no encoding")
    return ((means + (1 << shift - 1)) >> shift).astype(np.uint16), unit + shift


def _round_shift(value: int, shift: int) -> int:
    assert shift > 0, "the chunk of the largest element has a mean of at least 2^39 / 4096"
    return (value + (1 << shift - 1)) >> shift


def _pack_signs(m: Float32Array, mantissas: npt.NDArray[np.uint16], layout: Layout) -> npt.NDArray[np.uint8]:
    signs = np.empty(layout.sign_bytes, dtype=np.uint8)
    for block in layout.blocks:
        signs[block.signs] = np.packbits(np.signbit(m[block.elements]))
    for chunk in np.flatnonzero(mantissas == 0):
        start = layout.sign_starts[chunk]
        signs[start : start + (layout.chunk_lengths[chunk] + 7) // 8] = 0
    return signs
