"""Views continue while there is something to decide, for any distances of the voters, and rest otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from consensus.block import Block, decode_block, encode_block, encode_header, header_digest, make_header
from consensus.inputs import AgreementMessage, TickInput, WorkChangedInput
from consensus.pbft import replica_state
from consensus.pbft.pacemaker import REPEAT_SECONDS_MAX, VIEW_SECONDS_MAX, VIEW_SECONDS_MIN
from protocol import codec
from protocol.identity import sign_message
from protocol.limits import CLOCK_AHEAD_SECONDS
from protocol.messages import NO_VIEW, Commit, Decision, Prepare, Propose, ProposeEnvelope, Timeout, TimeoutEnvelope, Vote
from tests.consensus.bench import Bench, follower, others
from tests.consensus.network import CHAIN_ID, Network, Node

FAR_AHEAD = 2**50
REPEATED_MAX = 8  # a proposal, two certificates, two timeouts, two votes and a Status


def leader_and_others(network: Network) -> tuple[Node, list[Node]]:
    assert network.all[0].replica is not None
    leader = network.nodes[network.all[0].replica.leader or b""]
    return leader, [node for node in network.all if node is not leader]


def views(nodes: list[Node]) -> list[int]:
    return [node.replica.view for node in nodes if node.replica is not None]


def have_decided(nodes: list[Node]) -> Callable[[], bool]:
    return lambda: all(node.journal.decided for node in nodes)


def let_through(network: Network, passes: Callable[[bytes, bytes, AgreementMessage], bool]) -> Callable[[], None]:
    """Deliver only the messages that pass, until the returned function is called."""
    transmit = network._transmit

    def filtered(sender: bytes, peer: bytes, message: AgreementMessage) -> None:
        if passes(sender, peer, message):
            transmit(sender, peer, message)

    def heal() -> None:
        network._transmit = transmit  # type: ignore[method-assign]

    network._transmit = filtered  # type: ignore[method-assign]
    return heal


def give_up(network: Network, liar: Node, view: int, to: list[Node]) -> None:
    assert liar.replica is not None and liar.replica._book is not None
    timeout = Timeout(liar.replica._book.voters.hash, liar.replica.height, view, NO_VIEW, None)
    for node in to:
        network._transmit(liar.key, node.key, TimeoutEnvelope(sign_message(liar.signer, CHAIN_ID, timeout), None))


def offer(network: Network, liar: Node, to: list[Node], items: list[int] | None, **changes: object) -> None:
    """Offer a block of view 0 with these changes. Nobody gets the body if `items` is None."""
    assert liar.replica is not None
    body = codec.encode(items or [])
    block: Block = liar.replica._chain._envelope(liar.key, int(network.now * 1_000), None, body)
    header = encode_header(make_header(dataclasses.replace(block, **changes)))  # type: ignore[arg-type]
    propose = Propose(block.voters, block.height, 0, header_digest(header))
    short = codec.encode("nothing") if items is None else body
    for node in to:
        node.counter.expand_body = lambda short: None if short == codec.encode("nothing") else short  # type: ignore[method-assign]
        network._transmit(liar.key, node.key, ProposeEnvelope(sign_message(liar.signer, CHAIN_ID, propose), header, short, None))


# Far apart -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
def test_voters_that_are_more_views_apart_than_statements_are_kept_meet_and_decide(
    restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_state, "VIEWS_AHEAD_MAX", 3)
    network = Network()
    first, second, third, away = network.all
    heal = let_through(network, lambda *of: away.key not in of[:2] and not isinstance(of[2], ProposeEnvelope | Vote))
    network.inject(1)
    assert network.run_until(network.now + 3_600.0, lambda: min(views([first, second, third])) >= 10)
    network.crash(first)
    heal()
    for node in (second, third):
        if restarted:  # the certificates of ended views are forgotten
            network.crash(node)
            network.restart(node)
    assert views([away]) == [0]
    assert network.run_until(network.now + 4 * VIEW_SECONDS_MAX, have_decided([second, third, away]))


@pytest.fixture
def network() -> Network:
    """Return a network that has been idle for a second."""
    made = Network()
    made.run_until(made.now + 1.0, lambda: False)
    return made


def test_a_liar_that_gives_up_views_to_come_takes_nobody_there(network: Network) -> None:
    leader, others = leader_and_others(network)
    liar, honest = others[0], [leader, *others[1:]]
    for view in (FAR_AHEAD, FAR_AHEAD + 1, 2**53 - 1):
        give_up(network, liar, view, honest)
    network.crash(liar)
    network.inject(1)
    assert network.run_until(network.now + 1.0, have_decided(honest)) and views(honest) == [0, 0, 0]


# At rest -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "changes", "most"),
    [
        ([], {"state_root": bytes(32)}, 0),  # refused for good
        (None, {}, 1),  # its body never comes
        ([], {"time_ms": 10**13}, 1),  # refused until a time that will not come
        ([7], {}, 1),  # valid, and prepared
    ],
    ids=["refused", "without a body", "from the future", "sound"],
)
def test_a_leader_that_shows_one_voter_a_block_and_gives_up_every_view_leaves_an_idle_network_at_rest(
    network: Network, items: list[int] | None, changes: dict[str, object], most: int
) -> None:
    liar, honest = leader_and_others(network)
    offer(network, liar, honest[:1], items, **changes)
    for view in (0, 1, FAR_AHEAD):
        give_up(network, liar, view, honest)
    network.run_until(network.now + 0.1, lambda: False)
    network.crash(liar)
    network.run_until(network.now + 500.0, lambda: False)
    before = network.sent
    network.run_until(network.now + 500.0, lambda: False)
    assert max(views(honest)) <= most
    links, repeats = len(honest) * (len(network.all) - 1), 500.0 / REPEAT_SECONDS_MAX + 1
    assert network.sent - before <= most * REPEATED_MAX * links * repeats, "where no view was given up nothing is said at all"
    network.inject(1)
    assert network.run_until(network.now + 4 * VIEW_SECONDS_MIN, have_decided(honest))


@pytest.mark.parametrize(("items", "changes"), [(None, {}), ([], {"time_ms": 10**13})], ids=["body", "time"])
def test_a_block_whose_body_or_time_never_comes_is_given_up_even_if_nothing_else_is_due(
    network: Network, items: list[int] | None, changes: dict[str, object]
) -> None:
    liar, honest = leader_and_others(network)
    offer(network, liar, honest, items, **changes)
    network.run_until(network.now + 100.0, lambda: False)
    assert views(honest) == [1, 1, 1]


@pytest.mark.parametrize("told", [1, 3], ids=["one", "all"])
def test_what_was_prepared_is_decided_although_nobody_else_has_work(network: Network, told: int) -> None:
    """One voter or all of them know a certificate, and the proposer of the block is absent."""
    leader, others = leader_and_others(network)
    knowing = {node.key for node in others[:told]}

    def passes(sender: bytes, peer: bytes, message: AgreementMessage) -> bool:
        if not isinstance(message, Vote):
            return isinstance(message, ProposeEnvelope)
        is_prepare = codec.unpack(message.vote.body, len(message.vote.body))[0] == Prepare.TAG
        return is_prepare and peer in knowing

    heal = let_through(network, passes)
    leader.counter.add(1)
    network._give(leader, WorkChangedInput())
    network.run_until(network.now + 0.2, lambda: False)
    assert [
        node.replica._book.highest_prepare_certificate is not None for node in others if node.replica and node.replica._book
    ].count(True) == told
    network.crash(leader)
    heal()
    # The next leader's proposals are lost.
    heal = let_through(network, lambda _, __, message: not isinstance(message, ProposeEnvelope))
    assert network.run_until(network.now + 4 * VIEW_SECONDS_MIN, lambda: min(views(others)) == 2)
    heal()
    assert not any(node.counter.pending for node in others)
    assert network.run_until(network.now + 4 * VIEW_SECONDS_MIN, have_decided(others))


def test_idle_time_is_nobodys_time_to_decide(network: Network) -> None:
    """Messages of others, also repeated ones, start no view timer. It would expire before work comes."""
    liar, honest = leader_and_others(network)
    give_up(network, liar, 0, honest)
    offer(network, liar, honest[:1], None)
    network.run_until(network.now + 600.0, lambda: False)
    before = views(honest)
    network.inject(1)
    assert network.run_until(network.now + 1.0, have_decided(honest))
    assert before == [1, 1, 1] and all(node.replica is not None for node in honest)
    for node in honest:
        assert node.replica is not None and math.isclose(node.replica._pacemaker.view_seconds(), VIEW_SECONDS_MIN)


# Clocks ---------------------------------------------------------------------------------------------------------------


HEIGHT_SECONDS = 2.5  # a view that a dead leader costs, and the one after it


def dated(bench: Bench, time_ms: float) -> bytes:
    block = decode_block(bench.block(bench.leader(), bytes([0x91, bench.replica.height])))
    return encode_block(dataclasses.replace(block, time_ms=int(time_ms)))


def ahead(bench: Bench, seconds: float) -> bytes:
    return dated(bench, (bench.now + seconds) * 1_000)


@pytest.fixture
def bench() -> Bench:
    return follower(views=(0,))


def test_a_proposal_from_the_future_is_judged_again_when_its_time_has_come(bench: Bench) -> None:
    bench.give(bench.leader(), bench.propose(ahead(bench, CLOCK_AHEAD_SECONDS + 0.4)))
    assert not bench.sent_votes(Prepare) and bench.replica.block_refusal
    assert bench.turn.deadline is not None and bench.turn.deadline - bench.now < 0.41
    bench.step(TickInput(), wait=0.39)
    assert not bench.sent_votes(Prepare)
    bench.step(TickInput(), wait=0.02)
    assert len(bench.sent_votes(Prepare)) == 1 and bench.replica.block_refusal is None


@pytest.mark.parametrize("n", [4, 7])
def test_a_proposal_from_the_future_is_prepared_once_an_honest_voter_has_done_so(n: int) -> None:
    """f of the preparing voters may be liars, which may repeat their prepares at will."""
    bench = follower(n=n, views=(0,))
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


def test_who_gave_up_the_view_still_waits_for_the_block_s_time(bench: Bench) -> None:
    """It may prepare nothing in the view, but the awaited time has not come."""
    block = ahead(bench, 3_600.0)
    bench.give(bench.leader(), bench.propose(block))
    assert bench.turn.deadline is not None
    bench.step(TickInput(), wait=bench.turn.deadline - bench.now)
    assert bench.sent(TimeoutEnvelope)
    for voter in others(bench)[:2]:
        bench.give(voter, bench.prepare(voter, block))
    assert not bench.sent_votes(Prepare) and bench.replica.awaits_decision


def test_prepares_that_were_here_before_the_proposal_count_as_well(bench: Bench) -> None:
    block = ahead(bench, 3_600.0)
    for voter in others(bench)[:2]:
        bench.give(voter, bench.prepare(voter, block))
    bench.give(bench.leader(), bench.propose(block))
    assert len(bench.sent_votes(Prepare)) == 1


@pytest.mark.parametrize(("later_ms", "prepared"), [(0, 0), (1, 1), (2, 0)])
def test_behind_a_block_from_the_future_the_next_may_follow_at_once_but_not_later(
    bench: Bench, later_ms: int, prepared: int
) -> None:
    """Otherwise nothing would be decided until that time, and liars would advance the time with every block."""
    late = ahead(bench, 3_600.0)
    turn = bench.give(others(bench)[0], Decision(late, bench.certificate(Commit, late, 0, tuple(others(bench)))))
    bench.apply(turn.decided_blocks[0])
    assert bench.leader() != bench.place
    bench.give(bench.leader(), bench.propose(dated(bench, decode_block(late).time_ms + later_ms)))
    assert len(bench.sent_votes(Prepare)) == prepared


def heights(network: Network, count: int) -> list[float]:
    """Return the seconds of each of `count` heights, with one item each, until all running voters have decided."""
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
