"""The question of a peer that does not vote, but is heard in rounds, before it signs anything: its disk may be rolled back.

Voters ask the same inside the replica (`consensus.pbft.own_votes`), for the votes that agreement rests on. A trainer would
be expelled for a second, different proposal in one round. A voter that left while a round was open in which it votes would be
expelled for a second ballot.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from consensus.pbft.own_votes import ASK_SECONDS
from consensus.voter_set import VoterSet


@dataclass(slots=True)
class NonVoterRollbackCheck:
    """One per life of a node; it opens once, when a quorum of voters has said what it heard from us."""

    is_over: bool = False
    _claims: dict[bytes, int] = field(default_factory=dict)  # who answered -> its next height then
    _next: float = 0.0

    def add_answer(self, voter: bytes, claim: int) -> None:
        if not self.is_over:
            self._claims[voter] = claim

    def has_quorum(self, voters: VoterSet, height: int) -> bool:
        """`height` is applied next. An answerer from above it has forgotten rounds that are still open here: it counts later."""
        reached = sum(self._claims.get(voter, height + 1) <= height for voter in voters.keys)
        self.is_over = self.is_over or reached >= voters.quorum
        return self.is_over

    def voters_to_ask(self, voters: VoterSet, links: Set[bytes], now: float) -> tuple[bytes, ...]:
        """The voters to ask now."""
        missing = tuple(sorted(links & set(voters.keys) - self._claims.keys()))
        if not missing or now < self._next:
            return ()
        self._next = now + ASK_SECONDS
        return missing

    def deadline(self, now: float) -> float | None:
        """When to ask again."""
        return self._next if self._next > now else None
