"""Robust aggregation in exact integers: ARC → NNM → trimmed mean.

- ARC, adaptive robust clipping (Allouah et al., "Adaptive Gradient Clipping for Robust Federated Learning", arXiv:2405.14432):
  of m updates with f liars the k = ⌊2(f/m)(m−f)⌋ largest are clipped to the next norm.
- NNM, nearest-neighbour mixing (Allouah et al., "Fixing by Mixing", arXiv:2302.01772): every update becomes the mean of its m − f
  nearest ones, itself included.
- The trimmed mean (Yin et al., arXiv:1803.01498) drops the f largest and f smallest values of every coordinate.

An update is a sign per element and an integer scale per chunk, so dot products are sums over chunks of
scale · scale · (agreeing − differing signs): exact integers, counted by population count. Clipping rescales the chunk scales and
puts all updates on one grid; mixing and trimming add and compare integers. Only the last division and the conversion to float32
round, once each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError
from protocol.limits import TRAINERS_MAX
from training.replicated.codec import MANTISSA_BITS, Update
from training.replicated.layout import CHUNK, CHUNKS_MAX, Block, Float32Array, Layout

FACTOR_BITS: Final = 30  # a clipping factor is an integer in units of 2^-30
GRID_BITS: Final = 22  # the largest clipped scale of a round has 22 bits, so that sums over all trainers fit 32

assert TRAINERS_MAX << GRID_BITS < 1 << 31
assert MANTISSA_BITS + FACTOR_BITS < 63
assert CHUNK * CHUNKS_MAX << 2 * MANTISSA_BITS < 1 << 63

Integers = list[list[int]]
Rows = list[npt.NDArray[np.int32]]  # one per update, elements of one block


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that is decided about a round's updates before any coordinate is looked at; `values` then streams over blocks."""

    updates: tuple[Update, ...]  # ascending by trainer: the result does not depend on the order they came in
    scales: tuple[npt.NDArray[np.int32], ...]  # of each update's chunks after clipping, in units of 2^exponent
    exponent: int
    liars: int  # f, the number this round tolerates
    outsiders: tuple[tuple[int, ...], ...]  # for each update the f that it is not mixed with

    def values(self, block: Block) -> Float32Array:
        """The aggregate over one block."""
        signed = [update.signed(block, scales) for update, scales in zip(self.updates, self.scales, strict=True)]
        kept = _trim(self._mix(signed), self.liars) if self.liars else signed
        each = len(signed) - self.liars if self.liars else 1  # updates summed in each of those kept
        mean = _total(kept, np.int64).astype(np.float64) / (len(kept) * each)
        mean *= 2.0**self.exponent
        return np.asarray(mean, dtype=np.float32)

    def _mix(self, signed: Rows) -> Rows:
        """Sums over every update's neighbours: the sum over all, less its outsiders."""
        total = _total(signed, np.int32)
        mixed = [total.copy() for _ in signed]
        for row, outsiders in zip(mixed, self.outsiders, strict=True):
            for outsider in outsiders:
                row -= signed[outsider]
        return mixed


def _total(rows: Rows, dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    total = rows[0].astype(dtype)
    for row in rows[1:]:
        total += row
    return total


def _trim(rows: Rows, f: int) -> Rows:
    """What is left of every coordinate's values without the f largest and f smallest; overwrites `rows`.

    Carrying the extreme along takes 2·f·m passes, for a dozen updates twice as fast as sorting columns of a few values.
    """
    for _ in range(f):
        rows = _without_extreme(_without_extreme(rows, np.minimum, np.maximum), np.maximum, np.minimum)
    return rows


def _without_extreme(rows: Rows, keep: np.ufunc, carry: np.ufunc) -> Rows:
    kept, carried, spare = [], rows[0], np.empty_like(rows[0])
    for row in rows[1:]:
        kept.append(keep(carried, row, out=spare))
        carry(carried, row, out=carried)
        spare = row  # its values are in the other two now
    return kept


def tolerated(count: int, liars: int) -> int:
    """f_m: how many of `count` accepted updates may lie. Two or fewer cannot be protected by statistics: a plain mean."""
    return min(liars, (count - 1) // 2)


def plan(updates: Sequence[Update], liars: int) -> Plan:
    """How to aggregate `updates` (at least one, one per trainer) of which at most `liars` lie."""
    ordered = tuple(sorted(updates, key=lambda update: update.header.trainer))
    if not ordered or len({update.header.trainer for update in ordered}) < len(ordered):
        raise LocalProtocolError(f"{len(ordered)} updates: need at least one, and one per trainer")
    f = tolerated(len(ordered), liars)
    products = gram(ordered)
    least = min(update.exponent for update in ordered)
    factors = clipping(products, [update.exponent - least for update in ordered], f)
    scales, exponent = _grid(ordered, factors)
    weights = [factor << update.exponent - least for factor, update in zip(factors, ordered, strict=True)]
    return Plan(ordered, scales, exponent, f, outsiders(products, weights, f))


def aggregate(updates: Sequence[Update], layout: Layout, liars: int) -> Float32Array:
    """The whole aggregate as one vector."""
    planned = plan(updates, liars)
    result = np.empty(layout.size, dtype=np.float32)
    for block in layout.blocks:
        result[block.elements] = planned.values(block)
    return result


def gram(updates: Sequence[Update]) -> Integers:
    """Dot products of all pairs in units of 2^(exponent_i + exponent_j), exactly."""
    products = [[0] * len(updates) for _ in updates]
    for i, left in enumerate(updates):
        for j, right in enumerate(updates[: i + 1]):
            products[i][j] = products[j][i] = _dot(left, right)
    return products


def _dot(left: Update, right: Update) -> int:
    lengths, starts = left.layout.chunk_lengths, left.layout.sign_starts
    differing = np.add.reduceat(np.bitwise_count(left.signs ^ right.signs), starts, dtype=np.int64)
    scales = left.mantissas.astype(np.int64) * right.mantissas
    # The signs of an empty chunk are zeros, and its scale makes the product zero whatever they are compared with.
    return int(np.sum(scales * (lengths - 2 * differing)))


def clipping(products: Integers, shifts: Sequence[int], f: int) -> list[int]:
    """ARC's factor for each update in units of 2^-FACTOR_BITS, rounded down; `shifts` align the exponents."""
    squares = [row[i] << 2 * shift for i, (row, shift) in enumerate(zip(products, shifts, strict=True))]
    clipped = 2 * f * (len(squares) - f) // len(squares)
    bound = sorted(squares, reverse=True)[clipped]
    one = 1 << FACTOR_BITS
    return [one if square <= bound else math.isqrt((bound << 2 * FACTOR_BITS) // square) for square in squares]


def outsiders(products: Integers, weights: Sequence[int], f: int) -> tuple[tuple[int, ...], ...]:
    """For every update the f farthest ones after clipping; ties go to the lower index being nearer."""
    everyone = range(len(weights))

    def distance(i: int, j: int) -> int:
        cross = weights[i] * weights[j] * products[i][j]
        return weights[i] ** 2 * products[i][i] + weights[j] ** 2 * products[j][j] - 2 * cross

    return tuple(tuple(sorted(everyone, key=lambda j: (distance(i, j), j))[len(weights) - f :]) for i in everyone)


def _grid(updates: Sequence[Update], factors: Sequence[int]) -> tuple[tuple[npt.NDArray[np.int32], ...], int]:
    """All clipped scales as integers of at most 22 bits in one unit, rounded half up."""
    least = min(update.exponent for update in updates)
    largest = max(int(u.mantissas.max()) * factor << u.exponent - least for u, factor in zip(updates, factors, strict=True))
    exponent = least - FACTOR_BITS + max(0, largest.bit_length() - GRID_BITS)
    return tuple(_rescale(u, factor, exponent) for u, factor in zip(updates, factors, strict=True)), exponent


def _rescale(update: Update, factor: int, exponent: int) -> npt.NDArray[np.int32]:
    shift = exponent + FACTOR_BITS - update.exponent
    scaled = update.mantissas.astype(np.int64) * factor
    if shift <= 0:
        return (scaled << -shift).astype(np.int32)
    if shift > 62:  # below half a unit: 46 bits are gone, and wider shifts are undefined
        return np.zeros(len(scaled), dtype=np.int32)
    return ((scaled + (1 << shift - 1)) >> shift).astype(np.int32)
