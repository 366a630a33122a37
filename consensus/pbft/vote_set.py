"""The vote set of one height: the statements of voters, the certificates that they form, and evidence of contradictions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from consensus.evidence import AgreementStatement, Evidence, are_conflicting
from consensus.voter_set import VoterSet
from protocol.identity import Signed
from protocol.messages import Certificate, Commit, Prepare, Timeout, TimeoutCertificate


@dataclass(frozen=True, slots=True)
class BlockProposal:
    """A leader's proposal with verified signature and justification. The bytes of its block may still be missing."""

    propose: Signed
    header: bytes
    justification: TimeoutCertificate | None
    digest: bytes
    obligation: Prepare | None  # vote for the prepared block that the justification requires; None: the block is fresh
    compact_body: bytes | None  # compact body, which is not signed; None: it was wrong, so the block must be requested
    sender: bytes  # peer that sent `compact_body`, and is at fault if it is wrong

    def with_compact_body(self, short: bytes | None, sender: bytes) -> BlockProposal:
        return replace(self, compact_body=short, sender=sender)


@dataclass(slots=True)
class HeightVoteSet:
    """Verified statements of the voters at one height. A voter's first statement in a slot counts, and a second one is evidence.

    The set is bounded: four statements for each voter and view, in the views near the current one that the replica admits, and
    one uncounted statement for each voter.
    """

    height: int
    voters: VoterSet
    proposals: dict[int, BlockProposal] = field(default_factory=dict)  # view -> first proposal of the view's leader
    highest_prepare_certificate: Certificate | None = None  # prepare certificate of the highest view
    high_vote: Prepare | None = None
    commit: Certificate | None = None  # commit certificate, which decides the height
    commit_vote: Commit | None = None
    # Vote for the first certified block that was not accepted. None unless more than f voters are faulty.
    conflicting_commit: Commit | None = None
    timed_out_view: int = -1  # highest view with a quorum of timeouts; −1: there is none
    decided_view: int | None = None  # the replica's view at the decision, after which statements do not count; None: not decided
    _prepared: list[tuple[Certificate, Prepare]] = field(default_factory=list)
    _statements: dict[bytes, dict[tuple[str, int], tuple[Signed, AgreementStatement]]] = field(default_factory=dict)
    _tallies: dict[tuple[str, int, bytes], dict[bytes, Signed]] = field(default_factory=dict)
    # Voter -> its first statement in a certificate of a block that was not accepted.
    _uncounted: dict[bytes, tuple[Signed, AgreementStatement]] = field(default_factory=dict)
    _accused: set[bytes] = field(default_factory=set)
    _given_up: dict[bytes, int] = field(default_factory=dict)  # voter -> highest view that the voter gave up

    def add_statement(self, signed: Signed, statement: AgreementStatement) -> Evidence | None:
        """Count a voter's statement. Return evidence if it contradicts an earlier statement of that voter.

        A completed quorum shows in `pop_prepare_certificate`, `commit` or `timed_out_view`.
        """
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
        """Return evidence if a statement contradicts an earlier one of its voter. The statement does not count.

        The first uncounted statement of a voter is kept, and compared with later ones.
        """
        evidence = self._contradiction(signed, statement)
        self._uncounted.setdefault(signed.signer, (signed, statement))
        return evidence

    def _contradiction(self, signed: Signed, statement: AgreementStatement) -> Evidence | None:
        if signed.signer in self._accused:
            return None  # one piece of evidence for each voter and height is enough, which bounds their number
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
        # Timeouts of one view count together, even with different certificates. A vote counts only together with equal votes.
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
        """(L) Record the highest view that a voter gave up. Any view is allowed, because only one number per voter is stored."""
        self._given_up[voter] = max(view, self._given_up.get(voter, -1))

    def pop_prepare_certificate(self) -> tuple[Certificate, Prepare] | None:
        """Return a prepare certificate that has been completed since the last call, with its vote. None: there is none."""
        return self._prepared.pop() if self._prepared else None

    def adopt_prepare_certificate(self, certificate: Certificate, vote: Prepare) -> bool:
        """Adopt a verified prepare certificate if its view is the highest so far. Return whether it was adopted."""
        if self.high_vote is not None and self.high_vote.view >= vote.view:
            return False
        self.highest_prepare_certificate, self.high_vote = certificate, vote
        return True

    def adopt_commit_certificate(self, certificate: Certificate, vote: Commit) -> None:
        """Adopt a verified commit certificate if it is the first one, or has more signatures for the same block."""
        if self.commit is None or self.commit_vote is None:
            self.commit, self.commit_vote = certificate, vote
        elif self.commit_vote.block != vote.block:
            self.conflicting_commit = self.conflicting_commit or vote
        elif len(certificate.signatures) > len(self.commit.signatures):
            self.commit, self.commit_vote = certificate, vote

    def drop_commit_certificate(self) -> None:
        """Drop the commit certificate, because its block belongs to another chain."""
        self.conflicting_commit, self.commit, self.commit_vote = self.conflicting_commit or self.commit_vote, None, None

    def timeout_certificate(self, view: int) -> TimeoutCertificate | None:
        """Return a quorum of timeouts of `view`, with a prepare certificate that covers these. None: there is no quorum.

        The prepare certificate covers the timeouts, because those that they name were adopted before them.
        """
        tally = self._tallies.get((Timeout.TAG, view, b""), {})
        if len(tally) < self.voters.quorum:
            return None
        return TimeoutCertificate(tuple(tally[key] for key in sorted(tally)), self.highest_prepare_certificate)

    def view_to_join(self) -> int:
        """Return the highest view for which f + 1 voters gave up this view or a later one; −1 if there is none."""
        liars = self.voters.faults_tolerated
        return sorted(self._given_up.values(), reverse=True)[liars] if len(self._given_up) > liars else -1

    def is_active(self) -> bool:
        """Return whether honest voters work on this height: a prepare certificate is here, or f + 1 voters have signed."""
        return self.highest_prepare_certificate is not None or len(self._statements) > self.voters.faults_tolerated

    def voters_without_statement_since(self, view: int) -> tuple[bytes, ...]:
        """Return the voters without a statement about this view or a later one."""
        return tuple(key for key in self.voters.keys if not any(of_view >= view for _, of_view in self._statements.get(key, ())))

    def preparers(self, view: int, digest: bytes) -> tuple[bytes, ...]:
        """Return the voters that prepared this block in this view, and therefore have its bytes."""
        said = ((key, statements.get((Prepare.TAG, view))) for key, statements in self._statements.items())
        return tuple(key for key, entry in said if entry and isinstance(entry[1], Prepare) and entry[1].block == digest)

    def statements_of(self, voter: bytes) -> list[Signed]:
        """Return all statements of this voter, sorted by descending view."""
        said = self._statements.get(voter, {})
        return [said[slot][0] for slot in sorted(said, key=lambda slot: slot[1], reverse=True)]

    def prune_below_view(self, view: int, offers_below: int) -> None:
        """Drop statements of views below `view`, and proposals of views below `offers_below`."""
        for earlier in [known for known in self.proposals if known < offers_below]:
            del self.proposals[earlier]
        for voter, said in self._statements.items():
            if any(of_view < view for _, of_view in said):
                self._statements[voter] = {slot: entry for slot, entry in said.items() if slot[1] >= view}
        for slot in [slot for slot in self._tallies if slot[1] < view]:
            del self._tallies[slot]

    def mark_decided(self, view: int) -> None:
        """Mark the height as decided, and drop all data that only voting needs, so that old vote sets stay small."""
        self.decided_view = view
        self.proposals.clear()
        self._prepared.clear()
        self._tallies.clear()


def _certificate(tally: dict[bytes, Signed]) -> Certificate:
    return Certificate(next(iter(tally.values())).body, {key: tally[key].signature for key in sorted(tally)})
