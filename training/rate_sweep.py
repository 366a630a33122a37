"""Line search for a learning rate, also of rival programs.

The search continues beyond an end of the line while the best value is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

# Most values beyond the ends of the given line: with factors of two, a sixteenth or sixteen times of the rate at an end.
BEYOND_MAX = 4


class RateSweep:
    """A search over values of a rate. `losses` maps each measured value to its loss.

    A loss that is not finite counts as infinite: no value beyond a rate that diverges is better.
    """

    def __init__(self, values: Iterable[float], beyond: int = BEYOND_MAX) -> None:
        self.losses: dict[float, float] = {}
        self._waiting = list(values)
        self._left = beyond if len(self._waiting) > 1 else 0

    def next_value(self) -> float | None:
        """Return the next value to measure; None if none is left.

        A value beyond an end has the same ratio to the end as the end has to its neighbour.
        """
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
    """Return true if the best value is the smallest or the largest measured value, so that a better value may lie beyond it."""
    return len(losses) > 1 and best_value(losses) in (min(losses), max(losses))
