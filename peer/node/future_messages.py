"""A buffer for messages of rounds that this peer has not opened yet, or that do not include the signer yet. The senders are some
blocks ahead. Each voter has its own part of the buffer, so that a flood of one voter displaces no message of a quorum. All other
members together have one part. Our own messages from before a restart have the largest part, because a peer that signs a
different message for the same purpose is expelled.

Messages are kept encoded, since a decoded ballot takes four times the memory. The parts of 200 voters are 63 MiB, of which 66
faulty voters can fill 21 MiB. All other members together have 8 MiB.
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

OWN_MAX = 1_024  # messages of our own: many, since only the holder of our key can sign them
# Messages of one voter: in the next round of each running job, it sends a proposal, a ballot, a cut-off and eight vouches (for 66
# proposals).
PER_VOTER_MAX = 96
PER_MEMBER_MAX = 4  # messages of one member without a vote, which sends only its proposals for the next rounds
# Bytes of one voter's messages: 37 kB for the largest proposal, ballot, vouch and cut-off, in each of RUNNING_MAX jobs.
VOTER_BYTES_MAX = 320 << 10
MEMBER_BYTES_MAX = 8 << 10  # bytes of one member without a vote: PER_MEMBER_MAX of the largest proposals
OTHERS_MAX = 1_024  # messages of all non-voters together: room for proposals of TRAINERS_MAX trainers in some rounds
HEIGHTS_MAX = 64  # age in blocks at which a message is dropped; a GetRound request fetches it again if it counts later

RoundMessage = Proposal | Ballot | Vouch | CutOff
ROUND_MESSAGES = (Proposal, Ballot, Vouch, CutOff)
RoundKey = tuple[bytes, int]  # (job id, number of the round)


@dataclass(frozen=True, slots=True)
class BufferedMessage:
    signed: Signed
    key: RoundKey
    height: int  # this peer's applied height when the message arrived

    def decode(self) -> RoundMessage:
        message: RoundMessage = codec.decode_message(self.signed.body, ROUND_MESSAGES)  # type: ignore[assignment]
        return message


class FutureRoundMessages:
    def __init__(self, me: bytes) -> None:
        self._me = me
        self._height = 0
        self._members: MembersState | None = None
        self._voters: frozenset[bytes] = frozenset()
        self._kept: dict[bytes, list[BufferedMessage]] = {}  # signer -> its messages, without duplicates

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def drop_old_messages(self, state: LedgerState) -> None:
        """Drop messages of other peers older than `HEIGHTS_MAX` blocks, and all messages of rounds that can no longer open."""
        self._height, self._members = state.height, state.members
        self._voters = frozenset({*state.members.round_voters, *filter(state.members.is_current_key, state.members.upcoming)})
        jobs, oldest = state.jobs.jobs, self._height - HEIGHTS_MAX
        self._filter(lambda kept: not _is_over(kept, jobs) and (kept.signed.signer == self._me or kept.height > oldest))

    def _filter(self, stays: Callable[[BufferedMessage], bool]) -> None:
        left = {signer: [kept for kept in of_signer if stays(kept)] for signer, of_signer in self._kept.items()}
        self._kept = {signer: of_signer for signer, of_signer in left.items() if of_signer}

    def add_message(self, signed: Signed, message: RoundMessage) -> None:
        """Store a message if the signer's part of the buffer has room for it. The caller has verified the signature."""
        known = self._kept.get(signed.signer, [])
        size = sum(len(kept.signed.body) for kept in known) + len(signed.body)
        if self._has_room(signed.signer, len(known), size) and all(kept.signed.body != signed.body for kept in known):
            self._kept.setdefault(signed.signer, []).append(BufferedMessage(signed, (message.job, message.round), self._height))

    def _has_room(self, signer: bytes, count: int, size: int) -> bool:
        """Return whether the signer's part of the buffer has room for one more message.

        The part has `count` messages, and with the new one `size` bytes.
        """
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
        """Remove and return the messages of a round that opens. The messages of each signer are in the order of arrival."""
        taken = [kept for of_signer in self._kept.values() for kept in of_signer if kept.key == key]
        self._filter(lambda kept: kept.key != key)
        return taken


def _is_over(kept: BufferedMessage, jobs: Mapping[bytes, Job]) -> bool:
    of, number = kept.key
    job = jobs.get(of)
    return job is not None and (job.phase is JobPhase.FINISHED or number < job.round)
