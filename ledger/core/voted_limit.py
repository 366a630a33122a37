"""Limits that the voters of a network set: a quorum of equal votes changes one from the next transaction on.

A module declares its limits (`Module.limits`), and has the present values and the votes in its state. A voter has one vote for
each limit. A vote for the present value withdraws the voter's former vote.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from consensus.voter_set import VoterSet
from protocol.codec import Count, Key, Length
from protocol.identity import short_id
from protocol.limits import VOTERS_MAX


@dataclass(frozen=True, slots=True)
class LimitTerms:
    """The declaration of a limit."""

    kind: str  # kind of the transactions with votes
    make_vote: Callable[[str, int], Any]  # makes the content of such a transaction: the name of the limit, and the value
    most: int  # largest value that voters can set
    meaning: str  # meaning for people, with `{most}` where the value stands

    def describe(self, most: int) -> str:
        return self.meaning.format(most=most)


@dataclass(frozen=True, slots=True)
class VotedLimit:
    """The present value of a limit, and the votes for other values."""

    most: Count
    votes: Annotated[dict[Key, Count], Length(0, VOTERS_MAX)] = field(default_factory=dict)  # voter -> the value of its vote

    def vote_problem(self, name: str, most: int, author: bytes, voters: VoterSet) -> str | None:
        """Return why a vote for this value is refused; None if it counts. `name` is the name of the limit."""
        if author not in voters:
            return f"{short_id(author)} is not a voter, so it cannot vote for a limit"
        if most == self.most and author not in self.votes:
            return f"the network already allows {most} {name}"
        return None

    def with_vote(self, most: int, author: bytes, voters: VoterSet) -> VotedLimit:
        """Return the limit after a voter's vote that counts."""
        others = {voter: other for voter, other in self.votes.items() if voter != author}
        if most == self.most:
            return replace(self, votes=others)
        votes = {**others, author: most}
        if sum(votes.get(voter) == most for voter in voters.members) >= voters.quorum:
            return VotedLimit(most)
        return replace(self, votes=votes)

    def with_votes_of(self, voters: Container[bytes]) -> VotedLimit:
        """Return the limit without the votes of members that no longer vote."""
        left = {voter: most for voter, most in self.votes.items() if voter in voters}
        return self if len(left) == len(self.votes) else replace(self, votes=left)
