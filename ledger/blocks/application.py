"""The application under consensus at one peer: the ledger's state, the open rounds, and the messages that wait for a block.

Compact bodies are defined in this module, too. A leader sends them with digests in place of signed messages that other voters
should already have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, cast

from consensus.block import BODY_BYTES_MAX
from consensus.evidence import Evidence
from ledger import members as membership
from ledger.blocks.mempool import (
    TRANSACTIONS_BYTES_MAX,
    InclusionListSet,
    Mempool,
    PendingTransaction,
    TransactionSelection,
    signed_digest,
    transaction_digest,
)
from ledger.core.module import Refused
from ledger.jobs import RUNNING_MAX, JobPhase
from ledger.ledger_state import BlockBody, CurrentState, LedgerRules, LedgerState, decode_body
from protocol.codec import Count, Digest, Length, decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, short_id
from protocol.limits import (
    BLOCK_BYTES_MAX,
    CLOSING_VOUCHES_MAX,
    EVIDENCE_PER_BLOCK_MAX,
    TRAINERS_MAX,
    TRANSACTIONS_PER_BLOCK_MAX,
    VOTERS_MAX,
)
from protocol.messages import InclusionList
from rounds.round_state import OpenRoundState, RoundCertificate

# Time in seconds for which a round stays open after its certificate made the module `jobs` fail. Without this delay, the
# certificate would fill every block, without end. The delay is a time and not a number of heights, because a network that waits
# for this round alone decides no further height.
ROUND_DEFERRAL_SECONDS = 60.0
# Interval of blocks in seconds while a job without open rounds has audits. Its audits end by block time, so blocks are needed
# until then.
SETTLING_BLOCK_SECONDS = 1.0
BODY_FIXED_BYTES = 64  # bytes of an encoded body without its round certificates, evidence and transactions
# Maximum number of pieces of evidence that wait for a block, of at most 30 kB each. Further ones are dropped.
PENDING_EVIDENCE_MAX = 16 * EVIDENCE_PER_BLOCK_MAX
# Largest body that is sent whole: it fits into one packet with its header, so a compact form would save nothing.
WHOLE_BYTES_MAX = 1_024


@dataclass(frozen=True, slots=True)
class WholeBody:
    """A body that is too small for a compact form."""

    TAG: ClassVar[str] = "whole-body"
    body: Annotated[bytes, Length(0, WHOLE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class CompactRoundCertificate:
    """A `RoundCertificate` with digests in place of its ballots and other signed messages."""

    job: Digest
    round: Count
    ballots: Annotated[tuple[Digest, ...], Length(1, VOTERS_MAX)]
    cut_offs: Annotated[tuple[Digest, ...], Length(0, VOTERS_MAX)]
    proposals: Annotated[tuple[Digest, ...], Length(0, TRAINERS_MAX)]
    vouches: Annotated[tuple[Digest, ...], Length(0, CLOSING_VOUCHES_MAX)]


@dataclass(frozen=True, slots=True)
class CompactBody:
    """A `BlockBody` with digests in place of signed messages.

    Evidence stays whole, because it is rare and may not have reached all voters.
    """

    TAG: ClassVar[str] = "compact-body"
    round_certificates: Annotated[tuple[CompactRoundCertificate, ...], Length(0, RUNNING_MAX)]
    evidence: Annotated[tuple[Evidence, ...], Length(0, EVIDENCE_PER_BLOCK_MAX)]
    transactions: Annotated[tuple[Digest, ...], Length(0, TRANSACTIONS_PER_BLOCK_MAX)]


def compact_body(body: bytes) -> bytes:
    if len(body) <= WHOLE_BYTES_MAX:
        return encode(WholeBody(body))
    whole = decode_body(body)
    closings = tuple(
        CompactRoundCertificate(closing.job, closing.round, *map(_digests, _parts(closing)))
        for closing in whole.round_certificates
    )
    return encode(CompactBody(closings, whole.evidence, _digests(whole.transactions)))


def _parts(closing: RoundCertificate) -> tuple[tuple[Signed, ...], ...]:
    return closing.ballots, closing.cut_offs, closing.proposals, closing.vouches


def _digests(parts: Iterable[Signed]) -> tuple[bytes, ...]:
    return tuple(signed_digest(signed) for signed in parts)


def _found(digests: tuple[bytes, ...], index: dict[bytes, Signed]) -> tuple[Signed, ...] | None:
    found = [index[digest] for digest in digests if digest in index]
    return tuple(found) if len(found) == len(digests) else None


class LedgerApplication:
    """The ledger as the application that consensus calls (`consensus.inputs.Application`).

    All its answers refer to the last applied block.
    """

    def __init__(self, rules: LedgerRules, applied: CurrentState, certified_root: bytes) -> None:
        self.rules = rules
        self.applied = applied
        self.certified_root = certified_root  # state root that the last decided block names
        self.rounds: dict[bytes, OpenRoundState] = {}
        self.mempool = Mempool(applied.current.height, rules.transaction_traits)
        self.inclusion_lists = InclusionListSet()
        self._deferred: dict[tuple[bytes, int], float] = {}  # (job, round) -> time until which the round stays open
        self._now = 0.0
        self.pending_evidence: dict[bytes, Evidence] = {}  # culprit -> evidence that would expel it if it was decided now
        # Function that returns a signer's statements about rounds that are not open here yet. `peer.node.node` keeps these
        # statements and replaces this function.
        self.future_messages_of: Callable[[bytes], tuple[Signed, ...]] = lambda signer: ()
        # Job -> state of its open round, with indexes by digest of the round's ballots, cut-offs, proposals and vouches. The
        # indexes only grow, so that only new messages are hashed.
        self._indexed: dict[bytes, tuple[OpenRoundState, tuple[dict[bytes, Signed], ...]]] = {}
        self._selectable: tuple[LedgerState, int, bool] | None = None
        self._certification: tuple[LedgerState, bool] | None = None
        self._settling: tuple[LedgerState, bool] | None = None

    @property
    def state(self) -> LedgerState:
        return self.applied.current

    def advance_state(self, state: LedgerState, certified_root: bytes) -> None:
        assert state.height == self.state.height + 1
        self.applied.current, self.certified_root = state, certified_root
        self.mempool.height = state.height
        self.inclusion_lists.prune_lists(state.members, state.height)
        self.pending_evidence = {key: evidence for key, evidence in self.pending_evidence.items() if self._would_expel(key)}

    # Evidence and inclusion lists

    def add_evidence(self, evidence: Evidence) -> bool:
        """Keep evidence until a block carries it. Return whether it is new and would expel a member.

        Raises `RemoteProtocolError` if the evidence proves nothing.
        """
        known = evidence.signer in self.pending_evidence or len(self.pending_evidence) >= PENDING_EVIDENCE_MAX
        if known or not self._would_expel(evidence.signer):
            return False
        self.rules.apply_evidence(self.state, evidence)
        self.pending_evidence[evidence.signer] = evidence
        return True

    def _would_expel(self, culprit: bytes) -> bool:
        try:
            membership.expel_member(self.state.members, culprit, self.state.height + 1)
        except Refused:
            return False
        return True

    def make_inclusion_list(self, signer: bytes) -> InclusionList | None:
        """Return this voter's inclusion list after a block, with the transactions that have waited too long in its mempool.

        None: this voter sends no list.
        """
        members = self.state.members
        if signer not in members.voters or members.is_expelled(signer):
            return None
        neglected = self.mempool.overdue_transactions(self.rules, self.state)
        return InclusionList(self.state.height, neglected) if neglected else None

    def add_inclusion_list(self, voter: bytes, notice: InclusionList) -> bool:
        """Keep a voter's inclusion list. Return whether it is new. Raises `RemoteProtocolError` if it is malformed."""
        members = self.state.members
        return voter in members.voters and not members.is_expelled(voter) and self.inclusion_lists.add_list(voter, notice)

    # Application

    def make_body(self, height: int, now_ms: int) -> bytes | None:
        assert height == self.state.height + 1
        evidence, state = self._evidence()
        closings, room = self._closings(BODY_BYTES_MAX - BODY_FIXED_BYTES - _size(evidence))
        due = self.inclusion_lists.transactions_due(self.state.members.voters, height)
        transactions = self.mempool.select_transactions(self.rules, state, min(room, TRANSACTIONS_BYTES_MAX), first=due)
        is_due = self._certification_due() or self._is_time_due() or self.has_due_transactions()
        if not closings and not evidence and not is_due:
            return None
        return encode(BlockBody(closings, evidence, transactions))

    def _evidence(self) -> tuple[tuple[Evidence, ...], LedgerState]:
        """Return pending evidence for one block, and the state after that evidence is applied."""
        chosen: list[Evidence] = []
        state = self.state
        for _, evidence in sorted(self.pending_evidence.items()):
            try:
                after = self.rules.apply_evidence(state, evidence)
            except Refused:
                continue  # another key of the same member was expelled, or no other voter would be left
            if len(chosen) < EVIDENCE_PER_BLOCK_MAX:
                chosen.append(evidence)
                state = after
        return tuple(chosen), state

    def _closings(self, room: int) -> tuple[tuple[RoundCertificate, ...], int]:
        """Return certificates of rounds that can close now, of at most `room` bytes in total, and the number of bytes that
        remain.
        """
        closings: list[RoundCertificate] = []
        for book in self._closable():
            closing = book.certificate()
            if closing is not None and (size := len(encode(closing))) <= room:
                closings.append(closing)
                room -= size
        return tuple(closings), room

    def _closable(self) -> list[OpenRoundState]:
        """Return the open rounds that are not deferred, in ascending order of their jobs' ids."""
        books = [book for _, book in sorted(self.rounds.items())]
        return [book for book in books if (book.terms.job, book.terms.round) not in self._deferred]

    def defer_rounds(self, closings: Iterable[RoundCertificate], now: float) -> None:
        """Leave these rounds open for some time, because the block that closed them made the module `jobs` fail."""
        self._deferred |= {(closing.job, closing.round): now + ROUND_DEFERRAL_SECONDS for closing in closings}

    def resume_deferred_rounds(self, now: float) -> float | None:
        """End deferrals whose time is over. Return the next time at which a block may become due without a new message."""
        self._now = now
        self._deferred = {key: until for key, until in self._deferred.items() if until > now}
        times = (*self._deferred.values(), self._time_due_at)
        return min((time for time in times if time is not None and time > now), default=None)

    @property
    def _time_due_at(self) -> float | None:
        """Time in seconds at which a block is due even without content; None: no such block is due."""
        if self._settling is None or self._settling[0] is not self.state:
            self._settling = (self.state, any(job.phase is JobPhase.SETTLING for job in self.state.jobs.jobs.values()))
        return self.state.time_ms / 1_000 + SETTLING_BLOCK_SECONDS if self._settling[1] else None

    def _is_time_due(self) -> bool:
        due = self._time_due_at
        return due is not None and self._now >= due

    def why_body_refused(self, height: int, body: bytes, proposer: bytes) -> str | None:
        if height != self.state.height + 1:
            return f"height {height} does not follow {self.state.height}"
        problem = self.rules.why_body_refused(self.state, body)
        if problem:
            return problem
        content = decode_body(body)
        for closing in content.round_certificates:
            book = self.rounds.get(closing.job)
            refusal = book.why_certificate_refused(closing) if book else None
            if refusal:
                return refusal
        return self._censors(content)

    def _censors(self, body: BlockBody) -> str | None:
        """Return a refusal if a valid body omits a transaction that more than f voters have listed (`INCLUSION_LAG_HEIGHTS`).

        Only transactions that are here and could follow the block's last transaction count. Another transaction with the same
        nonce, or a full block, excuses the leader.
        """
        due = self.inclusion_lists.transactions_due(self.state.members.voters, self.state.height + 1)
        carried = {transaction_digest(signed) for signed in body.transactions} if due else set()
        missing = [entry for digest in sorted(due - carried) if (entry := self.mempool.get_transaction(digest)) is not None]
        if not missing:
            return None
        room = BODY_BYTES_MAX - BODY_FIXED_BYTES - _size(body.evidence) - _size(body.round_certificates)
        state = self.rules.apply_all_evidence(self.state, body.evidence)
        selection = TransactionSelection(self.rules, state, min(room, TRANSACTIONS_BYTES_MAX), TRANSACTIONS_PER_BLOCK_MAX)
        for signed in body.transactions:
            selection.add_unbounded(signed)
        left_out: PendingTransaction | None = next((entry for entry in missing if selection.try_add(entry)), None)
        if left_out is None:
            return None
        return f"its body omits a transaction of {short_id(left_out.signed.signer)} that inclusion lists require"

    def has_work(self) -> bool:
        closable = any(book.certificate() is not None for book in self._closable())
        is_due = self._certification_due() or self._is_time_due()
        return closable or bool(self.pending_evidence) or is_due or self.has_due_transactions()

    def has_due_transactions(self) -> bool:
        """Return whether transactions need a block now: one of them applies, and not all can wait (`Mempool.can_wait`)."""
        known = self._selectable
        if known is None or known[0] is not self.state or known[1] != self.mempool.version:
            found = not self.mempool.can_wait(self.state.jobs.running().keys())
            found = found and bool(self.mempool.select_transactions(self.rules, self.state, count_max=1))
            known = self._selectable = (self.state, self.mempool.version, found)
        return known[2]

    def make_compact_body(self, body: bytes) -> bytes:
        return compact_body(body)

    def expand_body(self, short: bytes) -> bytes | None:
        """Return the body of a compact form. None: a part is missing here.

        A missing part may never arrive, because peers keep only the first ballot of each voter.
        """
        message = cast(WholeBody | CompactBody, decode_message(short, (WholeBody, CompactBody), BLOCK_BYTES_MAX))
        if isinstance(message, WholeBody):
            return message.body
        closings = [self._closing(closing) for closing in message.round_certificates]
        transactions = [self.mempool.get_by_signed_digest(digest) for digest in message.transactions]
        present = tuple(closing for closing in closings if closing is not None)
        held = tuple(signed for signed in transactions if signed is not None)
        if len(present) < len(closings) or len(held) < len(transactions):
            return None
        # Checked before the body is built, because a few digests that are repeated many times must not exhaust the memory.
        parts = [part for closing in present for signed in _parts(closing) for part in signed]
        size = sum(len(signed.body) for signed in (*parts, *held))
        if size > BODY_BYTES_MAX:
            raise RemoteProtocolError("oversized", f"the compact body expands to {size} bytes, at most {BODY_BYTES_MAX}")
        return encode(BlockBody(present, message.evidence, held))

    def _closing(self, closing: CompactRoundCertificate) -> RoundCertificate | None:
        self._indexed = {job: indexed for job, indexed in self._indexed.items() if self.rounds.get(job) is indexed[0]}
        book = self.rounds.get(closing.job)
        if book is None or book.terms.round != closing.round:
            return None
        _, indexes = self._indexed.setdefault(closing.job, (book, ({}, {}, {}, {})))
        tables: tuple[Mapping[Any, Signed], ...] = (
            book.signed_ballots,
            book.signed_cut_offs,
            book.proposals,
            book.vouching.signed,
        )
        for index, table in zip(indexes, tables, strict=True):
            for signed in islice(table.values(), len(index), None):
                index[signed_digest(signed)] = signed
        named = (closing.ballots, closing.cut_offs, closing.proposals, closing.vouches)
        ballots, cut_offs, proposals, vouches = map(_found, named, indexes)
        if ballots is None or cut_offs is None or proposals is None or vouches is None:
            return None
        return RoundCertificate(closing.job, closing.round, ballots, cut_offs, proposals, vouches)

    def last_supported_height(self) -> int | None:
        return self.rules.last_supported_height(self.state)

    def is_member(self, peer: bytes) -> bool:
        return peer in self.state.members.members

    def statements_signed_by(self, peer: bytes) -> tuple[Signed, ...]:
        return (
            *(signed for book in self.rounds.values() for signed in book.statements_signed_by(peer)),
            *self.future_messages_of(peer),
        )

    def _certification_due(self) -> bool:
        """Return whether an empty block is due, to certify the last state root or to advance the voter sets.

        Cached for each state.
        """
        if self._certification is None or self._certification[0] is not self.state:
            due = membership.is_voter_change_due(self.state.members)
            due = due or (self.certified_root != self.state.state_root and not self.state.jobs.running())
            self._certification = (self.state, due)
        return self._certification[1]


def _size(parts: Sequence[Evidence | RoundCertificate]) -> int:
    return sum(len(encode(part)) for part in parts)
