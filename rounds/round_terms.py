"""The terms of a round: who votes, trains and re-executes in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from consensus.voter_set import faults_tolerated, quorum
from protocol.identity import Signed


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The terms of a round, fixed by the block that opened it, or by a later one that renewed it."""

    job: bytes
    round: int
    model_root: bytes
    voters: frozenset[bytes]
    reexecutors: frozenset[bytes]  # voters with a worker; empty if no trainer is `vouched`
    trainers: frozenset[bytes]
    awaited: frozenset[bytes]
    trainers_to_vouch_for: frozenset[bytes]  # trainers whose proposals are re-executed before the ballot: they need vouches
    successors: frozenset[tuple[bytes, bytes]] = frozenset()  # trainers that rotated in the round: former key, next key
    voting_keys: frozenset[tuple[bytes, bytes]] = frozenset()  # (key of a trainer, another key with which its member votes)
    called_last: frozenset[bytes] = frozenset()  # re-executors that gave no vouch of late
    suspended: frozenset[bytes] = frozenset()  # re-executors that vouched falsely, and are not called

    @property
    def signed_fields(self) -> tuple[bytes, int, bytes]:
        """What every ballot of the round binds to."""
        return self.job, self.round, self.model_root

    @property
    def quorum(self) -> int:
        return quorum(len(self.voters))

    @property
    def faults(self) -> int:
        return faults_tolerated(len(self.voters))

    @property
    def spare_voters(self) -> int:
        """How many voters may be down while the others still decide: f at least."""
        return len(self.voters) - self.quorum

    def voting_key(self, trainer: bytes) -> bytes:
        """The key with which the member of this trainer votes in the round, if it does."""
        return next((voter for key, voter in self.voting_keys if key == trainer), trainer)

    def outnumber_faulty_voters(self, trainers: Iterable[bytes]) -> bool:
        """Whether more of these trainers vote than may lie. Where fewer trainers vote, all that do have to be among these.

        f is a bound for voters. Trainers that do not vote are not counted, since one liar may have invited many.
        """
        voting = {self.voting_key(trainer) for trainer in self.trainers} & self.voters or self.trainers
        among = {self.voting_key(trainer) for trainer in trainers} & voting
        return len(among) >= min(self.faults + 1, len(voting)) > 0


def signed_body_digest(signed: Signed) -> bytes:
    """How ballots and vouches name proposals, and cut-offs name ballots."""
    return hashlib.sha256(signed.body).digest()
