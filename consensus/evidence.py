"""Evidence: two signed messages that exclude each other, because no honest peer signs both of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Verifier, open_signed, short_id
from protocol.messages import Ballot, Commit, CutOff, Prepare, Proposal, Propose, Timeout, Vouch

AgreementStatement = Propose | Prepare | Commit | Timeout  # statements of voters, at most one of each type per height and view
# Statements about rounds, at most one of each type per round of a job, and one Vouch per trainer.
RoundStatement = Proposal | Ballot | Vouch | CutOff
AGREEMENT_STATEMENT_TYPES = (Propose, Prepare, Commit, Timeout)
STATEMENT_TYPES = (*AGREEMENT_STATEMENT_TYPES, Proposal, Ballot, Vouch, CutOff)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two signed messages that exclude each other. Anybody with the chain id can verify them."""

    first: Signed
    second: Signed

    @property
    def signer(self) -> bytes:
        return self.first.signer


def are_conflicting(first: AgreementStatement | RoundStatement, second: AgreementStatement | RoundStatement) -> bool:
    """Return whether no honest peer signs both of these statements. Their order does not matter."""
    if isinstance(first, RoundStatement) or isinstance(second, RoundStatement):
        return type(first) is type(second) and _doubled(first, second)  # type: ignore[arg-type]
    if first.height != second.height or first.voters != second.voters:
        return False
    if type(first) is type(second):
        return first.view == second.view and first != second
    if isinstance(first, Commit) and isinstance(second, Timeout):
        # A voter that commits in a view has a prepare certificate of that view. Its later timeouts name this certificate or a
        # higher one.
        return second.view >= first.view > second.high_view
    return isinstance(second, Commit) and isinstance(first, Timeout) and are_conflicting(second, first)


def _doubled(first: RoundStatement, second: RoundStatement) -> bool:
    if (first.job, first.round) != (second.job, second.round):
        return False
    if isinstance(first, Vouch) and isinstance(second, Vouch):
        # Two vouches could repeat one verdict without contradiction, but repetitions could fill a block. Therefore one voter
        # vouches for each trainer only once.
        named = {judgement.trainer for judgement in first.judgements}
        return first != second and any(judgement.trainer in named for judgement in second.judgements)
    return first != second


def verify_evidence(evidence: Evidence, chain_id: bytes, verifier: Verifier) -> bytes:
    """Return the key that signed both messages. Raises `RemoteProtocolError` if they do not exclude each other."""
    first: Any = open_signed(evidence.first, chain_id, verifier, STATEMENT_TYPES)
    second: Any = open_signed(evidence.second, chain_id, verifier, STATEMENT_TYPES)
    if evidence.first.signer != evidence.second.signer or not are_conflicting(first, second):
        raise RemoteProtocolError(
            "no-evidence", f"the two messages of {short_id(evidence.first.signer)} do not exclude each other"
        )
    return evidence.signer
