"""Levels: the small integers that, times its chunk's scale, are the elements of an update; and their form in bits.

    bits  levels               form
    1     ±1                   1 = negative
    2     ±1, ±3               sign (1 = negative), then (|level| − 1) / 2
    4     ±1, ±3, … ±15        the same
    8     −127 … 127           two's complement

Up to four bits no level is zero: one that is would cost a sixteenth of the range or more, and error feedback says the rest.
Elements follow each other from the highest bit of a byte down.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.tensor_layout import Float32Array

Levels = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]

LEVEL_MAX: Final = 127
TOP: Final = {1: 1, 2: 3, 4: 15, 8: LEVEL_MAX}  # the largest level of each number of bits


def _of_code(code: int, bits: int) -> int:
    negative, magnitude = divmod(code, 1 << bits - 1)
    return (1 - 2 * negative) * (2 * magnitude + 1)


def _table(bits: int) -> npt.NDArray[np.unsignedinteger]:
    """The levels in each of the 256 bytes, as one unsigned integer of 8 / bits bytes."""
    codes = [[byte >> 8 - bits - at & (1 << bits) - 1 for at in range(0, 8, bits)] for byte in range(256)]
    levels = np.array([[_of_code(code, bits) for code in row] for row in codes], dtype=np.int8)
    return levels.view(f"u{8 // bits}").ravel()


_TABLES: Final = {bits: _table(bits) for bits in (1, 2, 4)}
# As many codes as fill a byte, one in each byte of a little-endian word, times this: the highest byte has them packed.
_FACTORS: Final = {2: 1 << 30 | 1 << 20 | 1 << 10 | 1, 4: 1 << 12 | 1}


def unpack_levels(packed: Bytes, bits: int) -> Levels:
    """The levels in whole bytes."""
    if bits == 8:
        return packed.view(np.int8)
    return _TABLES[bits].take(packed).view(np.int8)


def pack_levels(codes: Bytes, bits: int) -> Bytes:
    """Codes along the last axis in whole bytes, the last one of each row padded with zero bits."""
    if bits == 8:
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
    """The code of the level next to each element / its scale; zero counts as positive.

    `units` are `level_units` the scales. Quotients in float32 are on the same side as exact ones of every edge between two
    levels: an edge times its unit has thirteen bits, so it is a float32, from which |m| is at least one place away, or none; and
    a quotient is rounded by half a place at most.
    """
    negative = (part < 0).view(np.uint8)
    if bits == 1:
        return negative
    ratios = np.abs(part)
    ratios /= units
    np.minimum(ratios, TOP[bits] / 2 if bits < 8 else LEVEL_MAX, out=ratios)
    if bits < 8:
        negative *= 1 << bits - 1
        negative |= ratios.astype(np.uint8)
        return negative
    magnitudes = np.rint(ratios, out=ratios).astype(np.uint8)
    return (magnitudes ^ -negative) + negative  # two's complement


def level_units(scales: Float32Array, bits: int) -> Float32Array:
    """What |element| is divided by: the distance of two neighbouring levels; with scale zero nothing is left of it."""
    return np.where(scales > 0, scales * (2 if bits < 8 else 1), np.float32(np.inf))
