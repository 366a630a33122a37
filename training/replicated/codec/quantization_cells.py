"""The distance of a vector from all vectors with one encoding, by which an auditor compares a payload with re-executed work.

A vector has a given encoding if its magnitudes |v| meet these conditions. s is the scale of a chunk, s⁺ and s⁻ are the next
larger and the next smaller scale, t is the largest level and r is `quantization.RANGE`:

    bits  element of level l                              all elements of a chunk
    1     any magnitude                                   mean from (s⁻ + s) / 2 to (s + s⁺) / 2
    2, 4  (|l| − 1) · s to (|l| + 1) · s;                 largest and r · mean are at least t · s,
          level ±t has no upper bound                     and one of these two is less than t · s⁺
    8, 16 (|l| − ½) · s to (|l| + ½) · s;                 none
          level ±t has up to t · s⁺;
          with scale 0 all are less than t · s⁺

Elements have the signs of their levels; with level 0, any sign. A chunk of scale 0 has no lower bounds.

Each of the two columns of conditions defines a set of vectors, and the encoded vector is in both sets. A vector is no farther
from a set than from any of its members. An honest update is therefore at most as far away as two machines deviate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from training.replicated.codec import quantization
from training.replicated.codec.payload import QuantizedUpdate
from training.replicated.codec.quantization import TOP, Integers
from training.replicated.tensor_layout import Float32Array, TensorBlock

Floats = npt.NDArray[np.float64]

# Least largest scale: if the largest scale is smaller, the codec sends all scales as 0.
EMPTY = math.ldexp(1.0, quantization.EXPONENT_MIN + quantization.SCALE_BITS - 1)
SENT_AS_NOTHING = 16  # the smallest scale, which code 0 replaces
# For each code, its scale, and the scales of the codes before and after it.
_OWN = np.append(SENT_AS_NOTHING, quantization.SCALES[1:]).astype(np.float64)
_BEFORE, _NEXT = np.append(0, _OWN[:-1]), np.append(_OWN[1:], 1 << quantization.SCALE_BITS)


def cell_distance(update: QuantizedUpdate, values: Callable[[TensorBlock], Float32Array]) -> float:
    """Return the distance of a vector from the farther one of the two sets, in float64. `values` returns the vector's blocks."""
    squares = np.zeros(2)
    low, high = _bounds(update)
    for block in update.layout.blocks:
        squares += _squares(update, block, values(block), low[block.chunks], high[block.chunks])
    return math.sqrt(squares.max())


def _bounds(update: QuantizedUpdate) -> tuple[Floats, Floats]:
    """Return, for each chunk, the least and the largest value that the codec rounds to the chunk's scale, shapes (chunks,).

    With several bits, both values are multiplied by the largest level.
    """
    step, codes, bits = math.ldexp(1.0, update.exponent), update.codes, update.bits
    if bits == 1:  # The codec rounds scales to nearest.
        low, high, empty = (_BEFORE + _OWN) / 2 * step, (_OWN + _NEXT) / 2 * step, EMPTY * (1 - 1 / 64)
    else:  # The codec rounds scales down.
        low, high, empty = TOP[bits] * step * _OWN, TOP[bits] * step * _NEXT, TOP[bits] * EMPTY
    if not codes.any():
        return np.zeros(len(codes)), np.full(len(codes), empty)
    return np.where(codes > 0, low[codes], 0.0), high[codes]


def _squares(update: QuantizedUpdate, block: TensorBlock, v: Float32Array, low: Floats, high: Floats) -> Floats:
    """Return the squared distances of a block from the vectors with these levels and from those with these scales, shape (2,)."""
    bits, lengths, values = update.bits, update.layout.chunk_lengths[block.chunks], v.astype(np.float64)
    units = np.repeat(quantization.SCALES[update.codes[block.chunks]] * math.ldexp(1.0, update.exponent), lengths)
    tops = np.repeat(high, lengths) if bits >= 8 else np.inf
    of_levels = _outside_levels(values, update.levels_of(block).astype(np.float64), units, tops, bits)
    of_scales = _outside_scales(np.abs(values), lengths, low, high, bits) if bits < 8 else 0.0
    # `einsum`: the vectors are too short for a BLAS and its threads.
    return np.array([np.einsum("i,i", of_levels, of_levels), of_scales])


def _outside_levels(values: Floats, levels: Floats, units: Floats, tops: Floats | float, bits: int) -> Floats:
    sizes = np.abs(levels)
    signed = np.where(levels == 0, np.abs(values), values * np.sign(levels))
    if bits >= 8:
        least = sizes - 0.5
        most = np.where((sizes == TOP[bits]) | (units == 0), tops, (sizes + 0.5) * units)
    else:
        is_open = (sizes == TOP[bits]) | (units == 0)
        least, most = sizes - 1, np.where(is_open, np.inf, (sizes + 1) * units)
    outside = np.maximum(np.where(units > 0, least * units - signed, 0.0), signed - most)
    return np.maximum(outside, 0.0, out=outside)


def _outside_scales(magnitudes: Floats, lengths: Integers, low: Floats, high: Floats, bits: int) -> float:
    """Return the squared distance of a block from the vectors with the update's scales.

    The scale limits the mean, and with several bits also the largest element.
    """
    starts, root = np.cumsum(lengths) - lengths, np.sqrt(lengths)
    means = np.add.reduceat(magnitudes, starts) / lengths
    if bits == 1:
        return float(np.sum(_raised(low, means, root)) + np.sum(_lowered(magnitudes, starts, lengths, means, high)))
    times = quantization.RANGE[bits]
    beyond = np.maximum(magnitudes - np.repeat(high, lengths), 0.0)
    above = np.minimum(np.add.reduceat(beyond**2, starts), _lowered(magnitudes, starts, lengths, means, high / times))
    below = np.maximum(_raised(low, np.maximum.reduceat(magnitudes, starts), 1.0), _raised(low / times, means, root))
    return float(np.sum(np.maximum(above, below)))


def _raised(least: Floats, found: Floats, times: Floats | float) -> Floats:
    """Return the squared distances of chunks from the vectors whose mean or largest element is at least `least`, shape (chunks,).

    `found` is the chunk's own mean or largest element. The largest element, or each element, grows by the difference. The
    distance is `times` this difference.
    """
    return np.square(np.maximum(least - found, 0.0) * times)


def _lowered(magnitudes: Floats, starts: Integers, lengths: Integers, means: Floats, most: Floats) -> Floats:
    """Return the squared distances of chunks from the vectors with a mean of at most `most`, shape (chunks,).

    All elements shrink by the same amount, but not below zero: the projection onto the l1 ball (Duchi 2008, figure 1).
    """
    squares = np.zeros(len(lengths))
    for chunk in np.flatnonzero(means > most):
        part = np.sort(magnitudes[starts[chunk] : starts[chunk] + lengths[chunk]])[::-1]
        amounts = (np.cumsum(part) - most[chunk] * lengths[chunk]) / np.arange(1, len(part) + 1)
        squares[chunk] = np.sum(np.minimum(part, amounts.max()) ** 2)
    return squares
