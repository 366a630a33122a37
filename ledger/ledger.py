"""What consensus decides about, seen from one peer: the state, the open rounds, and transactions that wait for a block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from consensus.ballots import Closing, RoundBook
from consensus.block import BODY_BYTES_MAX
from ledger import members as membership
from ledger.state import Body, Rules, State, decode_body
from ledger.transactions import Refused
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import TRANSACTION_BYTES_MAX, TRANSACTIONS_PENDING_MAX, TRANSACTIONS_PER_BLOCK_MAX
from protocol.messages import Transaction

TRANSACTIONS_BYTES_MAX = BODY_BYTES_MAX // 2  # of one block: applying them stays quick
SIGNED_BYTES = 128  # what a signed message takes in a body beside its own bytes
BODY_FIXED_BYTES = 64  # what an encoded body takes beside its closings and transactions
PASSES_MAX = 4  # over waiting transactions: in order of their nonces, only those that follow another author's need a second one
PENDING_PER_MEMBER_MAX = 256  # a quarter of a block: no member's flood keeps out what the others want decided
PENDING_STRANGERS_MAX = 64  # of all who are not members here; nothing makes room for more, or it would be passed round for ever

assert TRANSACTION_BYTES_MAX + 1_024 < TRANSACTIONS_BYTES_MAX  # any transaction fits, so that `has_work` may ask without looking


class Waiting(NamedTuple):
    nonce: int
    signed: Signed


class Pool:
    """Transactions that are not decided yet. Only those that could still be decided stay."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Waiting] = {}
        self._strangers: set[bytes] = set()  # keys of `_waiting`

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Signed]:
        return iter([waiting.signed for waiting in self._waiting.values()])

    def add(self, signed: Signed, member: bool = True) -> bool:
        """False if it was here already or there is no room. Keys cost nothing, so strangers share one small part."""
        key = hashlib.sha256(signed.body + signed.signer).digest()
        if key in self._waiting or len(self._waiting) >= TRANSACTIONS_PENDING_MAX:
            return False
        if not member and len(self._strangers) >= PENDING_STRANGERS_MAX:
            return False
        if member and sum(other.signer == signed.signer for other in self) >= PENDING_PER_MEMBER_MAX:
            return False
        self._waiting[key] = Waiting(codec.decode_message(signed.body, (Transaction,)).nonce, signed)
        if not member:
            self._strangers.add(key)
        return True

    def _forget(self, key: bytes) -> None:
        del self._waiting[key]
        self._strangers.discard(key)

    def select(
        self, rules: Rules, state: State, size_max: int = TRANSACTIONS_BYTES_MAX, count_max: int = TRANSACTIONS_PER_BLOCK_MAX
    ) -> tuple[Signed, ...]:
        """What fits into the next block, in an order in which all of it applies."""
        chosen: list[Signed] = []
        waiting = sorted(self._waiting.values(), key=lambda entry: entry.nonce)
        for _ in range(PASSES_MAX):
            left: list[Waiting] = []
            for entry in waiting:
                signed, member = entry.signed, state.members.members.get(entry.signed.signer)
                if entry.nonce != (member.nonce if member else 0) + 1:
                    left.append(entry)  # seen at once: a flood of these must not slow down every vote
                    continue
                size = len(signed.body) + SIGNED_BYTES
                if len(chosen) >= count_max:
                    return tuple(chosen)
                try:
                    after = rules.apply_transaction(state, signed, state.height + 1) if size <= size_max else None
                except (Refused, RemoteProtocolError):
                    after = None  # its predecessor may be among the later ones
                if after is None:
                    left.append(entry)
                    continue
                chosen.append(signed)
                state, size_max = after, size_max - size
            if len(left) == len(waiting):
                break
            waiting = left
        return tuple(chosen)

    def prune(self, rules: Rules, state: State) -> list[tuple[Signed, str]]:
        """Forgets what was decided, expired or refused, with the reason; a nonce that is ahead may still come."""
        gone: list[tuple[Signed, str]] = []
        for key, (_, signed) in list(self._waiting.items()):
            transaction = rules.open_transaction(signed)
            member = state.members.members.get(signed.signer)
            try:
                rules.apply_transaction(state, signed, state.height + 1)
            except (Refused, RemoteProtocolError) as error:
                if transaction.nonce > (member.nonce if member else 0) + 1 and transaction.expires > state.height:
                    continue
                self._forget(key)
                gone.append((signed, str(error)))
        return gone


class Ledger:
    """Implements `consensus.application.Application`. Everything in it refers to the last applied block."""

    def __init__(self, rules: Rules, state: State, certified_root: bytes) -> None:
        self.rules = rules
        self.state = state
        self.certified_root = certified_root  # the root that the last decided block names
        self.books: dict[bytes, RoundBook] = {}
        self.pool = Pool()

    def advance(self, state: State, certified_root: bytes) -> None:
        assert state.height == self.state.height + 1
        self.state, self.certified_root = state, certified_root

    # Application

    def propose(self, height: int, now_ms: int) -> bytes | None:
        assert height == self.state.height + 1
        closings, room = self._closings()
        body = Body(closings, self.pool.select(self.rules, self.state, min(room, TRANSACTIONS_BYTES_MAX)))
        if not closings and not body.transactions and not self._certification_due():
            return None
        return codec.encode(body)

    def _closings(self) -> tuple[tuple[Closing, ...], int]:
        """The rounds that can be closed now, as many as one block holds, and the bytes left beside them."""
        closings: list[Closing] = []
        room = BODY_BYTES_MAX - BODY_FIXED_BYTES
        for _, book in sorted(self.books.items()):
            closing = book.closing()
            if closing is not None and (size := len(codec.encode(closing))) <= room:
                closings.append(closing)
                room -= size
        return tuple(closings), room

    def check(self, height: int, body: bytes, proposer: bytes) -> str | None:
        if height != self.state.height + 1:
            return f"height {height} does not follow {self.state.height}"
        problem = self.rules.problem(self.state, body)
        if problem:
            return problem
        for closing in decode_body(body).closings:
            book = self.books.get(closing.job)
            refusal = book.refuses(closing) if book else None
            if refusal:
                return refusal
        return None

    def has_work(self) -> bool:
        closable = any(book.closing() is not None for book in self.books.values())
        return closable or self._certification_due() or bool(self.pool.select(self.rules, self.state, count_max=1))

    def participants(self, body: bytes) -> frozenset[bytes] | None:
        closings = decode_body(body).closings
        return frozenset(ballot.signer for closing in closings for ballot in closing.ballots) if closings else None

    def _certification_due(self) -> bool:
        """An empty block: it certifies the last root, or moves the voter sets on."""
        if membership.change_due(self.state.members):
            return True
        return self.certified_root != self.state.root and not self.state.jobs.running()
