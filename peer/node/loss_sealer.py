"""The loss that a trainer hides until reports are in, and an auditor until the trainer opens:
`ledger.audits.loss_commitments`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ledger.audits.audit_state import AuditDuty
from ledger.audits.loss_commitments import LossOpening, SealedLoss, commit_loss, seal_loss
from ledger.ledger_state import LedgerState
from protocol.identity import Signer, derive_secret
from protocol.messages import Proposal

OPENING_DOMAIN, SEALED_LOSS_DOMAIN = "audit-opening", "audit-loss"  # the tags of no message
_ROUND_BYTES: Final = 8


class LossSealer:
    """Secrets are derived from the secret key and the place, so a peer that proposes again after a crash has the same."""

    def __init__(self, signer: Signer, chain_id: bytes) -> None:
        self._signer, self._chain_id = signer, chain_id
        self._committing: frozenset[bytes] = frozenset()

    def update_state(self, state: LedgerState) -> None:
        self._committing = frozenset(state.audits.jobs)

    def requires_commitment(self, job: bytes) -> bool:
        """Whether proposals of this job commit to a loss."""
        return job in self._committing

    def with_commitment(self, proposal: Proposal, opening: LossOpening | None) -> Proposal:
        """With a commitment to what `opening` will open, if this job's proposals commit to anything."""
        if opening is None or not self.requires_commitment(proposal.job):
            return proposal
        job, number = proposal.job, proposal.round
        assert (opening.job, opening.round, opening.trainer) == (job, number, self._signer.public)
        return replace(proposal, loss=commit_loss(job, number, opening.trainer, opening.secret, opening.loss))

    def make_opening(self, job: bytes, number: int, loss: int) -> LossOpening:
        """With the secret of this round. The peer keeps all of it: after a change of its key it cannot make the secret again."""
        own = self._of(OPENING_DOMAIN, job + number.to_bytes(_ROUND_BYTES, "big"))
        return LossOpening(job, number, self._signer.public, own, loss)

    def seal_loss(self, due: AuditDuty, loss: int) -> SealedLoss | None:
        """The loss of a report. None where the proposal commits to none."""
        if due.proposal.loss is None:
            return None
        own = self._of(SEALED_LOSS_DOMAIN, due.job + due.round.to_bytes(_ROUND_BYTES, "big") + due.trainer)
        return seal_loss(loss, due.job, due.round, due.trainer, due.auditor, due.proposal.loss, own)

    def _of(self, domain: str, body: bytes) -> bytes:
        return derive_secret(self._signer, domain, self._chain_id, body)
