"""A replica's answers to requests, its greetings to new links, and its repeats to peers that seem to have missed something."""

from __future__ import annotations

from consensus.effects import SendBlock, SendDecisions
from consensus.pbft.replica_state import ReplicaState
from consensus.pbft.rollback_check import newest_statements
from consensus.pbft.vote_set import HeightVoteSet
from protocol.identity import Signed
from protocol.limits import REMEMBERED_STATEMENTS_MAX
from protocol.messages import (
    Commit,
    GetBlock,
    GetDecisions,
    GetRememberedStatements,
    Prepare,
    Prepared,
    RememberedStatements,
    Status,
    Timeout,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)


class ReplicaResponder(ReplicaState):
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
                self._tell_heard(peer)
            case Status() if self._book is not None:  # of a voter in an earlier view: a few bytes ask for a whole proposal
                self._repeat_to((peer,), self._book)

    def _tell_heard(self, peer: bytes) -> None:
        """The lock first: an asker that forgot its own commit must hold the certificate when it begins to sign again."""
        if self._book is not None and self._book.highest_prepare_certificate is not None:
            self._send(peer, Prepared(self._book.highest_prepare_certificate))
        books = [self._closed[height] for height in sorted(self._closed, reverse=True)]
        if self._book is not None:
            books.insert(0, self._book)
        said = [signed for book in books for signed in book.statements_of(peer)]
        held = [*self._application.statements_signed_by(peer), *said, *self._chain.commit_votes_of(peer)]
        self._send(peer, RememberedStatements(self.height, newest_statements(held, REMEMBERED_STATEMENTS_MAX)))

    def _greet(self, peer: bytes) -> None:
        self._send(peer, Status(self.height, self.view))
        if self._book is not None and peer in self._book.voters:
            if peer in self._check.voters_without_answer(self.me, self._book.voters):
                self._send(peer, GetRememberedStatements())
            self._repeat_to((peer,), self._book)

    def _repeat_to(self, peers: tuple[bytes, ...], book: HeightVoteSet) -> None:
        """What this voter has signed last, the best certificate, and the proposal for those that seem to miss it."""
        offer = book.proposals.get(self.view)
        unheard = tuple(key for key in book.voters_without_statement_since(self.view) if key in peers)
        # Only what was found sound here: a liar's block may have a body that nobody can read, let alone condense.
        if offer is not None and unheard and offer.digest in self._stored and offer.digest in self._blocks:
            self._send_to(unheard, self._proposal(offer))
        ended = book.timeout_certificate(self.view - 1)
        if book.highest_prepare_certificate is not None:
            self._send_to(peers, Prepared(book.highest_prepare_certificate))
        is_covered = book.high_vote is None or book.high_vote.view < self.view  # not in the turn in which a higher one came
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
        """An own statement, unless it names other voters than the book's: nobody would take it."""
        signed = self._own.get_vote(tag, book.height, view)
        return signed if signed in book.statements_of(self.me) else None
