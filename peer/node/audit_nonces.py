"""The nonces of a voter's ballots in jobs with sampled audits: committed to in one ballot, revealed in the next decided one."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ledger.audits.audit_state import JobAudits
from ledger.audits.sortition import commit_nonce
from ledger.ledger_state import LedgerState
from protocol.identity import Signer, derive_secret
from protocol.limits import AUDIT_NONCE_BYTES
from protocol.messages import Ballot

NONCE_DOMAIN: Final = "audit-nonce"  # the tag of no message


class AuditNonces:
    """Derived from the secret key, the job and the round: a restart finds them again, and nothing has to be stored."""

    def __init__(self, signer: Signer, chain_id: bytes) -> None:
        self._signer, self._chain_id = signer, chain_id
        self._sampled: dict[bytes, JobAudits] = {}

    def update_state(self, state: LedgerState) -> None:
        self._sampled = state.audits.jobs

    def with_nonce(self, ballot: Ballot) -> Ballot:
        """With the nonce that our last decided ballot of the job committed to, and with a commitment to this round's."""
        audits = self._sampled.get(ballot.job)
        if audits is None:
            return ballot
        own = self._nonce(ballot.job, ballot.round)
        return replace(ballot, reveal=self._committed(audits, ballot.job), commitment=commit_nonce(own))

    def _committed(self, audits: JobAudits, job: bytes) -> bytes | None:
        known = audits.commitments.get(self._signer.public)
        return self._nonce(job, known.round) if known is not None else None

    def _nonce(self, job: bytes, number: int) -> bytes:
        return derive_secret(self._signer, NONCE_DOMAIN, self._chain_id, job + number.to_bytes(8, "big"))[:AUDIT_NONCE_BYTES]
