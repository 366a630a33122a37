"""What a replica does because time has passed: gives up a view, says things again, asks for what it lacks."""

from __future__ import annotations

from consensus.pbft.chain import DECIDED_AHEAD_MAX
from consensus.pbft.replica_rules import ReplicaRules
from consensus.pbft.vote_set import HeightVoteSet
from protocol.messages import GetRememberedStatements, Status


class ReplicaTimers(ReplicaRules):
    @property
    def awaits_decision(self) -> bool:
        """Whether there is work for the voters, as far as this one could judge it."""
        return self._is_working()

    def _is_working(self) -> bool:
        """(L) The view timer runs exactly while this voter itself waits for a decision that it could judge.

        The invariant: what one honest voter waits for, either reaches all of them, or ends with its view. The application's work
        is passed on, a prepare certificate is repeated, and any leader proposes what that certifies. A proposal that has no
        certificate yet binds no later leader, so it is work in its own view only, and not if it was refused here for good. What
        others said is none: liars can say it for ever, and f + 1 that gave up a view are joined without any timer.
        """
        book = self._book
        if book is None or not self._takes_part(book):
            return False
        return book.highest_prepare_certificate is not None or self._awaits_proposal(book) or self._application.has_work()

    def _awaits_proposal(self, book: HeightVoteSet) -> bool:
        """Whether this view's block was prepared here, or may be yet: its bytes may come, and so may its time."""
        return self.view in book.proposals and (self.block_refusal is None or self._ask_again is not None)

    def _may_be_missed(self) -> bool:
        """(L) Whether others may be at work and lack what was said here: it is repeated then, without a view timer.

        A proposal alone is no sign of that: where it was refused nothing was said, and liars that lead make as many as they like.
        """
        book = self._book
        return book is not None and self._takes_part(book) and (book.is_active() or self._own.has_voted(book.height))

    def _takes_part(self, book: HeightVoteSet) -> bool:
        return self._may_sign(book) and self._chain.is_applied

    def _pace(self) -> None:
        working = self._is_working()
        self._pacemaker.set_view_timer(working, self._now)
        self._pacemaker.set_repeat_timer(working or self._may_be_missed(), self._now)

    def _run_timers(self) -> None:
        book, now = self._book, self._now
        self._pace()
        if book is not None and _is_due(self._view_deadline(), now):
            self._give_up(book, self.view)
            self._settle()
            self._pace()
        elif book is not None and _is_due(self._pacemaker.repeat_deadline(), now):
            self._pacemaker.restart_repeat_timer(now)
            self._repeat_to(tuple(key for key in book.voters.keys if key != self.me), book)
            self._broadcast(book, Status(self.height, self.view))
        self._ask_what_was_heard()
        self._ask_for_block()
        self._ask_for_decisions()

    def _view_deadline(self) -> float | None:
        """(L) A leader that is known to be gone is not waited for as a silent one is."""
        if self._own.highest_timed_out_view(self.height) >= self.view:
            return None
        return self._pacemaker.view_deadline(self._lost.get(self.leader or b"") if self._lost else None)

    def _ask_for_decisions(self) -> None:
        if _is_due(self._decisions_deadline(), self._now):
            peer, request = self._catch_up.next_request(self._now, self._chain.is_known_voter)
            self._send(peer, request)

    def _decisions_deadline(self) -> float | None:
        """None while they would be of no use: it is unknown yet whose signatures prove them, or too many wait to be applied."""
        waiting = self.height - self._chain.applied
        return self._catch_up.deadline(self._now) if self._book is not None and waiting <= DECIDED_AHEAD_MAX else None

    def _ask_for_block(self) -> None:
        missing = self._missing_block()
        if missing is not None and missing[1] and _is_due(self._block_deadline(), self._now):
            peer, request = self._fetch.next_request(self.height, missing[1], self._now)
            self._send(peer, request)

    def _block_deadline(self) -> float | None:
        missing = self._missing_block()
        self._fetch.set_wanted_block(missing[0] if missing else None, self._now)
        return self._fetch.deadline()

    def _ask_what_was_heard(self) -> None:
        if _is_due(self._check_deadline(), self._now):
            self._send_to(self._unanswered(), GetRememberedStatements())
            self._check.record_request(self._now)

    def _unanswered(self) -> tuple[bytes, ...]:
        """Those without a link are asked when they get one."""
        if self._book is None or self._check.is_over:
            return ()
        return tuple(key for key in self._check.voters_without_answer(self.me, self._book.voters) if key in self._links)

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
        return min([time for time in times if time is not None], default=None)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
