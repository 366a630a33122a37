"""Which accepted proposals are audited, and by whom: drawn from the commitments of earlier ballots.

Every re-executor draws for itself: its tickets follow from the nonce that its own ballot reveals, and no other ticket matters. So
a liar that chooses or withholds a nonce changes its own draws alone. With one seed made of all nonces a liar could choose among
many draws. If the lowest tickets were drawn, a liar could make its own the lowest, in the places of honest auditors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.codec import Count, Digest

TICKET_DOMAIN = b"folkmoot/audit\x00"
TICKET_PREFIX_BYTES = 8  # of a ticket
# A lie has fewer honest rounds behind it the later it comes, so audits are densest late: shares of the job's rate, 1 on average.
EARLY_SHARE = 0.5  # in the first two thirds of a job's rounds, the closing ones not counted
LATE_SHARE = 2.0


@dataclass(frozen=True, slots=True)
class NonceCommitment:
    """A voter's commitment to its next nonce, from its last decided ballot of a job."""

    round: Count
    digest: Digest


def commit_nonce(nonce: bytes) -> bytes:
    return hashlib.sha256(nonce).digest()


def matching_reveals(reveals: Mapping[bytes, bytes], commitments: Mapping[bytes, NonceCommitment]) -> dict[bytes, bytes]:
    """The reveals, by voter, that are what the voter had committed to."""
    return {
        voter: nonce
        for voter, nonce in reveals.items()
        if voter in commitments and commitments[voter].digest == commit_nonce(nonce)
    }


def sortition_ticket(job: bytes, number: int, nonce: bytes, auditor: bytes, trainer: bytes) -> bytes:
    """32 bytes, of which the first are the auditor's lot for this trainer's proposal.

    The auditor's key is hashed, too. Without it, a liar that copies another voter's commitment would have the same ticket.
    """
    return hashlib.sha256(TICKET_DOMAIN + job + number.to_bytes(8, "big") + auditor + trainer + nonce).digest()


def audit_rate_of_round(rate: float, taken: int, rounds: int, closing: int) -> float:
    """The rate of the round after so many of a job's `rounds`, given that of the whole job.

    Audits do not sample the `closing` rounds, so the late share begins before them.
    """
    return rate * (EARLY_SHARE if 3 * taken < 2 * (rounds - closing) else LATE_SHARE)


def draw_auditors(tickets: Mapping[bytes, bytes], others: int, auditors: int, rate: float) -> tuple[bytes, ...]:
    """The re-executors that are drawn: their lots are under rate × auditors / others, in doubles and in this order.

    `others` counts all the round's re-executors but the trainer and those apart from it, with or without a ticket: a re-executor
    that withholds its ticket raises nobody's chance.
    """
    lots = {key: int.from_bytes(data[:TICKET_PREFIX_BYTES], "big") for key, data in sorted(tickets.items())}
    return tuple(key for key, lot in lots.items() if lot < rate * auditors / others * 2.0 ** (8 * TICKET_PREFIX_BYTES))


def lottery_tickets(
    job: bytes, number: int, nonces: Mapping[bytes, bytes], trainer: bytes, auditors: Sequence[bytes]
) -> dict[bytes, bytes]:
    """The tickets of the `auditors` that have a nonce, by auditor."""
    return {key: sortition_ticket(job, number, nonces[key], key, trainer) for key in auditors if key in nonces}
