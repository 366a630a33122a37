"""What a hostile reader found: inputs in one turn that made honest peers drop each other, and messages that cost too much."""

from __future__ import annotations

import dataclasses

from consensus.effects import SendMessage
from consensus.inputs import MessageInput
from consensus.pbft.block_sync import RESPONSE_BURST_MAX, FutureHeightMessages
from consensus.voter_set import verify_timeout_certificate
from protocol.identity import Signed
from protocol.messages import NO_VIEW, Prepare, Prepared, Propose, Status, Timeout, TimeoutCertificate, ViewEnded
from tests.consensus.bench import BODY, CHAIN_ID, Bench, ShortBench, follower, others, short_others
from tests.sim.keys import FastVerifier

JUNK = b"j" * (1 << 20)


def in_view_one(n: int = 4) -> Bench:
    bench = follower(n=n, views=(0, 1, 3))
    for voter in others(bench):
        bench.give(voter, bench.timed_out(voter))
    assert bench.replica.view == 1
    return bench


def test_a_certificate_of_a_later_view_in_the_same_turn_does_not_spoil_the_end_of_a_view_that_is_sent() -> None:
    bench = in_view_one(6)
    asker, *signers = others(bench)
    certificate = bench.certificate(Prepare, bench.block(bench.leader(3)), 3, tuple(signers))
    for message in (Prepared(certificate), Status(1, 0)):
        bench.replica.handle_input(MessageInput(bench.signers[asker].public, message), bench.now)
    turn = bench.replica.finish_step(bench.now)
    for send in turn.sends:  # whoever finds one of these wrong drops us
        if isinstance(send, SendMessage) and isinstance(send.message, ViewEnded):
            verify_timeout_certificate(send.message.certificate, 1, 0, bench.voters, CHAIN_ID, FastVerifier())


def test_a_voter_that_keeps_saying_that_it_lags_is_not_told_everything_each_time() -> None:
    bench = in_view_one()
    told = 0
    for _ in range(4 * int(RESPONSE_BURST_MAX)):
        bench.give(others(bench)[0], Status(1, 0))
        told += bool(bench.turn.sends)
    assert 0 < told <= RESPONSE_BURST_MAX


def test_timeouts_as_large_as_a_message_are_refused_before_they_are_kept_for_a_later_height() -> None:
    bench = follower(views=(0, 1, 3))
    voter, height = others(bench)[0], bench.replica.height + 1
    first = bench.sign(voter, Timeout(bench.voters.hash, height, 0, NO_VIEW, None))
    certificate = TimeoutCertificate((first, *(Signed(JUNK, signer.public, bytes(64)) for signer in bench.signers)), None)
    proposed = bench.propose(bench.block(bench.leader()))
    propose = bench.sign(voter, Propose(bench.voters.hash, height, 1, bytes(32)))
    for message in (ViewEnded(certificate), dataclasses.replace(proposed, propose=propose, justification=certificate)):
        bench.give(voter, message)
        assert bench.faults == ["oversized"]
    assert bench.replica._future == FutureHeightMessages()


def test_the_leaders_own_short_form_replaces_one_that_somebody_else_gave_for_it() -> None:
    bench = follower(ShortBench)
    liar = short_others(bench)[0]
    block = bench.block(bench.leader(), BODY)
    right = bench.short(block)
    bench.give(liar, dataclasses.replace(right, compact_body=b"s" * 32))  # a digest that nobody knows
    bench.learn()
    assert not bench.sent_votes(Prepare)
    bench.give(bench.leader(), right)
    assert bench.sent_votes(Prepare) and not bench.faults
