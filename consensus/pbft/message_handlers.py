"""The message handlers of a replica.

The statements of a valid message are added to a vote set. An invalid message is a fault of its sender. The handlers also answer
requests, greet new links, and repeat statements for peers that apparently lack them.
"""

from __future__ import annotations

from consensus.block import block_digest, header_digest
from consensus.effects import PeerFault, SendBlock, SendDecisions
from consensus.inputs import AgreementMessage, HeightMessage
from consensus.pbft.block_sync import FUTURE_HEIGHTS_MAX
from consensus.pbft.chain import DECIDED_AHEAD_MAX
from consensus.pbft.own_votes import open_remembered_statements
from consensus.pbft.replica_state import ReplicaState
from consensus.pbft.vote_set import BlockProposal, HeightVoteSet
from consensus.voter_set import check_timeout_sizes, covers_timeout, verify_certificate, verify_timeout_certificate
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, short_id
from protocol.limits import DECISIONS_PER_REPLY_MAX, REMEMBERED_STATEMENTS_MAX, VIEWS_AHEAD_MAX
from protocol.messages import (
    BlockBytes,
    Certificate,
    Commit,
    Decision,
    GetBlock,
    GetDecisions,
    GetRememberedStatements,
    Prepare,
    Prepared,
    Propose,
    ProposeEnvelope,
    RememberedStatements,
    Status,
    Timeout,
    TimeoutCertificate,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)


class ReplicaMessageHandlers(ReplicaState):
    def _receive(self, peer: bytes, message: AgreementMessage) -> None:
        try:
            self._handle(peer, message)
        except RemoteProtocolError as error:
            if error.reason == "foreign-voters" and self._is_unproven:
                self._set_aside(peer)
            else:
                self._faults.append(PeerFault(peer, error))

    def _set_aside(self, peer: bytes) -> None:
        """Drop the waiting messages of a peer on another chain, and ignore its decisions until it is asked again.

        The peer is not reported as faulty, because our chain may be the false one.
        """
        self._future.remove_peer(peer)
        self._catch_up.ignore_until_asked(peer)

    def _handle(self, peer: bytes, message: AgreementMessage) -> None:
        match message:
            case ProposeEnvelope():
                self._on_proposed(peer, message)
            case Vote():
                vote: Prepare | Commit = codec.decode_message(message.vote.body, (Prepare, Commit))  # type: ignore[assignment]
                self._remember(message.vote, vote)
                book = self._book_for(peer, vote.height, message)
                if book is not None and self._in_window(vote.view):
                    self._verify(book, message.vote, vote)
                    self._add(book, message.vote, vote)
            case TimeoutEnvelope():
                self._on_timed_out(peer, message)
            case Prepared():
                height = codec.decode_message(message.certificate.vote, (Prepare,)).height
                book = self._book_for(peer, height, message)
                if book is not None:
                    self._take_prepared(book, message.certificate)
            case ViewEnded():
                check_timeout_sizes(message.certificate)
                timeout = codec.decode_message(message.certificate.timeouts[0].body, (Timeout,))
                book = self._book_for(peer, timeout.height, message)
                if book is not None and timeout.view >= self.view - 1 and book.timeout_certificate(timeout.view) is None:
                    self._take_timeouts(book, message.certificate, timeout.view)
            case Decision():
                self._on_decision(peer, message)
            case Status():
                if message.height > self.height:
                    self._catch_up.record_claim(peer, message.height)
                elif message.height < self.height:
                    self._send(peer, Status(self.height, self.view))
                elif self._book is not None and message.view < self.view and peer in self._book.voters:
                    self._answer(peer, message)
            case GetDecisions() | GetBlock() | GetRememberedStatements():
                self._answer(peer, message)
            case BlockBytes():
                missing = self._missing_block()
                if missing is not None and block_digest(message.block) == missing[0]:
                    self._hold(missing[0], message.block)
                    self._ask_application = True
            case RememberedStatements():
                if not self.accepts_answers_of(peer):
                    return
                statements, of_rounds = open_remembered_statements(message, self.me, self._chain_id, self._verifier)
                for statement in statements:
                    self._recognise(statement)
                self._heard.extend(of_rounds)
                if message.height > self.height:
                    self._catch_up.record_claim(peer, message.height)
                self._check.record_answer(peer, message.height, self.height)
                self._ask_application = True  # the check may now be over, so that this voter may propose

    def _book_for(self, peer: bytes, height: int, message: HeightMessage) -> HeightVoteSet | None:
        """Return the vote set for a message of `height`.

        None: that height is not open. Messages of the next heights are stored.
        """
        if height > self.height:
            self._catch_up.record_claim(peer, height)
        if height == self.height and self._book is not None:
            return self._book
        if self.height <= height <= self.height + FUTURE_HEIGHTS_MAX and self._chain.is_known_voter(peer):
            self._future.add_message(peer, height, message)
        return None

    # Proposals -------------------------------------------------------------------------------------------------------

    def _on_proposed(self, peer: bytes, message: ProposeEnvelope) -> None:
        propose = codec.decode_message(message.propose.body, (Propose,))
        if message.justification is not None:
            check_timeout_sizes(message.justification)
        self._remember(message.propose, propose)
        book = self._book_for(peer, propose.height, message)
        if book is None or not self._in_window(propose.view):
            return
        offer = book.proposals.get(propose.view)
        if offer is not None and offer.propose == message.propose:
            # If our compact body was wrong, another sender may have the right one. The leader has it.
            if offer.compact_body is None or (peer == offer.propose.signer != offer.sender):
                book.proposals[propose.view] = offer.with_compact_body(message.compact_body, peer)
                self._ask_application = True
            return
        self._verify(book, message.propose, propose)
        schedule = self._chain.leader_schedule(self.height)
        if schedule is None:
            return
        if message.propose.signer != schedule.leader_of_view(propose.view):
            raise RemoteProtocolError(
                "not-the-leader", f"{short_id(message.propose.signer)} does not lead {propose.height}.{propose.view}"
            )
        if header_digest(message.header) != propose.block:
            raise RemoteProtocolError("wrong-block", f"the header does not match the proposal of {propose.height}.{propose.view}")
        obligation = self._justify(book, propose, message)
        self._add(book, message.propose, propose)
        if propose.view >= self.view and propose.view not in book.proposals:
            book.proposals[propose.view] = BlockProposal(
                message.propose, message.header, message.justification, propose.block, obligation, message.compact_body, peer
            )
            self._ask_application = True

    def _justify(self, book: HeightVoteSet, propose: Propose, message: ProposeEnvelope) -> Prepare | None:
        """(S3) Check that a proposal for a later view has a timeout certificate, and the block that this certificate requires.

        Return the vote for that block, or None if any block is allowed.
        """
        certificate = message.justification
        if (certificate is None) != (propose.view == 0):
            raise RemoteProtocolError(
                "bad-justification", f"every view except 0 needs a timeout certificate: {propose.height}.{propose.view}"
            )
        if certificate is None:
            return None
        high = self._take_timeouts(book, certificate, propose.view - 1)
        if high is not None and high.block != propose.block:
            raise RemoteProtocolError("bad-justification", "a different block was prepared and must be proposed again")
        return high

    # Votes and timeouts ----------------------------------------------------------------------------------------------

    def _remember(self, signed: Signed, statement: Propose | Prepare | Commit | Timeout) -> None:
        """Add a late statement about a decided height, because it may be evidence.

        Late commits of the parent also enter the certificate in the next block.
        """
        book = self._closed.get(statement.height)
        if book is None or book.decided_view is None or abs(statement.view - book.decided_view) > VIEWS_AHEAD_MAX:
            return
        self._verify(book, signed, statement)
        self._add(book, signed, statement)
        parent = self._chain.parent
        if parent is not None and statement == parent.vote and signed.signer not in parent.certificate.signatures:
            signatures = {**parent.certificate.signatures, signed.signer: signed.signature}
            parent.certificate = Certificate(parent.certificate.vote, dict(sorted(signatures.items())))

    def _on_timed_out(self, peer: bytes, message: TimeoutEnvelope) -> None:
        timeout = codec.decode_message(message.timeout.body, (Timeout,))
        self._remember(message.timeout, timeout)
        if timeout.height < self.height:
            self._send(peer, Status(self.height, self.view))
        book = self._book_for(peer, timeout.height, message)
        if book is None or (timeout.view < self.view and not self._in_window(timeout.view)):
            return
        self._verify(book, message.timeout, timeout)
        high = None
        if message.high is not None:
            high = self._take_prepared(book, message.high)
        if not covers_timeout(high, timeout) or timeout.high_view > timeout.view:
            # (S5) A timeout counts only with a prepare certificate that covers it.
            raise RemoteProtocolError("bad-timeout", f"the certificate of view {timeout.high_view} is missing")
        if self._in_window(timeout.view):
            self._add(book, message.timeout, timeout)
        else:
            book.record_timed_out_view(message.timeout.signer, timeout.view)

    def _take_prepared(self, book: HeightVoteSet, certificate: Certificate) -> Prepare:
        vote = verify_certificate(certificate, Prepare, book.voters, self._chain_id, self._verifier)
        if vote.height != book.height:
            raise RemoteProtocolError("wrong-height", f"prepare certificate of height {vote.height} at height {book.height}")
        if self._adopt(book, certificate, vote):
            self._add_certified(book, certificate, vote)
        return vote

    def _take_timeouts(self, book: HeightVoteSet, certificate: TimeoutCertificate, view: int) -> Prepare | None:
        high = verify_timeout_certificate(certificate, book.height, view, book.voters, self._chain_id, self._verifier)
        if certificate.high is not None and high is not None and self._adopt(book, certificate.high, high):
            self._add_certified(book, certificate.high, high)
        for signed in certificate.timeouts:
            self._add(book, signed, codec.decode_message(signed.body, (Timeout,)))
        return high

    # Decisions -------------------------------------------------------------------------------------------------------

    def _on_decision(self, peer: bytes, message: Decision) -> None:
        height = codec.decode_message(message.certificate.vote, (Commit,)).height
        if height > self.height or (height == self.height and self._book is None):  # the decision cannot be verified yet
            self._catch_up.record_claim(peer, height + 1)
            # Until the trusted block is decided, the known voters may have retired. Retired voters could send us another chain
            # at no cost.
            wanted = self._catch_up.was_asked(peer) or (self._chain.is_known_voter(peer) and not self._is_unproven)
            if wanted and height < self.height + DECISIONS_PER_REPLY_MAX:
                self._future.add_decision(peer, height, message)
        if height in self._closed:
            self._compare(self._closed[height], message.certificate)
        if self._book is None or height != self.height or self.height - self._chain.applied > DECIDED_AHEAD_MAX:
            return
        vote = verify_certificate(message.certificate, Commit, self._book.voters, self._chain_id, self._verifier)
        if block_digest(message.block) != vote.block:
            raise RemoteProtocolError("wrong-block", f"the block does not match the certificate of height {height}")
        if not self._chain.extends_tip(message.block):
            self._add_rival(self._book, message.certificate, vote)
            self._set_aside(peer)
            return
        self._catch_up.reset_backoff(peer)
        held = self._book.commit_vote
        if self._is_unproven and held is not None and held.block != vote.block:
            self._book.drop_commit_certificate()  # retired voters can certify a block that no peer has
        self._hold(vote.block, message.block)
        self._add_certified(self._book, message.certificate, vote)
        self._book.adopt_commit_certificate(message.certificate, vote)

    def _compare(self, book: HeightVoteSet, certificate: Certificate) -> None:
        """Handle the certificate of a decided height. Verify it only if it names another block than the decided one."""
        vote, decided = codec.decode_message(certificate.vote, (Commit,)), book.commit_vote
        if decided is None or vote.block == decided.block or vote.voters != decided.voters or self._is_below_anchor(book):
            return
        verify_certificate(certificate, Commit, book.voters, self._chain_id, self._verifier)
        self._add_rival(book, certificate, vote)

    # Answers ---------------------------------------------------------------------------------------------------------

    def _answer(self, peer: bytes, message: GetDecisions | GetBlock | GetRememberedStatements | Status) -> None:
        if not self._answers.allows(peer, self._now):
            return
        match message:
            case GetDecisions():
                self._sends.append(SendDecisions(peer, message.first, message.count))
            case GetBlock() if message.height < self.height:
                self._sends.append(SendDecisions(peer, message.height, 1))
            case GetBlock() if message.block in self._stored:
                self._sends.append(SendBlock(peer, message.height, message.block))
            case GetRememberedStatements():
                # The certificate goes first: a voter that lost its own commit must have the certificate before it signs again.
                if self._book is not None and self._book.highest_prepare_certificate is not None:
                    self._send(peer, Prepared(self._book.highest_prepare_certificate))
                books = [self._closed[height] for height in sorted(self._closed, reverse=True)]
                if self._book is not None:
                    books.insert(0, self._book)
                said = [signed for book in books for signed in book.statements_of(peer)]
                held = [*self._application.statements_signed_by(peer), *said, *self._chain.commit_votes_of(peer)]
                # The answer has no duplicates, and ends at the maximum number of statements.
                self._send(peer, RememberedStatements(self.height, tuple(dict.fromkeys(held))[:REMEMBERED_STATEMENTS_MAX]))
            # The sender is in an earlier view: a Status of few bytes requests our statements.
            case Status() if self._book is not None:
                self._repeat_to((peer,), self._book)

    def _repeat_to(self, peers: tuple[bytes, ...], book: HeightVoteSet) -> None:
        """Send our latest statements, the highest certificate and the proposal again to voters that apparently lack them."""
        offer = book.proposals.get(self.view)
        unheard = tuple(key for key in book.voters_without_statement_since(self.view) if key in peers)
        # The block must have been prepared here. A body from a faulty leader may not decode, and then has no compact form.
        if offer is not None and unheard and offer.digest in self._stored and offer.digest in self._blocks:
            self._send_to(unheard, self._proposal(offer))
        ended = book.timeout_certificate(self.view - 1)
        if book.highest_prepare_certificate is not None:
            self._send_to(peers, Prepared(book.highest_prepare_certificate))
        # A prepare certificate of a later view would make it invalid.
        is_covered = book.high_vote is None or book.high_vote.view < self.view
        if ended is not None and unheard and is_covered:
            self._send_to(unheard, ViewEnded(ended))
        for view in (self.view - 1, self.view):
            signed = self._said(book, Timeout.TAG, view)
            if signed is not None:
                self._send_to(peers, TimeoutEnvelope(signed, book.highest_prepare_certificate))
        for tag in (Prepare.TAG, Commit.TAG):
            signed = self._said(book, tag, self.view)
            if signed is not None:
                self._send_to(peers, Vote(signed))

    def _said(self, book: HeightVoteSet, tag: str, view: int) -> Signed | None:
        """Return our own statement of this type and view, or None.

        A statement for another voter set is omitted, because no voter accepts it.
        """
        signed = self._own.get_vote(tag, book.height, view)
        return signed if signed in book.statements_of(self.me) else None
