"""Compact proposals, without the data that the others hold: expansion of the block, and penalties for a wrong short form."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from consensus.block import block_digest, decode_block
from consensus.effects import SendBlock
from consensus.inputs import TickInput
from consensus.pbft.block_sync import FIRST_REQUEST_DELAY_SECONDS, RETRY_SECONDS
from protocol.messages import BlockBytes, GetBlock, Prepare, ProposeEnvelope
from tests.consensus.bench import BODY, Bench, ShortBench, follower, short_others


def test_a_leader_sends_the_short_form_and_stores_the_whole_block() -> None:
    bench = ShortBench(place=Bench().leader())
    bench.add_work(7)
    [message] = bench.sent(ProposeEnvelope)
    assert isinstance(message, ProposeEnvelope) and message.compact_body == hashlib.sha256(BODY).digest()
    [stored] = bench.journal.read_restart_state().blocks
    assert decode_block(stored.block).body == BODY


@pytest.fixture
def bench() -> ShortBench:
    return follower(ShortBench)


def test_a_block_whose_parts_are_here_is_prepared_and_stored_at_once(bench: ShortBench) -> None:
    bench.learn()
    block = bench.block(bench.leader(), BODY)
    bench.give(bench.leader(), bench.short(block))
    assert len(bench.sent_votes(Prepare)) == 1 and bench.journal.get_block(block_digest(block)) == block


def test_a_block_that_lacks_a_part_is_prepared_when_the_part_comes(bench: ShortBench) -> None:
    bench.give(bench.leader(), bench.short(bench.block(bench.leader(), BODY)))
    assert not bench.sent_votes(Prepare) and not bench.faults
    bench.learn()
    assert len(bench.sent_votes(Prepare)) == 1


def test_what_does_not_come_is_fetched_from_the_leader_and_then_from_those_that_prepared(bench: ShortBench) -> None:
    block = bench.block(bench.leader(), BODY)
    helper = short_others(bench)[0]
    bench.give(bench.leader(), bench.short(block))
    bench.give(helper, bench.prepare(helper, block))
    bench.step(TickInput(), wait=FIRST_REQUEST_DELAY_SECONDS / 2)
    assert not bench.asked()
    bench.step(TickInput(), wait=FIRST_REQUEST_DELAY_SECONDS)
    assert bench.asked() == [(bench.signers[bench.leader()].public,)]
    bench.step(TickInput(), wait=RETRY_SECONDS)
    assert bench.asked() == [(bench.signers[helper].public,)]
    bench.give(helper, BlockBytes(1, block))
    assert len(bench.sent_votes(Prepare)) == 1


def test_bytes_that_are_not_the_missing_block_change_nothing(bench: ShortBench) -> None:
    bench.give(bench.leader(), bench.short(bench.block(bench.leader(), BODY)))
    bench.give(short_others(bench)[0], BlockBytes(1, bench.block(bench.leader(), b"\x91\x08")))
    assert not bench.sent_votes(Prepare) and not bench.faults
    bench.give(short_others(bench)[0], BlockBytes(1, b"no block"))
    assert bench.faults == ["mistyped"]


def test_who_prepared_a_block_sends_its_bytes(bench: ShortBench) -> None:
    bench.learn()
    block = bench.block(bench.leader(), BODY)
    bench.give(bench.leader(), bench.short(block))
    turn = bench.give(short_others(bench)[0], GetBlock(1, block_digest(block)))
    assert turn.sends == (SendBlock(bench.signers[short_others(bench)[0]].public, 1, block_digest(block)),)


@pytest.mark.parametrize(("short", "reason"), [(b"x", "mistyped"), (hashlib.sha256(b"other").digest(), "wrong-block")])
def test_a_wrong_short_form_costs_who_sent_it_not_the_leader_and_the_right_one_still_counts(
    bench: ShortBench, short: bytes, reason: str
) -> None:
    bench.learn()
    bench.learn(b"other")
    bench.counter.known[hashlib.sha256(b"other").digest()] = b"other"  # type: ignore[attr-defined]
    right, liar = bench.short(bench.block(bench.leader(), BODY)), short_others(bench)[0]
    turn = bench.give(liar, dataclasses.replace(right, compact_body=short))
    assert [(fault.peer, fault.error.reason) for fault in turn.faults] == [(bench.signers[liar].public, reason)]
    bench.give(bench.leader(), right)
    assert len(bench.sent_votes(Prepare)) == 1 and not bench.faults


def test_a_header_that_the_leader_did_not_sign_is_refused(bench: ShortBench) -> None:
    message = bench.propose(bench.block(bench.leader(), BODY))
    other = bench.propose(bench.block(bench.leader(), b"\x91\x08"))
    bench.give(bench.leader(), dataclasses.replace(message, header=other.header))
    assert bench.faults == ["wrong-block"]


def test_a_proposal_is_repeated_in_our_own_words_and_only_when_its_block_is_here(bench: ShortBench) -> None:
    block = bench.block(bench.leader(), BODY)
    right = bench.short(block)
    bench.give(bench.leader(), dataclasses.replace(right, compact_body=b"x"))
    bench.connect(short_others(bench)[0])
    assert not bench.sent(ProposeEnvelope)
    bench.give(bench.leader(), BlockBytes(1, block))
    bench.connect(short_others(bench)[1])
    assert bench.sent(ProposeEnvelope) == [right]


def test_a_voter_without_the_block_commits_on_its_certificate(bench: ShortBench) -> None:
    block = bench.block(bench.leader(), BODY)
    bench.give(bench.leader(), bench.short(block))
    for voter in (bench.leader(), *short_others(bench)):
        bench.give(voter, bench.prepare(voter, block))
    assert [voted.slot[0] for voted in bench.journal.read_restart_state().votes] == ["commit"]
