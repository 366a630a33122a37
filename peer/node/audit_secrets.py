"""What a peer hides from audits until others have spoken: the nonces of its ballots, the loss of its proposals and reports.

In jobs with sampled audits a ballot commits to a nonce, which the next decided one reveals. A trainer hides its loss until
reports are in, and an auditor until the trainer opens: `ledger.audits.loss_commitments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ledger.audits.audit_state import AuditDuty, JobAudits
from ledger.audits.loss_commitments import LossOpening, SealedLoss, commit_loss, seal_loss
from ledger.audits.sortition import commit_nonce
from ledger.ledger_state import LedgerState
from protocol.identity import Signer, derive_secret
from protocol.limits import AUDIT_NONCE_BYTES
from protocol.messages import Ballot, Proposal

NONCE_DOMAIN: Final = "audit-nonce"  # the tags of no message
OPENING_DOMAIN: Final = "audit-opening"
SEALED_LOSS_DOMAIN: Final = "audit-loss"


class AuditSecrets:
    """Derived from the secret key and the place: a restart finds them again, and nothing has to be stored."""

    def __init__(self, signer: Signer, chain_id: bytes) -> None:
        self._signer, self._chain_id = signer, chain_id
        self._sampled: Mapping[bytes, JobAudits] = {}

    def update_state(self, state: LedgerState) -> None:
        self._sampled = state.audits.jobs

    def with_nonce(self, ballot: Ballot) -> Ballot:
        """With the nonce that our last decided ballot of the job committed to, and with a commitment to this round's."""
        audits = self._sampled.get(ballot.job)
        if audits is None:
            return ballot
        known = audits.commitments.get(self._signer.public)
        reveal = self._nonce(ballot.job, known.round) if known is not None else None
        return replace(ballot, reveal=reveal, commitment=commit_nonce(self._nonce(ballot.job, ballot.round)))

    def _nonce(self, job: bytes, number: int) -> bytes:
        return self._secret(NONCE_DOMAIN, job, number)[:AUDIT_NONCE_BYTES]

    def with_commitment(self, proposal: Proposal, opening: LossOpening | None) -> Proposal:
        """With a commitment to what `opening` will open, if this job's proposals commit to anything."""
        if opening is None or proposal.job not in self._sampled:
            return proposal
        job, number = proposal.job, proposal.round
        assert (opening.job, opening.round, opening.trainer) == (job, number, self._signer.public)
        return replace(proposal, loss=commit_loss(job, number, opening.trainer, opening.secret, opening.loss))

    def make_opening(self, job: bytes, number: int, loss: int) -> LossOpening:
        """What our proposal of that round may commit to. `loss` is of its last inner step, in millionths.

        The peer keeps all of it: after a change of its key it cannot make the secret again.
        """
        return LossOpening(job, number, self._signer.public, self._secret(OPENING_DOMAIN, job, number), loss)

    def seal_loss(self, due: AuditDuty, loss: int) -> SealedLoss | None:
        """The loss of a report. None where the proposal commits to none."""
        if due.proposal.loss is None:
            return None
        own = self._secret(SEALED_LOSS_DOMAIN, due.job, due.round, due.trainer)
        return seal_loss(loss, due.job, due.round, due.trainer, due.auditor, due.proposal.loss, own)

    def _secret(self, domain: str, job: bytes, number: int, trainer: bytes = b"") -> bytes:
        return derive_secret(self._signer, domain, self._chain_id, job + number.to_bytes(8, "big") + trainer)
