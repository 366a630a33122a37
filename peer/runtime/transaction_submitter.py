"""The submitter, which signs transactions with this peer's key or its former key, and waits until each is decided.

Several transactions may wait at once. They have consecutive nonces, and blocks contain them in the order of nonces. So an audit
report can wait for the block that closes its round, without delaying other transactions.

A request is signed again only when its earlier transaction can no longer be decided: another transaction was decided with the
same nonce, or the earlier one expired at an applied height. Until then any leader may include the earlier one, even if other
voters refused it.

A transaction that is refused now gets a substitute with the same nonce that changes nothing. Only one of the two is ever decided,
and signing both is no offence. The substitute also closes the gap before the transactions that wait behind it.
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

LIFETIME_HEIGHTS = 200  # blocks after which an undecided transaction expires: a round of training takes seconds and a block
# Undecided transactions of this peer: half of a member's limit in a mempool. Other peers may still have transactions that are
# decided at this peer, and they drop all transactions of a member with too many.
PENDING_MAX = PENDING_PER_MEMBER_MAX // 2
COST_IN_LOOP_MAX = 8  # most signature checks of a transaction that the event loop does without a thread: about a millisecond
DECISION_SECONDS_MAX = 120.0  # longest wait for a decision, after which the user is told that a quorum may be missing


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
        """True if a transaction of this peer is not decided yet."""
        return bool(self._waiting())

    async def submit(self, kind: str, content: object, seconds_max: float = DECISION_SECONDS_MAX) -> Transaction:
        """Submit a transaction, and return it when a block that contains it is applied.

        Raises `UserError` if the transaction is refused, if it is not decided within `seconds_max`, or if a snapshot was restored
        without the block that may contain it. In the last two cases, the transaction may be decided later or may have been
        decided.
        """
        with trio.move_on_after(seconds_max):
            async with self._places:
                while True:
                    signed, transaction = await self._put_on_log(kind, content)
                    if await self._was_decided(signed, transaction):
                        return transaction
        raise UserError(
            f"{kind} is not decided after {seconds_max:.0f} s and may still be decided: see `peer peers` for missing voters"
        )

    async def _was_decided(self, signed: Signed, transaction: Transaction) -> bool:
        """Wait until the transaction is decided, or can no longer be decided. Return whether it was decided."""
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
            text = "may have been decided: this peer restored a snapshot that skips the block; check before you try again"
            raise UserError(f"{transaction.kind} {text}")
        return transaction_digest(decided) == transaction_digest(signed)

    def _decided_with(self, nonce: int, height: int) -> Signed | None:
        """Return our decided transaction with this nonce from the blocks up to `height`, or None if its block is not stored."""
        while (decided := self._driver.store.get_decision(height)) is not None:
            for signed in decode_body(decided.decode().body).transactions:
                if signed.signer == self.signer.public and _opened(signed).nonce == nonce:
                    return signed
            height -= 1
        return None

    async def _keep_on_log(self, signed: Signed) -> None:
        """Queue the transaction again, or a substitute if it is refused, unless the mempool has one with the next nonce."""
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
        """Return our undecided transactions in the mempool by nonce."""
        return {_opened(signed).nonce: signed for signed in self._driver.node.ledger.mempool.transactions_of(self.signer.public)}

    async def _put_on_log(self, kind: str, content: object) -> tuple[Signed, Transaction]:
        """Sign a transaction and add it to the mempool. Raises `UserError` if the present state refuses the transaction.

        A peer that is behind may add a transaction that a later state refuses. The mempool then drops the transaction.
        """
        async with self._lock:
            waiting = self._waiting()
            nonce = next(number for number in itertools.count(self.nonce + 1) if number not in waiting)
            signed = self._signed(nonce, kind, content)
            transaction = _opened(signed)
            if self._driver.rules.transaction_traits(signed.signer, transaction).cost > COST_IN_LOOP_MAX:
                # A thread verifies the embedded statements first. `_refusal` then finds their signatures in the cache, or fails
                # at a false one.
                with contextlib.suppress(RemoteProtocolError):
                    await trio.to_thread.run_sync(self._driver.rules.check_embedded_statements, signed, transaction)
            refusal = self._refusal([waiting[number] for number in sorted(waiting) if number < nonce], signed)
            if refusal is not None:
                raise UserError(refusal)
            await self._put(signed)
        return signed, transaction

    def _signed(self, nonce: int, kind: str, content: object) -> Signed:
        """Return a signed transaction.

        Raises `UserError` if this peer must sign nothing, because its key is copied or its program too old.
        """
        replica = self._driver.replica
        if replica.duplicate_identity_reason is not None:
            raise UserError(duplicate_identity_text(replica.duplicate_identity_reason))
        if replica.is_outdated:
            raise UserError(self._driver.rules.why_version_unsupported(self._driver.state))
        expires = self._driver.state.height + LIFETIME_HEIGHTS
        return sign_message(self.signer, self._driver.chain_id, Transaction(nonce, expires, kind, codec.encode(content)))

    def _refusal(self, before: Sequence[Signed], signed: Signed) -> str | None:
        """Return the reason why the transaction would be refused after the transactions in `before`, or None.

        Refused ones in `before` are skipped.
        """
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
