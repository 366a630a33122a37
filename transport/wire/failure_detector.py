"""A failure detector for one link. Sans-IO; time is an argument.

A peer is suspected after a fixed silence, or after a longer silence if earlier silences of its link were nearly as long as the
fixed one. The bound follows the φ accrual failure detector (Hayashibara, Défago, Yared and Katayama, SRDS 2004) for normally
distributed silences. The paper defines φ(t) = −log10 P(a silence lasts longer than t), and φ ≥ 8 exactly if t ≥ mean + 5.61
standard deviations.

Silence is counted only while this peer reads the link. While a link is not read, its peer may be sending.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

PING_SECONDS = 5.0  # default of the setting `ping_seconds`
SUSPECT_SECONDS = 15.0  # default of the setting `suspect_seconds`: three pings, and faster pings after an unanswered one
# Without faster pings, a network of seven peers that loses a fifth of its pings would have a dozen suspicions per hour.
PROBE_SECONDS = 1.0  # interval of pings after an unanswered one
# Standard deviations above the mean: φ = 8, as in the paper; a normal distribution exceeds them with probability 1e-8.
DEVIATIONS = 5.61
SILENCES_KEPT = 200  # silences in the history of a link: a quarter of an hour of pings
SILENCES_MIN = 30  # silences needed for a deviation: two minutes of pings; fewer give no useful deviation
SILENCE_SECONDS_MIN = 1.0  # shorter silences are not recorded, or gaps between bulk frames would replace the others
SUSPECT_FACTOR_MAX = 2.0  # the longest bound, as a multiple of the fixed silence, even for a peer that is often silent
IDLE_FACTOR = 2.5  # silence after which the link ends, as a multiple of the fixed silence

assert SUSPECT_FACTOR_MAX < IDLE_FACTOR, "a peer is suspected before its link ends"


@dataclass(frozen=True, slots=True)
class KeepaliveConfig:
    """The interval of pings, and the silence that makes a peer suspected, both in seconds."""

    ping_seconds: float = PING_SECONDS
    suspect_seconds: float = SUSPECT_SECONDS

    @property
    def idle_seconds(self) -> float:
        """Seconds of silence after which a link is closed."""
        return IDLE_FACTOR * self.suspect_seconds


class LinkFailureDetector:
    """The failure detector of one link: its current silence, and the silence from which its peer is suspected."""

    def __init__(self, pace: KeepaliveConfig, now: float) -> None:
        self._pace = pace
        self._since: float | None = now  # start of the silence; None: the link is not read
        self._usual: deque[float] = deque(maxlen=SILENCES_KEPT)
        self.suspect_seconds = pace.suspect_seconds

    def resume_listening(self, now: float) -> None:
        self._since = now

    def record_arrival(self, now: float) -> None:
        """End the silence. A new one begins at `resume_listening`, after the message is handled."""
        seconds, self._since = self.silent_seconds(now), None
        # The history omits outages, as in Akka. Otherwise the next outage would be detected late.
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
        """Return the time of the next ping: `due`, or earlier if an answer is overdue."""
        return min(due, max(now, now - self.silent_seconds(now) + self._pace.ping_seconds + PROBE_SECONDS))

    def _suspicion_timeout(self) -> float:
        fixed, count = self._pace.suspect_seconds, len(self._usual)
        if count < SILENCES_MIN:
            return fixed
        mean = math.fsum(self._usual) / count
        deviation = math.sqrt(math.fsum((seconds - mean) ** 2 for seconds in self._usual) / count)
        return min(max(fixed, mean + DEVIATIONS * deviation), SUSPECT_FACTOR_MAX * fixed)
