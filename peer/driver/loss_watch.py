"""Watches this trainer's own loss. A lie that no audit draws can undo much of what was learned, and every trainer sees that."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

LOOKBACK_ROUNDS = 8
KNOWN_MIN = 4  # rounds before a jump can be told from chance
# A round's mean loss over ten batches of 1,024 bytes differs by 0.03 of itself between rounds; that of one batch, by 0.07.
JUMP_FACTOR = 1.1
JUMP_CHANGES = 4  # times the usual change from round to round: of one batch, one honest round in seventy is above
JOBS_MAX = 8  # as many as run at once


def jump_above(losses: Mapping[int, float], number: int) -> float:
    """The loss above which this round is no chance. `losses`: by round; infinite while too few of them are known."""
    before = [loss for other, loss in sorted(losses.items()) if other < number][-LOOKBACK_ROUNDS:]
    if len(before) < KNOWN_MIN:
        return math.inf
    usual, change = statistics.median(before), statistics.median(abs(b - a) for a, b in pairwise(before))
    return max(JUMP_FACTOR * usual, usual + JUMP_CHANGES * change)


def first_jump(losses: Mapping[int, float]) -> int | None:
    """The first of the newest rounds whose losses are all far above those before them. None: the newest loss is as usual."""
    first = None
    for number, loss in sorted(losses.items(), reverse=True):
        if loss <= jump_above(losses, number):
            break
        first = number
    return first


def suspicion(me: bytes, jump: int, number: int, trainer: bytes) -> tuple[int, bytes]:
    """A key to sort proposals by: near the round before the jump is first. Each peer sorts those of a round in another order."""
    return abs(jump - 1 - number), hashlib.sha256(me + trainer + number.to_bytes(8)).digest()


class LossWatch:
    """The last losses of each job."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, dict[int, float]] = OrderedDict()

    def note(self, job: bytes, number: int, loss: float) -> None:
        """`loss` of this trainer in its open round."""
        losses = self._jobs.pop(job, {}) | {number: loss}
        self._jobs[job] = dict(sorted(losses.items())[-2 * LOOKBACK_ROUNDS :])
        while len(self._jobs) > JOBS_MAX:
            self._jobs.popitem(last=False)

    def losses(self, job: bytes, since: int) -> dict[int, float]:
        """Of the last rounds from `since` on, by round."""
        return {number: loss for number, loss in self._jobs.get(job, {}).items() if number >= since}
