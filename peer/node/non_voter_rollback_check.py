"""A check that the disk of a non-voter was not rolled back, before the peer signs messages of rounds.

The peer asks the voters for its earlier statements. Voters do the same inside the replica (`consensus.pbft.own_votes`), for their
votes on blocks. After a rollback, a trainer could sign a second, different proposal of one round and be expelled. A former voter
that still votes in an open round could sign a second ballot.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from consensus.pbft.own_votes import ASK_SECONDS
from consensus.voter_set import VoterSet


@dataclass(slots=True)
class NonVoterRollbackCheck:
    """The answers of voters since the node started. The check is passed for good when a quorum has answered."""

    is_over: bool = False
    _claims: dict[bytes, int] = field(default_factory=dict)  # the next height of each voter when it answered
    _next: float = 0.0

    def add_answer(self, voter: bytes, claim: int) -> None:
        if not self.is_over:
            self._claims[voter] = claim

    def has_quorum(self, voters: VoterSet, height: int) -> bool:
        """Return whether a quorum has answered. `height` is the next one that this peer applies.

        A voter at a greater height has forgotten rounds that are still open at this peer. Its answer counts once this peer
        reaches its height.
        """
        reached = sum(self._claims.get(voter, height + 1) <= height for voter in voters.keys)
        self.is_over = self.is_over or reached >= voters.quorum
        return self.is_over

    def voters_to_ask(self, voters: VoterSet, links: Set[bytes], now: float) -> tuple[bytes, ...]:
        """Return the linked voters that are to be asked now."""
        missing = tuple(sorted(links & set(voters.keys) - self._claims.keys()))
        if not missing or now < self._next:
            return ()
        self._next = now + ASK_SECONDS
        return missing

    def deadline(self, now: float) -> float | None:
        """Return the time of the next question, or None if none is planned."""
        return self._next if self._next > now else None
