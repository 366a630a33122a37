"""Levels and scales, and their form in bits. An element of an update is a small integer, its level, times its chunk's scale.

    bits  levels               form
    1     ±1                   1 = negative
    2     ±1, ±3               sign (1 = negative), then (|level| − 1) / 2
    4     ±1, ±3, … ±15        the same
    8     −127 … 127           two's complement
    16    −32767 … 32767       two's complement, little-endian

Up to four bits no level is zero: a zero would cost a sixteenth of the range or more, and error feedback transmits the rest. The
first element in a byte has its highest bits.

One scale per chunk, as a byte: a small floating-point number under the exponent that all chunks of a payload share.

    code 0       scale 0: the chunk is empty
    code c > 0   scale (16 + c mod 16) · 2^⌊c / 16⌋, an integer of at most 20 bits

The codes of a payload are canonical if the largest one has the largest shift (it is at least 240), or if all are 0 and the
exponent is the least one. A scale of 16 · 2^0 is sent as 0.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError
from training.replicated.tensor_layout import CHUNK, Float32Array

Levels = npt.NDArray[np.int8] | npt.NDArray[np.int16]
Bytes = npt.NDArray[np.uint8]

LEVEL_MAX: Final = 127  # largest level of at most eight bits
TOP: Final = {1: 1, 2: 3, 4: 15, 8: LEVEL_MAX, 16: 32767}  # largest level for each number of bits


def _of_code(code: int, bits: int) -> int:
    negative, magnitude = divmod(code, 1 << bits - 1)
    return (1 - 2 * negative) * (2 * magnitude + 1)


def _table(bits: int) -> npt.NDArray[np.unsignedinteger]:
    """Return a table of the 256 bytes. An entry is an unsigned integer of 8 / bits bytes, which are the levels in the byte."""
    codes = [[byte >> 8 - bits - at & (1 << bits) - 1 for at in range(0, 8, bits)] for byte in range(256)]
    levels = np.array([[_of_code(code, bits) for code in row] for row in codes], dtype=np.int8)
    return levels.view(f"u{8 // bits}").ravel()


_TABLES: Final = {bits: _table(bits) for bits in (1, 2, 4)}
# Multipliers for little-endian words with one code in each byte. The product has the packed codes in its highest byte.
_FACTORS: Final = {2: 1 << 30 | 1 << 20 | 1 << 10 | 1, 4: 1 << 12 | 1}


def unpack_levels(packed: Bytes, bits: int) -> Levels:
    """Return all levels in the packed bytes, also those that only pad the last byte."""
    if bits >= 8:
        return packed.view(np.int8 if bits == 8 else "<i2")
    return _TABLES[bits].take(packed).view(np.int8)


def pack_levels(codes: Bytes, bits: int) -> Bytes:
    """Return the codes, packed into bytes along the last axis. The last byte of each row is padded with zero bits."""
    if bits >= 8:
        return codes
    if bits == 1:
        return np.packbits(codes, axis=-1)
    each = 8 // bits
    if missing := -codes.shape[-1] % each:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    words = codes.view(f"<u{each}") * _FACTORS[bits]
    words >>= 8 * (each - 1)
    return words.astype(np.uint8)


def quantize_levels(part: Float32Array, units: Float32Array, bits: int) -> Bytes:
    """Return the code of the level nearest to each element / its scale; zero counts as positive. A code of 16 bits is two bytes.

    `units` are the `level_units` of the scales. Quotients in float32 are on the same side of every edge between two levels as
    exact ones: an edge times its unit has at most 21 bits, so it is a float32. |m| equals this product or differs from it by at
    least one unit in the last place, and a quotient is rounded by at most half a unit.
    """
    negative = (part < 0).view(np.uint8)
    if bits == 1:
        return negative
    ratios = np.abs(part)
    ratios /= units
    np.minimum(ratios, TOP[bits] / 2 if bits < 8 else TOP[bits], out=ratios)
    if bits < 8:
        negative *= 1 << bits - 1
        negative |= ratios.astype(np.uint8)
        return negative
    np.rint(ratios, out=ratios)
    return np.copysign(ratios, part, out=ratios).astype(np.int8 if bits == 8 else "<i2").view(np.uint8)


def level_units(scales: Float32Array, bits: int) -> Float32Array:
    """Return the distance of two neighbouring levels, by which |element| is divided. For scale zero it is infinite."""
    return np.where(scales > 0, scales * (2 if bits < 8 else 1), np.float32(np.inf))


# Scales ------------------------------------------------------------------------------------------------------------

GRID_BITS: Final = 40  # bits of |m| on the grid: sums of 4096 such integers stay below 2^53, where float64 adds exactly
MANTISSA_BITS: Final = 5  # bits of a scale's mantissa: its error is at most 3 %, and the error of one-bit elements is 60 %
SHIFT_MAX: Final = 15  # largest shift of a scale: chunks of one payload differ a thousandfold (norms, embedding, layers)
SCALE_BITS: Final = MANTISSA_BITS + SHIFT_MAX
# Least exponent of a payload: scales are above 2^-80, and derived numbers stay far above float32's subnormal numbers.
EXPONENT_MIN: Final = -84
# Exponent of the finest grid: on a finer grid all scales would be zero, and float32 has the inverse of this unit.
UNIT_MIN: Final = EXPONENT_MIN + SCALE_BITS - 1 - GRID_BITS
EXPONENT_MAX: Final = 12  # largest exponent of a payload: scales below 2^32, more than any useful update needs

# Range of the levels of a chunk, in units of its mean |m|, for each number of bits. Larger elements are clipped, and error
# feedback transmits their rest, since a few large elements would leave no levels for all others (decision 27). With eight
# bits and more there is no range.
RANGE: Final = {2: 2, 4: 4}

Codes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

_CODES: Final = np.arange(256)
SCALES: Final[Integers] = np.where(_CODES > 0, (16 + _CODES % 16) << _CODES // 16, 0).astype(np.int64)
FULL: Final = SHIFT_MAX << 4  # smallest code of a scale with the largest shift

assert CHUNK << GRID_BITS < 1 << 53
assert int(SCALES[-1]).bit_length() == SCALE_BITS


def grid_exponent(m: Float32Array) -> int:
    """Return the exponent of the grid on which the largest |m| has 40 bits, but at least `UNIT_MIN`.

    Raises `LocalProtocolError` if m has non-finite elements.
    """
    extremes = (float(m.max()), -float(m.min()))
    if not all(math.isfinite(value) for value in extremes):
        raise LocalProtocolError("a buffer with non-finite elements has no encoding")
    return max(math.frexp(max(extremes))[1] - GRID_BITS, UNIT_MIN)


def round_to_grid(part: Float32Array, unit: int) -> Float32Array:
    """Return |part| / 2^unit, rounded to integers. Only this rounding makes an error, since float32 has every integer of 24 bits.

    A sum of floats would depend on the order in which a machine's vector unit adds; sums of integers do not.
    """
    integers = np.abs(part)
    integers *= np.float32(math.ldexp(1.0, -unit))
    return np.rint(integers, out=integers)


def scales_of_chunks(sums: Integers, counts: Integers, largest: Integers, unit: int, bits: int) -> tuple[Codes, int]:
    """Return the codes of the chunks' scales and their exponent, given the sum and the largest of |m| / 2^unit in each chunk."""
    means = sums // counts
    if bits == 1:
        return quantize_scales(means, unit, up=True)
    ranges = np.minimum(largest, RANGE[bits] * means) if bits in RANGE else largest
    return quantize_scales(ranges // TOP[bits], unit, up=False)


def quantize_scales(values: Integers, unit: int, up: bool) -> tuple[Codes, int]:
    """Return the codes and the exponent of the scales `values` · 2^unit. The values are integers from 0 to 2^53.

    Mantissas are rounded half up if `up`, else down.
    """
    shift = _bit_lengths(values.max(keepdims=True))[0] - MANTISSA_BITS  # After this shift the largest value has five bits.
    if up and int(values.max()) + (1 << shift - 1) >> shift >> MANTISSA_BITS:
        shift += 1
    exponent = unit + int(shift) - SHIFT_MAX
    if exponent < EXPONENT_MIN or not values.any():
        return np.zeros(len(values), dtype=np.uint8), EXPONENT_MIN
    if exponent > EXPONENT_MAX:
        raise LocalProtocolError(f"a buffer with chunk scales of 2^{exponent + SCALE_BITS} has no encoding")
    least = exponent - unit
    shifts = np.maximum(_bit_lengths(values) - MANTISSA_BITS, least)
    mantissas = (values + (up << shifts >> 1)) >> shifts
    codes = (shifts - least << 4) + mantissas - 16  # A mantissa that was rounded up to 32 becomes 16 with the next shift.
    return np.maximum(codes, 0).astype(np.uint8), exponent


def scale_values(codes: Codes, exponent: int) -> Float32Array:
    """Return the scales as float32. The scales are exact, since they have five significant bits."""
    return SCALES[codes].astype(np.float32) * np.float32(math.ldexp(1.0, exponent))


def _bit_lengths(values: Integers) -> Integers:
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)
