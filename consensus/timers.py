"""What a replica does because time has passed: gives up a view, says things again, asks for what it lacks."""

from __future__ import annotations

from consensus.chain import DECIDED_AHEAD_MAX
from consensus.rules import Rules
from protocol.messages import GetHeard, Status


class Timers(Rules):
    def _is_working(self) -> bool:
        """(L) A timer runs only while there is known work that this voter could judge."""
        book = self._book
        if book is None or not self._may_sign(book) or not self._chain.is_applied:
            return False
        return book.is_active() or self._own.has_voted(book.height) or self._application.has_work()

    def _run_timers(self) -> None:
        book, now = self._book, self._now
        self._pacemaker.run(self._is_working(), now)
        if book is not None and _is_due(self._view_deadline(), now):
            self._give_up(book, self.view)
            self._settle()
            self._pacemaker.run(self._is_working(), now)
        elif book is not None and _is_due(self._pacemaker.repeat_deadline(), now):
            self._pacemaker.repeated(now)
            self._repeat_to(tuple(key for key in book.voters.keys if key != self.me), book)
            self._broadcast(book, Status(self.height, self.view))
        self._ask_what_was_heard()
        self._ask_for_block()
        self._ask_for_decisions()

    def _view_deadline(self) -> float | None:
        """(L) A leader that is known to be gone is not waited for as long as a silent one."""
        if self._own.timed_out(self.height) >= self.view:
            return None
        return self._pacemaker.view_deadline(self._lost.get(self.leader or b""))

    def _ask_for_decisions(self) -> None:
        if _is_due(self._decisions_deadline(), self._now):
            peer, request = self._catch_up.ask(self._now, self._chain.is_known_voter)
            self._send(peer, request)

    def _decisions_deadline(self) -> float | None:
        waiting = self.height - self._chain.applied
        return self._catch_up.deadline(self._now) if waiting <= DECIDED_AHEAD_MAX else None

    def _ask_for_block(self) -> None:
        missing = self._missing_block()
        if missing is not None and missing[1] and _is_due(self._block_deadline(), self._now):
            peer, request = self._fetch.ask(self.height, missing[1], self._now)
            self._send(peer, request)

    def _block_deadline(self) -> float | None:
        missing = self._missing_block()
        self._fetch.want(missing[0] if missing else None, self._now)
        return self._fetch.deadline()

    def _ask_what_was_heard(self) -> None:
        if _is_due(self._check_deadline(), self._now):
            self._send_to(self._unanswered(), GetHeard())
            self._check.asked(self._now)

    def _unanswered(self) -> tuple[bytes, ...]:
        """Those without a link are asked when they get one."""
        voters = self._book.voters if self._book else None
        return tuple(key for key in self._check.unanswered(self.me, voters) if key in self._links) if voters else ()

    def _check_deadline(self) -> float | None:
        return self._check.deadline() if self._unanswered() else None

    def _deadline(self) -> float | None:
        times = (
            self._view_deadline(),
            self._pacemaker.repeat_deadline(),
            self._block_deadline(),
            self._decisions_deadline(),
            self._check_deadline(),
            self._ask_again,
        )
        return min((time for time in times if time is not None), default=None)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
