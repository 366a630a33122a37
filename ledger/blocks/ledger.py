"""What consensus decides about, seen from one peer: the state, the open rounds, and what waits for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from consensus.block import BODY_BYTES_MAX
from consensus.evidence import Evidence
from ledger import members as membership
from ledger.blocks.pool import TRANSACTIONS_BYTES_MAX, Notices, Pool, Selection, Waiting, transaction_digest
from ledger.blocks.short import Expander, condense
from ledger.core.module import Refused
from ledger.jobs import Phase
from ledger.state import Body, Rules, State, decode_body
from protocol import codec
from protocol.identity import Signed, short_id
from protocol.limits import EVIDENCE_PER_BLOCK_MAX, TRANSACTIONS_PER_BLOCK_MAX
from protocol.messages import InclusionList
from rounds.ballots import Closing, RoundBook

# A closing that made `jobs` fail would else fill every block: blocks without end, with the same failure. The deferral ends by
# time, since a network that waits for this closing alone reaches no further height.
DEFERRED_SECONDS = 60.0
# Audits of a job whose rounds are all taken end by the time of blocks, so there is a block so often until they are over.
SETTLING_SECONDS = 1.0
BODY_FIXED_BYTES = 64  # what an encoded body takes beside its closings, evidence and transactions
ACCUSATIONS_MAX = 16 * EVIDENCE_PER_BLOCK_MAX  # held until a block carries them: 30 kB each at most; more liars wait their turn


class Ledger:
    """Implements `consensus.application.Application`. Everything in it refers to the last applied block."""

    def __init__(self, rules: Rules, state: State, certified_root: bytes) -> None:
        self.rules = rules
        self.state = state
        self.certified_root = certified_root  # the root that the last decided block names
        self.books: dict[bytes, RoundBook] = {}
        self.pool = Pool(state.height, rules.traits)
        self.notices = Notices()
        self._deferred: dict[tuple[bytes, int], float] = {}  # rounds -> time from which this peer's blocks may close them
        self._now = 0.0
        self.accusations: dict[bytes, Evidence] = {}  # by culprit; each would expel it now
        # What a signer said in rounds that have no book here yet. `peer.node.node` keeps that, and puts its own function here.
        self.signed_early: Callable[[bytes], tuple[Signed, ...]] = lambda signer: ()
        self._expander = Expander(self.books, self.pool)
        self._selectable: tuple[State, int, bool] | None = None
        self._certification: tuple[State, bool] | None = None
        self._settling: tuple[State, bool] | None = None

    def advance(self, state: State, certified_root: bytes) -> None:
        assert state.height == self.state.height + 1
        self.state, self.certified_root = state, certified_root
        self.pool.height = state.height
        self.notices.prune(state.members, state.height)
        self.accusations = {key: evidence for key, evidence in self.accusations.items() if self._would_expel(key)}

    # Evidence and notices

    def accuse(self, evidence: Evidence) -> bool:
        """Keeps evidence until a block carries it: True if it is new and would expel somebody.

        `RemoteProtocolError` if it proves nothing.
        """
        known = evidence.signer in self.accusations or len(self.accusations) >= ACCUSATIONS_MAX
        if known or not self._would_expel(evidence.signer):
            return False
        self.rules.expel(self.state, evidence)
        self.accusations[evidence.signer] = evidence
        return True

    def _would_expel(self, culprit: bytes) -> bool:
        try:
            membership.expel(self.state.members, culprit, self.state.height + 1)
        except Refused:
            return False
        return True

    def notice_due(self, signer: bytes) -> InclusionList | None:
        """What this voter has to say after a block: which transactions have waited here too long."""
        members = self.state.members
        if signer not in members.voters or members.is_expelled(signer):
            return None
        neglected = self.pool.neglected(self.rules, self.state)
        return InclusionList(self.state.height, neglected) if neglected else None

    def add_notice(self, voter: bytes, notice: InclusionList) -> bool:
        """Whether it is a voter's and says something new. `RemoteProtocolError` if it has not the form of a notice."""
        members = self.state.members
        return voter in members.voters and not members.is_expelled(voter) and self.notices.add(voter, notice)

    # Application

    def make_body(self, height: int, now_ms: int) -> bytes | None:
        assert height == self.state.height + 1
        evidence, state = self._evidence()
        closings, room = self._closings(BODY_BYTES_MAX - BODY_FIXED_BYTES - _size(evidence))
        due = self.notices.due(self.state.members.voters, height)
        transactions = self.pool.select(self.rules, state, min(room, TRANSACTIONS_BYTES_MAX), first=due)
        is_due = self._certification_due() or self._is_time_due() or self.awaits_transactions()
        if not closings and not evidence and not is_due:
            return None
        return codec.encode(Body(closings, evidence, transactions))

    def _evidence(self) -> tuple[tuple[Evidence, ...], State]:
        """What one block holds of what is held here, and the state when it has acted."""
        chosen: list[Evidence] = []
        state = self.state
        for _, evidence in sorted(self.accusations.items()):
            try:
                after = self.rules.expel(state, evidence)
            except Refused:
                continue  # of the same member, by another of its keys; or nobody else would be left to vote
            if len(chosen) < EVIDENCE_PER_BLOCK_MAX:
                chosen.append(evidence)
                state = after
        return tuple(chosen), state

    def _closings(self, room: int) -> tuple[tuple[Closing, ...], int]:
        """The rounds that can be closed now, as many as fit, and the bytes left beside them."""
        closings: list[Closing] = []
        for book in self._closable():
            closing = book.closing()
            if closing is not None and (size := len(codec.encode(closing))) <= room:
                closings.append(closing)
                room -= size
        return tuple(closings), room

    def _closable(self) -> list[RoundBook]:
        """In order of their jobs."""
        books = [book for _, book in sorted(self.books.items())]
        return [book for book in books if (book.terms.job, book.terms.round) not in self._deferred]

    def defer(self, closings: Iterable[Closing], now: float) -> None:
        """Leaves these rounds open for some time: the block that closed them made the module `jobs` fail."""
        self._deferred |= {(closing.job, closing.round): now + DEFERRED_SECONDS for closing in closings}

    def resume(self, now: float) -> float | None:
        """Ends deferrals that are over. Returns the time at which there may be work without any message."""
        self._now = now
        self._deferred = {key: until for key, until in self._deferred.items() if until > now}
        times = (*self._deferred.values(), self._time_due_at)
        return min((time for time in times if time is not None and time > now), default=None)

    @property
    def _time_due_at(self) -> float | None:
        """When a block is due because time passes; None: it need not pass."""
        if self._settling is None or self._settling[0] is not self.state:
            self._settling = (self.state, any(job.phase is Phase.SETTLING for job in self.state.jobs.jobs.values()))
        return self.state.time_ms / 1_000 + SETTLING_SECONDS if self._settling[1] else None

    def _is_time_due(self) -> bool:
        due = self._time_due_at
        return due is not None and self._now >= due

    def why_body_refused(self, height: int, body: bytes, proposer: bytes) -> str | None:
        if height != self.state.height + 1:
            return f"height {height} does not follow {self.state.height}"
        problem = self.rules.problem(self.state, body)
        if problem:
            return problem
        content = decode_body(body)
        for closing in content.closings:
            book = self.books.get(closing.job)
            refusal = book.refuses(closing) if book else None
            if refusal:
                return refusal
        return self._censors(content)

    def _censors(self, body: Body) -> str | None:
        """Whether a valid body leaves out what more voters than there can be liars have waited for; see `NOTICE_LAG`.

        Only what is here, and could have stood behind the block's last transaction, counts: another transaction with the same
        nonce, or a full block, is an excuse.
        """
        due = self.notices.due(self.state.members.voters, self.state.height + 1)
        carried = {transaction_digest(signed) for signed in body.transactions} if due else set()
        missing = [entry for digest in sorted(due - carried) if (entry := self.pool.get(digest)) is not None]
        if not missing:
            return None
        room = BODY_BYTES_MAX - BODY_FIXED_BYTES - _size(body.evidence) - _size(body.closings)
        state = self.rules.expel_all(self.state, body.evidence)
        selection = Selection(self.rules, state, min(room, TRANSACTIONS_BYTES_MAX), TRANSACTIONS_PER_BLOCK_MAX)
        for signed in body.transactions:
            selection.follow(signed)
        left_out: Waiting | None = next((entry for entry in missing if selection.take(entry)), None)
        return f"leaves out a transaction of {short_id(left_out.signed.signer)} that has waited too long" if left_out else None

    def has_work(self) -> bool:
        closable = any(book.closing() is not None for book in self._closable())
        is_due = self._certification_due() or self._is_time_due()
        return closable or bool(self.accusations) or is_due or self.awaits_transactions()

    def awaits_transactions(self) -> bool:
        """Whether any that waits here applies, and all of them do not wait for a closing, or for others that come now."""
        known = self._selectable
        if known is None or known[0] is not self.state or known[1] != self.pool.version:
            found = not self.pool.is_patient(self.state.jobs.running().keys())
            found = found and bool(self.pool.select(self.rules, self.state, count_max=1))
            known = self._selectable = (self.state, self.pool.version, found)
        return known[2]

    def make_compact_body(self, body: bytes) -> bytes:
        return condense(body)

    def expand_body(self, short: bytes) -> bytes | None:
        return self._expander.expand(short)

    def last_supported_height(self) -> int | None:
        return self.rules.knows_until(self.state)

    def is_member(self, peer: bytes) -> bool:
        return peer in self.state.members.members

    def statements_signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        return (*(signed for book in self.books.values() for signed in book.signed_by(peer)), *self.signed_early(peer))

    def _certification_due(self) -> bool:
        """An empty block: it certifies the last root, or moves the voter sets on. Asked all the time, found out once a state."""
        if self._certification is None or self._certification[0] is not self.state:
            due = membership.change_due(self.state.members)
            due = due or (self.certified_root != self.state.root and not self.state.jobs.running())
            self._certification = (self.state, due)
        return self._certification[1]


def _size(parts: Sequence[Evidence | Closing]) -> int:
    return sum(len(codec.encode(part)) for part in parts)
