"""Orders of items from comparisons. The items of a ranking: ranked pairs, Tideman (1987). All items that a project's pairs
compare: strengths of Bradley and Terry (1952), by Hunter's (2004) algorithm, section 2; a tie is half a win for each item.
Integer arithmetic gives every peer the same results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Final, TypeVar

from curation.tasks.answers import Answer

# strength of a virtual opponent with a win and a loss against each item, so that all strengths are finite
STRENGTH_ONE: Final = 1 << 20
BRADLEY_TERRY_TURNS: Final = 200  # number of iterations, after which no strength of 50 items changes by a thousandth
FIRST, SECOND, TIE = 0, 1, 2  # answers that compare the items of a pair, unlike the fourth answer "both bad"

Item = TypeVar("Item", bound=Hashable)


# Rankings ----------------------------------------------------------------------------------------------------------------


def preference_margin(rankings: Sequence[Answer], better: int, worse: int) -> int:
    """Return the number of rankings with `better` before `worse`, less the number of those with `worse` before `better`."""
    return sum(1 if ranking.index(better) < ranking.index(worse) else -1 for ranking in rankings)


def ranked_pairs_order(rankings: Sequence[Answer]) -> Answer:
    """Return the items in order, the best first.

    Pairs are locked in the order of falling margins, except pairs that would close a cycle. Pairs with equal margins are ordered
    by the number of the better item, then of the worse one. In a pair with margin 0, the item with the lower number is the better
    one. `rankings`: at least one ranking, each of the items 0..n−1.
    """
    items = range(len(rankings[0]))
    margins = {(a, b): preference_margin(rankings, a, b) for a, b in combinations(items, 2)}
    won = [(-abs(more), a, b) if more >= 0 else (-abs(more), b, a) for (a, b), more in margins.items()]
    beaten: list[set[int]] = [set() for _ in items]  # items that each item beats, directly or through other items
    for _, better, worse in sorted(won):
        if better in beaten[worse]:
            continue
        below = {worse} | beaten[worse]
        for item in items:
            if item == better or better in beaten[item]:
                beaten[item] |= below
    return tuple(sorted(items, key=lambda item: -len(beaten[item])))


def order_confidence(rankings: Sequence[Answer], order: Answer, odds: Fraction) -> Fraction:
    """Return the probability that the order of two neighbours is right, for the neighbours with the lowest margin.

    `odds`: the odds that one ranking orders two items rightly.
    """
    least = min(preference_margin(rankings, better, worse) for better, worse in pairwise(order))
    weight = odds**least
    return weight / (weight + 1)


# Pairs -------------------------------------------------------------------------------------------------------------------


def bradley_terry(games: Sequence[tuple[Item, Item, int]]) -> dict[Item, int]:
    """Return the items' strengths in units of 1/STRENGTH_ONE. An item beats another with probability strength ∕ sum of both.

    `games`: first item, second item and answer of each pair. The order of the games does not matter.
    """
    wins: Counter[Item] = Counter()  # counted in half wins
    met: Counter[tuple[Item, Item]] = Counter()
    for first, second, answer in games:
        if first == second or answer not in (FIRST, SECOND, TIE):
            continue
        wins[first] += {FIRST: 2, TIE: 1}.get(answer, 0)
        wins[second] += {SECOND: 2, TIE: 1}.get(answer, 0)
        met[first, second] += 1
    strengths = {item: STRENGTH_ONE for pair in met for item in pair}
    for _ in range(BRADLEY_TERRY_TURNS):
        strengths = _stronger(strengths, wins, met)
    return strengths


def _stronger(strengths: Mapping[Item, int], wins: Mapping[Item, int], met: Mapping[tuple[Item, Item], int]) -> dict[Item, int]:
    against = {item: 2 * STRENGTH_ONE**2 // (strength + STRENGTH_ONE) for item, strength in strengths.items()}
    for (first, second), games in met.items():
        share = games * STRENGTH_ONE**2 // (strengths[first] + strengths[second])
        against[first] += share
        against[second] += share
    return {item: max(1, (wins[item] + 2) * STRENGTH_ONE**2 // (2 * below)) for item, below in against.items()}
