"""Search on a line of values that goes on beyond an edge while the best lies there: how rates are tuned, also those of rivals."""

from __future__ import annotations

import math
from collections.abc import Iterable

BEYOND_MAX = 4  # values tried beyond the edges of a line: with factors of two, a rate sixteen times as far away


class RateSweep:
    """`losses` is what has been measured: value → loss. A loss that is not finite counts as infinite: nothing lies beyond a rate
    that diverges.
    """

    def __init__(self, values: Iterable[float], beyond: int = BEYOND_MAX) -> None:
        self.losses: dict[float, float] = {}
        self._waiting = list(values)
        self._left = beyond if len(self._waiting) > 1 else 0

    def next_value(self) -> float | None:
        """The next value to measure, if any; beyond an edge as far from it, by ratio, as the edge from its neighbour."""
        if self._waiting:
            return self._waiting.pop(0)
        if not self._left or not is_best_at_edge(self.losses):
            return None
        self._left -= 1
        line, best = sorted(self.losses), best_value(self.losses)
        inner = line[1] if best == line[0] else line[-2]
        return float(f"{best * best / inner:.3g}")


def best_value(losses: dict[float, float]) -> float:
    return min(losses, key=lambda value: losses[value] if math.isfinite(losses[value]) else math.inf)


def is_best_at_edge(losses: dict[float, float]) -> bool:
    """Whether the best of a line is its first or its last value, so that a better one may lie outside."""
    return len(losses) > 1 and best_value(losses) in (min(losses), max(losses))
