"""From comparisons to an order: of the few items of a ranking, and of everything that a project's pairs compare.

Tideman (1987), ranked pairs. Bradley and Terry (1952), by Hunter's (2004) algorithm, section 2; a tie is half a win for each.
Both are in integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Final, TypeVar

from curation.tasks.answers import Answer

STRENGTH_ONE: Final = 1 << 20  # the strength of an opponent whom everybody has met twice, with a win and a loss: all stay finite
BRADLEY_TERRY_TURNS: Final = 200  # then no strength of 50 items changes by a thousandth any more
FIRST, SECOND, TIE = 0, 1, 2  # answers to a pair; both bad compares nothing

Item = TypeVar("Item", bound=Hashable)


# Rankings ----------------------------------------------------------------------------------------------------------------


def preference_margin(rankings: Sequence[Answer], better: int, worse: int) -> int:
    """How many more rankings have the one before the other than behind it."""
    return sum(1 if ranking.index(better) < ranking.index(worse) else -1 for ranking in rankings)


def ranked_pairs_order(rankings: Sequence[Answer]) -> Answer:
    """The best first. Pairs are locked by falling margins unless that closes a circle.

    Among equal margins, and where there is no majority, it is the pair with the lower numbers first: of the better item, then of
    the worse one. `rankings`: at least one, all of the same items 0..n-1.
    """
    items = range(len(rankings[0]))
    margins = {(a, b): preference_margin(rankings, a, b) for a, b in combinations(items, 2)}
    won = [(-abs(more), a, b) if more >= 0 else (-abs(more), b, a) for (a, b), more in margins.items()]
    beaten: list[set[int]] = [set() for _ in items]  # by each item, through others too
    for _, better, worse in sorted(won):
        if better in beaten[worse]:
            continue
        below = {worse} | beaten[worse]
        for item in items:
            if item == better or better in beaten[item]:
                beaten[item] |= below
    return tuple(sorted(items, key=lambda item: -len(beaten[item])))


def order_confidence(rankings: Sequence[Answer], order: Answer, odds: Fraction) -> Fraction:
    """How likely the least clear two neighbours are in the right order, if a vote is right with these odds on each pair."""
    least = min(preference_margin(rankings, better, worse) for better, worse in pairwise(order))
    weight = odds**least
    return weight / (weight + 1)


# Pairs -------------------------------------------------------------------------------------------------------------------


def bradley_terry(games: Sequence[tuple[Item, Item, int]]) -> dict[Item, int]:
    """Strengths in units of 1/STRENGTH_ONE: an item beats another with strength : sum of both.

    `games`: first, second, and the answer to that pair. The same for any order of the games.
    """
    wins: Counter[Item] = Counter()  # in halves
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
