"""The replica: PBFT with two phases, one height at a time, certificates carried through view changes.

Inputs are handled into facts (a verified statement, a certificate, a claim); then the rules run until none has anything to do.
`replica_state` holds the facts, `message_handlers` makes and tells them, `replica_rules` acts on them, the timers here act when
time has passed.

Safety, as the comments in those name it:
(S1) One Propose, Prepare, Commit and Timeout per (height, view), durable before it is sent, over restarts too.
(S2) No Prepare or Commit in a view after a Timeout for it or a later one.
(S3) A proposal of view v > 0 carries a timeout certificate of exactly v − 1; the prepared block in it is proposed again unjudged.
(S4) Block bytes are durable before the Prepare, the prepare certificate before the Commit.
(S5) A Timeout counts with its certificate only; certificates are taken whole; a commit certificate of any view decides.
(S6) Who has not applied the parent prepares nothing; who finds another state than a decided block names signs nothing.
(L) marks what liveness needs.
"""

from __future__ import annotations

from consensus.effects import NEVER_VOTED, RestartState, StepEffects
from consensus.inputs import (
    Application,
    AppliedInput,
    ConnectedInput,
    DisconnectedInput,
    DuplicateIdentityInput,
    MessageInput,
    ReplicaInput,
    TickInput,
    WorkChangedInput,
)
from consensus.pbft.chain import DECIDED_AHEAD_MAX
from consensus.pbft.replica_rules import ReplicaRules
from consensus.pbft.vote_set import HeightVoteSet
from protocol.identity import Signer, Verifier
from protocol.messages import GetRememberedStatements, Status


class Replica(ReplicaRules):
    """One voter's, or observer's, part in the agreement. Pure: time is an argument, effects are returned.

    `now` is seconds since the Unix epoch, and never goes backwards during a replica's life: the daemon adds a monotonic
    clock to the wall time at its start. `applied` is the last height the application has applied; decided heights above it that
    are in `restart` must follow as `AppliedInput` events, as for every `StepEffects.decided_blocks`. `anchor_height` is that of
    the block that this peer's invitation names, 0 if none: the executor lets no other block be decided there.
    """

    def __init__(
        self,
        signer: Signer,
        chain_id: bytes,
        verifier: Verifier,
        application: Application,
        applied: AppliedInput,
        restart: RestartState = NEVER_VOTED,
        anchor_height: int = 0,
    ) -> None:
        super().__init__(signer, chain_id, verifier, application, applied, restart, anchor_height)
        self._open_height()

    def step(self, event: ReplicaInput, now: float) -> StepEffects:
        """Handles one input. The turn must be executed, or merged with later ones and executed, before the next wait."""
        self.handle_input(event, now)
        return self.finish_step(now)

    def finish_step(self, now: float) -> StepEffects:
        """What the inputs taken since the last turn lead to. Rules and timers are looked at once for all of them."""
        self._now = max(now, self._now)
        if self._ask_again is not None and (self._ask_again <= self._now or self._is_vouched_for()):
            self._ask_application, self._ask_again = True, None
        self._settle()
        self._run_timers()
        turn = StepEffects(tuple(self._records), tuple(self._sends), self._deadline(), tuple(self._faults), tuple(self._heard))
        self._records, self._sends, self._faults, self._heard = [], [], [], []
        return turn

    def handle_input(self, event: ReplicaInput, now: float) -> None:
        """Makes facts of one input; nothing is signed before `finish_step`."""
        self._now = max(now, self._now)
        match event:
            case MessageInput(peer, message):
                self._receive(peer, message)
            case ConnectedInput(peer):
                self._links.add(peer)
                self._lost.pop(peer, None)
                self._greet(peer)
            case DisconnectedInput(peer):
                self._links.discard(peer)
                if self._chain.is_known_voter(peer):
                    self._lost[peer] = self._now
                for memory in (self._catch_up, self._future, self._answers):
                    memory.remove_peer(peer)
            case DuplicateIdentityInput(address):
                self._check.record_duplicate_identity(address)
            case AppliedInput():
                self._chain.add_applied(event)
                self._ask_application = True
                self._open_height()
            case WorkChangedInput():
                self._ask_application = True
            case TickInput():
                pass

    # What a replica does because time has passed: gives up a view, says things again, asks for what it lacks ---------------

    @property
    def awaits_decision(self) -> bool:
        """(L) The view timer runs exactly while this voter itself waits for a decision that it could judge.

        The invariant: what one honest voter waits for, either reaches all of them, or ends with its view. The application's work
        is passed on, a prepare certificate is repeated, and any leader proposes what that certifies. A proposal that has no
        certificate yet binds no later leader, so it is work in its own view only, and not if it was refused here for good. What
        others said is none: liars can say it for ever, and f + 1 that gave up a view are joined without any timer.
        """
        book = self._book
        if book is None or not self._takes_part(book):
            return False
        # This view's block was prepared here, or may be yet: its bytes may come, and so may its time.
        awaits_proposal = self.view in book.proposals and (self.block_refusal is None or self._ask_again is not None)
        return book.highest_prepare_certificate is not None or awaits_proposal or self._application.has_work()

    def _may_be_missed(self) -> bool:
        """(L) Whether others may be at work and lack what was said here: it is repeated then, without a view timer.

        A proposal alone is no sign of that: where it was refused nothing was said, and liars that lead make as many as they like.
        """
        book = self._book
        return book is not None and self._takes_part(book) and (book.is_active() or self._own.has_voted(book.height))

    def _takes_part(self, book: HeightVoteSet) -> bool:
        return self._may_sign(book) and self._chain.is_applied

    def _pace(self) -> None:
        working = self.awaits_decision
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
        unanswered = self._unanswered()
        if unanswered and self._check.next_request_at <= now:
            self._send_to(unanswered, GetRememberedStatements())
            self._check.record_request(now)
        missing = self._missing_block()
        if missing is not None and missing[1] and _is_due(self._block_deadline(), now):
            self._send(*self._fetch.next_request(self.height, missing[1], now))
        if _is_due(self._decisions_deadline(), now):
            self._send(*self._catch_up.next_request(now, self._chain.is_known_voter))

    def _view_deadline(self) -> float | None:
        """(L) A leader that is known to be gone is not waited for as a silent one is."""
        if self._own.highest_timed_out_view(self.height) >= self.view:
            return None
        return self._pacemaker.view_deadline(self._lost.get(self.leader or b"") if self._lost else None)

    def _decisions_deadline(self) -> float | None:
        """None while they would be of no use: it is unknown yet whose signatures prove them, or too many wait to be applied."""
        waiting = self.height - self._chain.applied
        return self._catch_up.deadline(self._now) if self._book is not None and waiting <= DECIDED_AHEAD_MAX else None

    def _block_deadline(self) -> float | None:
        missing = self._missing_block()
        self._fetch.set_wanted_block(missing[0] if missing else None, self._now)
        return self._fetch.deadline()

    def _unanswered(self) -> tuple[bytes, ...]:
        """Those without a link are asked when they get one."""
        if self._book is None or self._check.is_over:
            return ()
        return tuple(key for key in self._check.voters_without_answer(self.me, self._book.voters) if key in self._links)

    def _deadline(self) -> float | None:
        times = (
            self._view_deadline(),
            self._pacemaker.repeat_deadline(),
            self._block_deadline(),
            self._decisions_deadline(),
            self._check.next_request_at if self._unanswered() else None,
            self._ask_again,
        )
        return min([time for time in times if time is not None], default=None)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
