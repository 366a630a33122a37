"""Whether this trainer's updates come too late, from the decided rounds. Told to its own operator; nothing is decided by it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rounds.round_state import PROPOSALS_FACTOR, RoundResult

WINDOW_SECONDS = 60.0  # what counts are the rounds of the last minute, so that one that goes well does not wipe out the others,
WINDOW_ROUNDS_MIN = 5  # and where rounds are long so many
WINDOW_ROUNDS_MAX = 1_000  # of a tenth of a second and less, which no network decides for a whole minute
LATE_ROUNDS_MIN = 3  # one or two happen to anybody, as beside another program
LATE_SECONDS_MIN = 30.0  # together: a worker that has just been started takes a third of that, while short rounds go by


@dataclass(frozen=True, slots=True)
class _RoundTiming:
    absent: bool  # it was closed without this trainer's update
    proposed: bool  # which had said its proposal before that
    seconds: float  # that it took here


class StragglerDetector:
    """Of one trainer in one job: the last rounds in which the others waited for it."""

    def __init__(self) -> None:
        self._rounds: deque[_RoundTiming] = deque(maxlen=WINDOW_ROUNDS_MAX)
        self._missed = 0  # rounds, since few were missed
        self._told = 0  # how many that were when it was told last; 0: it was not

    def record_round(self, outcome: RoundResult, me: bytes, proposed: bool, seconds: float) -> bool:
        """After one more closed round. Whether its operator is to be told now.

        It is told as soon as it is late, and again whenever twice as many rounds were missed, for whoever reads the log later.
        """
        absent = me in outcome.absent
        if not absent and me not in outcome.accepted and me not in outcome.rejected:
            return False  # it does not train in this round
        self._rounds.append(_RoundTiming(absent, proposed, seconds))
        self._missed += absent
        while len(self._rounds) > WINDOW_ROUNDS_MIN and self._seconds() - self._rounds[0].seconds >= WINDOW_SECONDS:
            self._rounds.popleft()
        # Not already below half: a trainer that misses every second round would be told again and again.
        if 4 * len(self._absent()) <= len(self._rounds):
            self._missed = self._told = 0
        if not self.is_straggling or self._missed < 2 * self._told:
            return False
        self._told = self._missed
        return True

    def _seconds(self) -> float:
        return sum(round.seconds for round in self._rounds)

    def _absent(self) -> list[_RoundTiming]:
        return [round for round in self._rounds if round.absent]

    @property
    def is_straggling(self) -> bool:
        """In most of the last rounds."""
        absent = self._absent()
        is_enough = len(absent) >= LATE_ROUNDS_MIN and sum(round.seconds for round in absent) >= LATE_SECONDS_MIN
        return is_enough and 2 * len(absent) > len(self._rounds)

    def describe_cause(self, name: str) -> str:
        """What happens, why, and what helps; empty if it is not late, or it is too early to say."""
        if not self.is_straggling:
            return ""
        absent = self._absent()
        patience = f"the others wait {PROPOSALS_FACTOR:.0f} times what most of them take, `proposal_seconds` of the job at most"
        if 2 * sum(round.proposed for round in absent) > len(absent):
            why = "they were computed in time and reached too few voters in time: this peer's link is too slow, or cut"
            helps = "a faster link, or a job that sends less often (more `local_steps`)"
        else:
            took = sum(round.seconds for round in absent) / len(absent)
            why = f"a round closes after {took:.1f} s, before they are computed"
            helps = "more `threads` or a faster machine, or a job with fewer `local_steps`"
        missing = f"this peer's updates are missing in {len(absent)} of the last {len(self._rounds)} rounds of {name!r}"
        return f"{missing}: {why}; what helps: {helps}; {patience}"
