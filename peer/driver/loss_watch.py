"""Watches this trainer's own loss. A lie that no audit draws can undo much of what was learned, and every trainer sees that."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Mapping

LOOKBACK_ROUNDS = 8
KNOWN_MIN = 3  # rounds before a jump can be told from chance
# A round's mean loss over ten batches of 1,024 bytes differs by 0.03 of itself between rounds.
JUMP_FACTOR = 1.1
JOBS_MAX = 8  # as many as run at once


def has_jumped(losses: Mapping[int, float], number: int) -> bool:
    """Whether the loss of this round is far above those of the rounds before it. `losses`: by round."""
    before = [loss for other, loss in sorted(losses.items()) if other < number][-LOOKBACK_ROUNDS:]
    return number in losses and len(before) >= KNOWN_MIN and losses[number] > JUMP_FACTOR * statistics.median(before)


class LossWatch:
    """The last losses of each job."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, dict[int, float]] = OrderedDict()

    def note(self, job: bytes, number: int, loss: float) -> None:
        """`loss` of this trainer in its open round."""
        losses = self._jobs.setdefault(job, {})
        losses[number] = loss
        self._jobs.move_to_end(job)
        self._jobs[job] = dict(sorted(losses.items())[-LOOKBACK_ROUNDS - 1 :])
        while len(self._jobs) > JOBS_MAX:
            self._jobs.popitem(last=False)

    def jumped(self, job: bytes, since: int) -> int | None:
        """The newest round, if its loss is far above those of the rounds from `since` on."""
        losses = {number: loss for number, loss in self._jobs.get(job, {}).items() if number >= since}
        newest = max(losses, default=0)
        return newest if has_jumped(losses, newest) else None
