"""Streams of numbers of the same few bits each, from the highest bit of the first byte down, the last byte padded with zeros."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from training.replicated.codec.quantization_levels import Bytes

WIDTH_MAX: Final = 9  # wherever such a number starts, two bytes hold it


def packed_bytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def pack_numbers(numbers: npt.NDArray[np.uint16], width: int) -> Bytes:
    places = np.arange(width - 1, -1, -1, dtype=np.uint16)
    return np.packbits((numbers[:, None] >> places & 1).astype(np.uint8))


def unpack_numbers(stream: Bytes, first: int, count: int, width: int) -> npt.NDArray[np.uint16]:
    """`count` numbers from number `first` on."""
    assert width <= WIDTH_MAX
    offsets = np.arange(first * width % 8, first * width % 8 + count * width, width) if width else np.zeros(count, np.int64)
    part = stream[first * width // 8 : packed_bytes(first + count, width)]
    pairs = np.zeros(len(part) + 1, dtype=np.uint16)  # each byte with the one after it
    pairs[:-1] = part
    pairs <<= 8
    pairs[:-2] |= part[1:]
    shifts = (16 - width - (offsets & 7)).astype(np.uint16)
    return pairs[offsets >> 3] >> shifts & np.uint16((1 << width) - 1)


def padding_bits(stream: Bytes, count: int, width: int) -> int:
    """What is in the unused bits of the last byte."""
    unused = -count * width % 8
    return int(stream[-1]) & (1 << unused) - 1 if unused else 0
