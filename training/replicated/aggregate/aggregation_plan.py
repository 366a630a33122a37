"""The plan of an aggregation, which is complete before any coordinate is read, and its execution block by block."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError
from protocol.limits import TRAINERS_MAX
from training.job_spec import BITS_ROBUST_MAX, AggregationRule
from training.replicated.aggregate.level_matrix import LevelMatrix, Row, group_blocks
from training.replicated.aggregate.robust_rules import FACTOR_BITS, UpdateCombination, combine_updates
from training.replicated.codec import LEVEL_MAX, SCALE_BITS, QuantizedUpdate
from training.replicated.codec.quantization import TOP
from training.replicated.outer_optimizer import FLUSH_BELOW
from training.replicated.parallel_map import ParallelMap, serial_map
from training.replicated.tensor_layout import ElementRun, Float32Array

SUM_BITS: Final = 30  # most bits of the sum of an element over a round's updates: after rounding up, the sum still fits an int32
SUM_BITS_WIDE: Final = 61  # the same for an int64, for levels of 16 bits, whose products with scales have 35 bits
# Least bits of a round's largest element. If 32-bit sums of mixed updates leave fewer, sums have 64 bits.
GRID_BITS_MIN: Final = 22
# Least exponent of the grid: aggregates are then zero or at least `FLUSH_BELOW`, and derived numbers are normal.
GRID_EXPONENT_MIN: Final = -84
COLUMNS: Final = 1 << 14  # least number of columns that are processed at once: two dozen rows of 64 KiB stay in the caches
# Elements of all updates together that are processed at once: with few updates, threads would wait for each other in shorter
# calls.
COLUMNS_OF_ALL: Final = 1 << 18

# These limits exclude overflows. In the first one, rounding up a scale adds at most half of the level to each element.
assert (1 << SUM_BITS) + max(TRAINERS_MAX, 1 << SUM_BITS - GRID_BITS_MIN) * LEVEL_MAX < 1 << 31
assert SUM_BITS - TRAINERS_MAX.bit_length() >= GRID_BITS_MIN
assert SCALE_BITS + FACTOR_BITS < 63
assert math.ldexp(1.0, GRID_EXPONENT_MIN) / TRAINERS_MAX**2 >= FLUSH_BELOW


@dataclass(frozen=True, slots=True, eq=False)
class AggregationPlan:
    """A plan that `iter_aggregate` executes block by block. It needs memory for the levels of all updates in a few blocks."""

    updates: tuple[QuantizedUpdate, ...]  # updates in ascending order of origin, so that their order of arrival does not matter
    # For each update, the scales of its chunks times its factor, in units of 2^exponent.
    scales: tuple[Row, ...]
    exponent: int
    # For each update, the numbers of the updates that it is not mixed with; empty: no mixing.
    outsiders: tuple[tuple[int, ...], ...]
    trimmed: int  # number of the largest values of each coordinate that are dropped, and of the smallest ones
    divisor: int
    sums: type[np.signedinteger[Any]]  # integer type of the last sum: int32 if the sum fits

    def iter_aggregate(self, blocks: Sequence[ElementRun]) -> Iterator[Float32Array]:
        """Yield the aggregate over each of these consecutive blocks or runs, in float32. Any thread may call this method."""
        for some in group_blocks(blocks, len(self.updates)):
            mean, first = self._mean(ElementRun.of_blocks(some)), some[0].elements.start
            for block in some:
                yield mean[block.elements.start - first : block.elements.stop - first].astype(np.float32)

    def _mean(self, run: ElementRun) -> npt.NDArray[np.float64]:
        levels, scales = LevelMatrix.of_run(self.updates, run), [scales[run.chunks] for scales in self.scales]
        mean, step = np.empty(run.size), max(COLUMNS, COLUMNS_OF_ALL // len(scales))
        for chunks, part in levels.iter_parts():
            rows, combined = [levels.scaled_row(row, of[chunks], chunks, part) for row, of in enumerate(scales)], mean[part]
            for start in range(0, len(combined), step):
                at = slice(start, start + step)
                columns = [row[at] for row in rows]
                if self.outsiders:
                    columns = self._mix(columns)
                if self.trimmed:
                    columns = select_middle(columns, self.trimmed)
                combined[at] = _total(columns, self.sums)
        # This division and the later conversion to float32 round. The divisor is exact.
        mean /= math.ldexp(self.divisor, -self.exponent)
        return mean

    def _mix(self, rows: list[Row]) -> list[Row]:
        """Return, for each update, the sum over its neighbours: the sum over all updates, minus its outsiders."""
        total = _total(rows, np.int32)
        mixed = []
        for outsiders in self.outsiders:
            left = total - rows[outsiders[0]]
            for outsider in outsiders[1:]:
                left -= rows[outsider]
            mixed.append(left)
        return mixed


def _total(rows: Sequence[Row], dtype: type[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
    total = rows[0].astype(dtype)
    for row in rows[1:]:
        total += row
    return total


def plan_aggregation(
    updates: Sequence[QuantizedUpdate], rule: AggregationRule, liars: int, each: ParallelMap = serial_map
) -> AggregationPlan:
    """Return the plan to aggregate `updates` (at least one, one per trainer), of which at most `liars` are false."""
    ordered = tuple(sorted(updates, key=lambda update: update.origin))
    if not ordered or len({update.origin for update in ordered}) < len(ordered):
        raise LocalProtocolError(f"{len(ordered)} updates: at least one is needed, and one per trainer")
    return plan_on_grid(ordered, combine_updates(ordered, rule, liars, each))


def plan_on_grid(updates: Sequence[QuantizedUpdate], combination: UpdateCombination) -> AggregationPlan:
    """Return the plan for a combination: all scales, times their factors, become integers in one unit, rounded half up."""
    # By coordinate, an update takes part even if its factor is zero.
    by_coordinate = combination.outsiders or combination.trimmed
    chosen = [i for i in range(len(updates)) if combination.factors[i] or by_coordinate] or [0]
    updates, factors = tuple(updates[i] for i in chosen), [combination.factors[i] for i in chosen]
    least = min(update.exponent for update in updates)
    largest = [int(u.scales.max()) * factor << u.exponent - least for u, factor in zip(updates, factors, strict=True)]
    bound, sums = _largest_sum(largest, combination)
    is_wide = updates[0].bits > BITS_ROBUST_MAX
    assert not (is_wide and by_coordinate), "levels of 16 bits have the rule `mean`"
    excess = max(0, (bound * TOP[updates[0].bits]).bit_length() - (SUM_BITS_WIDE if is_wide else SUM_BITS))
    exponent = max(GRID_EXPONENT_MIN, least - FACTOR_BITS + excess)
    dtype: type[np.signedinteger[Any]] = np.int64 if is_wide else np.int32
    scales = tuple(_rescale(update, factor, exponent).astype(dtype) for update, factor in zip(updates, factors, strict=True))
    sums = np.int64 if is_wide else sums
    return AggregationPlan(updates, scales, exponent, combination.outsiders, combination.trimmed, combination.divisor, sums)


def _largest_sum(largest: list[int], combination: UpdateCombination) -> tuple[int, type[np.signedinteger[Any]]]:
    """Return a bound of all sums of elements, given the largest scale of each update, and the integer type of the last sum."""
    if not combination.outsiders:
        return sum(largest), np.int32
    summed = max(len(largest), combination.divisor)
    if summed <= 1 << SUM_BITS - GRID_BITS_MIN:
        return summed * max(largest), np.int32
    return len(largest) * max(largest), np.int64  # This is the bound for a mixed row, which is still int32.


def _rescale(update: QuantizedUpdate, factor: int, exponent: int) -> npt.NDArray[np.int64]:
    scaled = update.scales * factor
    shift = exponent + FACTOR_BITS - update.exponent
    if shift > 62 or not scaled.any():  # All scales round to zero. A wider shift would be undefined.
        return np.zeros(len(scaled), dtype=np.int64)
    return scaled << -shift if shift <= 0 else (scaled + (1 << shift - 1)) >> shift


# Selection of the middle values of every coordinate -----------------------------------------------------------------------

# A selection network computes minima and maxima of whole rows, in place. Batcher's merge exchange (Knuth, The Art of Computer
# Programming 3, 5.2.2 M) sorts any number of rows by O(n log² n) comparators. Only the sum of the middle ranks is needed. So the
# network omits a comparator between two rows that end in the same part (below, middle or above). It also omits the minimum or the
# maximum of a comparator if this result ends outside the middle.


@dataclass(frozen=True, slots=True)
class Comparator:
    low: int
    high: int
    keeps_low: bool  # True if the minimum is used later.
    keeps_high: bool


def select_middle(rows: Sequence[Row], f: int) -> list[Row]:
    """Return rows with all values of every column except the f smallest and f largest, in any order.

    The call overwrites `rows`.
    """
    rows, spare = list(rows), np.empty_like(rows[0])
    for comparator in selection_network(len(rows), f):
        low, high = rows[comparator.low], rows[comparator.high]
        if comparator.keeps_low and comparator.keeps_high:
            np.minimum(low, high, out=spare)
            np.maximum(low, high, out=high)
            rows[comparator.low], spare = spare, low
        elif comparator.keeps_low:
            np.minimum(low, high, out=low)
        else:
            np.maximum(low, high, out=high)
    return rows[f : len(rows) - f]


@functools.lru_cache(maxsize=64)
def selection_network(count: int, f: int) -> tuple[Comparator, ...]:
    """Return the comparators that move the f smallest of `count` values to the first f places and the f largest to the last f."""
    # Use of the value at each place after a comparator: the exact value (None), only its part in the sum (True), or none (False).
    matters: list[bool | None] = [f <= place < count - f for place in range(count)]
    kept = []
    for low, high in reversed(list(_merge_exchange(count))):
        if matters[low] is not None and matters[low] == matters[high]:
            continue
        kept.append(Comparator(low, high, matters[low] is not False, matters[high] is not False))
        matters[low] = matters[high] = None
    return tuple(reversed(kept))


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    p = top = 1 << max(0, (count - 1).bit_length() - 1)
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            for i in range(count - d):
                if i & p == r:
                    yield i, i + d
            d, q, r = q - p, q // 2, p
        p //= 2
