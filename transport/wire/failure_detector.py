"""When does a peer count as gone? A failure detector for one link. Sans-IO; time is an argument.

A peer is suspected after a fixed silence, or after a longer one where silences of this link have come near that. The
bound is that of the φ accrual failure detector (Hayashibara, Défago, Yared and Katayama, SRDS 2004), silences taken as normal:
φ(t) = −log10 P(a silence lasts longer than t), and φ ≥ 8 exactly where t ≥ mean + 5.61 standard deviations.

Silence is counted only while somebody listens: a link that its own reader leaves alone says nothing about the peer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

PING_SECONDS = 5.0  # the setting `ping_seconds` says otherwise, `suspect_seconds` the next
SUSPECT_SECONDS = 15.0  # three pings
PROBE_SECONDS = 1.0  # between pings of a link on which one was not answered: with three pings alone, a link that loses a fifth of
# them would be suspected a dozen times an hour among seven peers
DEVIATIONS = 5.61  # of a normal distribution, beyond which lie 1e-8: φ = 8, as Hayashibara's paper and later users of it have it
SILENCES_KEPT = 200  # a quarter of an hour of pings
SILENCES_MIN = 30  # two minutes of them; fewer say nothing about how they spread
SILENCE_SECONDS_MIN = 1.0  # what is shorter is no silence: bulk, which comes frame by frame, would push the others out
SUSPECT_FACTOR_MAX = 2.0  # times the fixed silence: a peer that stays silent now and then does not earn more
IDLE_FACTOR = 2.5  # times it: then the link ends

assert SUSPECT_FACTOR_MAX < IDLE_FACTOR, "a peer is suspected before its link ends"


@dataclass(frozen=True, slots=True)
class KeepaliveConfig:
    """How often links are pinged, and what silence is suspicious."""

    ping_seconds: float = PING_SECONDS
    suspect_seconds: float = SUSPECT_SECONDS

    @property
    def idle_seconds(self) -> float:
        """A link that brings nothing for so long is dead."""
        return IDLE_FACTOR * self.suspect_seconds


class LinkFailureDetector:
    """How long nothing has come over one link, and how long that may be."""

    def __init__(self, pace: KeepaliveConfig, now: float) -> None:
        self._pace = pace
        self._since: float | None = now  # None: nobody listens
        self._usual: deque[float] = deque(maxlen=SILENCES_KEPT)
        self.suspect_seconds = pace.suspect_seconds

    def resume_listening(self, now: float) -> None:
        self._since = now

    def record_arrival(self, now: float) -> None:
        """Something came, and is worked on until `resume_listening`."""
        seconds, self._since = self.silent_seconds(now), None
        # An outage is no habit: with it in the history the next one would be noticed late (Akka leaves it out, too).
        if SILENCE_SECONDS_MIN <= seconds < self.suspect_seconds:
            self._usual.append(seconds)
            self.suspect_seconds = self._suspicion_timeout()

    @property
    def is_listening(self) -> bool:
        return self._since is not None

    def silent_seconds(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def is_suspected(self, now: float) -> bool:
        return self.silent_seconds(now) >= self.suspect_seconds

    def next_ping_at(self, now: float, due: float) -> float:
        """When to ping, if `due` is the regular time: sooner where an answer is overdue."""
        return min(due, max(now, now - self.silent_seconds(now) + self._pace.ping_seconds + PROBE_SECONDS))

    def _suspicion_timeout(self) -> float:
        fixed, count = self._pace.suspect_seconds, len(self._usual)
        if count < SILENCES_MIN:
            return fixed
        mean = math.fsum(self._usual) / count
        deviation = math.sqrt(math.fsum((seconds - mean) ** 2 for seconds in self._usual) / count)
        return min(max(fixed, mean + DEVIATIONS * deviation), SUSPECT_FACTOR_MAX * fixed)
