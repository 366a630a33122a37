"""A check that the disk of a non-voter was not rolled back, before the peer signs messages of rounds.

The peer asks the voters for its earlier statements. The replica of a voter has another check (`consensus.pbft.own_votes`), for
votes on blocks. After a rollback of its disk, a trainer could sign a second, different proposal of one round and be expelled. A
former voter that still votes in an open round could sign a second ballot.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from consensus.pbft.own_votes import ASK_SECONDS
from consensus.voter_set import VoterSet


@dataclass(slots=True)
class NonVoterRollbackCheck:
    """The check of one run of the node, with the voters' answers. It is passed for good when a quorum has answered."""

    is_over: bool = False
    _claims: dict[bytes, int] = field(default_factory=dict)  # voter -> its next height when it answered
    _next: float = 0.0

    def add_answer(self, voter: bytes, claim: int) -> None:
        if not self.is_over:
            self._claims[voter] = claim

    def has_quorum(self, voters: VoterSet, height: int) -> bool:
        """Return whether the answers of a quorum count. `height` is the height of the block that this peer applies next.

        A voter at a greater height has forgotten rounds that are still open at this peer. The voter's answer counts when this
        peer reaches that height.
        """
        reached = sum(self._claims.get(voter, height + 1) <= height for voter in voters.keys)
        self.is_over = self.is_over or reached >= voters.quorum
        return self.is_over

    def voters_to_ask(self, voters: VoterSet, links: Set[bytes], now: float) -> tuple[bytes, ...]:
        """Return the linked voters to ask now: those without an answer, at most every `ASK_SECONDS`."""
        missing = tuple(sorted(links & set(voters.keys) - self._claims.keys()))
        if not missing or now < self._next:
            return ()
        self._next = now + ASK_SECONDS
        return missing

    def deadline(self, now: float) -> float | None:
        """Return the time of the next question to voters, or None if no question is planned."""
        return self._next if self._next > now else None
