"""The rules: each does one thing if its time has come, and says whether it did."""

from __future__ import annotations

from consensus.block import assemble_block, block_digest, decode_block, decode_header, encode_header, make_header
from consensus.effects import PeerFault, SendMessage
from consensus.pbft.chain import make_decided_block
from consensus.pbft.message_handlers import ReplicaMessageHandlers
from consensus.pbft.rollback_check import VOTE_SETS_KEPT
from consensus.pbft.vote_set import BlockProposal, HeightVoteSet
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.messages import NO_VIEW, Commit, Decision, Prepare, Propose, Status, Timeout, TimeoutEnvelope, Vote


class ReplicaRules(ReplicaMessageHandlers):
    def _settle(self) -> None:
        """What is certain comes before what follows from it; a vote comes last, when all that could forbid it is known."""
        while self._book is not None and self._act(self._book):
            pass
        self._ask_application = False

    def _act(self, book: HeightVoteSet) -> bool:
        """Whether one of the rules had something to do: the first one that had."""
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
        """(S5) A commit certificate decides, from whatever view it is, if its block follows from the last one decided."""
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
        self._own.prune_below_height(self.height - VOTE_SETS_KEPT)  # as long as others may tell us what they heard of us
        self._blocks.clear()
        self._stored.clear()
        self._close_book(book)
        self._open_height()
        return True

    def _tell_observers(self, book: HeightVoteSet, decision: Decision, leader: bytes | None) -> None:
        """The leader sends members the block; the others only say that there is one, in case the leader lies."""
        if self.me not in book.voters:
            return
        observers = sorted(peer for peer in self._links if peer not in book.voters)
        served = {peer for peer in observers if leader == self.me and self._application.is_member(peer)}
        for told, message in ((served, decision), (set(observers) - served, Status(self.height, 0))):
            if told:
                self._sends.append(SendMessage(tuple(sorted(told)), message))

    def _open_height(self) -> None:
        """Starts the book of the current height, once its voters are known."""
        voters = self._chain.voters.get(self.height)
        self._catch_up.record_own_height(self.height, self._now)
        if voters is None or self._book is not None:
            return
        self._book = book = HeightVoteSet(self.height, voters)
        self._check.enter_height(voters, self.height)
        self._lost = {peer: at for peer, at in self._lost.items() if peer in voters}
        self._enter_view(book, self._own.highest_signed_view(self.height))
        for signed, statement in self._own.statements_at(self.height):
            if statement.voters == voters.hash:  # what was signed on a wrong state, before a restore, counts for nobody
                book.add_statement(signed, statement)
        if self._recovered is not None:
            # (S3) Timeouts after a restart must name the certificate from before it, if these voters signed it.
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
        """(L) Any certificate of a later view takes us there."""
        prepared_view = book.high_vote.view if book.high_vote else NO_VIEW
        target = max(prepared_view, book.timed_out_view + 1)
        if target <= self.view:
            return False
        self._enter_view(book, target)
        return True

    def _join_timeouts(self, book: HeightVoteSet) -> bool:
        """(L) More voters than there can be liars gave up this view, or a later one: so do I."""
        view = book.view_to_join()
        if view < self.view or not self._may_sign(book) or self._own.highest_timed_out_view(book.height) >= view:
            return False
        if view > self.view:
            self._enter_view(book, view)
        self._give_up(book, self.view)
        return True

    def _vouch(self, book: HeightVoteSet) -> bool:
        """(L) A voter in a view may hold no certificate that shows why: it restarted, or joined. It gives up the view before.

        Without this, it could be the one voter that the others need to follow it, and none of its messages would count for them.
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
        """(S3) The leader of a later view needs the timeouts of the view before and keeps to the certificate they carry."""
        if not self._may_judge(book) or self.leader != self.me or self.view in book.proposals:
            return False
        justification = None if self.view == 0 else book.timeout_certificate(self.view - 1)
        if self.view > 0 and justification is None:
            return False
        obligation = book.high_vote if justification else None
        if obligation is not None and obligation.view >= self.view:
            return False  # this view's block was prepared before a restart: it goes on without being proposed again
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
            # (S1) Signed before a restart: the same block, unless the timeouts now oblige to another one.
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
        """Makes the proposed block of messages that are here. Missing ones come with the work, or the block is fetched."""
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
        if offer is None or block is None or not self._may_judge(book):
            return False
        if self._own.get_vote(Prepare.TAG, book.height, self.view) or not self._is_sound(offer, block):
            return False
        self._store(book.height, offer.digest, block)
        self._vote(book, Prepare(book.voters.hash, book.height, self.view, offer.digest))
        return True

    def _is_sound(self, offer: BlockProposal, block: bytes) -> bool:
        """Judges a fresh block; one that was prepared before is judged by nobody again (S3)."""
        if offer.obligation is not None:
            return True
        if not self._ask_application:
            return False
        problem = self._chain.why_block_refused(
            block, offer.propose.signer, self._now_ms(), self._is_vouched_for(), self._verifier
        )
        self.block_refusal, self._ask_again = (problem.reason, problem.retry_at) if problem else (None, None)
        return problem is None

    def _commit(self, book: HeightVoteSet) -> bool:
        high = book.high_vote
        if high is None or not self._is_prepared(book) or not self._may_sign(book):
            return False
        if self._own.highest_timed_out_view(book.height) >= self.view or self._own.get_vote(Commit.TAG, book.height, self.view):
            return False
        self._vote(book, Commit(book.voters.hash, book.height, self.view, high.block))
        return True

    def _vote(self, book: HeightVoteSet, vote: Prepare | Commit) -> None:
        self._broadcast(book, Vote(self._sign(book, vote)))
