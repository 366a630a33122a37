"""What binds an auditor to its replay: its report seals the loss of the last inner step. The trainer opens its own loss when no
report on the proposal can come any more. Decision 0061 says why.

All here is pure. `ledger.audits.loss_openings` says when a loss may be opened, and what follows.
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
LOSS_MAX = 2**53 - 1  # also of what is no number
LOSS_DIFFERENCE_MAX = 1_000  # 1e-3 nat. Replays on other processors differ by 2e-7 of the loss, step losses by a tenth of a nat
LOSS_DIFFERENCE_DIVISOR = 10_000  # or 1e-4 of the loss, if that is more
REPORTS_PER_CONTRADICTION = 10  # an auditor's last reports that count, for each voter that has to contradict it
# reports that count, so the most that are wrong among them
WRONG_LOSSES_MAX = REPORTS_PER_CONTRADICTION * (faults_tolerated(VOTERS_MAX) + 1)
LOSS_BYTES = 8
_DOMAIN = b"folkmoot/loss-commitment\x00"
_SEAL = b"folkmoot/loss\x00"

LossMillionths = Annotated[int, Between(-LOSS_MAX, LOSS_MAX)]


@dataclass(frozen=True, slots=True)
class SealedLoss:
    """The loss that an auditor computed. Whoever has the secret of the proposal's commitment reads it, nobody else."""

    key: Key  # X25519, the auditor's for this report
    masked: Annotated[bytes, Length(LOSS_BYTES, LOSS_BYTES)]


@dataclass(frozen=True, slots=True)
class ProposalReference:
    """Names one accepted proposal."""

    job: Digest
    round: Count
    trainer: Key  # as in the round

    @property
    def proposal_key(self) -> tuple[int, bytes]:
        return self.round, self.trainer


@dataclass(frozen=True, slots=True)
class LossOpening(ProposalReference):
    """`audit/open-loss`: the trainer opens the loss that its proposal committed to, once all reports on it are in."""

    secret: Digest
    loss: LossMillionths  # of the round's last inner step


@dataclass(frozen=True, slots=True)
class UnopenedLosses:
    """The sealed losses of the reports on one accepted proposal."""

    commitment: LossCommitment
    reports: Annotated[dict[Key, SealedLoss], Length(0, VOTERS_MAX)]  # by auditor, as in the round
    reexecutors: Annotated[int, Between(1, VOTERS_MAX)]  # of the round
    since: Count | None = None  # the round whose closing ended the window of the reports
    since_ms: Count = 0  # of the parent of the block that closed it


@dataclass(frozen=True, slots=True)
class LossComparisons:
    """What openings said of one auditor's reports."""

    reports: Count = 0  # that were compared
    # Trainer -> which of these reports was the last wrong one about it.
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
    """`secret` is 32 bytes that only this auditor knows, for this report alone."""
    shared = x25519_shared_secret(secret, commitment.key) or bytes(32)  # nobody can open a commitment whose key gives nothing
    return SealedLoss(x25519_public_key(secret), _masked(_bytes_of(loss), shared, job, number, trainer, auditor))


def unseal_loss(of: SealedLoss, job: bytes, number: int, trainer: bytes, auditor: bytes, secret: bytes) -> int | None:
    """None: its author has sealed nothing. Another auditor's bytes give any number."""
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
    """After one more report about this trainer. What is older than the last reports that count is forgotten."""
    number = before.reports + 1
    kept = {key: at for key, at in before.wrong.items() if at > number - REPORTS_PER_CONTRADICTION * (faults + 1)}
    return LossComparisons(number, dict(sorted({**kept, trainer: number}.items())) if wrong else kept)


def is_lazy_auditor(known: LossComparisons, voters: Collection[bytes], faults: int) -> bool:
    """Whether more voters contradict the auditor than may lie."""
    return sum(trainer in voters for trainer in known.wrong) > faults
