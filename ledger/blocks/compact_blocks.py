"""Bodies as leaders send them: whatever the others should hold already is named by the digest of its signed bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, cast

from consensus.block import BODY_BYTES_MAX
from consensus.evidence import Evidence
from ledger.blocks.mempool import Mempool, signed_digest
from ledger.jobs import RUNNING_MAX
from ledger.ledger_state import BlockBody, decode_body
from protocol import codec
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import (
    BLOCK_BYTES_MAX,
    CLOSING_VOUCHES_MAX,
    EVIDENCE_PER_BLOCK_MAX,
    TRAINERS_MAX,
    TRANSACTIONS_PER_BLOCK_MAX,
    VOTERS_MAX,
)
from rounds.round_state import OpenRoundState, RoundCertificate

WHOLE_BYTES_MAX = 1_024  # such a body goes with its header in one packet: naming its parts would save nothing


@dataclass(frozen=True, slots=True)
class WholeBody:
    """A small body as it is."""

    TAG: ClassVar[str] = "whole-body"
    body: Annotated[bytes, Length(0, WHOLE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class CompactRoundCertificate:
    """A `RoundCertificate` with the digests of what it holds."""

    job: Digest
    round: Count
    ballots: Annotated[tuple[Digest, ...], Length(1, VOTERS_MAX)]
    cut_offs: Annotated[tuple[Digest, ...], Length(0, VOTERS_MAX)]
    proposals: Annotated[tuple[Digest, ...], Length(0, TRAINERS_MAX)]
    vouches: Annotated[tuple[Digest, ...], Length(0, CLOSING_VOUCHES_MAX)]


@dataclass(frozen=True, slots=True)
class CompactBody:
    """A `BlockBody` with the digests of what it holds. Evidence is rare, and need not have reached everybody: it goes whole."""

    TAG: ClassVar[str] = "compact-body"
    round_certificates: Annotated[tuple[CompactRoundCertificate, ...], Length(0, RUNNING_MAX)]
    evidence: Annotated[tuple[Evidence, ...], Length(0, EVIDENCE_PER_BLOCK_MAX)]
    transactions: Annotated[tuple[Digest, ...], Length(0, TRANSACTIONS_PER_BLOCK_MAX)]


def compact_body(body: bytes) -> bytes:
    if len(body) <= WHOLE_BYTES_MAX:
        return codec.encode(WholeBody(body))
    whole = decode_body(body)
    closings = tuple(
        CompactRoundCertificate(closing.job, closing.round, *map(_digests, _parts(closing)))
        for closing in whole.round_certificates
    )
    return codec.encode(CompactBody(closings, whole.evidence, _digests(whole.transactions)))


def _parts(closing: RoundCertificate) -> tuple[tuple[Signed, ...], ...]:
    return closing.ballots, closing.cut_offs, closing.proposals, closing.vouches


def _digests(parts: Iterable[Signed]) -> tuple[bytes, ...]:
    return tuple(signed_digest(signed) for signed in parts)


def _found(digests: tuple[bytes, ...], index: dict[bytes, Signed]) -> tuple[Signed, ...] | None:
    found = [index[digest] for digest in digests if digest in index]
    return tuple(found) if len(found) == len(digests) else None


class CompactBodyExpander:
    """Puts short bodies together again from the round books and the pool."""

    def __init__(self, books: dict[bytes, OpenRoundState], pool: Mempool) -> None:
        self._books, self._pool = books, pool
        # By job: the book of its round; its ballots, cut-offs, proposals and vouches that were indexed, by digest. A book only
        # grows, so that only what is new is hashed.
        self._indexed: dict[bytes, tuple[OpenRoundState, tuple[dict[bytes, Signed], ...]]] = {}

    def expand_body(self, short: bytes) -> bytes | None:
        """None: a part is not here. It may come, or never: of two ballots of a liar only the first is kept."""
        message = cast(WholeBody | CompactBody, codec.decode_message(short, (WholeBody, CompactBody), BLOCK_BYTES_MAX))
        if isinstance(message, WholeBody):
            return message.body
        closings = [self._closing(closing) for closing in message.round_certificates]
        transactions = [self._pool.get_by_signed_digest(digest) for digest in message.transactions]
        present = tuple(closing for closing in closings if closing is not None)
        held = tuple(signed for signed in transactions if signed is not None)
        if len(present) < len(closings) or len(held) < len(transactions):
            return None
        # Before it is put together: a few digests, each named many times, must not cost all the memory there is.
        parts = [part for closing in present for signed in _parts(closing) for part in signed]
        size = sum(len(signed.body) for signed in (*parts, *held))
        if size > BODY_BYTES_MAX:
            raise RemoteProtocolError("oversized", f"a short body stands for {size} bytes, at most {BODY_BYTES_MAX} are allowed")
        return codec.encode(BlockBody(present, message.evidence, held))

    def _closing(self, closing: CompactRoundCertificate) -> RoundCertificate | None:
        self._indexed = {job: indexed for job, indexed in self._indexed.items() if self._books.get(job) is indexed[0]}
        book = self._books.get(closing.job)
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
