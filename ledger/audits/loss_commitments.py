"""Loss commitments, which bind an auditor to its replay. A report seals the auditor's loss of the last local step.

The trainer opens its own loss when all reports on the proposal are in or lapsed. Decision 0061 gives the reasons. All functions
of this module are pure. `ledger.audits.loss_openings` decides when a loss may be opened, and the consequences.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated

from consensus.voter_set import faults_tolerated
from protocol.codec import Between, Count, Digest, Key, Length
from protocol.identity import x25519_public_key, x25519_shared_secret
from protocol.limits import VOTERS_MAX
from protocol.messages import LossCommitment

MILLIONTHS = 1_000_000  # units of a loss per nat: losses are integers in millionths of a nat
LOSS_MAX = 2**53 - 1  # largest absolute value of a loss; it also represents a loss that is not finite
# Tolerated absolute difference of two losses, 1e-3 nat: replays on other processors differ by 2e-7 of the loss, steps by 0.1
# nat.
LOSS_DIFFERENCE_MAX = 1_000
# Divisor of a loss that gives its tolerated relative difference, 1e-4; the larger tolerance applies.
LOSS_DIFFERENCE_DIVISOR = 10_000
REPORTS_PER_CONTRADICTION = 10  # number of an auditor's last reports that are compared, for each voter that must contradict it
# Maximum number of an auditor's last reports that are compared, and therefore of its wrong reports.
WRONG_LOSSES_MAX = REPORTS_PER_CONTRADICTION * (faults_tolerated(VOTERS_MAX) + 1)
LOSS_BYTES = 8
_DOMAIN = b"folkmoot/loss-commitment\x00"
_SEAL = b"folkmoot/loss\x00"

LossMillionths = Annotated[int, Between(-LOSS_MAX, LOSS_MAX)]


@dataclass(frozen=True, slots=True)
class SealedLoss:
    """An auditor's encrypted loss. Only the trainer, which knows the secret of its proposal's loss commitment, can decrypt it."""

    key: Key  # X25519 public key of the auditor for this report
    masked: Annotated[bytes, Length(LOSS_BYTES, LOSS_BYTES)]


@dataclass(frozen=True, slots=True)
class ProposalReference:
    """The identifiers of one accepted proposal: its job, its round and its trainer."""

    job: Digest
    round: Count
    trainer: Key  # the trainer's key in the round

    @property
    def proposal_key(self) -> tuple[int, bytes]:
        return self.round, self.trainer


@dataclass(frozen=True, slots=True)
class LossOpening(ProposalReference):
    """`audit/open-loss`: the trainer opens the loss that its proposal committed to, once no further report can come."""

    secret: Digest
    loss: LossMillionths  # loss of the round's last local step


@dataclass(frozen=True, slots=True)
class UnopenedLosses:
    """The sealed losses of the reports on one accepted proposal whose trainer has not opened its own loss."""

    commitment: LossCommitment
    reports: Annotated[dict[Key, SealedLoss], Length(0, VOTERS_MAX)]  # auditor's key in the round -> sealed loss of the auditor
    reexecutors: Annotated[int, Between(1, VOTERS_MAX)]  # number of re-executors in the round
    since: Count | None = None  # the job's last closed round when the trainer could first open its loss; None: it cannot yet
    since_ms: Count = 0  # time of the parent of the block in which the trainer could first open its loss


@dataclass(frozen=True, slots=True)
class LossComparisons:
    """Results of comparing the losses in one auditor's reports with the losses that trainers opened."""

    reports: Count = 0  # number of compared reports
    # Trainer -> number of the auditor's last wrong report about this trainer. Compared reports are numbered from 1.
    wrong: Annotated[dict[Key, Count], Length(0, WRONG_LOSSES_MAX)] = field(default_factory=dict)


# Sealing -----------------------------------------------------------------------------------------------------------------


def nats_to_millionths(nats: float) -> int:
    if not math.isfinite(nats):
        return LOSS_MAX
    return max(-LOSS_MAX, min(LOSS_MAX, round(nats * MILLIONTHS)))


def commit_loss(job: bytes, number: int, trainer: bytes, secret: bytes, loss: int) -> LossCommitment:
    digest = hashlib.sha256(_DOMAIN + _place(job, number, trainer) + secret + _bytes_of(loss)).digest()
    return LossCommitment(digest, x25519_public_key(secret))


def is_valid_opening(commitment: LossCommitment, opening: LossOpening) -> bool:
    return commitment == commit_loss(opening.job, opening.round, opening.trainer, opening.secret, opening.loss)


def seal_loss(
    loss: int, job: bytes, number: int, trainer: bytes, auditor: bytes, commitment: LossCommitment, secret: bytes
) -> SealedLoss:
    """Return the loss, sealed so that only the owner of the commitment can read it.

    `secret` is 32 bytes that only this auditor knows and uses only for this report.
    """
    # Fallback: a commitment with an invalid key can never be opened.
    shared = x25519_shared_secret(secret, commitment.key) or bytes(32)
    return SealedLoss(x25519_public_key(secret), _masked(_bytes_of(loss), shared, job, number, trainer, auditor))


def unseal_loss(of: SealedLoss, job: bytes, number: int, trainer: bytes, auditor: bytes, secret: bytes) -> int | None:
    """Return the auditor's loss, or None if the auditor's key is invalid.

    A seal copied from another auditor gives an arbitrary number.
    """
    shared = x25519_shared_secret(secret, of.key)
    return (
        None if shared is None else int.from_bytes(_masked(of.masked, shared, job, number, trainer, auditor), "big", signed=True)
    )


def _bytes_of(loss: int) -> bytes:
    return loss.to_bytes(LOSS_BYTES, "big", signed=True)


def _masked(data: bytes, shared: bytes, job: bytes, number: int, trainer: bytes, auditor: bytes) -> bytes:
    mask = hashlib.sha256(_SEAL + shared + _place(job, number, trainer) + auditor).digest()
    return bytes(a ^ b for a, b in zip(data, mask[:LOSS_BYTES], strict=True))


def _place(job: bytes, number: int, trainer: bytes) -> bytes:
    return job + number.to_bytes(8, "big") + trainer


# Comparing ---------------------------------------------------------------------------------------------------------------


def is_wrong_loss(reported: int | None, opened: int) -> bool:
    return reported is None or abs(reported - opened) > max(LOSS_DIFFERENCE_MAX, abs(opened) // LOSS_DIFFERENCE_DIVISOR)


def add_comparison(before: LossComparisons, trainer: bytes, wrong: bool, faults: int) -> LossComparisons:
    """Return the auditor's comparisons after one more report about this trainer.

    Only the last reports that count are kept.
    """
    number = before.reports + 1
    kept = {key: at for key, at in before.wrong.items() if at > number - REPORTS_PER_CONTRADICTION * (faults + 1)}
    return LossComparisons(number, dict(sorted({**kept, trainer: number}.items())) if wrong else kept)


def is_lazy_auditor(known: LossComparisons, voters: Collection[bytes], faults: int) -> bool:
    """Return whether more than f voters, as trainers, opened other losses than the auditor reported."""
    return sum(trainer in voters for trainer in known.wrong) > faults
