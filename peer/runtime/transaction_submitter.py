"""Signs transactions of this peer, or of the key it had before, and waits until each is decided.

Several may wait at once, with consecutive nonces: a block takes them in that order. So a report of an audit can wait for the
block that closes a round, and nothing else has to wait for that block.

The author signs a command again only when its earlier transaction can never act any more: another one was decided with its nonce,
or it expired at an applied height. Until then any leader may put the earlier one into a block, however often others have refused
it.

A transaction that is refused now gets a substitute: one with the same nonce that changes nothing. Only one of the two is ever
decided, and signing both is no offence. The substitute also closes the gap before the transactions that wait behind it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import trio

from ledger.blocks.mempool import PENDING_PER_MEMBER_MAX, transaction_digest
from ledger.core.module import Refused
from ledger.ledger_state import decode_body
from ledger.members import RegisterRoles
from peer.node.open_rounds import RoundEffects
from peer.runtime.driver import Driver
from peer.runtime.telemetry.health import duplicate_identity_text
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Signed, Signer, sign_message
from protocol.messages import Transaction

LIFETIME_HEIGHTS = 200  # a transaction that is not decided by then is refused; rounds take seconds
# Half of a member's room: other peers may still hold transactions that are decided here, and they drop all of a member that has
# too many.
PENDING_MAX = PENDING_PER_MEMBER_MAX // 2
COST_IN_LOOP_MAX = 8  # of one transaction, in signature checks: a millisecond of the event loop
DECISION_SECONDS_MAX = 120.0  # the person who asked is then told that there may be no quorum


class TransactionSubmitter:
    def __init__(self, driver: Driver, signer: Signer | None = None) -> None:
        self._driver = driver
        self.signer = signer or driver.signer
        self._lock = trio.Lock()
        self._places = trio.CapacityLimiter(PENDING_MAX)

    @property
    def nonce(self) -> int:
        member = self._driver.state.members.members.get(self.signer.public)
        return member.nonce if member else 0

    @property
    def has_pending(self) -> bool:
        """Whether a transaction of ours is not decided yet."""
        return bool(self._waiting())

    async def submit(self, kind: str, content: object, seconds_max: float = DECISION_SECONDS_MAX) -> Transaction:
        """The transaction, once it stands in an applied block.

        Raises `UserError` if it is refused; if it is not decided in time, and then it may still be; and if a snapshot hides
        whether it was decided.
        """
        with trio.move_on_after(seconds_max):
            async with self._places:
                while True:
                    signed, transaction = await self._put_on_log(kind, content)
                    if await self._was_decided(signed, transaction):
                        return transaction
        raise UserError(
            f"{kind} was not decided within {seconds_max:.0f} s, and may still be: is a quorum of voters running? (`peers` shows)"
        )

    async def _was_decided(self, signed: Signed, transaction: Transaction) -> bool:
        """Whether it stands in a block. Returns when that can never change any more."""
        while True:
            async with self._lock:
                applied = self._driver.block_applied
                if self.nonce >= transaction.nonce:
                    break
                if self._driver.state.height >= transaction.expires:
                    return False
                await self._keep_on_log(signed)
            await applied.wait()
        decided = await trio.to_thread.run_sync(self._decided_with, transaction.nonce, self._driver.state.height)
        if decided is None:
            text = "may have been decided: a snapshot was restored without the block that shows it; look before you try again"
            raise UserError(f"{transaction.kind} {text}")
        return transaction_digest(decided) == transaction_digest(signed)

    def _decided_with(self, nonce: int, height: int) -> Signed | None:
        """This author's decided transaction with this nonce, from the blocks up to `height`; None if its block is not here."""
        while (decided := self._driver.store.get_decision(height)) is not None:
            for signed in decode_body(decided.decode().body).transactions:
                if signed.signer == self.signer.public and _opened(signed).nonce == nonce:
                    return signed
            height -= 1
        return None

    async def _keep_on_log(self, signed: Signed) -> None:
        """If no transaction of ours with the next nonce waits: queues this one again, or its substitute if it is refused."""
        following, members = self.nonce + 1, self._driver.state.members
        if following in self._waiting():
            return
        refusal = self._refusal([], signed)
        if refusal is not None:
            if not members.is_current_key(self.signer.public):
                raise UserError(refusal)
            signed = self._signed(following, "member/register", RegisterRoles(members.members[self.signer.public].roles))
        await self._put(signed)

    def _waiting(self) -> dict[int, Signed]:
        """Our transactions that are not decided yet, by nonce."""
        return {_opened(signed).nonce: signed for signed in self._driver.node.ledger.mempool.transactions_of(self.signer.public)}

    async def _put_on_log(self, kind: str, content: object) -> tuple[Signed, Transaction]:
        """Signs and queues it. Raises `UserError` if it is refused now.

        A peer that is catching up may queue a transaction that later turns out expired or refused: the pool drops it then.
        """
        async with self._lock:
            waiting = self._waiting()
            nonce = next(number for number in itertools.count(self.nonce + 1) if number not in waiting)
            signed = self._signed(nonce, kind, content)
            transaction = _opened(signed)
            if self._driver.rules.transaction_traits(signed.signer, transaction).cost > COST_IN_LOOP_MAX:
                # In a thread; `_refusal` then finds them verified, or the first false one.
                with contextlib.suppress(RemoteProtocolError):
                    await trio.to_thread.run_sync(self._driver.rules.check_embedded_statements, signed, transaction)
            refusal = self._refusal([waiting[number] for number in sorted(waiting) if number < nonce], signed)
            if refusal is not None:
                raise UserError(refusal)
            await self._put(signed)
        return signed, transaction

    def _signed(self, nonce: int, kind: str, content: object) -> Signed:
        """Raises `UserError` if this peer may sign nothing any more."""
        replica = self._driver.replica
        if replica.duplicate_identity_reason is not None:
            raise UserError(duplicate_identity_text(replica.duplicate_identity_reason))
        if replica.is_outdated:
            raise UserError(self._driver.rules.why_version_unsupported(self._driver.state))
        expires = self._driver.state.height + LIFETIME_HEIGHTS
        return sign_message(self.signer, self._driver.chain_id, Transaction(nonce, expires, kind, codec.encode(content)))

    def _refusal(self, before: Sequence[Signed], signed: Signed) -> str | None:
        """Why it cannot be decided now behind our waiting ones `before` it. Those that are refused themselves are skipped."""
        rules, state = self._driver.rules, self._driver.state
        for waiting in before:
            with contextlib.suppress(Refused, RemoteProtocolError):
                state = rules.apply_transaction(state, waiting)
        try:
            rules.apply_transaction(state, signed)
        except (Refused, RemoteProtocolError) as error:
            return str(error)
        return None

    async def _put(self, signed: Signed) -> None:
        def put() -> RoundEffects:
            self._driver.node.ledger.mempool.add_transaction(signed)
            return RoundEffects(sends=[signed])

        await self._driver.run_action(put)


def _opened(signed: Signed) -> Transaction:
    return codec.decode_message(signed.body, (Transaction,))
