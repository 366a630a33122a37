"""Loss commitments, which bind an auditor to its replay. A report seals the auditor's loss of the last local step.

The trainer opens its own loss when all reports on the proposal are in or lapsed. Decision 0061 gives the reasons. Everything here
is pure. `ledger.audits.loss_openings` decides when a loss may be opened, and the consequences.
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

MILLIONTHS = 1_000_000  # losses are integers, in millionths of a nat
LOSS_MAX = 2**53 - 1  # maximum, also used for a loss that is not finite
LOSS_DIFFERENCE_MAX = 1_000  # 1e-3 nat: replays on other processors differ by 2e-7 of the loss, steps by 0.1 nat
LOSS_DIFFERENCE_DIVISOR = 10_000  # relative tolerance: 1e-4 of the loss, if that is more
REPORTS_PER_CONTRADICTION = 10  # an auditor's last reports that count, for each voter that must contradict it
# number of reports that count, and so the maximum of wrong ones
WRONG_LOSSES_MAX = REPORTS_PER_CONTRADICTION * (faults_tolerated(VOTERS_MAX) + 1)
LOSS_BYTES = 8
_DOMAIN = b"folkmoot/loss-commitment\x00"
_SEAL = b"folkmoot/loss\x00"

LossMillionths = Annotated[int, Between(-LOSS_MAX, LOSS_MAX)]


@dataclass(frozen=True, slots=True)
class SealedLoss:
    """The loss that an auditor computed. Only the holder of the secret of the proposal's commitment can read it."""

    key: Key  # the auditor's X25519 key for this report
    masked: Annotated[bytes, Length(LOSS_BYTES, LOSS_BYTES)]


@dataclass(frozen=True, slots=True)
class ProposalReference:
    """Identifies one accepted proposal."""

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
    """The sealed losses of the reports on one accepted proposal."""

    commitment: LossCommitment
    reports: Annotated[dict[Key, SealedLoss], Length(0, VOTERS_MAX)]  # auditor's key in the round -> its sealed loss
    reexecutors: Annotated[int, Between(1, VOTERS_MAX)]  # number of re-executors in the round
    since: Count | None = None  # the last closed round when the trainer could first open its loss
    since_ms: Count = 0  # time of the parent of the block that closed it


@dataclass(frozen=True, slots=True)
class LossComparisons:
    """Results of openings for one auditor's reports."""

    reports: Count = 0  # number of compared reports
    # Trainer -> number of the last wrong report about it, counted from 1.
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
    """Return the sealed loss. `secret` is 32 bytes that only this auditor knows and uses only for this report."""
    shared = x25519_shared_secret(secret, commitment.key) or bytes(32)  # a commitment with an invalid key can never be opened
    return SealedLoss(x25519_public_key(secret), _masked(_bytes_of(loss), shared, job, number, trainer, auditor))


def unseal_loss(of: SealedLoss, job: bytes, number: int, trainer: bytes, auditor: bytes, secret: bytes) -> int | None:
    """Return the loss, or None if the auditor's key is invalid. A seal copied from another auditor gives an arbitrary number."""
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
    """Return the comparisons after one more report about this trainer, limited to the last reports that count."""
    number = before.reports + 1
    kept = {key: at for key, at in before.wrong.items() if at > number - REPORTS_PER_CONTRADICTION * (faults + 1)}
    return LossComparisons(number, dict(sorted({**kept, trainer: number}.items())) if wrong else kept)


def is_lazy_auditor(known: LossComparisons, voters: Collection[bytes], faults: int) -> bool:
    """Return whether more than f voters contradict the auditor."""
    return sum(trainer in voters for trainer in known.wrong) > faults
