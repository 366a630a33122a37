"""Messages of rounds that are not open here yet, or in which their signers take no part yet: others may be some blocks ahead.

Every voter has room of its own, so that nobody's flood keeps out a quorum's messages. Members that do not vote share a part. Our
own forgotten messages are kept before everything else: a peer that signs one again in other words is expelled.

Messages are kept encoded, since a decoded ballot takes four times the memory. All 200 voters together have 63 MiB, 66 liars among
them 21 MiB, and all other members 8 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ledger.jobs import Job, JobPhase
from ledger.ledger_state import LedgerState
from ledger.members import MembersState
from protocol import codec
from protocol.identity import Signed
from protocol.messages import Ballot, CutOff, Proposal, Vouch

OWN_MAX = 1_024  # only whoever has our key can sign them
# Proposal, ballot, cut-off and eight vouches, of 66 proposals, of the next round of each job that may run at once, and some more.
PER_VOTER_MAX = 96
PER_MEMBER_MAX = 4  # of a member that does not vote: its proposals of the next rounds
VOTER_BYTES_MAX = 320 << 10  # the largest proposal, ballot, vouch and cut-off take 37 kB together, for each of RUNNING_MAX jobs
MEMBER_BYTES_MAX = 8 << 10  # PER_MEMBER_MAX of the largest proposals
OTHERS_MAX = 1_024  # of all that do not vote: room for the proposals of some rounds of TRAINERS_MAX
HEIGHTS_MAX = 64  # applied meanwhile; if a message is dropped then and counts later, GetRound brings it back

RoundMessage = Proposal | Ballot | Vouch | CutOff
ROUND_MESSAGES = (Proposal, Ballot, Vouch, CutOff)
RoundKey = tuple[bytes, int]  # job, round


@dataclass(frozen=True, slots=True)
class BufferedMessage:
    signed: Signed
    key: RoundKey
    height: int  # applied last when it came

    def decode(self) -> RoundMessage:
        message: RoundMessage = codec.decode_message(self.signed.body, ROUND_MESSAGES)  # type: ignore[assignment]
        return message


class FutureRoundMessages:
    def __init__(self, me: bytes) -> None:
        self._me = me
        self._height = 0
        self._members: MembersState | None = None
        self._voters: frozenset[bytes] = frozenset()
        self._kept: dict[bytes, list[BufferedMessage]] = {}  # by signer, no bytes twice

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def drop_old_messages(self, state: LedgerState) -> None:
        """Forgets old messages, and those of rounds that cannot open any more."""
        self._height, self._members = state.height, state.members
        self._voters = frozenset({*state.members.round_voters, *filter(state.members.is_current_key, state.members.upcoming)})
        jobs, oldest = state.jobs.jobs, self._height - HEIGHTS_MAX
        self._filter(lambda kept: not _is_over(kept, jobs) and (kept.signed.signer == self._me or kept.height > oldest))

    def _filter(self, stays: Callable[[BufferedMessage], bool]) -> None:
        left = {signer: [kept for kept in of_signer if stays(kept)] for signer, of_signer in self._kept.items()}
        self._kept = {signer: of_signer for signer, of_signer in left.items() if of_signer}

    def add_message(self, signed: Signed, message: RoundMessage) -> None:
        """The signature was verified."""
        known = self._kept.get(signed.signer, [])
        size = sum(len(kept.signed.body) for kept in known) + len(signed.body)
        if self._has_room(signed.signer, len(known), size) and all(kept.signed.body != signed.body for kept in known):
            self._kept.setdefault(signed.signer, []).append(BufferedMessage(signed, (message.job, message.round), self._height))

    def _has_room(self, signer: bytes, count: int, size: int) -> bool:
        """`count` messages of this signer are here; with the next one they have `size` bytes."""
        if signer == self._me:
            return count < OWN_MAX
        if signer in self._voters:
            return count < PER_VOTER_MAX and size <= VOTER_BYTES_MAX
        if self._members is None or not self._members.is_current_key(signer):
            return False
        others = sum(len(of_signer) for key, of_signer in self._kept.items() if key not in self._voters and key != self._me)
        return count < PER_MEMBER_MAX and size <= MEMBER_BYTES_MAX and others < OTHERS_MAX

    def signed_by(self, signer: bytes) -> tuple[Signed, ...]:
        return tuple(kept.signed for kept in self._kept.get(signer, ()))

    def pop_round(self, key: RoundKey) -> list[BufferedMessage]:
        """The messages of a round that opens, of each signer in the order in which they came."""
        taken = [kept for of_signer in self._kept.values() for kept in of_signer if kept.key == key]
        self._filter(lambda kept: kept.key != key)
        return taken


def _is_over(kept: BufferedMessage, jobs: Mapping[bytes, Job]) -> bool:
    of, number = kept.key
    job = jobs.get(of)
    return job is not None and (job.phase is JobPhase.FINISHED or number < job.round)
