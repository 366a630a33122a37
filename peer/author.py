"""Puts transactions of this peer, or of the key it had before, on the log, one at a time, and waits until they are decided."""

from __future__ import annotations

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

    async def submit(self, kind: str, content: object) -> Transaction:
        """The decided transaction. `UserError` if it is refused, or if nothing is decided."""
        async with self._lock:
            before = self.nonce
            with trio.move_on_after(DECISION_SECONDS_MAX):
                while True:
                    signed, transaction = await self._put_on_log(kind, content)
                    while self.nonce == before and signed in self._driver.ledger.pool:
                        await self._driver.applied.wait()
                    if self.nonce != before:
                        return transaction
        raise UserError(
            f"{kind} was not decided within {DECISION_SECONDS_MAX:.0f} s: is a quorum of voters running? (`peers` shows)"
        )

    async def _put_on_log(self, kind: str, content: object) -> tuple[Signed, Transaction]:
        """`UserError` if it is refused now. While this peer still catches up, what it puts there may expire or be refused later,
        which takes it out of the pool."""
        expires = self._driver.state.height + LIFETIME_HEIGHTS
        transaction = Transaction(self.nonce + 1, expires, kind, codec.encode(content))
        signed = sign(self.signer, self._driver.chain_id, transaction)
        self._require_acceptable(signed)
        await self._driver.call(lambda: self._put(signed))
        return signed, transaction

    def _require_acceptable(self, signed: Signed) -> None:
        state = self._driver.state
        try:
            self._driver.rules.apply_transaction(state, signed, state.height + 1)
        except (Refused, RemoteProtocolError) as error:
            raise UserError(str(error)) from None

    def _put(self, signed: Signed) -> Said:
        self._driver.ledger.pool.add(signed)
        return Said(sends=[signed])
