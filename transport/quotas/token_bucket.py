"""So many units a second: what may be sent, opened or told. Pure: the time is an argument."""

from __future__ import annotations

import math

ROUNDING = 1e-6  # of what a budget saves, after a while that was just long enough


class TokenBucket:
    """So many units a second, and `saved` at once. Whatever is due goes if nothing is owed for what went before."""

    def __init__(self, per_second: float, saved_max: float, least: int = 0) -> None:
        """`least`: counted for whatever is less."""
        self._rate, self._saved_max, self._least = per_second, saved_max, least
        self._saved, self._at = saved_max, -math.inf

    def wait_seconds(self, now: float) -> float:
        """0: the next one may go."""
        self._saved = min(self._saved_max, self._saved + self._rate * (now - self._at))
        self._at = now
        return 0.0 if self._saved > -ROUNDING else -self._saved / self._rate

    def spend(self, amount: int) -> None:
        self._saved -= max(amount, self._least)
