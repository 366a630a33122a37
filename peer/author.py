"""Puts transactions of this peer, or of the key it had before, on the log, and waits until each is decided.

Several may wait at once, with consecutive nonces: a block takes them in that order, and reports of audits wait for the block that
closes a round, which nothing else may have to wait for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import trio

from ledger.transactions import Refused
from peer.driver import Driver
from peer.rounds import Outcome as Said
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Signed, Signer, sign
from protocol.messages import Transaction

LIFETIME_HEIGHTS = 200  # a transaction that was not decided by then is refused; rounds take seconds
DECISION_SECONDS_MAX = 120.0  # then the person who asked is told that there is no quorum


class Author:
    def __init__(self, driver: Driver, signer: Signer | None = None) -> None:
        self._driver = driver
        self.signer = signer or driver.signer
        self._lock = trio.Lock()

    @property
    def nonce(self) -> int:
        member = self._driver.state.members.members.get(self.signer.public)
        return member.nonce if member else 0

    async def submit(self, kind: str, content: object, seconds_max: float = DECISION_SECONDS_MAX) -> Transaction:
        """The decided transaction. `UserError` if it is refused, or if nothing is decided."""
        with trio.move_on_after(seconds_max):
            while True:
                signed, transaction = await self._put_on_log(kind, content)
                if signed not in self._waiting().values() and self.nonce < transaction.nonce:
                    await self._driver.applied.wait()  # the pool is full: a block makes room
                while self._may_be_decided(signed, transaction):
                    await self._driver.applied.wait()
                if self.nonce >= transaction.nonce:
                    return transaction
        raise UserError(f"{kind} was not decided within {seconds_max:.0f} s: is a quorum of voters running? (`peers` shows)")

    def _may_be_decided(self, signed: Signed, transaction: Transaction) -> bool:
        """Not if it, or one of ours that must come before it, was refused: then it is signed anew."""
        waiting = self._waiting()
        return signed in waiting.values() and self.nonce < transaction.nonce and self.nonce + 1 in waiting

    def _waiting(self) -> dict[int, Signed]:
        """Ours that are not decided yet, by nonce."""
        own = self._driver.ledger.pool.of(self.signer.public)
        return {self._driver.rules.open_transaction(signed).nonce: signed for signed in own}

    async def _put_on_log(self, kind: str, content: object) -> tuple[Signed, Transaction]:
        """`UserError` if it is refused now. While this peer still catches up, what it puts there may expire or be refused later,
        which takes it out of the pool."""
        async with self._lock:
            waiting = self._waiting()
            nonce = next(number for number in itertools.count(self.nonce + 1) if number not in waiting)
            expires = self._driver.state.height + LIFETIME_HEIGHTS
            transaction = Transaction(nonce, expires, kind, codec.encode(content))
            signed = sign(self.signer, self._driver.chain_id, transaction)
            self._require_acceptable([waiting[number] for number in sorted(waiting) if number < nonce], signed)
            await self._driver.call(lambda: self._put(signed))
        return signed, transaction

    def _require_acceptable(self, before: Sequence[Signed], signed: Signed) -> None:
        """Behind those of ours that wait, as far as they are acceptable themselves."""
        rules, state = self._driver.rules, self._driver.state
        height = state.height + 1
        for waiting in before:
            with contextlib.suppress(Refused, RemoteProtocolError):
                state = rules.apply_transaction(state, waiting, height)
        try:
            rules.apply_transaction(state, signed, height)
        except (Refused, RemoteProtocolError) as error:
            raise UserError(str(error)) from None

    def _put(self, signed: Signed) -> Said:
        self._driver.ledger.pool.add(signed)
        return Said(sends=[signed])
