"""What a trainer that does not vote asks before it signs anything: its disk may have been rolled back to an older state.

Voters do the same inside the replica (`consensus.rollback`), for the votes that agreement rests on. A trainer has one thing to
lose: a second, different proposal of one round, for which it would be expelled.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from consensus.rollback import ASK_SECONDS
from consensus.voters import VoterSet


@dataclass(slots=True)
class Recall:
    """One per life of a node; it opens once, when a quorum of voters has said what it heard from us."""

    is_over: bool = False
    _answered: set[bytes] = field(default_factory=set)
    _next: float = 0.0

    def answer(self, voter: bytes, claim: int, height: int) -> None:
        """`claim`: the voter's next height, `height`: ours. Whoever is ahead has forgotten rounds that are still open here."""
        if claim <= height:
            self._answered.add(voter)

    def look(self, voters: VoterSet) -> bool:
        self.is_over = self.is_over or len(self._answered.intersection(voters.keys)) >= voters.quorum
        return self.is_over

    def ask(self, voters: VoterSet, links: Set[bytes], now: float) -> tuple[bytes, ...]:
        """Whom to ask now."""
        missing = tuple(sorted(links & set(voters.keys) - self._answered))
        if not missing or now < self._next:
            return ()
        self._next = now + ASK_SECONDS
        return missing

    def deadline(self, now: float) -> float | None:
        """When to ask again."""
        return self._next if self._next > now else None
