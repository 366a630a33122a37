"""The distance of a vector from all vectors with one encoding. An auditor compares a payload with re-executed work by it.

A vector has an encoding if its magnitudes |v| lie so. s is the scale of a chunk, s⁺ and s⁻ are the next larger and smaller one, t
is the largest level and r is `scales.RANGE`:

    bits  an entry of level l                             all entries of a chunk
    1     has any magnitude                               have a mean from (s⁻ + s) / 2 to (s + s⁺) / 2
    2, 4  has (|l| − 1) · s to (|l| + 1) · s, of level    have a largest and r times a mean of t · s or more, and one of
          ±t no upper bound                               these two is less than t · s⁺
    8     has (|l| − ½) · s to (|l| + ½) · s, of level
          ±127 up to 127 · s⁺; in a chunk of scale 0 any
          has less than 127 · s⁺

Signs are those of the levels; level 0 has both. A chunk of scale 0 has no least magnitudes. In a sparse payload no entry is
smaller than the elements left out of its chunk, and entries of level ±1 have no least magnitude.

Each column is a set of vectors, and so is the choice of a sparse payload's entries. The encoded vector lies in all three sets.
A vector is no farther from a set than from a member of it. So honest work is at most as far away as two machines deviate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from training.replicated.codec import quantization_scales, top_k_support
from training.replicated.codec.quantization_levels import LEVEL_MAX, TOP
from training.replicated.codec.quantized_update import QuantizedUpdate
from training.replicated.tensor_layout import CHUNK, Float32Array, TensorBlock

Floats = npt.NDArray[np.float64]

# where the largest scale is below this, all are 0
EMPTY = math.ldexp(1.0, quantization_scales.EXPONENT_MIN + quantization_scales.SCALE_BITS - 1)
SENT_AS_NOTHING = 16  # the scale of code 0
# of each code, and the same of its neighbours
_OWN = np.append(SENT_AS_NOTHING, quantization_scales.SCALES[1:]).astype(np.float64)
_BEFORE, _NEXT = np.append(0, _OWN[:-1]), np.append(_OWN[1:], 1 << quantization_scales.SCALE_BITS)


def cell_distance(update: QuantizedUpdate, values: Callable[[TensorBlock], Float32Array]) -> float:
    """v's largest distance to one of the three sets, in float64; `values` gives v of each block."""
    squares = np.zeros(3)
    low, high = _bounds(update)
    for block in update.layout.blocks:
        squares += _squares(update, block, values(block), low[block.chunks], high[block.chunks])
    return math.sqrt(squares.max())


def _bounds(update: QuantizedUpdate) -> tuple[Floats, Floats]:
    """(chunks,) each: the least and the largest value that the codec rounds to a chunk's scale, times t with several bits."""
    step, codes, bits = math.ldexp(1.0, update.exponent), update.codes, update.mode.bits
    if bits == 1:  # it rounds to the nearest
        low, high, empty = (_BEFORE + _OWN) / 2 * step, (_OWN + _NEXT) / 2 * step, EMPTY * (1 - 1 / 64)
    else:  # it rounds down
        low, high, empty = TOP[bits] * step * _OWN, TOP[bits] * step * _NEXT, TOP[bits] * EMPTY
    if not codes.any():
        return np.zeros(len(codes)), np.full(len(codes), empty)
    return np.where(codes > 0, low[codes], 0.0), high[codes]


def _squares(update: QuantizedUpdate, block: TensorBlock, v: Float32Array, low: Floats, high: Floats) -> Floats:
    """(3,): the squared distances of a block to what its levels, its scales and its support may be said of."""
    bits, codes = update.mode.bits, update.codes[block.chunks]
    positions, levels, kept = _entries(update, block, v)
    said = (v if positions is None else v[positions]).astype(np.float64)
    units = np.repeat(quantization_scales.SCALES[codes] * math.ldexp(1.0, update.exponent), kept)
    tops = np.repeat(high, kept) if bits == 8 else np.inf
    of_levels = _outside_levels(said, levels.astype(np.float64), units, tops, update)
    magnitudes = np.abs(said)
    of_scales = _outside_scales(magnitudes, kept, low, high, bits) if bits < 8 else 0.0
    of_support = 0.0 if positions is None else _outside_support(np.abs(v), positions, codes > 0)
    return np.array([np.einsum("i,i", of_levels, of_levels), of_scales, of_support])  # in this thread: too short for a BLAS


def _entries(
    update: QuantizedUpdate, block: TensorBlock, v: Float32Array
) -> tuple[top_k_support.Positions | None, npt.NDArray[np.int8], top_k_support.Counts]:
    """Positions and levels of the block's entries, and their count in each chunk. In a chunk of scale 0, of which a sparse
    payload has none, they are those that v would have.
    """
    entries, filled = update.entries(block), update.codes[block.chunks] > 0
    if entries.positions is None:
        return None, entries.levels, entries.counts
    kept = top_k_support.kept_counts(update.layout, update.mode.keep)[block.chunks]
    if filled.all():
        return entries.positions, entries.levels, kept
    is_said = np.repeat(filled, kept)
    positions, levels = top_k_support.choose_top_k(v, kept), np.zeros(len(is_said), dtype=np.int8)
    positions[is_said], levels[is_said] = entries.positions, entries.levels
    return positions, levels, kept


def _outside_levels(said: Floats, levels: Floats, units: Floats, tops: Floats | float, update: QuantizedUpdate) -> Floats:
    bits, sizes = update.mode.bits, np.abs(levels)
    signed = np.where(levels == 0, np.abs(said), said * np.sign(levels))
    if bits == 8:
        least = np.where(sizes == 1, 0.0, sizes - 0.5) if update.mode.sparse else sizes - 0.5
        most = np.where((sizes == LEVEL_MAX) | (units == 0), tops, (sizes + 0.5) * units)
    else:
        is_open = (sizes == TOP[bits]) | (units == 0)
        least, most = sizes - 1, np.where(is_open, np.inf, (sizes + 1) * units)
    outside = np.maximum(np.where(units > 0, least * units - signed, 0.0), signed - most)
    return np.maximum(outside, 0.0, out=outside)


def _outside_scales(magnitudes: Floats, kept: top_k_support.Counts, low: Floats, high: Floats, bits: int) -> float:
    """The sum over the chunks: of one bit by the mean, of more by the largest and the mean together."""
    starts, root = np.cumsum(kept) - kept, np.sqrt(kept)
    means = np.add.reduceat(magnitudes, starts) / kept
    if bits == 1:
        return float(np.sum(_raised(low, means, root)) + np.sum(_lowered(magnitudes, starts, kept, means, high)))
    times = quantization_scales.RANGE[bits]
    beyond = np.maximum(magnitudes - np.repeat(high, kept), 0.0)
    above = np.minimum(np.add.reduceat(beyond**2, starts), _lowered(magnitudes, starts, kept, means, high / times))
    below = np.maximum(_raised(low, np.maximum.reduceat(magnitudes, starts), 1.0), _raised(low / times, means, root))
    return float(np.sum(np.maximum(above, below)))


def _raised(least: Floats, found: Floats, times: Floats | float) -> Floats:
    """Squared distances (chunks,) to vectors in which `found` is at least `least`. One entry or each grows by the rest."""
    return np.square(np.maximum(least - found, 0.0) * times)


def _lowered(magnitudes: Floats, starts: top_k_support.Counts, kept: top_k_support.Counts, means: Floats, most: Floats) -> Floats:
    """Squared distances (chunks,) to vectors with a mean of at most `most`. All entries shrink by one amount, none below zero:
    the projection onto the l1 ball (Duchi 2008, figure 1).
    """
    squares = np.zeros(len(kept))
    for chunk in np.flatnonzero(means > most):
        part = np.sort(magnitudes[starts[chunk] : starts[chunk] + kept[chunk]])[::-1]
        amounts = (np.cumsum(part) - most[chunk] * kept[chunk]) / np.arange(1, len(part) + 1)
        squares[chunk] = np.sum(np.minimum(part, amounts.max()) ** 2)
    return squares


def _outside_support(magnitudes: Float32Array, positions: top_k_support.Positions, filled: npt.NDArray[np.bool_]) -> float:
    is_said = np.zeros(len(magnitudes), dtype=np.bool_)
    is_said[positions] = True
    total = 0.0
    for start, is_filled in zip(range(0, len(magnitudes), CHUNK), filled, strict=True):
        part, said = magnitudes[start : start + CHUNK], is_said[start : start + CHUNK]
        if is_filled and not said.all():
            total += _outside_threshold(part[said].astype(np.float64), part[~said].astype(np.float64))
    return total


def _outside_threshold(said: Floats, left: Floats) -> float:
    """The squared distance to vectors in which every said entry is at least as large as every entry left out.

    The derivative of the square by the threshold rises, and is linear between any two of these magnitudes.
    """
    said, left = np.sort(said[said < left.max()]), np.sort(left[left > said.min()])
    if not len(said):
        return 0.0
    points = np.sort(np.concatenate([said, left]))
    missing, over = (np.concatenate([[0.0], np.cumsum(part)]) for part in (said, left))
    lower, upper = np.searchsorted(said, points), np.searchsorted(left, points)
    slopes = points * lower - missing[lower] - (over[-1] - over[upper] - points * (len(left) - upper))
    threshold = np.interp(0.0, slopes, points)
    return float(np.sum(np.maximum(threshold - said, 0.0) ** 2) + np.sum(np.maximum(left - threshold, 0.0) ** 2))
