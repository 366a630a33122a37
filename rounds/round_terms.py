"""The terms of a round: its voters, trainers and re-executors."""

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
    awaited: frozenset[bytes]  # trainers whose proposals the voters wait for
    trainers_to_vouch_for: frozenset[bytes]  # trainers whose proposals need vouches before the ballot
    successors: frozenset[tuple[bytes, bytes]] = frozenset()  # trainers that rotated in the round: former key, next key
    voting_keys: frozenset[tuple[bytes, bytes]] = frozenset()  # (key of a trainer, other key with which its member votes)
    called_last: frozenset[bytes] = frozenset()  # re-executors that have sent no vouch recently
    suspended: frozenset[bytes] = frozenset()  # re-executors with false vouches, which are not called if others suffice

    @property
    def signed_fields(self) -> tuple[bytes, int, bytes]:
        """The fields that every ballot of the round repeats."""
        return self.job, self.round, self.model_root

    @property
    def quorum(self) -> int:
        return quorum(len(self.voters))

    @property
    def faults(self) -> int:
        return faults_tolerated(len(self.voters))

    @property
    def spare_voters(self) -> int:
        """n − q: the number of voters that may be down while the others decide. It is at least f."""
        return len(self.voters) - self.quorum

    def voting_key(self, trainer: bytes) -> bytes:
        """Return the key with which this trainer's member votes in the round, or the trainer's own key."""
        return next((voter for key, voter in self.voting_keys if key == trainer), trainer)

    def outnumber_faulty_voters(self, trainers: Iterable[bytes]) -> bool:
        """Return whether f + 1 of these trainers vote. If fewer trainers vote in the round, all of them must be among these.

        f bounds the number of faulty voters. Trainers that do not vote are not counted, since one liar may have invited many.
        If no trainer votes, all trainers count as voting ones.
        """
        voting = {self.voting_key(trainer) for trainer in self.trainers} & self.voters or self.trainers
        among = {self.voting_key(trainer) for trainer in trainers} & voting
        return len(among) >= min(self.faults + 1, len(voting)) > 0


def signed_body_digest(signed: Signed) -> bytes:
    """Return the digest by which ballots and vouches name a proposal, and cut-offs name a ballot."""
    return hashlib.sha256(signed.body).digest()
