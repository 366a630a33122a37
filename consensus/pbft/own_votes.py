"""This voter's own signatures: one message per slot, ever."""

from __future__ import annotations

from collections.abc import Iterable

from consensus.effects import OwnStatement, VoteSlot
from consensus.evidence import AGREEMENT_STATEMENT_TYPES, AgreementStatement
from protocol import codec
from protocol.errors import LocalProtocolError
from protocol.identity import Signed, Signer, sign_message
from protocol.messages import Commit, Prepare, Timeout


class OwnVotes:
    """Everything signed for the undecided height. A `OwnStatement` record goes out before the message does."""

    def __init__(self, signer: Signer, chain_id: bytes, votes: Iterable[OwnStatement]) -> None:
        self._signer = signer
        self._chain_id = chain_id
        self._signed: dict[VoteSlot, Signed] = {voted.slot: voted.signed for voted in votes}

    def get_vote(self, tag: str, height: int, view: int) -> Signed | None:
        return self._signed.get((tag, height, view))

    def has_signed(self, statement: AgreementStatement) -> bool:
        """Whether this very statement was signed here."""
        signed = self.get_vote(statement.TAG, statement.height, statement.view)
        return signed is not None and signed.body == codec.encode(statement)

    def statements_at(self, height: int) -> list[tuple[Signed, AgreementStatement]]:
        return [
            (signed, codec.decode_message(signed.body, AGREEMENT_STATEMENT_TYPES))  # type: ignore[misc]
            for (_, of_height, _), signed in self._signed.items()
            if of_height == height
        ]

    def sign_statement(self, message: AgreementStatement) -> OwnStatement:
        """Signs. `LocalProtocolError` if the slot is taken or a rule of the protocol forbids the message."""
        slot = (message.TAG, message.height, message.view)
        if slot in self._signed:
            raise LocalProtocolError(f"{slot} is signed already")
        if isinstance(message, (Prepare, Commit)) and self.highest_timed_out_view(message.height) >= message.view:
            raise LocalProtocolError(f"{message.TAG} in {message.height}.{message.view} after a timeout")
        signed = sign_message(self._signer, self._chain_id, message)
        self._signed[slot] = signed
        return OwnStatement(slot, signed)

    def has_voted(self, height: int) -> bool:
        return any(tag != Timeout.TAG and of_height == height for tag, of_height, _ in self._signed)

    def highest_timed_out_view(self, height: int) -> int:
        """The highest view of `height` that was given up; −1: none."""
        given_up = (view for tag, of_height, view in self._signed if tag == Timeout.TAG and of_height == height)
        return max(given_up, default=-1)

    def highest_signed_view(self, height: int) -> int:
        """The highest view of `height` that anything was signed in."""
        return max((view for _, of_height, view in self._signed if of_height == height), default=0)

    def prune_below_height(self, height: int) -> None:
        self._signed = {slot: signed for slot, signed in self._signed.items() if slot[1] >= height}
