"""Whole networks without faulty links: the cost of a killed leader, the leaders after it, and joining voters."""

from __future__ import annotations

from collections import defaultdict

import pytest

from consensus.block import decode_block
from consensus.inputs import ConnectedInput
from consensus.pbft.pacemaker import LEADER_LOST_SECONDS, VIEW_SECONDS_MIN
from protocol import codec
from protocol.messages import Commit, Decision, Status
from tests.consensus.counter import Counter
from tests.consensus.network import DELAY_SECONDS, Network, Node


def decide(network: Network, item: int) -> float:
    """Return the virtual seconds until all running voters have applied the item."""
    start = network.now
    network.inject(item)
    running = [node for node in network.nodes.values() if node.replica is not None]
    assert network.run_until(network.now + 60.0, lambda: all(item in node.counter.done for node in running))
    return network.now - start


def leader(network: Network) -> Node:
    return network.nodes[next(node.replica.leader for node in network.all if node.replica)]  # type: ignore[index]


def deciding_view(network: Network, height: int) -> int:
    node = next(node for node in network.all if node.replica)
    return codec.decode_message(node.journal.decided[height].certificate.vote, (Commit,)).view


def test_without_trouble_a_decision_takes_a_few_message_delays() -> None:
    assert decide(Network(), 1) < 10 * DELAY_SECONDS[1]


@pytest.fixture
def network() -> Network:
    return Network()


def test_an_idle_network_sends_nothing(network: Network) -> None:
    decide(network, 1)
    network.run_until(network.now + 5.0, lambda: False)
    sent = network.sent
    network.run_until(network.now + 500.0, lambda: False)
    assert network.sent == sent


def test_a_killed_leader_is_known_to_be_gone_and_is_skipped_afterwards(network: Network) -> None:
    decide(network, 1)
    network.crash(leader(network))
    assert LEADER_LOST_SECONDS < decide(network, 2) < LEADER_LOST_SECONDS + 0.5
    assert deciding_view(network, 2) == 1
    for item in range(3, 11):
        assert decide(network, item) < VIEW_SECONDS_MIN / 2 and deciding_view(network, item) == 0


def test_a_leader_that_is_known_to_be_gone_costs_messages_and_no_timer(network: Network) -> None:
    decide(network, 1)
    network.crash(leader(network))
    network.run_until(network.now + 5.0, lambda: False)
    assert decide(network, 2) < LEADER_LOST_SECONDS and deciding_view(network, 2) == 1


def test_a_voter_that_died_costs_one_view_of_its_own_and_never_another(network: Network) -> None:
    decide(network, 1)
    network.crash(leader(network))
    for item in range(2, 60):
        decide(network, item)
    assert [deciding_view(network, height) for height in range(1, 60)] == [0, 1, *[0] * 57]


def test_a_failed_leader_leads_again_after_two_rotations(network: Network) -> None:
    decide(network, 1)
    killed = leader(network)
    network.crash(killed)
    decide(network, 2)
    network.restart(killed)
    proposers = []
    for item in range(3, 20):
        decide(network, item)
        node = next(node for node in network.all if node is not killed)
        proposers.append(decode_block(node.journal.decided[len(node.journal.decided)].block).proposer)
    assert killed.key not in proposers[1:7] and killed.key in proposers[8:]


def test_a_restarted_voter_catches_up_to_the_same_root(network: Network) -> None:
    killed = network.all[2]
    decide(network, 1)
    network.crash(killed)
    for item in range(2, 60):
        decide(network, item)
    network.restart(killed)
    assert network.run_until(network.now + 5.0, lambda: killed.counter.height == network.all[0].counter.height)
    assert killed.counter.root == network.all[0].counter.root


def test_observers_follow_without_voting() -> None:
    network = Network(observers=1)
    observer = network.all[-1]
    decide(network, 1)
    assert observer.counter.done == {1} and observer.replica is not None and not observer.replica.is_voter


def test_the_leader_sends_members_the_block_and_strangers_the_news() -> None:
    network, told = Network(observers=1), defaultdict[bytes, list[object]](list)
    transmit, stranger, member = network._transmit, bytes(32), network.all[-1].key

    def look(sender: bytes, peer: bytes, message: object) -> None:
        told[peer].append(type(message))
        if peer != stranger:
            transmit(sender, peer, message)

    network._transmit = look  # type: ignore[method-assign]
    for node in network.all[:4]:
        assert node.replica is not None
        node.replica.handle_input(ConnectedInput(stranger), network.now)
    decide(network, 1)
    assert Decision in told[member] and Decision not in told[stranger] and Status in told[stranger]


def test_a_voter_joins_two_heights_after_the_block_that_admits_it() -> None:
    network = Network(observers=1)
    joiner = network.all[-1]
    decide(network, Counter.CHANGE + 4)
    for item, n in ((2, 4), (3, 5), (4, 5)):
        decide(network, item)
        certificate = network.all[0].journal.decided[item].certificate
        block = decode_block(network.all[0].journal.decided[item].block)
        assert block.voters == (network.all[0].counter.founders.hash if n == 4 else joiner.counter.voters[0].hash)
        assert (joiner.key in certificate.signatures) <= (n == 5)
    assert joiner.replica is not None and joiner.replica.is_voter


def test_a_joined_voter_counts() -> None:
    network = Network(observers=1)
    for item in (Counter.CHANGE + 4, 2, 3, 4):
        decide(network, item)
    network.crash(network.all[0])
    decide(network, 5)  # four of five are a quorum, so the new one must have signed
    assert network.all[-1].key in network.all[1].journal.decided[5].certificate.signatures


def test_a_dead_quorum_decides_nothing_and_goes_on_when_one_returns(network: Network) -> None:
    for node in network.all[:2]:
        network.crash(node)
    network.inject(1)
    assert not network.run_until(network.now + 120.0, lambda: bool(network.all[3].counter.done))
    network.restart(network.all[0])
    assert network.run_until(network.now + 70.0, lambda: bool(network.all[3].counter.done))
