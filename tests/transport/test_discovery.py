"""How peers find one another over real sockets, and what a hostile peer gets by what it passes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from protocol.addresses import Scope
from protocol.identity import Identity, sign
from protocol.messages import AgedRecord, GetRecords, PeerRecord, Records
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CAROL, CHAIN, DAVE, linked, until
from tests.transport.test_swarm import free_address
from transport import hub
from transport.framing import Priority

DEADLINE_SECONDS = 20.0
EVE = Identity(bytes([9]) * 32)


def record(of: Identity, *addresses: str, sequence: int = 1) -> AgedRecord:
    return AgedRecord(sign(of, CHAIN, PeerRecord(sequence, Scope.LOOPBACK, addresses, ())), 0)


async def test_two_groups_find_each_other_by_one_who_knows_one_of_each(tcp: SwarmWorld) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        alice = await tcp.start(ALICE, bootstrap=[])
        bob = await tcp.start(BOB, bootstrap=[alice.address])
        carol = await tcp.start(CAROL, bootstrap=[])
        dave = await tcp.start(DAVE, bootstrap=[carol.address])
        await linked(alice, bob)
        await linked(carol, dave)
        eve = await tcp.start(EVE, bootstrap=[bob.address, dave.address])
        await linked(alice, bob, carol, dave, eve)


async def test_the_record_of_somebody_who_is_away_is_passed_on_by_those_who_only_heard_of_it(tcp: SwarmWorld) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        alice = await tcp.start(ALICE, bootstrap=[])
        bob = await tcp.start(BOB, bootstrap=[alice.address])
        await linked(alice, bob)
        bob._links[alice.me].post(Records((record(EVE, free_address()),)), Priority.CONTROL)
        await until(lambda: alice.records.knows(EVE.public))
        tcp.stop(bob)
        carol = await tcp.start(CAROL, bootstrap=[alice.address])
        await until(lambda: carol.records.knows(EVE.public))


async def test_near_addresses_are_not_told_to_peers_from_elsewhere(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.Link, "reach", Scope.PUBLIC)
    with trio.fail_after(DEADLINE_SECONDS):
        alice = await tcp.start(ALICE, bootstrap=[], advertise=["alice.invalid:7700", "10.0.0.7:7700", "127.0.0.1:7700"])
        bob = await tcp.start(BOB, bootstrap=[alice.address])
        await until(lambda: bob.records.knows(alice.me))
        assert bob.records.addresses(alice.me) == ("alice.invalid:7700",)
        assert not alice.records.knows(bob.me), "it is reached on this machine alone"


@pytest.mark.parametrize("claims", [EVE, CAROL], ids=["who is nowhere", "who is linked"])
async def test_who_claims_the_address_of_another_does_not_hide_it(tcp: SwarmWorld, claims: Identity) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        alice = await tcp.start(ALICE, bootstrap=[])
        bob, carol = await tcp.start(BOB, bootstrap=[]), await tcp.start(CAROL, bootstrap=[])
        await carol.connect(bob.address)
        both = record(claims, alice.address, sequence=9), record(ALICE, alice.address)
        carol._links[bob.me].post(Records(both), Priority.CONTROL)
        await linked(bob, alice)


async def test_a_peer_that_starts_again_elsewhere_is_found_there_though_others_hold_a_newer_record(tcp: SwarmWorld) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        bob = await tcp.start(BOB, bootstrap=[])
        carol = await tcp.start(CAROL, bootstrap=[bob.address])
        await linked(bob, carol)
        old = record(ALICE, free_address(), sequence=7)
        carol._links[bob.me].post(Records((old,)), Priority.CONTROL)
        await until(lambda: bob.records.knows(ALICE.public))
        alice = await tcp.start(ALICE, bootstrap=[bob.address])
        await until(lambda: bob.records.addresses(alice.me) == (alice.address,))
        await linked(alice, bob, carol)


async def test_whoever_sends_an_old_record_of_its_own_is_told_the_newer_one_and_signs_above_it(tcp: SwarmWorld) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        alice, bob = await tcp.pair()
        await until(lambda: alice.records.knows(bob.me))
        alice.records.take(record(BOB, free_address(), sequence=7), Scope.LOOPBACK, trio.current_time())
        bob._links[alice.me].post(Records((record(BOB, free_address(), sequence=0),)), Priority.CONTROL)
        await until(lambda: alice.records.addresses(bob.me) == (bob.address,))


async def test_a_forged_record_costs_its_carrier_the_link(tcp: SwarmWorld) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        alice, bob = await tcp.pair()
        forged = replace(record(EVE, "127.0.0.1:1").record, signer=CAROL.public)
        bob._links[alice.me].post(Records((AgedRecord(forged, 0),)), Priority.CONTROL)
        await until(lambda: alice.refused().get("bad-signature") == 1 and bob.me not in alice.connected())
        assert not alice.records.knows(CAROL.public)


async def test_all_records_are_not_sent_as_often_as_somebody_asks(tcp: SwarmWorld) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        alice, bob = await tcp.pair()
        for _ in range(10):
            bob._links[alice.me].post(GetRecords(), Priority.CONTROL)
        await until(lambda: alice.refused().get("too-often", 0) >= 9)
        assert bob.me in alice.connected()
