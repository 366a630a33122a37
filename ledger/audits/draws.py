"""Which accepted proposals are audited, by whom, and which step: drawn from what the voters had committed to before.

Every re-executor draws for itself: its tickets follow from the nonce that its own ballot reveals, and each is drawn or not
whatever the others' are. Who chooses or withholds a nonce changes its own draws alone. From one seed of all it could choose among
many draws; and were the lowest tickets drawn, it could make its own the lowest, in the places of the honest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.codec import Count, Digest

DOMAIN = b"folkmoot/audit\x00"
LOT_BYTES = 8  # of a ticket, as many for its step: a remainder of 2^64 favours no step by more than 2^-50


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
    """32 bytes, of which come the auditor's lot and its step for this trainer's proposal.

    The auditor is part of it, or whoever copies another's commitment would have the same ticket.
    """
    return hashlib.sha256(DOMAIN + job + number.to_bytes(8, "big") + auditor + trainer + nonce).digest()


def draw(tickets: Mapping[bytes, bytes], others: int, auditors: int, rate: float, steps: int) -> dict[bytes, int]:
    """The step of each re-executor that is drawn: whose lot falls under rate × auditors / others, in doubles and in this order.

    `others` are all the round's re-executors but the trainer, with or without a ticket: who withholds one raises nobody's chance.
    """
    lots = {key: int.from_bytes(data[:LOT_BYTES], "big") for key, data in sorted(tickets.items())}
    drawn = [key for key, lot in lots.items() if lot < rate * auditors / others * 2.0 ** (8 * LOT_BYTES)]
    return {key: int.from_bytes(tickets[key][-LOT_BYTES:], "big") % steps for key in drawn}


def tickets_for(
    job: bytes, number: int, nonces: Mapping[bytes, bytes], trainer: bytes, auditors: Sequence[bytes]
) -> dict[bytes, bytes]:
    """Of the `auditors` that have a nonce, by auditor."""
    return {key: ticket(job, number, nonces[key], key, trainer) for key in auditors if key in nonces}
