"""What the voters of one undecided height have said: statements, certificates made of them, contradictions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from consensus.evidence import AgreementStatement, Evidence, are_conflicting
from consensus.voter_set import VoterSet
from protocol.identity import Signed
from protocol.messages import Certificate, Commit, Prepare, Timeout, TimeoutCertificate


@dataclass(frozen=True, slots=True)
class BlockProposal:
    """A leader's proposal whose signature and justification are verified. Its block may not be here yet."""

    propose: Signed
    header: bytes
    justification: TimeoutCertificate | None
    digest: bytes
    obligation: Prepare | None  # the prepared block that the justification obliges to; None: the block is fresh
    compact_body: bytes | None  # nobody signs it; None: it was wrong, and the block must be fetched
    sender: bytes  # who answers for `short`

    def with_compact_body(self, short: bytes | None, sender: bytes) -> BlockProposal:
        return replace(self, compact_body=short, sender=sender)


@dataclass(slots=True)
class HeightVoteSet:
    """Only verified statements come in here. The first statement of a voter in a slot counts, a second one is evidence.

    It holds at most four statements a voter and view, in the views around the current one that the replica lets in, and one
    a voter that does not count.
    """

    height: int
    voters: VoterSet
    proposals: dict[int, BlockProposal] = field(default_factory=dict)  # view -> the first proposal of its leader
    highest_prepare_certificate: Certificate | None = None  # the highest prepare certificate seen
    high_vote: Prepare | None = None
    commit: Certificate | None = None  # a commit certificate: the height is decided
    commit_vote: Commit | None = None
    # names the first certified block that is not taken: there is none unless more than f voters lie
    conflicting_commit: Commit | None = None
    timed_out_view: int = -1  # the highest view with a quorum of timeouts
    decided_view: int | None = None  # the view in which it was decided; from then on nothing counts, it only remembers
    _prepared: list[tuple[Certificate, Prepare]] = field(default_factory=list)
    _statements: dict[bytes, dict[tuple[str, int], tuple[Signed, AgreementStatement]]] = field(default_factory=dict)
    _tallies: dict[tuple[str, int, bytes], dict[bytes, Signed]] = field(default_factory=dict)
    # what voters signed in a rival's certificate
    _uncounted: dict[bytes, tuple[Signed, AgreementStatement]] = field(default_factory=dict)
    _accused: set[bytes] = field(default_factory=set)
    _given_up: dict[bytes, int] = field(default_factory=dict)  # voter -> the highest view it gave up

    def add_statement(self, signed: Signed, statement: AgreementStatement) -> Evidence | None:
        """Counts a statement of a voter. What it completes shows in `pop_prepare_certificate`, `commit` and `timed_out_view`."""
        said = self._statements.setdefault(signed.signer, {})
        first = said.get((statement.TAG, statement.view))
        if first is not None and first[1] == statement:
            return None
        evidence = self._contradiction(signed, statement)
        if first is None:
            said[statement.TAG, statement.view] = (signed, statement)
            self._count(signed, statement)
        return evidence

    def add_uncounted_statement(self, signed: Signed, statement: AgreementStatement) -> Evidence | None:
        """Only looks for contradictions, with what came before and with what will come."""
        evidence = self._contradiction(signed, statement)
        self._uncounted.setdefault(signed.signer, (signed, statement))
        return evidence

    def _contradiction(self, signed: Signed, statement: AgreementStatement) -> Evidence | None:
        if signed.signer in self._accused:
            return None  # one proof per voter and height is enough, and bounded
        said = list(self._statements.get(signed.signer, {}).values())
        if signed.signer in self._uncounted:
            said.append(self._uncounted[signed.signer])
        for earlier, other in said:
            if are_conflicting(other, statement):
                self._accused.add(signed.signer)
                return Evidence(earlier, signed)
        return None

    def _count(self, signed: Signed, statement: AgreementStatement) -> None:
        if self.decided_view is not None:
            return
        if isinstance(statement, Timeout):
            self.record_timed_out_view(signed.signer, statement.view)
        # Timeouts of one view count together whatever certificate they name; votes only with equal votes.
        group = b"" if isinstance(statement, Timeout) else signed.body
        tally = self._tallies.setdefault((statement.TAG, statement.view, group), {})
        tally[signed.signer] = signed
        if len(tally) < self.voters.quorum:
            return
        if isinstance(statement, Timeout):
            self.timed_out_view = max(self.timed_out_view, statement.view)
        elif isinstance(statement, Commit):
            self.adopt_commit_certificate(_certificate(tally), statement)
        elif isinstance(statement, Prepare) and len(tally) == self.voters.quorum:
            self._prepared.append((_certificate(tally), statement))

    def record_timed_out_view(self, voter: bytes, view: int) -> None:
        """(L) One number a voter, so from whatever distance: f + 1 of them lead to views that are too far ahead to be kept."""
        self._given_up[voter] = max(view, self._given_up.get(voter, -1))

    def pop_prepare_certificate(self) -> tuple[Certificate, Prepare] | None:
        """A prepare certificate that prepares have made since the last call."""
        return self._prepared.pop() if self._prepared else None

    def adopt_prepare_certificate(self, certificate: Certificate, vote: Prepare) -> bool:
        """Whether this verified prepare certificate is higher than what was held."""
        if self.high_vote is not None and self.high_vote.view >= vote.view:
            return False
        self.highest_prepare_certificate, self.high_vote = certificate, vote
        return True

    def adopt_commit_certificate(self, certificate: Certificate, vote: Commit) -> None:
        """More signatures for the same block are welcome; another block does not take its place."""
        if self.commit is None or self.commit_vote is None:
            self.commit, self.commit_vote = certificate, vote
        elif self.commit_vote.block != vote.block:
            self.conflicting_commit = self.conflicting_commit or vote
        elif len(certificate.signatures) > len(self.commit.signatures):
            self.commit, self.commit_vote = certificate, vote

    def drop_commit_certificate(self) -> None:
        """The block that is certified here belongs to another history."""
        self.conflicting_commit, self.commit, self.commit_vote = self.conflicting_commit or self.commit_vote, None, None

    def timeout_certificate(self, view: int) -> TimeoutCertificate | None:
        """A quorum of timeouts of exactly `view`. `high` covers them: a timeout is counted after its certificate was adopted."""
        tally = self._tallies.get((Timeout.TAG, view, b""), {})
        if len(tally) < self.voters.quorum:
            return None
        return TimeoutCertificate(tuple(tally[key] for key in sorted(tally)), self.highest_prepare_certificate)

    def view_to_join(self) -> int:
        """The highest view that more voters than there can be liars have given up, in it or above; −1 if there is none."""
        liars = self.voters.faults_tolerated
        return sorted(self._given_up.values(), reverse=True)[liars] if len(self._given_up) > liars else -1

    def is_active(self) -> bool:
        """Whether this height is being decided: a certificate is here, or more voters spoke than may be liars."""
        return self.highest_prepare_certificate is not None or len(self._statements) > self.voters.faults_tolerated

    def voters_without_statement_since(self, view: int) -> tuple[bytes, ...]:
        """The voters from which nothing came for this view or a later one."""
        return tuple(key for key in self.voters.keys if not any(of_view >= view for _, of_view in self._statements.get(key, ())))

    def preparers(self, view: int, digest: bytes) -> tuple[bytes, ...]:
        """The voters that prepared this block in this view, and so hold its bytes."""
        said = ((key, statements.get((Prepare.TAG, view))) for key, statements in self._statements.items())
        return tuple(key for key, entry in said if entry and isinstance(entry[1], Prepare) and entry[1].block == digest)

    def statements_of(self, voter: bytes) -> list[Signed]:
        """Everything held of this voter, the latest views first."""
        said = self._statements.get(voter, {})
        return [said[slot][0] for slot in sorted(said, key=lambda slot: slot[1], reverse=True)]

    def prune_below_view(self, view: int, offers_below: int) -> None:
        for earlier in [known for known in self.proposals if known < offers_below]:
            del self.proposals[earlier]
        for voter, said in self._statements.items():
            if any(of_view < view for _, of_view in said):
                self._statements[voter] = {slot: entry for slot, entry in said.items() if slot[1] >= view}
        for slot in [slot for slot in self._tallies if slot[1] < view]:
            del self._tallies[slot]

    def mark_decided(self, view: int) -> None:
        """The height is decided: what a replica needs of it for voting goes, so that old books stay small."""
        self.decided_view = view
        self.proposals.clear()
        self._prepared.clear()
        self._tallies.clear()


def _certificate(tally: dict[bytes, Signed]) -> Certificate:
    return Certificate(next(iter(tally.values())).body, {key: tally[key].signature for key in sorted(tally)})
