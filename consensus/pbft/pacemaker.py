"""View timeouts, measured from the decisions of this network. They grow with every view that fails."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from consensus.voter_set import VoterSet

VIEW_SECONDS_MIN = 1.0  # minimum seconds of a view: voters also train, and a busy processor must not look like a failed leader
VIEW_SECONDS_MAX = 60.0  # maximum seconds of a view: a repaired network decides again within a minute
VIEW_GROWTH = 1.5  # factor of a view's length after each failed view, until all honest voters are in one view for long enough
# Seconds to wait for a leader whose link broke: a new link is faster, and a dead process does not return.
LEADER_LOST_SECONDS = 0.25
TAIL_FACTOR = 3.0  # view's length as a multiple of the slowest recent decision, not counting the f slowest leaders
MEASURED_PER_LEADER = 8  # measured decisions of each leader: enough to remember that a leader is slow at times
# Maximum seconds between repeats: links lose no messages unless they break, and a new link starts with all statements.
REPEAT_SECONDS_MAX = 5.0


@dataclass(slots=True)
class Pacemaker:
    """The timers of views and of repeated statements.

    The view timer runs while this voter waits for a decision. The repeat timer also runs while only other voters may wait.
    """

    _durations: dict[bytes, deque[float]] = field(default_factory=dict)  # leader -> seconds that its last decisions took
    _tail: float = 0.0
    _view: int = 0
    _seconds: float | None = None  # length of the current view in seconds; None: not computed yet
    # Start time of the view timer: when the view started, or later when work arrived; None: it is stopped.
    _started: float | None = None
    _repeat_from: float | None = None

    def enter_view(self, view: int) -> None:
        self._view, self._seconds = view, None
        self._started = self._repeat_from = None

    def set_view_timer(self, working: bool, now: float) -> None:
        """Start the view timer, or stop it."""
        self._started = _running_since(self._started, working, now)

    def set_repeat_timer(self, talking: bool, now: float) -> None:
        """Start the repeat timer, or stop it."""
        self._repeat_from = _running_since(self._repeat_from, talking, now)

    def record_decision(self, leader: bytes, voters: VoterSet, now: float) -> None:
        """Record that the block of `leader` was decided in the current view, and how long this took.

        The f slowest leaders do not count. Otherwise each of f faulty leaders could propose just in time, and so triple its
        timeout with every block, up to the maximum. While at most f leaders are measured, all of them may be faulty. Then the
        fastest decision counts, so that a later decision cannot raise the timeout.
        """
        if self._started is None:
            return
        self._durations = {key: durations for key, durations in self._durations.items() if key in voters}
        self._durations.setdefault(leader, deque(maxlen=MEASURED_PER_LEADER)).append(now - self._started)
        slowest, f = sorted(map(max, self._durations.values()), reverse=True), voters.faults_tolerated
        self._tail = slowest[f] if len(slowest) > f else min(map(min, self._durations.values()))
        self._seconds = None

    def view_seconds(self) -> float:
        if self._seconds is None:
            self._seconds = min(VIEW_SECONDS_MAX, max(VIEW_SECONDS_MIN, TAIL_FACTOR * self._tail) * self._growth)
        return self._seconds

    @property
    def _growth(self) -> float:
        # The bound of the exponent only keeps the power finite. The length of a view reaches its maximum long before.
        return float(VIEW_GROWTH ** min(self._view, 64))

    def view_deadline(self, leader_lost: float | None) -> float | None:
        """Return the time at which the view times out. `leader_lost` is the time at which the link to the leader broke, or None.

        A leader without a link for some time gets no time in view 0, and more in each later view. Without this growth, voters
        with broken links would change views as fast as messages travel.
        """
        if self._started is None:
            return None
        deadline = self._started + self.view_seconds()
        if leader_lost is None:
            return deadline
        return min(deadline, max(self._started, leader_lost + LEADER_LOST_SECONDS) + LEADER_LOST_SECONDS * (self._growth - 1.0))

    def repeat_deadline(self) -> float | None:
        if self._repeat_from is None:
            return None
        waits_itself = self._started is not None  # False: only other voters may wait, which a faulty voter can pretend for ever
        return self._repeat_from + (min(REPEAT_SECONDS_MAX, self.view_seconds()) if waits_itself else REPEAT_SECONDS_MAX)

    def restart_repeat_timer(self, now: float) -> None:
        self._repeat_from = now


def _running_since(since: float | None, is_running: bool, now: float) -> float | None:
    started = now if since is None else since
    return started if is_running else None
