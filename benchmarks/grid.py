"""Search on a line of values that goes on beyond an edge while the best lies there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

BEYOND_MAX = 4  # values tried beyond the edges of a line: with factors of two, a rate sixteen times as far away


def search(values: Iterable[float], measure: Callable[[float], float], beyond: int = BEYOND_MAX) -> dict[float, float]:
    """Value → loss, ascending by value. What is beyond an edge is as far from it, by ratio, as the edge from its neighbour.

    A loss that is not finite counts as infinite: nothing lies beyond a rate that diverges.
    """
    losses = {value: measure(value) for value in values}
    for _ in range(beyond if len(losses) > 1 else 0):
        if (best := best_of(losses)) not in (line := sorted(losses))[:: len(line) - 1]:
            break
        inner = line[1] if best == line[0] else line[-2]
        further = float(f"{best * best / inner:.3g}")
        losses[further] = measure(further)
    return dict(sorted(losses.items()))


def best_of(losses: dict[float, float]) -> float:
    return min(losses, key=lambda value: losses[value] if math.isfinite(losses[value]) else math.inf)


def at_edge(losses: dict[float, float]) -> bool:
    """Whether the best of a line is its first or its last value, so that a better one may lie outside."""
    return len(losses) > 1 and best_of(losses) in (min(losses), max(losses))
