"""The replica: PBFT (Castro and Liskov 1999) with two phases, one height at a time, and certificates that view changes carry.

Handlers turn inputs into facts: verified statements, certificates, claims. Then the rules run until none of them applies.
`replica_state` holds the facts, and `message_handlers` makes and sends them. The rules and the timers are in this module.

Safety rules, as the comments name them:
(S1) One Propose, Prepare, Commit and Timeout per (height, view), also after a restart. Each is durable before it is sent.
(S2) No Prepare or Commit in a view after a Timeout for that view or a later one.
(S3) A proposal of view v > 0 carries a timeout certificate of exactly v − 1. If the certificate names a prepared block, the
     leader proposes this block again, and voters prepare it without judging it.
(S4) A block's bytes are durable before the Prepare, and a prepare certificate before the Commit.
(S5) A Timeout counts only with a certificate that covers it. A voter adopts a prepare certificate whatever it prepared itself.
     A commit certificate of any view decides.
(S6) A voter prepares nothing before it has applied the parent. It signs nothing after a decided block names another state than
     its own.
(L) marks rules that liveness needs.
"""

from __future__ import annotations

from consensus.block import assemble_block, block_digest, decode_block, decode_header, encode_header, make_header
from consensus.effects import NEVER_VOTED, PeerFault, RestartState, SendMessage, StepEffects
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
from consensus.pbft.chain import DECIDED_AHEAD_MAX, make_decided_block
from consensus.pbft.message_handlers import ReplicaMessageHandlers
from consensus.pbft.own_votes import ASK_SECONDS, VOTE_SETS_KEPT
from consensus.pbft.vote_set import BlockProposal, HeightVoteSet
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signer, Verifier
from protocol.messages import (
    NO_VIEW,
    Commit,
    Decision,
    GetRememberedStatements,
    Prepare,
    Propose,
    Status,
    Timeout,
    TimeoutEnvelope,
    Vote,
)


class Replica(ReplicaMessageHandlers):
    """A voter or an observer in agreement. It does no I/O and reads no clock: time is an argument, effects are returned.

    `now` is in seconds since the Unix epoch and never goes backwards: the daemon adds a monotonic clock to the wall time at its
    start. `applied` is the last applied height. The decided heights of `restart` above it must follow as `AppliedInput`, as for
    all `StepEffects.decided_blocks`. `anchor_height` is the height of the trusted block in this peer's invitation, or 0. At
    that height, the executor accepts only the decision of the trusted block.
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
        """Handle one input and return its effects.

        The caller executes them before the next wait, alone or merged with later ones.
        """
        self.handle_input(event, now)
        return self.finish_step(now)

    def finish_step(self, now: float) -> StepEffects:
        """Run the rules and the timers once, for all inputs since the last step, and return the effects."""
        self._now = max(now, self._now)
        if self._ask_again is not None and (self._ask_again <= self._now or self._is_vouched_for()):
            self._ask_application, self._ask_again = True, None
        self._settle()
        self._run_timers()
        turn = StepEffects(tuple(self._records), tuple(self._sends), self._deadline(), tuple(self._faults), tuple(self._heard))
        self._records, self._sends, self._faults, self._heard = [], [], [], []
        return turn

    def handle_input(self, event: ReplicaInput, now: float) -> None:
        """Handle one input, without signing. The rules and timers sign in `finish_step`."""
        self._now = max(now, self._now)
        match event:
            case MessageInput(peer, message):
                self._receive(peer, message)
            case ConnectedInput(peer):
                self._links.add(peer)
                self._lost.pop(peer, None)
                self._send(peer, Status(self.height, self.view))
                if self._book is not None and peer in self._book.voters:
                    if peer in self._check.voters_without_answer(self.me, self._book.voters):
                        self._send(peer, GetRememberedStatements())
                    self._repeat_to((peer,), self._book)
            case DisconnectedInput(peer):
                self._links.discard(peer)
                if self._chain.is_known_voter(peer):
                    self._lost[peer] = self._now
                for memory in (self._catch_up, self._future, self._answers):
                    memory.remove_peer(peer)
            case DuplicateIdentityInput(address):
                self._check.duplicate_identity_reason = self.duplicate_identity_reason or f"is at {address}"
            case AppliedInput():
                self._chain.add_applied(event)
                self._ask_application = True
                self._open_height()
            case WorkChangedInput():
                self._ask_application = True
            case TickInput():
                pass

    # Rules: each does one thing if its conditions hold, and returns whether it did ------------------------------------------

    def _settle(self) -> None:
        """Run rules until none applies. Rules for votes are last, because earlier rules may forbid a vote."""
        while self._book is not None and self._act(self._book):
            pass
        self._ask_application = False

    def _act(self, book: HeightVoteSet) -> bool:
        """Run the first rule whose conditions hold. Return whether there was one."""
        return (
            self._decide(book)
            or self._collect_prepares(book)
            or self._follow(book)
            or self._join_timeouts(book)
            or self._vouch(book)
            or self._propose(book)
            or self._expand(book)
            or self._prepare(book)
            or self._commit(book)
        )

    # Heights ---------------------------------------------------------------------------------------------------------

    def _decide(self, book: HeightVoteSet) -> bool:
        """(S5) Decide on a commit certificate of any view, if the parent of its block is the last decided block."""
        if book.commit is None or book.commit_vote is None:
            return False
        block = self._blocks.get(book.commit_vote.block)
        if block is None:
            return False
        if not self._chain.extends_tip(block):
            book.drop_commit_certificate()
            return False
        schedule, voters = self._chain.leader_schedule(self.height), self._chain.voters.get(self.height)
        if book.commit_vote.view == self.view and schedule is not None and voters is not None:
            self._pacemaker.record_decision(schedule.leader_of_view(self.view), voters, self._now)
        decided = make_decided_block(block, book.commit, book.commit_vote)
        self._records.append(decided)
        self._chain.add_decided(decided)
        self._tell_observers(
            book, Decision(block, book.commit), schedule.leader_of_view(book.commit_vote.view) if schedule else None
        )
        # Other voters may still return our statements at these heights.
        self._own.prune_below_height(self.height - VOTE_SETS_KEPT)
        self._blocks.clear()
        self._stored.clear()
        self._rivalry = self._rivalry or self._rivalry_in(book)
        book.mark_decided(self.view)
        self._closed[book.height] = book
        self._closed = {height: kept for height, kept in self._closed.items() if height > book.height - VOTE_SETS_KEPT}
        self._book = None
        self._open_height()
        return True

    def _tell_observers(self, book: HeightVoteSet, decision: Decision, leader: bytes | None) -> None:
        """Send a decision to connected members that do not vote, if this peer was the leader.

        Other voters only send their height, in case the leader sends nothing.
        """
        if self.me not in book.voters:
            return
        observers = sorted(peer for peer in self._links if peer not in book.voters)
        served = {peer for peer in observers if leader == self.me and self._application.is_member(peer)}
        for told, message in ((served, decision), (set(observers) - served, Status(self.height, 0))):
            if told:
                self._sends.append(SendMessage(tuple(sorted(told)), message))

    def _open_height(self) -> None:
        """Start the vote set of the current height, once its voters are known."""
        voters = self._chain.voters.get(self.height)
        self._catch_up.record_own_height(self.height, self._now)
        if voters is None or self._book is not None:
            return
        self._book = book = HeightVoteSet(self.height, voters)
        self._check.enter_height(voters, self.height)
        self._lost = {peer: at for peer, at in self._lost.items() if peer in voters}
        self._enter_view(book, self._own.highest_signed_view(self.height))
        for signed, statement in self._own.statements_at(self.height):
            # Statements that were signed on a wrong state, before a restore, name another voter set.
            if statement.voters == voters.hash:
                book.add_statement(signed, statement)
        if self._recovered is not None:
            # (S3) Timeouts after a restart must name the certificate from before the restart, if these voters signed it.
            vote = codec.decode_message(self._recovered.vote, (Prepare,))
            if vote.height == book.height and vote.voters == voters.hash:
                book.adopt_prepare_certificate(self._recovered, vote)
                self._add_certified(book, self._recovered, vote)
        for peer, message in self._future.pop_height(self.height):
            self._receive(peer, message)

    # Views -----------------------------------------------------------------------------------------------------------

    def _collect_prepares(self, book: HeightVoteSet) -> bool:
        prepared = book.pop_prepare_certificate()
        return prepared is not None and self._adopt(book, *prepared)

    def _follow(self, book: HeightVoteSet) -> bool:
        """(L) Enter the latest view to which a prepare certificate or a quorum of timeouts leads."""
        prepared_view = book.high_vote.view if book.high_vote else NO_VIEW
        target = max(prepared_view, book.timed_out_view + 1)
        if target <= self.view:
            return False
        self._enter_view(book, target)
        return True

    def _join_timeouts(self, book: HeightVoteSet) -> bool:
        """(L) Give up the latest view that f + 1 voters gave up, unless this voter is in a later one: one of f + 1 is honest."""
        view = book.view_to_join()
        if view < self.view or not self._may_sign(book) or self._own.highest_timed_out_view(book.height) >= view:
            return False
        if view > self.view:
            self._enter_view(book, view)
        self._give_up(book, self.view)
        return True

    def _vouch(self, book: HeightVoteSet) -> bool:
        """(L) Sign a timeout of the view before the current one, if no certificate here leads to the current view.

        A voter can be in such a view after a restart, or after it joined timeouts. The other voters may need its timeout to
        enter the view. Until then, they ignore its other messages.
        """
        before = self.view - 1
        if before < 0 or not self._may_sign(book) or self._own.get_vote(Timeout.TAG, book.height, before):
            return False
        if book.timeout_certificate(before) or self._is_prepared(book):
            return False
        self._give_up(book, before)
        return True

    def _give_up(self, book: HeightVoteSet, view: int) -> None:
        high = book.high_vote
        high_view, high_block = (high.view, high.block) if high else (NO_VIEW, None)
        signed = self._sign(book, Timeout(book.voters.hash, book.height, view, high_view, high_block))
        self._broadcast(book, TimeoutEnvelope(signed, book.highest_prepare_certificate))

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _propose(self, book: HeightVoteSet) -> bool:
        """(S3) Propose a block as leader.

        After view 0, this needs a timeout certificate of the view before, which may require a certain block.
        """
        if not self._may_judge(book) or self.leader != self.me or self.view in book.proposals:
            return False
        justification = None if self.view == 0 else book.timeout_certificate(self.view - 1)
        if self.view > 0 and justification is None:
            return False
        obligation = book.high_vote if justification else None
        if obligation is not None and obligation.view >= self.view:
            return False  # the block of this view was prepared before a restart, and needs no other proposal
        block = self._block_to_propose(book, obligation)
        if block is None:
            return False
        digest = block_digest(block)
        signed = self._own.get_vote(Propose.TAG, book.height, self.view)
        if signed is None:
            signed = self._sign(book, Propose(book.voters.hash, book.height, self.view, digest))
        self._store(book.height, digest, block)
        header = encode_header(make_header(decode_block(block)))
        offer = BlockProposal(signed, header, justification, digest, obligation, None, self.me)
        book.proposals[self.view] = offer
        self._broadcast(book, self._proposal(offer))
        return True

    def _block_to_propose(self, book: HeightVoteSet, obligation: Prepare | None) -> bytes | None:
        signed = self._own.get_vote(Propose.TAG, book.height, self.view)
        if signed is not None:
            # (S1) The proposal of this view was signed before a restart. Its block is proposed again, unless timeouts now
            # require another block.
            propose = codec.decode_message(signed.body, (Propose,))
            if propose.voters != book.voters.hash or (obligation and obligation.block != propose.block):
                return None
            return self._blocks.get(propose.block)
        if obligation is not None:
            return self._blocks.get(obligation.block)
        if not self._ask_application:
            return None
        body = self._application.make_body(book.height, self._now_ms())
        return None if body is None else self._chain.build_block(body, self.me, self._now_ms())

    def _expand(self, book: HeightVoteSet) -> bool:
        """Build the proposed block from its compact body.

        Missing messages arrive by gossip. Otherwise the whole block is requested.
        """
        offer = book.proposals.get(self.view)
        if offer is None or offer.compact_body is None or offer.digest in self._blocks or not self._ask_application:
            return False
        try:
            body = self._application.expand_body(offer.compact_body)
            if body is None:
                return False
            self._hold(offer.digest, assemble_block(decode_header(offer.header), body))
        except RemoteProtocolError as error:
            self._faults.append(PeerFault(offer.sender, error))
            book.proposals[self.view] = offer.with_compact_body(None, offer.sender)
        return True

    def _prepare(self, book: HeightVoteSet) -> bool:
        offer = book.proposals.get(self.view)
        block = self._blocks.get(offer.digest) if offer else None
        has_prepared = self._own.get_vote(Prepare.TAG, book.height, self.view) is not None
        if offer is None or block is None or has_prepared or not self._may_judge(book):
            return False
        if offer.obligation is None:  # a fresh block is judged; a block that was prepared before is not (S3)
            if not self._ask_application:
                return False
            problem = self._chain.why_block_refused(
                block, offer.propose.signer, self._now_ms(), self._is_vouched_for(), self._verifier
            )
            self.block_refusal, self._ask_again = (problem.reason, problem.retry_at) if problem else (None, None)
            if problem is not None:
                return False
        self._store(book.height, offer.digest, block)
        vote = Prepare(book.voters.hash, book.height, self.view, offer.digest)
        self._broadcast(book, Vote(self._sign(book, vote)))
        return True

    def _commit(self, book: HeightVoteSet) -> bool:
        high = book.high_vote
        if high is None or not self._is_prepared(book) or not self._may_sign(book):
            return False
        if self._own.highest_timed_out_view(book.height) >= self.view or self._own.get_vote(Commit.TAG, book.height, self.view):
            return False
        vote = Commit(book.voters.hash, book.height, self.view, high.block)
        self._broadcast(book, Vote(self._sign(book, vote)))
        return True

    # Timers: they give up a view, repeat statements, and request missing data ----------------------------------------------

    @property
    def awaits_decision(self) -> bool:
        """(L) True while this voter waits for a decision that it could judge. The view timer runs exactly then.

        Invariant: work for which one honest voter waits either reaches all honest voters, or ends with its view. Work of the
        application is gossiped, a prepare certificate is repeated, and every leader proposes its block again. A proposal
        without a certificate binds no later leader. So it is work in its own view only, and not after it was refused here for
        good. Statements of other voters are no work: faulty voters can repeat them for ever, and timeouts of f + 1 voters are
        joined without a timer.
        """
        book = self._book
        if book is None or not self._takes_part(book):
            return False
        # The block of this view is prepared here, or may still be: its bytes may arrive, or its time may be reached.
        awaits_proposal = self.view in book.proposals and (self.block_refusal is None or self._ask_again is not None)
        return book.highest_prepare_certificate is not None or awaits_proposal or self._application.has_work()

    def _may_be_missed(self) -> bool:
        """(L) Return whether other voters may wait and lack our statements, which are then repeated even without a view timer.

        A proposal alone is no sign of work. If this voter refused it, there is nothing to repeat, and a lying leader can make any
        number of proposals.
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
            self._check.next_request_at = now + ASK_SECONDS
        missing = self._missing_block()
        if missing is not None and missing[1] and _is_due(self._block_deadline(), now):
            self._send(*self._fetch.next_request(self.height, missing[1], now))
        if _is_due(self._decisions_deadline(), now):
            self._send(*self._catch_up.next_request(now, self._chain.is_known_voter))

    def _view_deadline(self) -> float | None:
        """Return the time at which to give up the view, or None. The wait is shorter if the link to the leader broke."""
        if self._own.highest_timed_out_view(self.height) >= self.view:
            return None
        return self._pacemaker.view_deadline(self._lost.get(self.leader or b"") if self._lost else None)

    def _decisions_deadline(self) -> float | None:
        """Return the time at which to request decisions.

        None: they cannot be verified yet, or too many decided blocks are not applied.
        """
        waiting = self.height - self._chain.applied
        return self._catch_up.deadline(self._now) if self._book is not None and waiting <= DECIDED_AHEAD_MAX else None

    def _block_deadline(self) -> float | None:
        missing = self._missing_block()
        return self._fetch.deadline(missing[0] if missing else None, self._now)

    def _unanswered(self) -> tuple[bytes, ...]:
        """Return the linked voters that have not answered the check. A voter without a link is asked when it connects."""
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
