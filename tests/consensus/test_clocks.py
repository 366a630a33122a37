"""What blocks may say about the time, and voters whose clocks are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from consensus.block import decode_block, encode_block
from consensus.inputs import TickInput
from protocol.limits import CLOCK_AHEAD_SECONDS
from protocol.messages import Commit, Decision, Prepare, TimeoutEnvelope
from tests.consensus.bench import Bench
from tests.consensus.network import Network, Node

HEIGHT_SECONDS = 2.5  # a view that a dead leader costs, and the one after it


def follower(n: int = 4) -> Bench:
    return Bench(n, place=next(place for place in range(n) if place != Bench(n).leader()))


def others(bench: Bench) -> list[int]:
    return [place for place in range(bench.n) if place != bench.place]


def dated(bench: Bench, time_ms: float) -> bytes:
    block = decode_block(bench.block(bench.leader(), bytes([0x91, bench.replica.height])))
    return encode_block(dataclasses.replace(block, time_ms=int(time_ms)))


def ahead(bench: Bench, seconds: float) -> bytes:
    return dated(bench, (bench.now + seconds) * 1_000)


def test_a_proposal_from_the_future_is_judged_again_when_its_time_has_come() -> None:
    bench = follower()
    bench.give(bench.leader(), bench.propose(ahead(bench, CLOCK_AHEAD_SECONDS + 0.4)))
    assert not bench.sent_votes(Prepare) and bench.replica.block_refusal
    assert bench.turn.deadline is not None and bench.turn.deadline - bench.now < 0.41
    bench.step(TickInput(), wait=0.39)
    assert not bench.sent_votes(Prepare)
    bench.step(TickInput(), wait=0.02)
    assert len(bench.sent_votes(Prepare)) == 1 and bench.replica.block_refusal is None


@pytest.mark.parametrize("n", [4, 7])
def test_a_proposal_from_the_future_is_prepared_once_an_honest_voter_has_done_so(n: int) -> None:
    """f of those that did may be liars, and may say so as often as they like."""
    bench = follower(n)
    block = ahead(bench, 3_600.0)
    prepared = others(bench)[: bench.voters.faults_tolerated + 1]
    bench.give(bench.leader(), bench.propose(block))
    for voter in [*prepared[:-1], *prepared[:-1]]:
        bench.give(voter, bench.prepare(voter, block))
        bench.give(voter, bench.prepare(voter, ahead(bench, 3_601.0)))
        bench.step(TickInput())
        assert not bench.sent_votes(Prepare)
    bench.give(prepared[-1], bench.prepare(prepared[-1], block))
    assert len(bench.sent_votes(Prepare)) == 1 and bench.replica.block_refusal is None


def test_who_gave_up_the_view_still_waits_for_the_block_s_time() -> None:
    """It may prepare nothing in it, but what it waits for has not come."""
    bench = follower()
    block = ahead(bench, 3_600.0)
    bench.give(bench.leader(), bench.propose(block))
    assert bench.turn.deadline is not None
    bench.step(TickInput(), wait=bench.turn.deadline - bench.now)
    assert bench.sent(TimeoutEnvelope)
    for voter in others(bench)[:2]:
        bench.give(voter, bench.prepare(voter, block))
    assert not bench.sent_votes(Prepare) and bench.replica.awaits_decision


def test_prepares_that_were_here_before_the_proposal_count_as_well() -> None:
    bench = follower()
    block = ahead(bench, 3_600.0)
    for voter in others(bench)[:2]:
        bench.give(voter, bench.prepare(voter, block))
    bench.give(bench.leader(), bench.propose(block))
    assert len(bench.sent_votes(Prepare)) == 1


@pytest.mark.parametrize(("later_ms", "prepared"), [(0, 0), (1, 1), (2, 0)])
def test_behind_a_block_from_the_future_the_next_may_follow_at_once_but_not_later(later_ms: int, prepared: int) -> None:
    """Else nothing would be decided until that time has come; and liars would move the time on with every block."""
    bench = follower()
    late = ahead(bench, 3_600.0)
    turn = bench.give(others(bench)[0], Decision(late, bench.certificate(Commit, late, 0, tuple(others(bench)))))
    bench.apply(turn.decided_blocks[0])
    assert bench.leader() != bench.place
    bench.give(bench.leader(), bench.propose(dated(bench, decode_block(late).time_ms + later_ms)))
    assert len(bench.sent_votes(Prepare)) == prepared


def heights(network: Network, count: int) -> list[float]:
    """Seconds that so many heights take, one item each, at everybody that is there."""
    taken = []
    for _ in range(count):
        there = [node for node in network.all if node.replica is not None]
        height, began = max(len(node.journal.decided) for node in there) + 1, network.now
        network.inject(1_000 + height)
        assert network.run_until(began + 4_000.0, are_at(there, height)), height
        taken.append(network.now - began)
    return taken


def are_at(nodes: list[Node], height: int) -> Callable[[], bool]:
    return lambda: all(node.counter.height >= height for node in nodes)


@pytest.mark.parametrize("behind", [10.0, 3_600.0])
def test_one_dead_and_one_clock_behind_cost_no_height_its_time(behind: float) -> None:
    network = Network()
    network.crash(network.all[3])
    for _ in range(2):
        network.crash(network.all[0])
        network.all[0].offset = -behind  # a clock is read at the start
        network.restart(network.all[0])
        assert max(heights(network, 12)) < HEIGHT_SECONDS


def test_clocks_that_were_all_ahead_and_were_set_right_stop_nothing() -> None:
    network = Network()
    for offset in (7_200.0, 0.0):
        for node in network.all:
            network.crash(node)
            node.offset = offset
        for node in network.all:
            network.restart(node)
        assert max(heights(network, 6)) < HEIGHT_SECONDS


@pytest.mark.parametrize("n", [2, 3])
def test_where_nobody_lies_one_clock_that_is_ahead_moves_no_other(n: int) -> None:
    network = Network(n)
    network.crash(network.all[0])
    network.all[0].offset = 3_600.0
    network.restart(network.all[0])
    heights(network, 3 * n)
    times = [decided.decode().time_ms for decided in network.all[1].journal.decided.values()]
    assert max(times) < (network.now + CLOCK_AHEAD_SECONDS) * 1_000
