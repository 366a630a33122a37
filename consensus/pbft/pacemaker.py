"""View timeouts, measured from the decisions of this network. They grow with every view that fails."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from consensus.voter_set import VoterSet

VIEW_SECONDS_MIN = 1.0  # voters also train: a busy processor must not look like a failed leader
VIEW_SECONDS_MAX = 60.0  # a healed network decides again within a minute
VIEW_GROWTH = 1.5  # growth per failed view, until all honest voters stay in one view for long enough
LEADER_LOST_SECONDS = 0.25  # wait for a leader whose link broke: a link that restarts is back by then, a dead process is not
TAIL_FACTOR = 3.0  # timeout as a multiple of the slowest recent decision, without those of the f slowest leaders
MEASURED_PER_LEADER = 8  # decisions per leader: enough to remember a leader that is slow only at times
REPEAT_SECONDS_MAX = 5.0  # links deliver in order or break, and a new link starts with all statements: repeats are rarely needed


@dataclass(slots=True)
class Pacemaker:
    """The timers of views and of repeats. A view timer runs while there is work here, repeats also while others may have work."""

    _durations: dict[bytes, deque[float]] = field(default_factory=dict)  # leader -> seconds until its last decisions
    _tail: float = 0.0
    _view: int = 0
    _seconds: float | None = None  # length of this view; None: not computed yet
    _started: float | None = None  # start of this view's timer: the start of the view, or the later arrival of work
    _repeat_from: float | None = None

    def enter_view(self, view: int) -> None:
        self._view, self._seconds = view, None
        self._started = self._repeat_from = None

    def set_view_timer(self, working: bool, now: float) -> None:
        """Start or stop the view timer."""
        self._started = _running_since(self._started, working, now)

    def set_repeat_timer(self, talking: bool, now: float) -> None:
        """Start or stop the repeats."""
        self._repeat_from = _running_since(self._repeat_from, talking, now)

    def record_decision(self, leader: bytes, voters: VoterSet, now: float) -> None:
        """Record that a block of `leader` was decided in the view that this peer is in.

        The f slowest leaders do not count. Otherwise each of f liars could propose just in time, and so triple its timeout with
        every block, up to the maximum. While at most f leaders are measured, all of them may be liars. Then the fastest decision
        counts, and no later one can raise the timeout.
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
        # The bound of the exponent only keeps the power finite: the maximum is reached long before.
        return float(VIEW_GROWTH ** min(self._view, 64))

    def view_deadline(self, leader_lost: float | None) -> float | None:
        """Return when the view times out. `leader_lost` is the time when the link to the leader broke, or None.

        A leader that has been away for a while gets no time in view 0, and more in each later view. Without this growth, voters
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
        waits_itself = self._started is not None  # otherwise only others may wait, which a liar can prolong for ever
        return self._repeat_from + (min(REPEAT_SECONDS_MAX, self.view_seconds()) if waits_itself else REPEAT_SECONDS_MAX)

    def restart_repeat_timer(self, now: float) -> None:
        self._repeat_from = now


def _running_since(since: float | None, is_running: bool, now: float) -> float | None:
    started = now if since is None else since
    return started if is_running else None
