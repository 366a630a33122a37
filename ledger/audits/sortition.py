"""The draw of audits from nonces that earlier ballots committed to.

Every re-executor draws for itself: its tickets depend only on the nonce that its own ballot reveals. A faulty voter that
chooses or withholds a nonce therefore changes only its own draws. With one seed from all nonces, it could choose the best of
many draws. With a draw of the lowest tickets, it could make its own the lowest and take the places of honest auditors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.codec import Count, Digest

TICKET_DOMAIN = b"folkmoot/audit\x00"
TICKET_PREFIX_BYTES = 8  # length in bytes of an auditor's lot, which is the start of its ticket
# Shares of the job's audit rate, early and late in the job. A late false update is followed by fewer honest rounds, so audits
# are densest late. The average of the shares over a job is 1.
EARLY_SHARE = 0.5  # factor in the first two thirds of a job's rounds, not counting the closing rounds
LATE_SHARE = 2.0


@dataclass(frozen=True, slots=True)
class NonceCommitment:
    """A voter's commitment to its next nonce, taken from the last ballot of the voter that was decided in this job."""

    round: Count
    digest: Digest


def commit_nonce(nonce: bytes) -> bytes:
    return hashlib.sha256(nonce).digest()


def matching_reveals(reveals: Mapping[bytes, bytes], commitments: Mapping[bytes, NonceCommitment]) -> dict[bytes, bytes]:
    """Return voter -> revealed nonce, for all nonces that match their voter's commitment."""
    return {
        voter: nonce
        for voter, nonce in reveals.items()
        if voter in commitments and commitments[voter].digest == commit_nonce(nonce)
    }


def sortition_ticket(job: bytes, number: int, nonce: bytes, auditor: bytes, trainer: bytes) -> bytes:
    """Return a ticket of 32 bytes, which begins with the auditor's lot for this trainer's proposal.

    The auditor's key is hashed, too. Without it, a voter that copies another voter's commitment would have the same ticket.
    """
    return hashlib.sha256(TICKET_DOMAIN + job + number.to_bytes(8, "big") + auditor + trainer + nonce).digest()


def audit_rate_of_round(rate: float, taken: int, rounds: int, closing: int) -> float:
    """Return the audit rate of the round that follows `taken` rounds, for a job with the average `rate`.

    The `closing` rounds are not sampled, so the late share begins before them.
    """
    return rate * (EARLY_SHARE if 3 * taken < 2 * (rounds - closing) else LATE_SHARE)


def draw_auditors(tickets: Mapping[bytes, bytes], others: int, auditors: int, rate: float) -> tuple[bytes, ...]:
    """Return the drawn re-executors, whose lots are below rate × auditors / others, computed in doubles in this order.

    `others` is the number of the round's re-executors, with or without a ticket, without the trainer and the re-executors that
    are separated from the trainer. A re-executor that withholds its ticket therefore does not raise the chance of any other.
    """
    lots = {key: int.from_bytes(data[:TICKET_PREFIX_BYTES], "big") for key, data in sorted(tickets.items())}
    return tuple(key for key, lot in lots.items() if lot < rate * auditors / others * 2.0 ** (8 * TICKET_PREFIX_BYTES))


def lottery_tickets(
    job: bytes, number: int, nonces: Mapping[bytes, bytes], trainer: bytes, auditors: Sequence[bytes]
) -> dict[bytes, bytes]:
    """Return the tickets of those re-executors in `auditors` that have a nonce."""
    return {key: sortition_ticket(job, number, nonces[key], key, trainer) for key in auditors if key in nonces}
