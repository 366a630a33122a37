"""The terms of a round: its voters, trainers and re-executors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from consensus.voter_set import faults_tolerated, quorum
from protocol.identity import Signed


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The terms of a round, which the block that opened the round fixed, or a later block that renewed the terms."""

    job: bytes
    round: int
    model_root: bytes
    voters: frozenset[bytes]
    reexecutors: frozenset[bytes]  # voters with a worker; empty if no proposal needs vouches
    trainers: frozenset[bytes]
    awaited: frozenset[bytes]  # trainers whose proposals the voters wait for
    trainers_to_vouch_for: frozenset[bytes]  # trainers whose proposals need vouches before the ballot
    # (former key, next key) of each trainer that rotated its key in the round.
    successors: frozenset[tuple[bytes, bytes]] = frozenset()
    # (key of a trainer, key with which its member votes) where the two keys differ.
    voting_keys: frozenset[tuple[bytes, bytes]] = frozenset()
    called_last: frozenset[bytes] = frozenset()  # re-executors that have sent no vouch recently: they are called after the others
    may_be_empty: bool = False  # True: if no proposal arrives by T1, the round closes without one, and another trainer follows
    suspended: frozenset[bytes] = frozenset()  # re-executors with false vouches: they are not called if others suffice

    @property
    def signed_fields(self) -> tuple[bytes, int, bytes]:
        """Job, round number and model root, which every ballot of the round repeats."""
        return self.job, self.round, self.model_root

    @property
    def quorum(self) -> int:
        return quorum(len(self.voters))

    @property
    def faults(self) -> int:
        return faults_tolerated(len(self.voters))

    @property
    def spare_voters(self) -> int:
        """Number of voters minus quorum. The remaining voters can decide if at most this many are down. It is at least f."""
        return len(self.voters) - self.quorum

    def voting_key(self, trainer: bytes) -> bytes:
        """Return the key with which this trainer's member votes in the round, or the trainer's own key."""
        return next((voter for key, voter in self.voting_keys if key == trainer), trainer)

    def outnumber_faulty_voters(self, trainers: Iterable[bytes]) -> bool:
        """Return whether these trainers include more voters than f, the number of tolerated faulty voters.

        At least one of f + 1 voters is honest. Trainers that are not voters do not count, because one dishonest member may have
        invited many of them. Two cases have fewer voters:

        | voters among all trainers of the round | the result is true if `trainers` include |
        |----------------------------------------|------------------------------------------|
        | f + 1 or more                          | f + 1 of these voters                    |
        | 1 to f                                 | all of these voters                      |
        | none                                   | f + 1 trainers, or all of the round      |
        """
        voting = {self.voting_key(trainer) for trainer in self.trainers} & self.voters or self.trainers
        among = {self.voting_key(trainer) for trainer in trainers} & voting
        return len(among) >= min(self.faults + 1, len(voting)) > 0


def signed_body_digest(signed: Signed) -> bytes:
    """Return the digest of a signed message. Ballots and vouches name a proposal by it, and cut-offs name a ballot."""
    return hashlib.sha256(signed.body).digest()
