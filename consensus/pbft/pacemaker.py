"""How long a view may take: measured from the decisions of this network, longer with every view that fails."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from consensus.voter_set import VoterSet

VIEW_SECONDS_MIN = 1.0  # machines that vote also train: a busy processor must not look like a dead leader
VIEW_SECONDS_MAX = 60.0  # a healed network goes on within a minute
VIEW_GROWTH = 1.5  # per failed view, until all honest voters are in one view long enough
# patience with a leader whose link has broken: a restarted link is back by then, a dead process is not
LEADER_LOST_SECONDS = 0.25
TAIL_FACTOR = 3.0  # above the slowest of the last decisions of most leaders
MEASURED_PER_LEADER = 8  # decisions: a leader that is slow now and then stays known as such
REPEAT_SECONDS_MAX = 5.0  # links deliver in order or break, and a new link is greeted with everything: repeats are a last resort


@dataclass(slots=True)
class Pacemaker:
    """Timer of the current view and of repeats: the first runs while there is work here, the other also while others may have."""

    _durations: dict[bytes, deque[float]] = field(default_factory=dict)  # by leader: seconds from the start of its view
    _tail: float = 0.0
    _view: int = 0
    _seconds: float | None = None  # that this view may take; None: to be computed
    _started: float | None = None  # when this view's clock began: at its start, or when work turned up
    _repeat_from: float | None = None

    def enter_view(self, view: int) -> None:
        self._view, self._seconds = view, None
        self._started = self._repeat_from = None

    def set_view_timer(self, working: bool, now: float) -> None:
        """Starts or stops the view timer."""
        self._started = _running_since(self._started, working, now)

    def set_repeat_timer(self, talking: bool, now: float) -> None:
        """Starts or stops the repeats."""
        self._repeat_from = _running_since(self._repeat_from, talking, now)

    def record_decision(self, leader: bytes, voters: VoterSet, now: float) -> None:
        """A block of `leader` was decided in the view that this peer is in.

        The f slowest leaders set nothing: each of f liars could otherwise propose just in time, be measured, and so get three
        times as long the next time, up to the cap. While no more than f are measured, all may be liars: the fastest decision of
        all counts, which no later one makes slower.
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
        # The exponent is bounded only to keep the power a finite number; the cap is reached long before.
        return float(VIEW_GROWTH ** min(self._view, 64))

    def view_deadline(self, leader_lost: float | None) -> float | None:
        """`leader_lost`: when the link to the leader broke; None if it did not, or if there never was one.

        A leader that has been gone for a while gets no time in view 0, and more in each later view. Without that, views would end
        as fast as messages go between voters whose links stay broken.
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
        waits_itself = self._started is not None  # otherwise only others may: a liar can make that last for ever
        return self._repeat_from + (min(REPEAT_SECONDS_MAX, self.view_seconds()) if waits_itself else REPEAT_SECONDS_MAX)

    def restart_repeat_timer(self, now: float) -> None:
        self._repeat_from = now


def _running_since(since: float | None, is_running: bool, now: float) -> float | None:
    started = now if since is None else since
    return started if is_running else None
