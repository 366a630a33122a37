"""Transactions that are not decided yet, the order in which a block takes them, and what voters say has waited too long."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import pairwise

from consensus.block import BODY_BYTES_MAX
from consensus.quorum import faults_tolerated
from ledger.core.module import Refused
from ledger.members import MembersState
from ledger.state import Rules, State
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import NOTICED_MAX, TRANSACTION_BYTES_MAX, TRANSACTIONS_PENDING_MAX, TRANSACTIONS_PER_BLOCK_MAX
from protocol.messages import Notice, Transaction

TRANSACTIONS_BYTES_MAX = BODY_BYTES_MAX // 2  # of one block: applying them stays quick
SIGNED_BYTES = 128  # what a signed message takes in a body beside its own bytes
PASSES_MAX = 4  # over waiting transactions: in order of their nonces, only those that follow another author's need a second one
PENDING_PER_MEMBER_MAX = 256  # a quarter of a block: no member's flood keeps out what the others want decided
PENDING_BYTES_PER_MEMBER_MAX = 4 << 20  # sixteen of the largest; a member's whole quarter of a block otherwise, many times over
PENDING_BYTES_MAX = 128 << 20  # of all: what thirty members could fill together must not fill a small machine
PENDING_STRANGERS_MAX = 64  # of all who are not members here; nothing makes room for more, or it would be passed round for ever
DROPPED_MAX = TRANSACTIONS_PENDING_MAX  # digests of what left the pool last: what all members can fill it with, once

assert TRANSACTION_BYTES_MAX + 1_024 < TRANSACTIONS_BYTES_MAX  # any transaction fits, so that `has_work` may ask without looking


def transaction_digest(signed: Signed) -> bytes:
    """How notices name a transaction: whoever signs the same twice, with other signature bytes, makes no other transaction."""
    return hashlib.sha256(signed.body + signed.signer).digest()


def signed_digest(signed: Signed) -> bytes:
    """How short bodies name whatever is signed: the very bytes, so that nothing else can take their place."""
    return hashlib.sha256(codec.encode(signed)).digest()


@dataclass(frozen=True, slots=True)
class Waiting:
    digest: bytes
    nonce: int
    expires: int
    added: int  # the height that was applied last when it came
    signed: Signed
    number: int  # how many had come before it
    awaited_job: bytes | None  # see `ledger.core.module.Module.can_wait`

    @property
    def size(self) -> int:
        return len(self.signed.body) + SIGNED_BYTES


class Selection:
    """The transactions of one block while they are being chosen: each applies to what those before it leave."""

    def __init__(self, rules: Rules, state: State, size_max: int, count_max: int) -> None:
        self._rules, self._state = rules, state
        self._room, self._count_max = size_max, count_max
        self.chosen: list[Signed] = []

    @property
    def is_full(self) -> bool:
        return len(self.chosen) >= self._count_max

    def follow(self, signed: Signed) -> None:
        """Puts in what a valid block carries here, whatever the bounds."""
        self._state = self._rules.apply_transaction(self._state, signed)
        self.chosen.append(signed)
        self._room -= len(signed.body) + SIGNED_BYTES

    def take(self, entry: Waiting) -> bool:
        """Whether it fits and applies now; then it is the next one."""
        member = self._state.members.members.get(entry.signed.signer)
        if entry.nonce != (member.nonce if member else 0) + 1:
            return False  # seen at once: a flood of these must not slow down every vote
        if self.is_full or entry.size > self._room:
            return False
        try:
            self._state = self._rules.apply_transaction(self._state, entry.signed)
        except (Refused, RemoteProtocolError):
            return False
        self.chosen.append(entry.signed)
        self._room -= entry.size
        return True


class Pool:
    """Only those that could still be decided stay. `height` is the one applied last."""

    def __init__(self, height: int = 0, can_wait: Callable[[Transaction], bytes | None] = lambda transaction: None) -> None:
        self.height = height
        self._can_wait = can_wait  # `Rules.can_wait`
        self.version = 0  # changes whenever something comes or goes
        self.count = 0  # of all that ever came
        self._waiting: dict[bytes, Waiting] = {}
        self._by_signed: dict[bytes, bytes] = {}  # `signed_digest` -> key of `_waiting`
        self._strangers: set[bytes] = set()  # keys of `_waiting`
        self._count: Counter[bytes] = Counter()  # by signer
        self._bytes: Counter[bytes] = Counter()
        self._bytes_of_all = 0
        self._overflowed: set[bytes] = set()  # signers, since the last block
        self._dropped: dict[bytes, None] = {}  # keys of `_waiting` that left it, the last ones

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Signed]:
        return iter([waiting.signed for waiting in self._waiting.values()])

    def awaited_jobs(self) -> Iterator[bytes | None]:
        """For each of those that wait here, the job whose next closing is soon enough for it, if any is."""
        return (waiting.awaited_job for waiting in self._waiting.values())

    def get(self, digest: bytes) -> Waiting | None:
        return self._waiting.get(digest)

    def of(self, signer: bytes) -> tuple[Signed, ...]:
        return tuple(signed for signed in self if signed.signer == signer) if self._count[signer] else ()

    def by_signed_digest(self, digest: bytes) -> Signed | None:
        key = self._by_signed.get(digest)
        return None if key is None else self._waiting[key].signed

    def was_dropped(self, signed: Signed) -> bool:
        """Lately: whoever refuses it now has refused it before, and passed it on all the same."""
        return transaction_digest(signed) in self._dropped

    def page(self, start: int, end: int, size_max: int, count_max: int) -> tuple[list[Signed], int]:
        """Some that are numbered from `start` on, and where the next page begins; `end` if nothing follows before that number."""
        found: list[Signed] = []
        for entry in self._waiting.values():
            if not start <= entry.number < end:
                continue
            size_max -= entry.size
            if len(found) == count_max or (size_max < 0 and found):
                return found, entry.number
            found.append(entry.signed)
        return found, end

    def add(self, signed: Signed, member: bool = True) -> bool:
        """Whether it is new, and has to be passed on. Keys cost nothing, so strangers share one small part.

        Who has more waiting than a member may loses all of it, and is not heard before the next block. So in whatever order the
        same ones come between two blocks, the same stay. Across a block they need not: it makes room for one that was too much
        right before it. `peer.node` tells a leader what it lacks for this reason. To keep those with the smallest nonces instead
        would pass a flood round without end that comes in descending order. If all have too much, who has most makes room.
        """
        digest = transaction_digest(signed)
        if digest in self._waiting or signed.signer in self._overflowed:
            return False
        if not member and (len(self._strangers) >= PENDING_STRANGERS_MAX or self._is_full):
            return False
        transaction = codec.decode_message(signed.body, (Transaction,))
        job = self._can_wait(transaction)
        entry = Waiting(digest, transaction.nonce, transaction.expires, self.height, signed, self.count, job)
        self.count += 1
        self._waiting[digest] = entry
        self._by_signed[signed_digest(signed)] = digest
        if not member:
            self._strangers.add(digest)
        self._account(entry, 1)
        if self.share(signed.signer) > 1:
            self._overflow(signed.signer)
        while member and self._has_too_much:
            self._overflow(max(self._count, key=lambda signer: (self.share(signer), signer)))
        return True

    def share(self, signer: bytes) -> float:
        """Of what one member may have waiting here, how much this one has."""
        return max(self._count[signer] / PENDING_PER_MEMBER_MAX, self._bytes[signer] / PENDING_BYTES_PER_MEMBER_MAX)

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= TRANSACTIONS_PENDING_MAX or self._bytes_of_all >= PENDING_BYTES_MAX

    @property
    def _has_too_much(self) -> bool:
        return len(self._waiting) > TRANSACTIONS_PENDING_MAX or self._bytes_of_all > PENDING_BYTES_MAX

    def _overflow(self, signer: bytes) -> None:
        self._overflowed.add(signer)
        for entry in [entry for entry in self._waiting.values() if entry.signed.signer == signer]:
            self._forget(entry)

    def _account(self, entry: Waiting, sign: int) -> None:
        signer = entry.signed.signer
        self._count[signer] += sign
        self._bytes[signer] += sign * entry.size
        self._bytes_of_all += sign * entry.size
        if not self._count[signer]:
            del self._count[signer], self._bytes[signer]
        self.version += 1

    def _forget(self, entry: Waiting) -> None:
        del self._waiting[entry.digest], self._by_signed[signed_digest(entry.signed)]
        self._strangers.discard(entry.digest)
        self._account(entry, -1)

    def select(
        self,
        rules: Rules,
        state: State,
        size_max: int = TRANSACTIONS_BYTES_MAX,
        count_max: int = TRANSACTIONS_PER_BLOCK_MAX,
        first: Set[bytes] = frozenset(),
    ) -> tuple[Signed, ...]:
        """What fits into the next block, in an order in which all of it applies, those named in `first` before the others.

        None of `first` is left out that would fit and apply behind all the chosen ones.
        """
        selection = Selection(rules, state, size_max, count_max)
        waiting = sorted(self._waiting.values(), key=lambda entry: (entry.digest not in first, entry.nonce))
        for _ in range(PASSES_MAX):
            left = _take_all(selection, waiting)
            if len(left) == len(waiting) or selection.is_full:
                break
            waiting = left
        urgent = [entry for entry in waiting if entry.digest in first]
        while urgent and len(left := _take_all(selection, urgent)) < len(urgent):
            urgent = left
        return tuple(selection.chosen)

    def neglected(self, rules: Rules, state: State) -> tuple[bytes, ...]:
        """Those that were here before the last block could be made, and could still be decided: the oldest few, ascending."""
        old = [entry for entry in self._waiting.values() if entry.added <= state.height - 2]
        found: list[bytes] = []
        for entry in sorted(old, key=lambda entry: entry.added):
            if len(found) == NOTICED_MAX:
                break
            if Selection(rules, state, TRANSACTIONS_BYTES_MAX, 1).take(entry):
                found.append(entry.digest)
        return tuple(sorted(found))

    def prune(self, rules: Rules, state: State) -> list[tuple[Signed, str]]:
        """Forgets what was decided, expired or refused, with the reason; a nonce that is ahead may still come."""
        self._overflowed.clear()
        gone: list[tuple[Signed, str]] = []
        for entry in list(self._waiting.values()):
            reason = self._hopeless(rules, state, entry)
            if reason is not None:
                self._forget(entry)
                gone.append((entry.signed, reason))
                self._dropped[entry.digest] = None
        while len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]
        return gone

    def _hopeless(self, rules: Rules, state: State, entry: Waiting) -> str | None:
        author = entry.signed.signer
        member = state.members.members.get(author)
        may_speak = member is None or state.members.speaks(author)
        if may_speak and entry.nonce > (member.nonce if member else 0) + 1 and entry.expires > state.height:
            return None
        try:
            rules.apply_transaction(state, entry.signed)
        except (Refused, RemoteProtocolError) as error:
            return str(error)
        return None


def _take_all(selection: Selection, waiting: Iterable[Waiting]) -> list[Waiting]:
    """Takes what can be taken and gives what is left."""
    return [entry for entry in waiting if not selection.take(entry)]


# Notices -------------------------------------------------------------------------------------------------------------

# Block k must carry what f+1 voters have noticed, without a break, since a notice of height k−2 or below.
#
# An honest leader that holds the same notices and the transaction puts it first, so it satisfies the rule whatever else there is:
# `Pool.select` leaves nothing out that would apply behind what it chose, which is what `check` asks for. It need not hold the
# notices: one of the f+1 voters is honest. That one held the transaction before block k−2 could be made, as its notice of k−2
# says, and passed it on when it came. Meanwhile blocks k−2 and k−1 were decided, three message delays each: the leader of k, who
# has applied k−1, missed a message that was sent six delays before. Where that happens nevertheless, or where its pool dropped
# it, it costs this one view: the honest one of the f+1 leads too, and does hold it. Notices of k−1 would leave no time at all:
# they are sent by whoever applies k−1, in the moment in which the leader makes k.
NOTICE_LAG = 2
NOTICE_HEIGHTS_MAX = 8  # a notice is repeated at every height: one that is not is over, and its voter may have changed its mind


@dataclass(frozen=True, slots=True)
class Noticed:
    """By one voter: its latest notice, and since which height each transaction in it has been in all of its notices."""

    height: int
    since: dict[bytes, int]


class Notices:
    def __init__(self) -> None:
        self._by_voter: dict[bytes, Noticed] = {}

    def add(self, voter: bytes, notice: Notice) -> bool:
        """Whether it says something new."""
        if any(left >= right for left, right in pairwise(notice.transactions)):
            raise RemoteProtocolError("non-canonical", "a notice's transactions must ascend, each once")
        last = self._by_voter.get(voter, Noticed(-1, {}))
        if notice.height <= last.height:
            return False
        since = {digest: last.since.get(digest, notice.height) for digest in notice.transactions}
        self._by_voter[voter] = Noticed(notice.height, since)
        return True

    def prune(self, members: MembersState, height: int) -> None:
        self._by_voter = {
            voter: noticed
            for voter, noticed in self._by_voter.items()
            if voter in members.voters and not members.is_expelled(voter) and noticed.height >= height - NOTICE_HEIGHTS_MAX
        }

    def due(self, voters: tuple[bytes, ...], height: int) -> frozenset[bytes]:
        """What the block at `height`, which `voters` decide, must not leave out."""
        names = Counter(
            digest
            for noticed in self._by_voter.values()
            for digest, since in noticed.since.items()
            if since <= height - NOTICE_LAG
        )
        return frozenset(digest for digest, count in names.items() if count > faults_tolerated(len(voters)))
