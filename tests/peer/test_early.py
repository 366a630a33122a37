"""Memory of messages whose rounds are not open yet: its bound holds in bytes, and honest voters have room for all they say."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ledger.jobs import RUNNING_MAX
from ledger.members import Member
from peer.node.future_messages import (
    MEMBER_BYTES_MAX,
    OTHERS_MAX,
    PER_MEMBER_MAX,
    PER_VOTER_MAX,
    VOTER_BYTES_MAX,
    FutureRoundMessages,
    RoundMessage,
)
from protocol import codec
from protocol.identity import Identity, Signed
from protocol.limits import DECLARATION_BYTES_MAX, TRAINERS_MAX, VOTERS_MAX
from protocol.messages import Ballot, CutOff, Judgement, LossCommitment, Proposal, Vouch
from protocol.verdicts import Verdict
from tests.peer.chain import Chain

KEYS = tuple(number.to_bytes(32, "big") for number in range(TRAINERS_MAX))
VOTERS = tuple(bytes([1]) + number.to_bytes(31, "big") for number in range(VOTERS_MAX))
OTHERS = tuple(bytes([2]) + number.to_bytes(31, "big") for number in range(OTHERS_MAX + 10))
LATER = 2**40  # a round that no job has reached
PYTHON_FACTOR = 1.1  # objects around the bytes of the largest messages


def job_of(number: int) -> bytes:
    return bytes([3]) + number.to_bytes(31, "big")


WORST = max(Verdict, key=lambda verdict: len(codec.encode(verdict)))
JUDGED = tuple(Judgement(key, bytes(32), WORST) for key in KEYS)
VOUCHES = (1, 1, 2, 4, 8, 16, 32, 2)  # trainers in each vouch of 66: the next one waits until it doubles those before


def largest_ballot(job: bytes) -> Ballot:
    return Ballot(job, LATER, bytes(32), JUDGED, bytes(16), bytes(32))


def vouches(job: bytes, counts: tuple[int, ...] = VOUCHES) -> list[Vouch]:
    ends = itertools.accumulate(counts)
    return [Vouch(job, LATER, JUDGED[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def largest_of_a_round(job: bytes) -> list[RoundMessage]:
    digest = bytes(32)
    declaration, loss = bytes(DECLARATION_BYTES_MAX), LossCommitment(digest, digest)
    proposal = Proposal(job, LATER, digest, digest, 2**30, digest, digest, digest, digest, declaration, loss)
    return [proposal, largest_ballot(job), CutOff(job, LATER, VOTERS)]


def put(early: FutureRoundMessages, signer: bytes, message: RoundMessage) -> None:
    """As it comes from a link: nothing else holds the message."""
    body = codec.encode(message)
    early.add_message(Signed(body, signer, bytes(64)), codec.decode_message(body, (type(message),)))


@pytest.fixture
def early(tmp_path: Path) -> Iterator[FutureRoundMessages]:
    """A peer's early messages in a network of VOTERS_MAX voters and many other members."""
    chain = Chain(tmp_path / "chain")
    state = chain.ledger.state
    member = Member("somebody", (), 1, None, 0)
    people = dict(sorted(dict.fromkeys((*VOTERS, *OTHERS), member).items()))
    members = replace(state.members, members=people, voters=VOTERS, previous=VOTERS, upcoming=VOTERS)
    made = FutureRoundMessages(Identity(bytes(32)).public)
    made.drop_old_messages(state.with_modules(members=members))
    yield made
    chain.close()


@pytest.mark.parametrize("counts", [VOUCHES, (TRAINERS_MAX,)])
def test_an_honest_voter_has_room_for_the_next_round_of_all_jobs_that_may_run(
    early: FutureRoundMessages, counts: tuple[int, ...]
) -> None:
    for number in range(RUNNING_MAX):
        for message in (*largest_of_a_round(job_of(number)), *vouches(job_of(number), counts)):
            put(early, VOTERS[0], message)
    assert len(early.signed_by(VOTERS[0])) == (3 + len(counts)) * RUNNING_MAX <= PER_VOTER_MAX


def test_a_member_without_a_vote_has_room_for_its_largest_proposals(early: FutureRoundMessages) -> None:
    for number in range(PER_MEMBER_MAX):
        put(early, OTHERS[0], largest_of_a_round(job_of(number))[0])
    assert len(early.signed_by(OTHERS[0])) == PER_MEMBER_MAX


def test_messages_of_a_liar_take_no_more_memory_than_its_bound(early: FutureRoundMessages) -> None:
    liars = VOTERS[:6]  # every voter has room of its own
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for liar in liars:
            for number in range(PER_VOTER_MAX):
                put(early, liar, largest_ballot(job_of(number)))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    sizes = [sum(len(signed.body) for signed in early.signed_by(liar)) for liar in liars]
    assert 0.9 * VOTER_BYTES_MAX < max(sizes) <= VOTER_BYTES_MAX
    assert taken <= PYTHON_FACTOR * len(liars) * VOTER_BYTES_MAX, f"{taken / 2**20:.0f} MiB"


def test_messages_of_members_without_a_vote_are_bounded_in_bytes(early: FutureRoundMessages) -> None:
    for other in OTHERS:
        put(early, other, CutOff(job_of(0), LATER, VOTERS))  # the largest that fits
        put(early, other, largest_ballot(job_of(0)))
        put(early, other, CutOff(job_of(1), LATER, VOTERS))
    sizes = [sum(len(signed.body) for signed in early.signed_by(other)) for other in OTHERS]
    assert max(sizes) <= MEMBER_BYTES_MAX and sum(sizes) <= OTHERS_MAX * MEMBER_BYTES_MAX
