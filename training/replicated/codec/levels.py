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

from training.replicated.layout import Float32Array

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


def unpack(packed: Bytes, bits: int) -> Levels:
    """The levels in whole bytes."""
    if bits == 8:
        return packed.view(np.int8)
    return _TABLES[bits].take(packed).view(np.int8)


def pack(levels: Levels, bits: int) -> Bytes:
    """Whole bytes, the last one padded with zero bits."""
    if bits == 8:
        return levels.view(np.uint8)
    if bits == 1:
        return np.packbits(levels < 0)
    codes = (levels < 0).astype(np.uint8) << bits - 1 | np.abs(levels).view(np.uint8) >> 1
    each = 8 // bits
    padded = np.zeros(-(-len(codes) // each) * each, dtype=np.uint8)
    padded[: len(codes)] = codes
    columns = padded.reshape(-1, each)
    return np.bitwise_or.reduce(columns << np.arange(8 - bits, -1, -bits, dtype=np.uint8), axis=1)


def quantise(part: Float32Array, scales: npt.NDArray[np.int64], exponent: int, bits: int, least: int = 0) -> Levels:
    """The level next to each element / (its scale · 2^exponent), and at least `least` of its sign; zero counts as positive."""
    if bits == 1:
        return np.where(part < 0, np.int8(-1), np.int8(1))
    ratios = np.abs(part).astype(np.float64)
    ratios *= 2.0**-exponent
    ratios /= np.maximum(scales, 1)
    if bits < 8:  # the odd number next to a ratio, which may be beyond any integer type where a scale is zero
        ratios = 2 * np.floor(ratios / 2) + 1
    levels = np.clip(np.rint(ratios, out=ratios), least, TOP[bits], out=ratios).astype(np.int8)
    return np.negative(levels, out=levels, where=part < 0)
