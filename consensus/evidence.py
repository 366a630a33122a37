"""Two messages that one honest peer never signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Verifier, open_signed, short_id
from protocol.messages import Ballot, Commit, CutOff, Prepare, Proposal, Propose, Timeout, Vouch

AgreementStatement = Propose | Prepare | Commit | Timeout  # of the agreement: once per height and view
RoundStatement = Proposal | Ballot | Vouch | CutOff  # once per round of a job; of vouches one for each trainer
AGREEMENT_STATEMENT_TYPES = (Propose, Prepare, Commit, Timeout)
STATEMENT_TYPES = (*AGREEMENT_STATEMENT_TYPES, Proposal, Ballot, Vouch, CutOff)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Self-contained: anybody who knows the chain id can check it."""

    first: Signed
    second: Signed

    @property
    def signer(self) -> bytes:
        return self.first.signer


def are_conflicting(first: AgreementStatement | RoundStatement, second: AgreementStatement | RoundStatement) -> bool:
    """Whether no honest peer signs both, in whatever order."""
    if isinstance(first, RoundStatement) or isinstance(second, RoundStatement):
        return type(first) is type(second) and _doubled(first, second)  # type: ignore[arg-type]
    if first.height != second.height or first.voters != second.voters:
        return False
    if type(first) is type(second):
        return first.view == second.view and first != second
    if isinstance(first, Commit) and isinstance(second, Timeout):
        # A voter that commits in a view holds its prepare certificate. Every later timeout of it names one at least as high.
        return second.view >= first.view > second.high_view
    return isinstance(second, Commit) and isinstance(first, Timeout) and are_conflicting(second, first)


def _doubled(first: RoundStatement, second: RoundStatement) -> bool:
    if (first.job, first.round) != (second.job, second.round):
        return False
    if isinstance(first, Vouch) and isinstance(second, Vouch):
        # Repetitions are no statements, but they could fill a block: an honest voter names each trainer once.
        named = {judgement.trainer for judgement in first.judgements}
        return first != second and any(judgement.trainer in named for judgement in second.judgements)
    return first != second


def verify_evidence(evidence: Evidence, chain_id: bytes, verifier: Verifier) -> bytes:
    """The key of the peer that is proven to lie; `RemoteProtocolError` if nothing is proven."""
    first: Any = open_signed(evidence.first, chain_id, verifier, STATEMENT_TYPES)
    second: Any = open_signed(evidence.second, chain_id, verifier, STATEMENT_TYPES)
    if evidence.first.signer != evidence.second.signer or not are_conflicting(first, second):
        raise RemoteProtocolError("no-evidence", f"against {short_id(evidence.first.signer)}")
    return evidence.signer
