"""Which accepted proposals are audited, by whom, and which step: drawn from what the voters had committed to before.

Every re-executor draws for itself: its tickets follow from the nonce that its own ballot reveals. Who withholds a nonce gives up
its own tickets and changes nobody else's, and a leader can only leave out the few ballots that a closing does not need. From one
seed of all nonces, either could choose among many draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.codec import Count, Digest

DOMAIN = b"folkmoot/audit\x00"
LOT_BYTES = 8  # of a ticket: a remainder of 2^64 favours no step by more than 2^-50


@dataclass(frozen=True, slots=True)
class Commitment:
    """Of a voter, in its last decided ballot of a job."""

    round: Count
    digest: Digest


def commitment_to(nonce: bytes) -> bytes:
    return hashlib.sha256(nonce).digest()


def matching(reveals: Mapping[bytes, bytes], commitments: Mapping[bytes, Commitment]) -> dict[bytes, bytes]:
    """The reveals, by voter, that are what the voter had committed to."""
    return {
        voter: nonce
        for voter, nonce in reveals.items()
        if voter in commitments and commitments[voter].digest == commitment_to(nonce)
    }


def ticket(job: bytes, number: int, nonce: bytes, auditor: bytes, trainer: bytes) -> bytes:
    """32 bytes: the auditor's rank, its lot and its step for this trainer's proposal.

    The auditor is part of it, or whoever copies another's commitment would have the same ticket.
    """
    return hashlib.sha256(DOMAIN + job + number.to_bytes(8, "big") + auditor + trainer + nonce).digest()


def draw(tickets: Mapping[bytes, bytes], auditors: int, rate: float, steps: int) -> dict[bytes, int]:
    """The step of each re-executor that is drawn: of the `auditors` lowest tickets those whose lot falls under `rate`."""
    lowest = sorted(tickets, key=lambda key: tickets[key][: -2 * LOT_BYTES])[:auditors]
    chosen = {key: tickets[key] for key in sorted(lowest) if _lot(tickets[key]) < rate * 2.0 ** (8 * LOT_BYTES)}
    return {key: int.from_bytes(data[-LOT_BYTES:], "big") % steps for key, data in chosen.items()}


def _lot(data: bytes) -> int:
    return int.from_bytes(data[-2 * LOT_BYTES : -LOT_BYTES], "big")


def tickets_for(
    job: bytes, number: int, nonces: Mapping[bytes, bytes], trainer: bytes, auditors: Sequence[bytes]
) -> dict[bytes, bytes]:
    """Of the `auditors` that have a nonce, by auditor."""
    return {key: ticket(job, number, nonces[key], key, trainer) for key in auditors if key in nonces}
