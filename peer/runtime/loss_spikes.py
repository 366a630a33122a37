"""Watches this trainer's own loss. A lie that no audit draws can undo much of what was learned, and every trainer sees that."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from ledger.jobs import RUNNING_MAX

LOOKBACK_ROUNDS = 8
KNOWN_MIN = 4  # rounds before a jump can be told from chance
# A round's mean loss over ten batches of 1,024 bytes differs by 0.03 of itself between rounds; that of one batch, by 0.07.
SPIKE_FACTOR = 1.1
SPIKE_CHANGES = 4  # times the usual change from round to round: of one batch, one honest round in seventy is above
CHANCE_MAX = 1 / 3  # of the usual loss: liars could make it change as much as they like
ROUNDS_KEPT = 64  # more than a rollback undoes, and the rounds before


def spike_threshold(losses: Mapping[int, float], number: int) -> float:
    """The loss above which this round is no chance. `losses`: by round; infinite while too few of them are known."""
    before = [loss for other, loss in sorted(losses.items()) if other < number][-LOOKBACK_ROUNDS:]
    if len(before) < KNOWN_MIN:
        return math.inf
    usual, change = statistics.median(before), statistics.median(abs(b - a) for a, b in pairwise(before))
    return max(SPIKE_FACTOR * usual, usual + min(SPIKE_CHANGES * change, CHANCE_MAX * usual))


def first_spike(losses: Mapping[int, float], opened: int) -> int | None:
    """The first of the newest rounds whose losses are all far above those before them.

    None: the newest loss is as usual, or older than that of the round before the one that is open.
    """
    first = None
    for number, loss in sorted(losses.items(), reverse=True):
        if loss <= spike_threshold(losses, number):
            break
        first = number
    return first if losses and max(losses) >= opened - 1 else None


def most_suspect_round(rounds: Iterable[int], jump: int) -> int:
    """Which of these a jump most likely comes from: the one before it, and then the nearest."""
    return min(rounds, key=lambda number: (abs(jump - 1 - number), number))


class LossHistory:
    """The last losses of each job."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, dict[int, float]] = OrderedDict()

    def record_loss(self, job: bytes, number: int, loss: float) -> None:
        """`loss` of this trainer in that round; infinite if it is no number."""
        losses = self._jobs.pop(job, {}) | {number: loss}
        self._jobs[job] = dict(sorted(losses.items())[-ROUNDS_KEPT:])
        while len(self._jobs) > RUNNING_MAX:
            self._jobs.popitem(last=False)

    def losses(self, job: bytes, undone: Iterable[tuple[int, int]]) -> dict[int, float]:
        """By round, but for those that are undone. `undone`: first and last of each line of rounds."""
        known, lines = self._jobs.get(job, {}), list(undone)
        return {of: loss for of, loss in known.items() if not any(first <= of <= last for first, last in lines)}
