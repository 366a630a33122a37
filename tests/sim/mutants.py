"""Planted bugs: each breaks one rule of the replica, and the invariants must notice within some seeds."""

from __future__ import annotations

from typing import Any

from consensus.book import Book
from consensus.evidence import Statement
from consensus.quorum import quorum
from consensus.replica import Replica
from consensus.signing import OwnVotes
from consensus.turn import Restart, Voted
from consensus.voters import VoterSet
from protocol.errors import LocalProtocolError
from protocol.identity import sign
from protocol.messages import Certificate, Prepare


def small_quorum(voters: VoterSet) -> int:
    return quorum(len(voters)) - 1


class ForgetsCertificates(Replica):
    """Times out as if nothing had been prepared."""

    def _give_up(self, book: Book, view: int) -> None:
        high, vote = book.high, book.high_vote
        book.high = book.high_vote = None
        super()._give_up(book, view)
        book.high, book.high_vote = high, vote


class CarelessVotes(OwnVotes):
    def cast(self, message: Statement) -> Voted:
        try:
            return super().cast(message)
        except LocalProtocolError:
            slot = (message.TAG, message.height, message.view)
            self._signed[slot] = sign(self._signer, self._chain_id, message)
            return Voted(slot, self._signed[slot])


class VotesAfterTimeout(Replica):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._own.__class__ = CarelessVotes

    def _may_judge(self, book: Book) -> bool:
        return self._may_sign(book) and self._chain.is_applied  # whatever was given up


class ForgetsVotes(Replica):
    """Restarts as if it had signed nothing."""

    def __init__(self, signer: Any, chain_id: Any, verifier: Any, application: Any, applied: Any, restart: Restart) -> None:
        super().__init__(signer, chain_id, verifier, application, applied, Restart(restart.decided))


class IgnoresJustification(Replica):
    """Prepares any block in a later view, whatever the timeouts oblige to."""

    def _adopt(self, book: Book, certificate: Certificate, vote: Prepare) -> bool:
        return super()._adopt(book, certificate, vote) if vote.view == self.view else False

    def _block_to_propose(self, book: Book, obligation: Prepare | None) -> bytes | None:
        return super()._block_to_propose(book, None)
