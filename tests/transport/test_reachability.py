"""Reachability: a peer's belief that others can dial it, and its choice of peers to ask."""

from __future__ import annotations

import pytest

from protocol.errors import UserError
from protocol.identity import Identity
from protocol.messages import DialBack, ObservedAddress
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, linked, next_event, until
from transport.discovery.reachability import ANSWER_SECONDS, ASK_AGAIN_SECONDS, Reachability, ReachabilityState
from transport.network import DataReceived
from transport.wire.framing import Priority

HOME, LAN = "8.8.8.8:5001", "192.168.1.5:5001"
B, C, D = BOB.public, CAROL.public, DAVE.public


@pytest.fixture
def reach() -> Reachability:
    return Reachability(True, members=lambda peer: peer in (B, C, D))


def test_one_that_sees_it_is_not_believed_two_are_and_then_asked(reach: Reachability) -> None:
    reach.on_observed(B, HOME, False)
    assert reach.choose_dialers(0) == [] and reach.observed_host is None
    reach.on_observed(C, "8.8.8.8:7", False)
    assert (
        reach.observed_host == "8.8.8.8"
        and reach.choose_dialers(0) == sorted([B, C])
        and reach.state is ReachabilityState.UNKNOWN
    )
    reach.on_inbound_handshake(C)
    assert reach.state is ReachabilityState.DIRECT and reach.choose_dialers(10 * ASK_AGAIN_SECONDS) == []


def test_two_that_miss_it_make_it_relayed_and_they_are_asked_again_later(reach: Reachability) -> None:
    for peer in (B, C):
        reach.on_observed(peer, HOME, False)
    reach.choose_dialers(0)
    reach.on_dial_back_failed(B)
    assert reach.state is ReachabilityState.UNKNOWN, "one may lie"
    reach.on_dial_back_failed(C)
    assert reach.state is ReachabilityState.RELAYED and reach.choose_dialers(ASK_AGAIN_SECONDS - 1) == []
    assert len(reach.choose_dialers(ASK_AGAIN_SECONDS)) == 2
    reach.on_inbound_handshake(B)
    assert reach.state is ReachabilityState.DIRECT


def test_who_says_nothing_is_waited_for_before_another_is_asked(reach: Reachability) -> None:
    for peer in (B, C, D):
        reach.on_observed(peer, HOME, False)
    assert len(reach.choose_dialers(0)) == 2 and reach.choose_dialers(1) == []
    assert len(reach.choose_dialers(ANSWER_SECONDS)) == 1


def test_what_nobody_was_asked_is_not_heard(reach: Reachability) -> None:
    for peer in (B, C):
        reach.on_observed(peer, HOME, False)
        reach.on_dial_back_failed(peer)
    assert reach.state is ReachabilityState.UNKNOWN


def test_strangers_are_neither_believed_nor_asked(reach: Reachability) -> None:
    for peer in [Identity(bytes([n]) * 32).public for n in range(50, 54)]:
        reach.on_observed(peer, HOME, True)
        reach.on_inbound_handshake(peer)
    assert reach.observed_host is None and reach.state is ReachabilityState.UNKNOWN and reach.choose_dialers(0) == []


def test_to_be_reached_in_its_own_network_is_not_to_be_reached_by_everybody(reach: Reachability) -> None:
    members = [Identity(bytes([n]) * 32).public for n in range(50, 54)]
    reach = Reachability(True, members=lambda peer: True)
    for peer in members[:2]:
        reach.on_observed(peer, LAN, True)
    assert reach.state is ReachabilityState.DIRECT
    for peer in members[2:]:
        reach.on_observed(peer, HOME, False)
    assert reach.state is ReachabilityState.UNKNOWN and reach.observed_host == "8.8.8.8"


def test_another_host_and_a_lost_link_end_what_was_known(reach: Reachability) -> None:
    for peer in (B, C):
        reach.on_observed(peer, HOME, True)
    reach.on_observed(B, "9.9.9.9:1", False)
    assert reach.observed_host is None and reach.state is ReachabilityState.UNKNOWN
    reach.on_observed(C, "9.9.9.9:1", False)
    assert reach.state is ReachabilityState.UNKNOWN
    reach.retain_peers({B})
    assert reach.observed_host is None


def test_who_accepts_nothing_is_relayed_and_asks_nobody() -> None:
    reach = Reachability(False, members=lambda peer: True)
    for peer in (B, C):
        reach.on_observed(peer, HOME, False)
    assert reach.state is ReachabilityState.RELAYED and reach.choose_dialers(0) == []


@pytest.mark.parametrize("address", ["nowhere", "victim.example:443"])
def test_an_address_that_is_none_is_refused_and_so_is_a_name(reach: Reachability, address: str) -> None:
    with pytest.raises(UserError):
        reach.on_observed(B, address, False)


@pytest.mark.parametrize("liars_first", [True, False])
def test_two_that_lie_do_not_outvote_those_who_do_not(liars_first: bool) -> None:
    members = [Identity(bytes([n]) * 32).public for n in range(50, 55)]
    reach = Reachability(True, members=lambda peer: True)
    said = [(peer, "9.9.9.9:1" if number < 2 else HOME) for number, peer in enumerate(members)]
    for peer, address in said if liars_first else said[::-1]:
        reach.on_observed(peer, address, False)
    assert reach.observed_host == "8.8.8.8" and set(reach.choose_dialers(0)) <= set(members[2:])


# Real sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.real("sockets")
async def test_a_peer_that_dials_everybody_is_dialed_back_and_knows_that_it_is_reached(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.start(ALICE, bootstrap=[]), await tcp.start(BOB, bootstrap=[])
    carol = await tcp.start(CAROL, bootstrap=[alice.address, bob.address])
    await linked(carol, alice, bob)
    await until(lambda: carol.reachability is ReachabilityState.DIRECT)
    assert not carol.refusal_counts()


@pytest.mark.real("sockets")
async def test_a_peer_that_nobody_reaches_knows_that_it_is_not(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.start(ALICE, bootstrap=[]), await tcp.start(BOB, bootstrap=[])
    carol = await tcp.start(CAROL, bootstrap=[alice.address, bob.address], advertise=["127.0.0.1:1"])
    await linked(carol, alice, bob)
    await until(lambda: carol.reachability is ReachabilityState.RELAYED)


@pytest.mark.real("sockets")
async def test_a_dial_back_goes_to_the_askers_host_alone_and_not_often(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = await tcp.start(ALICE, bootstrap=[])
    dialed: list[str] = []

    async def dial(peer: bytes, address: str) -> bool:
        dialed.append(address)
        return True

    monkeypatch.setattr(alice._discovery, "_dial_back", dial)
    bob = await tcp.start(BOB)
    await linked(alice, bob)
    for port in (22, 25, 80):
        bob._links[alice.me].queue_message(DialBack(port), Priority.CONTROL)
    await until(lambda: dialed and alice.refusal_counts().get("too-often") == 2)
    assert dialed == ["127.0.0.1:22"]


@pytest.mark.real("sockets")
async def test_strangers_get_no_dial_back(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[], members=lambda peer: False)
    bob = await tcp.start(BOB)
    await linked(alice, bob)
    bob._links[alice.me].queue_message(DialBack(22), Priority.CONTROL)
    assert bob.send(alice.me, b"later")  # the same priority, so it comes after
    await next_event(alice, DataReceived)
    assert not alice._discovery._dialed_back


@pytest.mark.real("sockets")
async def test_what_comes_over_a_relay_says_nothing_of_where_a_peer_is_seen(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.pair()
    await until(lambda: bob.me in alice._discovery._reachability._seen)
    alice._links[bob.me].remote = None
    bob._links[alice.me].queue_message(ObservedAddress(HOME), Priority.CONTROL)
    assert bob.send(alice.me, b"later")  # the same priority, so it comes after
    await next_event(alice, DataReceived)
    assert alice._discovery._reachability._seen == {bob.me: "127.0.0.1"}
