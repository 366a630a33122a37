"""Transactions that are not decided yet, their order in a block, and voters' notices of those that wait too long."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import pairwise

from consensus.block import BODY_BYTES_MAX
from consensus.voter_set import faults_tolerated
from ledger.core.module import Refused
from ledger.ledger_state import LedgerRules, LedgerState, TransactionTraits
from ledger.members import MembersState
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import (
    COST_PER_BLOCK_MAX,
    INCLUSION_LIST_MAX,
    TRANSACTION_BYTES_MAX,
    TRANSACTIONS_PENDING_MAX,
    TRANSACTIONS_PER_BLOCK_MAX,
)
from protocol.messages import InclusionList, Transaction

TRANSACTIONS_BYTES_MAX = BODY_BYTES_MAX // 2  # of one block: applying them stays quick
SIGNED_BYTES = 128  # of a signed message in a body, beside its own bytes
SELECTION_PASSES_MAX = 4  # over waiting transactions, sorted by nonce: a second pass finds those that follow another author's
# tried for one block: an honest member has one of a nonce, so one refusal in a pass
REFUSED_PER_MEMBER_MAX = 2 * SELECTION_PASSES_MAX
PENDING_PER_MEMBER_MAX = 256  # a quarter of a block: one member's flood does not keep out the others' transactions
PENDING_BYTES_PER_MEMBER_MAX = 4 << 20  # sixteen of the largest transactions, or 256 of 16 kB
PENDING_BYTES_MAX = 128 << 20  # of all members: thirty members that fill their room must not fill a small machine
PENDING_STRANGERS_MAX = 64  # of all strangers. A stranger's transaction displaces none, or peers would pass floods on for ever
DROPPED_MAX = TRANSACTIONS_PENDING_MAX  # digests of transactions that left the pool last: one whole pool
LINGER_SECONDS = 0.4  # of a transaction that waits for others; see `ledger.core.module.Module.lingers`

assert TRANSACTION_BYTES_MAX + 1_024 < TRANSACTIONS_BYTES_MAX  # any transaction fits, so that `has_work` may ask without looking


def transaction_digest(signed: Signed) -> bytes:
    """How notices name a transaction. Other signature bytes on the same body make no other transaction."""
    return hashlib.sha256(signed.body + signed.signer).digest()


def signed_digest(signed: Signed) -> bytes:
    """How short bodies name anything signed: with its signature bytes, because the body's hash covers these, too."""
    return hashlib.sha256(codec.encode(signed)).digest()


@dataclass(frozen=True, slots=True)
class PendingTransaction:
    digest: bytes
    nonce: int
    expires: int
    added_height: int  # the height that was applied last when it came
    signed: Signed
    number: int  # of all that ever came, counted from 0
    traits: TransactionTraits

    @property
    def size(self) -> int:
        return len(self.signed.body) + SIGNED_BYTES


class TransactionSelection:
    """The transactions of one block while they are being chosen. Each applies to the state after those before it."""

    def __init__(self, rules: LedgerRules, state: LedgerState, size_max: int, count_max: int) -> None:
        self._rules, self._state = rules, state
        self._room, self._count_max, self._cost_left = size_max, count_max, COST_PER_BLOCK_MAX
        self.chosen: list[Signed] = []
        self.refused: Counter[bytes] = Counter()  # by signer

    @property
    def is_full(self) -> bool:
        return len(self.chosen) >= self._count_max

    def add_unbounded(self, signed: Signed) -> None:
        """Adds a transaction of somebody's block, whatever the bounds. Raises `Refused` or `RemoteProtocolError`."""
        self._state = self._rules.apply_transaction(self._state, signed)
        self._add(signed, self._rules.transaction_traits(signed.signer, self._rules.open_transaction(signed)).cost)

    def try_add(self, entry: PendingTransaction) -> bool:
        """Adds it if it fits and applies now, and says whether it did."""
        member = self._state.members.members.get(entry.signed.signer)
        if entry.nonce != (member.nonce if member else 0) + 1:
            return False  # before the costly check: a flood of these must not slow down every vote
        if self.is_full or entry.size > self._room or entry.traits.cost > self._cost_left:
            return False
        try:
            self._state = self._rules.apply_transaction(self._state, entry.signed)
        except (Refused, RemoteProtocolError):
            self.refused[entry.signed.signer] += 1
            return False
        self._add(entry.signed, entry.traits.cost)
        return True

    def _add(self, signed: Signed, cost: int) -> None:
        self.chosen.append(signed)
        self._room -= len(signed.body) + SIGNED_BYTES
        self._cost_left -= cost


class Mempool:
    """Transactions that could still be decided. `height` is the one applied last."""

    def __init__(
        self,
        height: int = 0,
        traits: Callable[[bytes, Transaction], TransactionTraits] = lambda author, transaction: TransactionTraits(),
    ) -> None:
        self.height = height
        self._traits = traits  # `LedgerRules.transaction_traits`
        self.version = 0  # changes whenever a transaction comes or goes, or has lingered long enough
        self.count = 0  # all that ever came
        self._waiting: dict[bytes, PendingTransaction] = {}
        self._by_signed: dict[bytes, bytes] = {}  # `signed_digest` -> key of `_waiting`
        self._strangers: set[bytes] = set()  # keys of `_waiting`
        self._count: Counter[bytes] = Counter()  # by signer
        self._bytes: Counter[bytes] = Counter()
        self._bytes_of_all = 0
        self._lingering: dict[bytes, float | None] = {}  # keys of `_waiting` -> until when, once `release_lingering` was asked
        self._overflowed: set[bytes] = set()  # signers that had too many since the last block
        self._dropped: dict[bytes, None] = {}  # the last keys that left `_waiting`
        self._tried = -1  # number of the last transaction that `prune` tried

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Signed]:
        return iter([waiting.signed for waiting in self._waiting.values()])

    def can_wait(self, running: Set[bytes]) -> bool:
        """Whether no transaction wants a block of its own: each waits for a closing of a job that runs, or lingers."""
        return all(entry.traits.awaited_job in running or key in self._lingering for key, entry in self._waiting.items())

    def release_lingering(self, now: float) -> float | None:
        """When the next transaction will have lingered long enough. Those that have by now want a block."""
        self._lingering = {key: now + LINGER_SECONDS if until is None else until for key, until in self._lingering.items()}
        for key in [key for key, until in self._lingering.items() if until is not None and until <= now]:
            del self._lingering[key]
            self.version += 1
        return min((until for until in self._lingering.values() if until is not None), default=None)

    def get_transaction(self, digest: bytes) -> PendingTransaction | None:
        return self._waiting.get(digest)

    def transactions_of(self, signer: bytes) -> tuple[Signed, ...]:
        return tuple(signed for signed in self if signed.signer == signer) if self._count[signer] else ()

    def get_by_signed_digest(self, digest: bytes) -> Signed | None:
        key = self._by_signed.get(digest)
        return None if key is None else self._waiting[key].signed

    def was_dropped(self, signed: Signed) -> bool:
        """Whether this pool dropped it lately. A transaction that is refused now was passed on all the same when it came."""
        return transaction_digest(signed) in self._dropped

    def page_of_transactions(self, start: int, end: int, size_max: int, count_max: int) -> tuple[list[Signed], int]:
        """(transactions numbered from `start` on, the number at which the next page begins). The last page names `end`."""
        found: list[Signed] = []
        for entry in self._waiting.values():
            if not start <= entry.number < end:
                continue
            size_max -= entry.size
            if len(found) == count_max or (size_max < 0 and found):
                return found, entry.number
            found.append(entry.signed)
        return found, end

    def add_transaction(self, signed: Signed, member: bool = True) -> bool:
        """Whether it is new, so that this peer passes it on.

        | if                                       | then                                                                     |
        | strangers have too many, or all together | it is dropped, and not passed on: a stranger's key costs nothing         |
        | its member has too many                  | all of that member's are dropped, and no more come before the next block |
        | all members together have too many       | the same for the member with the largest share, until the rest fits      |

        A member's transaction that is too many is passed on all the same.
        """
        # So the same transactions stay in whatever order they come between two blocks. If the smallest nonces stayed instead,
        # peers would pass on a flood in descending order without end. Two peers may still differ over a block, which makes room
        # for a transaction that was too many right before it: `peer.node` tells a leader the transactions that it lacks.
        digest = transaction_digest(signed)
        if digest in self._waiting or signed.signer in self._overflowed:
            return False
        is_full = len(self._waiting) >= TRANSACTIONS_PENDING_MAX or self._bytes_of_all >= PENDING_BYTES_MAX
        if not member and (len(self._strangers) >= PENDING_STRANGERS_MAX or is_full):
            return False
        transaction = codec.decode_message(signed.body, (Transaction,))
        traits = self._traits(signed.signer, transaction)
        entry = PendingTransaction(digest, transaction.nonce, transaction.expires, self.height, signed, self.count, traits)
        self.count += 1
        self._waiting[digest] = entry
        if traits.lingers:
            self._lingering[digest] = None
        self._by_signed[signed_digest(signed)] = digest
        if not member:
            self._strangers.add(digest)
        self._account(entry, 1)
        if self.quota_share(signed.signer) > 1:
            self._overflow(signed.signer)
        while member and (len(self._waiting) > TRANSACTIONS_PENDING_MAX or self._bytes_of_all > PENDING_BYTES_MAX):
            self._overflow(max(self._count, key=lambda signer: (self.quota_share(signer), signer)))
        return True

    def quota_share(self, signer: bytes) -> float:
        """The share of a member's room that this signer has taken."""
        return max(self._count[signer] / PENDING_PER_MEMBER_MAX, self._bytes[signer] / PENDING_BYTES_PER_MEMBER_MAX)

    def _overflow(self, signer: bytes) -> None:
        self._overflowed.add(signer)
        for entry in [entry for entry in self._waiting.values() if entry.signed.signer == signer]:
            self._forget(entry)

    def _account(self, entry: PendingTransaction, sign: int) -> None:
        signer = entry.signed.signer
        self._count[signer] += sign
        self._bytes[signer] += sign * entry.size
        self._bytes_of_all += sign * entry.size
        if not self._count[signer]:
            del self._count[signer], self._bytes[signer]
        self.version += 1

    def _forget(self, entry: PendingTransaction) -> None:
        del self._waiting[entry.digest], self._by_signed[signed_digest(entry.signed)]
        self._strangers.discard(entry.digest)
        self._lingering.pop(entry.digest, None)
        self._account(entry, -1)

    def select_transactions(
        self,
        rules: LedgerRules,
        state: LedgerState,
        size_max: int = TRANSACTIONS_BYTES_MAX,
        count_max: int = TRANSACTIONS_PER_BLOCK_MAX,
        first: Set[bytes] = frozenset(),
    ) -> tuple[Signed, ...]:
        """Transactions that fit into the next block, in an order in which all apply, those named in `first` before the others.

        A transaction of `first` is left out only if it does not fit, or does not apply, behind all the chosen ones.
        """
        selection = TransactionSelection(rules, state, size_max, count_max)
        waiting = sorted(self._waiting.values(), key=lambda entry: (entry.digest not in first, entry.nonce))
        for _ in range(SELECTION_PASSES_MAX):
            left = _take_all(selection, waiting, REFUSED_PER_MEMBER_MAX)
            if len(left) == len(waiting) or selection.is_full:
                break
            waiting = left
        urgent = [entry for entry in waiting if entry.digest in first]
        while urgent and len(left := _take_all(selection, urgent)) < len(urgent):
            urgent = left
        return tuple(selection.chosen)

    def overdue_transactions(self, rules: LedgerRules, state: LedgerState) -> tuple[bytes, ...]:
        """Digests of the oldest few, ascending, that came before the last block could be made and could still be decided.

        The tries together cost no more than a block. An entry that exceeds the rest of this cost is passed over.
        """
        old = [
            entry
            for entry in self._waiting.values()
            if entry.added_height <= state.height - 2 and not _nonces_ahead(entry, state)
        ]
        found: list[bytes] = []
        cost_left = COST_PER_BLOCK_MAX
        for entry in sorted(old, key=lambda entry: (entry.added_height, entry.traits.cost)):
            if len(found) == INCLUSION_LIST_MAX:
                break
            if entry.traits.cost > cost_left:
                continue
            cost_left -= entry.traits.cost
            if TransactionSelection(rules, state, TRANSACTIONS_BYTES_MAX, 1).try_add(entry):
                found.append(entry.digest)
        return tuple(sorted(found))

    def prune_transactions(self, rules: LedgerRules, state: LedgerState) -> list[tuple[Signed, str]]:
        """Drops decided, expired and refused transactions, each with the reason. One whose nonce lies ahead stays.

        A refusal may come after costly work. Each call does the work of one block, and the next call goes on from there.
        """
        self._overflowed.clear()
        gone: list[tuple[Signed, str]] = []
        next_ones: list[PendingTransaction] = []
        for entry in list(self._waiting.values()):
            nonces_ahead = _nonces_ahead(entry, state)
            if nonces_ahead == 0:
                next_ones.append(entry)
            elif nonces_ahead < 0:
                self._drop(rules, state, entry, gone)  # a check of its author, nonce or expiry refuses it at little cost
        cost_left = COST_PER_BLOCK_MAX
        for place, entry in enumerate(sorted(next_ones, key=lambda entry: (entry.number <= self._tried, entry.number))):
            cost_left -= entry.traits.cost
            if cost_left < 0 and place:  # at least one is tried
                break
            self._drop(rules, state, entry, gone)
            self._tried = entry.number
        while len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]
        return gone

    def _drop(self, rules: LedgerRules, state: LedgerState, entry: PendingTransaction, gone: list[tuple[Signed, str]]) -> None:
        """Drops it if it is refused."""
        try:
            rules.apply_transaction(state, entry.signed)
        except (Refused, RemoteProtocolError) as error:
            self._forget(entry)
            gone.append((entry.signed, str(error)))
            self._dropped[entry.digest] = None


def _nonces_ahead(entry: PendingTransaction, state: LedgerState) -> int:
    """How many transactions its author has to have decided before it; less than 0: by author, nonce or expiry it is refused.

    If there are none, its module may refuse it, after costly work.
    """
    author, members = entry.signed.signer, state.members
    member = members.members.get(author)
    if (member is not None and not members.is_current_key(author)) or entry.expires <= state.height:
        return -1
    return entry.nonce - (member.nonce if member else 0) - 1


def _take_all(
    selection: TransactionSelection, waiting: Iterable[PendingTransaction], refused_max: float = math.inf
) -> list[PendingTransaction]:
    """Takes all that fit and apply, and returns the others. Signers with so many refused ones are passed over."""
    return [entry for entry in waiting if selection.refused[entry.signed.signer] >= refused_max or not selection.try_add(entry)]


# Notices -------------------------------------------------------------------------------------------------------------

# Block k must carry each transaction that f+1 voters have noticed, without a break, since a notice of height k−2 or below.
#
# - An honest leader that holds the notices and the transaction puts it first. `Mempool.select_transactions` leaves none out that
# would apply   behind the chosen ones, and that is what the check of a block asks for.
# - An honest leader that lacks the notices holds the transaction nevertheless. One of the f+1 voters is honest; its notice of k−2
#   says that it held the transaction before block k−2 could be made, and it passed the transaction on at once. Blocks k−2 and k−1
#   took three message delays each since, so the transaction was sent six delays before the leader makes k.
# - If that message is still on its way, or the leader's pool dropped the transaction, one view fails. The honest one of the f+1
#   voters holds the transaction and leads in its turn.
# - A lag of one would leave no time: voters send notices of k−1 when they apply k−1, just when the leader makes k.
INCLUSION_LAG_HEIGHTS = 2
# voters repeat notices at every height: without a new one for so long, a voter may have changed its mind
INCLUSION_LIST_HEIGHTS_MAX = 8


class InclusionListSet:
    def __init__(self) -> None:
        # Of each voter's latest notice its height, and for each transaction the height since which all its notices named it.
        self._by_voter: dict[bytes, tuple[int, dict[bytes, int]]] = {}

    def add_list(self, voter: bytes, notice: InclusionList) -> bool:
        """Whether it is newer than the voter's last one. Raises `RemoteProtocolError`."""
        if any(left >= right for left, right in pairwise(notice.transactions)):
            raise RemoteProtocolError("non-canonical", "a notice's transactions must ascend, each once")
        last, known = self._by_voter.get(voter, (-1, {}))
        if notice.height <= last:
            return False
        since = {digest: known.get(digest, notice.height) for digest in notice.transactions}
        self._by_voter[voter] = (notice.height, since)
        return True

    def prune_lists(self, members: MembersState, height: int) -> None:
        self._by_voter = {
            voter: noticed
            for voter, noticed in self._by_voter.items()
            if voter in members.voters and not members.is_expelled(voter) and noticed[0] >= height - INCLUSION_LIST_HEIGHTS_MAX
        }

    def transactions_due(self, voters: tuple[bytes, ...], height: int) -> frozenset[bytes]:
        """Digests of the transactions that the block at `height`, which `voters` decide, must not leave out."""
        names = Counter(
            digest
            for _, noticed in self._by_voter.values()
            for digest, since in noticed.items()
            if since <= height - INCLUSION_LAG_HEIGHTS
        )
        return frozenset(digest for digest, count in names.items() if count > faults_tolerated(len(voters)))
