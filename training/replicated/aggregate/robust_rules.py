"""Aggregation rules: integer factors, neighbours and a divisor from the exact dot products of a round's updates.

The rules for m updates, of which f may be false (`tolerated_faults`):

    arc-nnm-trim       ARC, adaptive robust clipping (Allouah 2024, arXiv:2405.14432): the ⌊2(f/m)(m−f)⌋ longest updates are
                       clipped to the next norm. NNM, nearest-neighbour mixing (Allouah 2023, arXiv:2302.01772): each update
                       becomes the mean of its m − f nearest updates, itself included. Trimmed mean (Yin 2018, arXiv:1803.01498):
                       the f largest and f smallest values of every coordinate are dropped
    centered-clipping  v ← v + mean of (x − v)·min(1, τ/‖x − v‖) (Karimireddy 2021, arXiv:2012.10333), from v = 0. τ is the median
                       distance, which no minority can move beyond the honest distances
    mean, median, trimmed-mean    by coordinate
    krum               the update with the least sum of squared distances to its m − f − 2 nearest updates (Blanchard 2017)
    geometric-median   Weiszfeld's iteration, smoothed (Pillutla 2019, arXiv:1912.13445), from the mean

Iterations adjust integer weights of the updates in units of 2^-FACTOR_BITS. The current point of an iteration is a linear
combination of the updates, so its distances follow from the dot products. Statistics cannot protect two or fewer updates: all
rules take their plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from training.job_spec import AggregationRule
from training.replicated.aggregate.level_matrix import Integers, gram_matrix
from training.replicated.codec import QuantizedUpdate
from training.replicated.parallel_map import ParallelMap, serial_map

FACTOR_BITS: Final = 30  # bits of factors and weights: both are integers in units of 2^-30
ONE: Final = 1 << FACTOR_BITS
CLIPPING_ITERATIONS: Final = 10  # iterations of centered clipping: each at least halves the influence of the start
# Iterations of Weiszfeld's method, which converges linearly: after a dozen the error is within a thousandth.
WEISZFELD_ITERATIONS: Final = 16
CLOSEST_BITS: Final = 20  # Weiszfeld's least distance is 2^-20 of the largest distance, so that no weight dominates all others.


@dataclass(frozen=True, slots=True)
class UpdateCombination:
    """The result of a rule: the sum of factor · update / divisor, after mixing and trimming, if the rule has these steps."""

    factors: tuple[int, ...]  # factors of the updates in units of 2^-FACTOR_BITS, at most ONE
    divisor: int
    # For each update, the numbers of the updates that it is not mixed with; empty: no mixing.
    outsiders: tuple[tuple[int, ...], ...] = ()
    trimmed: int = 0  # number of the largest values of each coordinate that are dropped, and of the smallest ones


def tolerated_faults(count: int, liars: int) -> int:
    """Return f, the number of false updates that a rule tolerates among `count` accepted updates of a round."""
    return min(liars, (count - 1) // 2)


def is_plain_mean(count: int, rule: AggregationRule, liars: int) -> bool:
    """Return true if `rule` takes the plain mean of this many updates, which any false update can move."""
    return (
        count <= 2
        or rule is AggregationRule.MEAN
        or (rule is AggregationRule.ARC_NNM_TRIM and not tolerated_faults(count, liars))
    )


def combine_updates(
    updates: Sequence[QuantizedUpdate], rule: AggregationRule, liars: int, each: ParallelMap = serial_map
) -> UpdateCombination:
    """Return the combination by `rule`. `updates` are in ascending order of their origins; in a tie the first update wins."""
    count = len(updates)
    f = tolerated_faults(count, liars)
    if is_plain_mean(count, rule, liars):
        return _trimmed_mean(count, 0)
    if rule is AggregationRule.MEDIAN:
        return _trimmed_mean(count, (count - 1) // 2)
    if rule is AggregationRule.TRIMMED_MEAN:
        return _trimmed_mean(count, f)
    return _BY_DISTANCE[rule](align_exponents(gram_matrix(updates, each), [update.exponent for update in updates]), f)


def align_exponents(products: Integers, exponents: Sequence[int]) -> Integers:
    """Return the dot products in one unit, given the exponents of the updates."""
    shifts = [exponent - min(exponents) for exponent in exponents]
    return [
        [product << left + right for product, right in zip(row, shifts, strict=True)]
        for row, left in zip(products, shifts, strict=True)
    ]


def _trimmed_mean(count: int, f: int) -> UpdateCombination:
    return UpdateCombination((ONE,) * count, count - 2 * f, trimmed=f)


# Rules by distance ---------------------------------------------------------------------------------------------------


def _arc_nnm_trim(products: Integers, f: int) -> UpdateCombination:
    factors = arc_factors([row[i] for i, row in enumerate(products)], f)
    clipped = [
        [x * left * right for x, right in zip(row, factors, strict=True)] for row, left in zip(products, factors, strict=True)
    ]
    count = len(products)
    # NNM divides by m − f, and the trimmed mean by m − 2f. One division by the product does both.
    return UpdateCombination(tuple(factors), (count - 2 * f) * (count - f), farthest_updates(clipped, f), f)


def arc_factors(squares: Sequence[int], f: int) -> list[int]:
    """Return ARC's factor for each update, rounded down, given the squared norms of all updates."""
    clipped = 2 * f * (len(squares) - f) // len(squares)
    return [_shrink(square, sorted(squares, reverse=True)[clipped]) for square in squares]


def _shrink(square: int, bound: int) -> int:
    """Return min(1, √(bound / square)) in units of 2^-FACTOR_BITS, rounded down."""
    return ONE if square <= bound else math.isqrt((bound << 2 * FACTOR_BITS) // square)


def farthest_updates(products: Integers, f: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each update, the numbers of the f updates that are farthest from it.

    In a tie the lower number counts as nearer.
    """
    count = len(products)
    return tuple(tuple(sorted(range(count), key=lambda j: (row[j], j))[count - f :]) for row in squared_distances(products))


def squared_distances(products: Integers) -> Integers:
    """Return the squared distances of all pairs of updates."""
    squares = [row[i] for i, row in enumerate(products)]
    return [
        [left + right - 2 * x for x, right in zip(row, squares, strict=True)] for row, left in zip(products, squares, strict=True)
    ]


def _krum(products: Integers, f: int) -> UpdateCombination:
    nearest = max(1, len(products) - f - 2)
    scores = [sum(sorted(row[:i] + row[i + 1 :])[:nearest]) for i, row in enumerate(squared_distances(products))]
    best = scores.index(min(scores))
    return UpdateCombination(tuple(ONE * (i == best) for i in range(len(products))), 1)


def _centered_clipping(products: Integers, f: int) -> UpdateCombination:
    count = len(products)
    weights = [0] * count
    for _ in range(CLIPPING_ITERATIONS):
        squares = squared_distances_to(products, weights)
        bound = sorted(squares)[(count - 1) // 2]
        shares = [_shrink(square, bound) for square in squares]
        stays = count * ONE - sum(shares)
        weights = [(stays * weight + share * ONE) // (count * ONE) for weight, share in zip(weights, shares, strict=True)]
    return UpdateCombination(tuple(weights), 1)


def _geometric_median(products: Integers, f: int) -> UpdateCombination:
    count = len(products)
    weights = [ONE // count] * count
    for _ in range(WEISZFELD_ITERATIONS):
        far = [math.isqrt(square) for square in squared_distances_to(products, weights)]
        longest = max(1, *far)
        shares = [(longest << FACTOR_BITS) // max(distance, longest >> CLOSEST_BITS, 1) for distance in far]
        weights = [share * ONE // sum(shares) for share in shares]
    return UpdateCombination(tuple(weights), 1)


def squared_distances_to(products: Integers, weights: Sequence[int]) -> list[int]:
    """Return the squared distance of each update to the sum with these weights, in units of ONE^-2 of the unit of `products`."""
    along = [sum(x * weight for x, weight in zip(row, weights, strict=True)) for row in products]
    square = sum(x * weight for x, weight in zip(along, weights, strict=True))
    return [row[i] * ONE * ONE - 2 * ONE * along[i] + square for i, row in enumerate(products)]


_BY_DISTANCE: Final[dict[AggregationRule, Callable[[Integers, int], UpdateCombination]]] = {
    AggregationRule.ARC_NNM_TRIM: _arc_nnm_trim,
    AggregationRule.CENTERED_CLIPPING: _centered_clipping,
    AggregationRule.KRUM: _krum,
    AggregationRule.GEOMETRIC_MEDIAN: _geometric_median,
}
