"""The secrets of a peer in sampled audits: the nonces of its ballots, and the losses of its proposals and reports.

A ballot commits to a nonce, and the peer's next decided ballot reveals this nonce. A trainer hides its loss until the auditors
have reported, and an auditor hides its loss until the trainer opens its own (`ledger.audits.loss_commitments`).
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

# Domain of nonces in the derivation of secrets: domains must differ from the tags of all messages.
NONCE_DOMAIN: Final = "audit-nonce"
OPENING_DOMAIN: Final = "audit-opening"
SEALED_LOSS_DOMAIN: Final = "audit-loss"


class AuditSecrets:
    """Secrets of audits, derived from the peer's key, the chain, the job and the round.

    A restarted peer derives the same nonces. The caller stores openings, because a peer with a new key cannot derive their
    secrets.
    """

    def __init__(self, signer: Signer, chain_id: bytes) -> None:
        self._signer, self._chain_id = signer, chain_id
        self._sampled: Mapping[bytes, JobAudits] = {}

    def update_state(self, state: LedgerState) -> None:
        self._sampled = state.audits.jobs

    def with_nonce(self, ballot: Ballot) -> Ballot:
        """Return the ballot with the nonce of our last decided ballot of the job, and with a commitment to this round's nonce.

        Ballots of jobs without sampled audits are returned unchanged.
        """
        audits = self._sampled.get(ballot.job)
        if audits is None:
            return ballot
        known = audits.commitments.get(self._signer.public)
        reveal = self._nonce(ballot.job, known.round) if known is not None else None
        return replace(ballot, reveal=reveal, commitment=commit_nonce(self._nonce(ballot.job, ballot.round)))

    def _nonce(self, job: bytes, number: int) -> bytes:
        return self._secret(NONCE_DOMAIN, job, number)[:AUDIT_NONCE_BYTES]

    def with_commitment(self, proposal: Proposal, opening: LossOpening | None) -> Proposal:
        """Return the proposal with a commitment to `opening`, if the job has sampled audits."""
        if opening is None or proposal.job not in self._sampled:
            return proposal
        job, number = proposal.job, proposal.round
        assert (opening.job, opening.round, opening.trainer) == (job, number, self._signer.public)
        return replace(proposal, loss=commit_loss(job, number, opening.trainer, opening.secret, opening.loss))

    def make_opening(self, job: bytes, number: int, loss: int) -> LossOpening:
        """Return the opening for our proposal of a round. `loss` is the loss of the proposal's last local step, in millionths.

        The peer stores the opening, because it cannot derive the secret after a change of its key.
        """
        return LossOpening(job, number, self._signer.public, self._secret(OPENING_DOMAIN, job, number), loss)

    def seal_loss(self, due: AuditDuty, loss: int) -> SealedLoss | None:
        """Return the sealed loss for our report on a proposal, or None if the proposal commits to no loss."""
        if due.proposal.loss is None:
            return None
        own = self._secret(SEALED_LOSS_DOMAIN, due.job, due.round, due.trainer)
        return seal_loss(loss, due.job, due.round, due.trainer, due.auditor, due.proposal.loss, own)

    def _secret(self, domain: str, job: bytes, number: int, trainer: bytes = b"") -> bytes:
        return derive_secret(self._signer, domain, self._chain_id, job + number.to_bytes(8, "big") + trainer)
