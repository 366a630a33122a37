"""Undecided transactions, their order in a block, and voters' inclusion lists of transactions that wait too long."""

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

TRANSACTIONS_BYTES_MAX = BODY_BYTES_MAX // 2  # maximum bytes of a block's transactions, which must be quick to apply
SIGNED_BYTES = 128  # bytes that a signed message takes in a body beside its own bytes
# Passes over waiting transactions in order of nonces: a later pass finds those that depend on another author's transaction.
SELECTION_PASSES_MAX = 4
# Refusals of one member's transactions in the selection for one block, after which its other transactions are skipped. An
# honest member has one transaction per nonce, so at most one refusal in a pass.
REFUSED_PER_MEMBER_MAX = 2 * SELECTION_PASSES_MAX
# Maximum number of waiting transactions of one member, about a quarter of a block. A flood from one member therefore does not
# displace the transactions of other members.
PENDING_PER_MEMBER_MAX = 256
PENDING_BYTES_PER_MEMBER_MAX = 4 << 20  # bytes of one member's waiting transactions: 16 of the largest, or 256 of 16 kB
# Bytes of all waiting transactions: thirty members at their quota would otherwise fill a small machine.
PENDING_BYTES_MAX = 128 << 20
# Waiting transactions of all strangers together: a new one displaces none, or peers would relay floods without end.
PENDING_STRANGERS_MAX = 64
# Number of remembered digests of transactions that were dropped last: the capacity of one mempool.
DROPPED_MAX = TRANSACTIONS_PENDING_MAX
# Seconds for which a transaction waits for others before it needs a block (`ledger.core.module.Module.lingers`).
LINGER_SECONDS = 0.4

# Any transaction fits into a block, so `has_work` need not check sizes.
assert TRANSACTION_BYTES_MAX + 1_024 < TRANSACTIONS_BYTES_MAX


def transaction_digest(signed: Signed) -> bytes:
    """Return the digest that names a transaction in inclusion lists. It does not depend on the bytes of the signature."""
    return hashlib.sha256(signed.body + signed.signer).digest()


def signed_digest(signed: Signed) -> bytes:
    """Return the digest that names a signed message in compact bodies. Like the hash of the body, it depends on the signature."""
    return hashlib.sha256(codec.encode(signed)).digest()


@dataclass(frozen=True, slots=True)
class PendingTransaction:
    digest: bytes
    nonce: int
    expires: int
    added_height: int  # last applied height when the transaction arrived
    signed: Signed
    number: int  # number of transactions that arrived before this one
    traits: TransactionTraits

    @property
    def size(self) -> int:
        return len(self.signed.body) + SIGNED_BYTES


class TransactionSelection:
    """The transactions of one block during their selection. Each one is applied to the state after those chosen before it."""

    def __init__(self, rules: LedgerRules, state: LedgerState, size_max: int, count_max: int) -> None:
        self._rules, self._state = rules, state
        self._room, self._count_max, self._cost_left = size_max, count_max, COST_PER_BLOCK_MAX
        self.chosen: list[Signed] = []
        self.refused: Counter[bytes] = Counter()  # signer -> number of its refused transactions

    @property
    def is_full(self) -> bool:
        return len(self.chosen) >= self._count_max

    def add_unbounded(self, signed: Signed) -> None:
        """Add a transaction of a proposed block without checking size, number or cost.

        Raises `Refused` or `RemoteProtocolError`.
        """
        self._state = self._rules.apply_transaction(self._state, signed)
        self._add(signed, self._rules.transaction_traits(signed.signer, self._rules.open_transaction(signed)).cost)

    def try_add(self, entry: PendingTransaction) -> bool:
        """Add the transaction if it fits and applies now. Return whether it was added."""
        member = self._state.members.members.get(entry.signed.signer)
        if entry.nonce != (member.nonce if member else 0) + 1:
            return False  # checked first because it is cheap: a flood of wrong nonces must not slow down every vote
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
    """The undecided transactions at one peer. `height` is the last applied height."""

    def __init__(
        self,
        height: int = 0,
        traits: Callable[[bytes, Transaction], TransactionTraits] = lambda author, transaction: TransactionTraits(),
    ) -> None:
        self.height = height
        self._traits = traits  # function that returns a transaction's traits: `LedgerRules.transaction_traits`
        self.version = 0  # number that grows when a transaction is added or dropped, or its delay ends
        self.count = 0  # number of transactions that were ever added, which numbers the next one
        self._waiting: dict[bytes, PendingTransaction] = {}
        self._by_signed: dict[bytes, bytes] = {}  # `signed_digest` of a transaction -> its key in `_waiting`
        self._strangers: set[bytes] = set()  # strangers' transactions, by their keys in `_waiting`
        self._count: Counter[bytes] = Counter()  # signer -> number of its waiting transactions
        self._bytes: Counter[bytes] = Counter()
        self._bytes_of_all = 0
        # Keys in `_waiting` of transactions that linger -> end of the delay; None: not set yet.
        self._lingering: dict[bytes, float | None] = {}
        self._overflowed: set[bytes] = set()  # signers that have exceeded their quota since the last block
        self._dropped: dict[bytes, None] = {}  # digests of the transactions that were dropped last, as an ordered set
        self._tried = -1  # `number` of the last transaction that `prune_transactions` tried to apply

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Signed]:
        return iter([waiting.signed for waiting in self._waiting.values()])

    def can_wait(self, running: Set[bytes]) -> bool:
        """Return whether every transaction lingers or waits for a round of a job in `running`, so that none needs a block now."""
        return all(entry.traits.awaited_job in running or key in self._lingering for key, entry in self._waiting.items())

    def release_lingering(self, now: float) -> float | None:
        """End the delays that are over, so that their transactions need a block. Return when the next delay ends."""
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
        """Return whether this pool dropped the transaction recently.

        Peers relay a transaction on arrival, even if it is refused later.
        """
        return transaction_digest(signed) in self._dropped

    def page_of_transactions(self, start: int, end: int, size_max: int, count_max: int) -> tuple[list[Signed], int]:
        """Return a page of the transactions numbered from `start` to before `end`, and the number at which the next page begins.

        For the last page, this number is `end`.
        """
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
        """Add a transaction. Return whether it is new, so that this peer relays it.

        | if                                         | then                                                                    |
        | it is a stranger's, and there is no room   | it is dropped and not relayed, because a stranger's key costs nothing   |
        | its member exceeds a quota                 | all of that member's are dropped, and further ones until the next block |
        | all members together exceed the bounds     | the same for the member with the largest share, until the rest fits     |

        A member's transaction in excess is relayed all the same.
        """
        # By these rules, the order of arrival between two blocks does not determine which transactions stay. If the
        # transactions with the smallest nonces stayed instead, peers would relay a flood in descending order without end. Two
        # peers may still differ around a block, which makes room for a transaction that was in excess before it: `peer.node`
        # sends a leader the transactions that it lacks.
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
        """Return the share of a member's quota that this signer uses: 1 is the whole quota."""
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
        """Return transactions for the next block, in an order in which each transaction applies after the earlier ones.

        The selection tries transactions with digests in `first` before all others. It omits such a transaction only if the
        transaction does not fit or does not apply after all chosen transactions.
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
        """Return the digests, ascending, of the oldest valid transactions that arrived before the last block was proposed.

        Trying the transactions costs at most as much as one block. A transaction that exceeds the remaining cost is skipped.
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
        """Drop decided, expired and refused transactions, and return each with the reason. Transactions with later nonces stay.

        Finding that a transaction is refused may be costly. One call does at most the work of one block, and the next call
        continues with the transactions after these.
        """
        self._overflowed.clear()
        gone: list[tuple[Signed, str]] = []
        next_ones: list[PendingTransaction] = []
        for entry in list(self._waiting.values()):
            nonces_ahead = _nonces_ahead(entry, state)
            if nonces_ahead == 0:
                next_ones.append(entry)
            elif nonces_ahead < 0:
                self._drop(rules, state, entry, gone)  # author, nonce or expiry is wrong, so the refusal costs little
        cost_left = COST_PER_BLOCK_MAX
        for place, entry in enumerate(sorted(next_ones, key=lambda entry: (entry.number <= self._tried, entry.number))):
            cost_left -= entry.traits.cost
            if cost_left < 0 and place:  # each call tries at least one transaction
                break
            self._drop(rules, state, entry, gone)
            self._tried = entry.number
        while len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]
        return gone

    def _drop(self, rules: LedgerRules, state: LedgerState, entry: PendingTransaction, gone: list[tuple[Signed, str]]) -> None:
        """Drop a transaction if the state refuses it now. Append a dropped transaction to `gone` with the reason."""
        try:
            rules.apply_transaction(state, entry.signed)
        except (Refused, RemoteProtocolError) as error:
            self._forget(entry)
            gone.append((entry.signed, str(error)))
            self._dropped[entry.digest] = None


def _nonces_ahead(entry: PendingTransaction, state: LedgerState) -> int:
    """Return the number of nonces between the author's next nonce and this transaction's nonce.

    Below 0: the transaction is refused because of its author, nonce or expiry. At 0, its module may still refuse it, after
    costly work.
    """
    author, members = entry.signed.signer, state.members
    member = members.members.get(author)
    if (member is not None and not members.is_current_key(author)) or entry.expires <= state.height:
        return -1
    return entry.nonce - (member.nonce if member else 0) - 1


def _take_all(
    selection: TransactionSelection, waiting: Iterable[PendingTransaction], refused_max: float = math.inf
) -> list[PendingTransaction]:
    """Add all transactions that fit and apply, and return the others.

    A signer's transactions are skipped once `refused_max` of them were refused.
    """
    return [entry for entry in waiting if selection.refused[entry.signed.signer] >= refused_max or not selection.try_add(entry)]


# Inclusion lists -----------------------------------------------------------------------------------------------------

# Number of heights between voters' lists and the block that must carry the listed transactions. Block k must carry each
# transaction that f+1 voters have named in all their lists since height k−2 or earlier.
#
# - An honest leader that holds the lists and the transaction puts it first. `Mempool.select_transactions` omits none that would
#   apply after the chosen ones, and the check of a block requires the same.
# - An honest leader without the lists holds the transaction nevertheless. One of the f+1 voters is honest. Its list of k−2
#   implies that it held the transaction before block k−2 could be proposed, and it relayed the transaction at once. Blocks k−2
#   and k−1 took three message delays each since, so the transaction was sent six delays before the leader proposes k.
# - If that message is still on its way, or the leader's pool dropped the transaction, one view fails. The honest voter among the
#   f+1 holds the transaction and leads in its turn.
# - A lag of one height would leave no time: voters send lists of k−1 when they apply k−1, just when the leader proposes k.
INCLUSION_LAG_HEIGHTS = 2
# Number of heights for which a voter's list counts. Voters repeat their lists at every height, so an older list may be out of
# date.
INCLUSION_LIST_HEIGHTS_MAX = 8


class InclusionListSet:
    def __init__(self) -> None:
        # Voter -> height of its latest list, and for each transaction in that list the first height from which all its lists
        # name the transaction.
        self._by_voter: dict[bytes, tuple[int, dict[bytes, int]]] = {}

    def add_list(self, voter: bytes, notice: InclusionList) -> bool:
        """Keep an inclusion list. Return whether it is newer than the voter's last one. Raises `RemoteProtocolError`."""
        if any(left >= right for left, right in pairwise(notice.transactions)):
            raise RemoteProtocolError("non-canonical", "an inclusion list's transactions must ascend, without duplicates")
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
        """Return the digests of the transactions that the block at `height` must carry.

        `voters` are the voters of that height.
        """
        names = Counter(
            digest
            for _, noticed in self._by_voter.values()
            for digest, since in noticed.items()
            if since <= height - INCLUSION_LAG_HEIGHTS
        )
        return frozenset(digest for digest, count in names.items() if count > faults_tolerated(len(voters)))
