"""Discovery of peers over real sockets, and the limits of the damage by a peer that passes on false addresses."""

from __future__ import annotations

import math
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from protocol.addresses import AddressScope, parse_address
from protocol.identity import Identity, sign_message
from protocol.limits import ADVERTISED_MAX, PEER_RECORDS_MAX
from protocol.messages import AgedPeerRecord, GetPeerRecords, PeerRecord, PeerRecords
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CAROL, CHAIN, DAVE, DEADLINE_SECONDS, linked, next_event, until
from tests.transport.test_swarm import free_address
from transport import dialer
from transport.connections import connection_manager
from transport.discovery import address_book
from transport.discovery.address_book import SOURCE_BOOK_MAX, SOURCE_DIALS_MAX, STRANGERS_BOOK_MAX
from transport.discovery.peer_records import CHANGES_BURST
from transport.network import DataReceived, DuplicateIdentity
from transport.peer_policy import PeerClass
from transport.wire.framing import Priority

EVE = Identity(bytes([9]) * 32)


def record(of: Identity, *addresses: str, sequence: int = 1, scope: AddressScope = AddressScope.LOOPBACK) -> AgedPeerRecord:
    return AgedPeerRecord(sign_message(of, CHAIN, PeerRecord(sequence, scope, addresses, ())), 0)


@pytest.mark.real("sockets")
async def test_two_groups_find_each_other_by_one_who_knows_one_of_each(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[])
    bob = await tcp.start(BOB, bootstrap=[alice.address])
    carol = await tcp.start(CAROL, bootstrap=[])
    dave = await tcp.start(DAVE, bootstrap=[carol.address])
    await linked(alice, bob)
    await linked(carol, dave)
    eve = await tcp.start(EVE, bootstrap=[bob.address, dave.address])
    await linked(alice, bob, carol, dave, eve)


@pytest.mark.real("sockets")
async def test_the_record_of_somebody_who_is_away_is_passed_on_by_those_who_only_heard_of_it(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[])
    bob = await tcp.join(BOB, alice)
    bob._links[alice.me].queue_message(PeerRecords((record(EVE, free_address()),)), Priority.CONTROL)
    await until(lambda: alice.records.has_records_of(EVE.public))
    tcp.stop(bob)
    carol = await tcp.start(CAROL, bootstrap=[alice.address])
    await until(lambda: carol.records.has_records_of(EVE.public))


@pytest.mark.real("sockets")
async def test_near_addresses_are_not_told_to_peers_from_elsewhere(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager.PeerLink, "address_scope", AddressScope.PUBLIC)
    alice = await tcp.start(ALICE, bootstrap=[], advertise=["alice.invalid:7700", "10.0.0.7:7700", "127.0.0.1:7700"])
    bob = await tcp.start(BOB, bootstrap=[alice.address])
    await until(lambda: bob.records.has_records_of(alice.me))
    assert bob.records.addresses(alice.me) == ("alice.invalid:7700",)
    assert not alice.records.has_records_of(bob.me), "it is reached on this machine alone"


@pytest.mark.real("sockets")
@pytest.mark.parametrize("claims", [EVE, CAROL], ids=["who is nowhere", "who is linked"])
async def test_who_claims_the_address_of_another_does_not_hide_it(tcp: SwarmWorld, claims: Identity) -> None:
    alice = await tcp.start(ALICE, bootstrap=[])
    bob, carol = await tcp.start(BOB, bootstrap=[]), await tcp.start(CAROL, bootstrap=[])
    await carol.connect(bob.address)
    both = record(claims, alice.address, sequence=9), record(ALICE, alice.address)
    carol._links[bob.me].queue_message(PeerRecords(both), Priority.CONTROL)
    await linked(bob, alice)


@pytest.mark.real("sockets")
async def test_a_peer_that_starts_again_elsewhere_is_found_there_though_others_hold_a_newer_record(tcp: SwarmWorld) -> None:
    bob = await tcp.start(BOB, bootstrap=[])
    carol = await tcp.join(CAROL, bob)
    carol._links[bob.me].queue_message(PeerRecords((record(ALICE, free_address(), sequence=7),)), Priority.CONTROL)
    await until(lambda: bob.records.has_records_of(ALICE.public))
    alice = await tcp.start(ALICE, bootstrap=[bob.address])
    await until(lambda: bob.records.addresses(alice.me) == (alice.address,))
    await linked(alice, bob, carol)


@pytest.mark.real("sockets")
async def test_whoever_sends_an_old_record_of_its_own_is_told_the_newer_one_and_signs_above_it(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.pair()
    await until(lambda: alice.records.has_records_of(bob.me))
    alice.records.accept_record(record(BOB, free_address(), sequence=7), AddressScope.LOOPBACK, trio.current_time())
    bob._links[alice.me].queue_message(PeerRecords((record(BOB, free_address(), sequence=0),)), Priority.CONTROL)
    await until(lambda: alice.records.addresses(bob.me) == (bob.address,))


@pytest.mark.real("sockets")
async def test_a_forged_record_costs_its_carrier_the_link(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.pair()
    forged = replace(record(EVE, "127.0.0.1:1").record, signer=CAROL.public)
    bob._links[alice.me].queue_message(PeerRecords((AgedPeerRecord(forged, 0),)), Priority.CONTROL)
    await until(lambda: alice.refusal_counts().get("bad-signature") == 1 and bob.me not in alice.connected_peers())
    assert not alice.records.has_records_of(CAROL.public)


@pytest.mark.real("sockets")
async def test_all_records_are_not_sent_as_often_as_somebody_asks(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.pair()
    for _ in range(10):
        bob._links[alice.me].queue_message(GetPeerRecords(), Priority.CONTROL)
    await until(lambda: alice.refusal_counts().get("too-often", 0) >= 9)
    assert bob.me in alice.connected_peers()


# False addresses ------------------------------------------------------------------------------------------------------


def standing(**named: PeerClass) -> Callable[[bytes], PeerClass]:
    keys = {identity.public: name for name, identity in {"alice": ALICE, "bob": BOB, "carol": CAROL, "eve": EVE}.items()}
    return lambda peer: named.get(keys.get(peer, ""), PeerClass.MEMBER)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count dials by host. Dials of a network for documentation never end."""
    dialed, dial = Counter[str](), trio.open_tcp_stream

    async def open_tcp_stream(host: str, port: int) -> trio.SocketStream:
        dialed[f"{host}:{port}"] += 1
        if host.startswith("198.51.100."):
            await trio.sleep_forever()
        return await dial(host, port)

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)
    return dialed


def junk_of_a_member(number: int) -> AgedPeerRecord:
    """Return the next record of a peer that is not linked, so that its addresses are dialed."""
    addresses = [f"198.51.100.{host}:{number + 1}" for host in range(ADVERTISED_MAX)]
    return record(EVE, *addresses, sequence=number, scope=AddressScope.PRIVATE)


def junk_of_a_stranger(number: int) -> AgedPeerRecord:
    """Return a record with a new key for each number."""
    return record(Identity(bytes([number, 255] * 16)), f"198.51.100.{number}:1", scope=AddressScope.PRIVATE)


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("junk", "count", "book_max"),
    [(junk_of_a_member, CHANGES_BURST, SOURCE_BOOK_MAX), (junk_of_a_stranger, 2 * PEER_RECORDS_MAX + 8, STRANGERS_BOOK_MAX)],
)
async def test_who_names_addresses_that_lead_nowhere_holds_up_no_dial_of_others(
    tcp: SwarmWorld,
    monkeypatch: pytest.MonkeyPatch,
    hanging: Counter[str],
    junk: Callable[[int], AgedPeerRecord],
    count: int,
    book_max: int,
) -> None:
    monkeypatch.setattr(dialer, "DIAL_SECONDS", 2 * DEADLINE_SECONDS)  # no dial that hangs ends by itself
    members = {ALICE.public, BOB.public, CAROL.public} | ({EVE.public} if junk is junk_of_a_member else set())
    standing_of = lambda peer: PeerClass.MEMBER if peer in members else PeerClass.STRANGER  # noqa: E731
    alice = await tcp.start(ALICE, bootstrap=[], members=members.__contains__, standing_of=standing_of)
    bob = await tcp.join(BOB, alice)
    records = tuple(map(junk, range(count)))
    for start in range(0, count, PEER_RECORDS_MAX):
        bob._links[alice.me].queue_message(PeerRecords(records[start : start + PEER_RECORDS_MAX]), Priority.CONTROL)
    named = lambda: sum(entry.address.startswith("198.51.100.") for entry in alice._book.entries())  # noqa: E731
    await until(lambda: named() >= book_max)
    await trio.testing.wait_all_tasks_blocked()
    assert len(hanging) <= 2 + SOURCE_DIALS_MAX and named() <= book_max
    carol = await tcp.start(CAROL, bootstrap=[])
    assert await alice.connect(carol.address) == carol.me


@pytest.mark.real("sockets")
async def test_names_that_nobody_answers_for_hold_up_no_other_thread(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is written in one of Trio's 40 threads."""
    over, look = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str | bytes, *rest: Any) -> Any:  # bytes mark a name that is resolved in a thread
        return over.wait() and [] if isinstance(host, bytes) and host.endswith(b"example") else look(host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(dialer, "DIAL_SECONDS", 0.01)
    monkeypatch.setattr(address_book, "BACKOFF_SECONDS_MAX", 0.01)
    try:
        alice = await tcp.start(ALICE, bootstrap=[])
        for n in range(64):
            alice._book.add_signed(f"name{n}.example:1", EVE.public)
        await until(lambda: sum(entry.failures for entry in alice._book.entries()) > 100)
        await trio.to_thread.run_sync(lambda: None)
        monkeypatch.setattr(dialer, "DIAL_SECONDS", DEADLINE_SECONDS)
        assert await alice.connect((await tcp.start(BOB, bootstrap=[])).address) == BOB.public
    finally:
        over.set()


@pytest.mark.real("sockets")
async def test_a_name_that_leads_nearer_than_it_seems_is_followed_only_if_the_operator_gave_it(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: look("127.0.0.1" if host == b"home.example" else host, *rest))
    alice, bob = await tcp.start(ALICE, bootstrap=[]), await tcp.start(BOB, bootstrap=[])
    name = f"home.example:{parse_address(bob.address)[1]}"
    alice._book.add_signed(name, bob.me)
    await until(lambda: alice._book.get(name).reason == "the name resolves to an address of a local network")
    await until(lambda: not bob._open)
    assert not alice.connected_peers()
    assert await alice.connect(name) == bob.me


@pytest.mark.real("sockets")
async def test_what_a_stranger_names_is_dialed_once_and_a_member_that_names_it_too_is_believed(
    tcp: SwarmWorld, hanging: Counter[str]
) -> None:
    alice = await tcp.start(ALICE, bootstrap=[], standing_of=standing(eve=PeerClass.STRANGER))
    await tcp.join(BOB, alice)
    nowhere, hung = free_address(), "198.51.100.1:1"
    alice._book.add_signed(nowhere, EVE.public)
    await until(lambda: nowhere not in alice._book._entries)
    assert hanging[nowhere] == 1
    alice._book.add_signed(hung, EVE.public)
    assert alice._book.get(hung).source is alice._book._strangers
    alice._book.add_signed(hung, BOB.public)
    assert alice._book.get(hung).source is alice._book._members[BOB.public]


@pytest.mark.real("sockets")
async def test_an_address_that_is_claimed_again_and_again_leaves_no_task_behind(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[])
    carol = await tcp.start(CAROL, bootstrap=[alice.address])
    await until(lambda: carol.address in alice._book._entries and carol.me in alice.connected_peers())
    await trio.testing.wait_all_tasks_blocked(0.01)
    tasks = len(alice._dialer._nursery.child_tasks)
    for sequence in range(1, 5):
        carol._links[alice.me].queue_message(PeerRecords((record(EVE, carol.address, sequence=sequence),)), Priority.CONTROL)
        await until(lambda sequence=sequence: alice.refusal_counts().get("wrong-peer") == sequence)
        await until(lambda: alice._book.get(carol.address).peer == carol.me)
    await until(lambda: len(alice._dialer._nursery.child_tasks) <= tasks)


@pytest.mark.real("sockets")
async def test_whoever_is_said_to_be_at_an_address_must_prove_it_there(tcp: SwarmWorld) -> None:
    """Bob dials Alice's address, which Dave's record names, and meets Alice."""
    alice, bob = await tcp.start(ALICE, bootstrap=[]), await tcp.start(BOB, bootstrap=[])
    carol = await tcp.join(CAROL, bob)
    carol._links[bob.me].queue_message(PeerRecords((record(DAVE, alice.address),)), Priority.CONTROL)
    await until(lambda: bob.refusal_counts().get("wrong-peer"))
    assert alice.address not in bob._book._entries and bob.connected_peers() == {carol.me}


@pytest.mark.real("sockets")
async def test_what_is_said_of_my_own_key_and_leads_to_myself_is_no_other_machine_and_dialed_once(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[], listen="0.0.0.0:0")
    port = parse_address(alice.address)[1]
    bob = await tcp.start(BOB, bootstrap=[f"127.0.0.1:{port}"])
    await linked(alice, bob)
    mine = f"127.0.0.2:{port}"
    bob._links[alice.me].queue_message(PeerRecords((record(ALICE, mine, sequence=100),)), Priority.CONTROL)
    await until(lambda: mine in alice._book._mine)
    assert mine not in alice._book._entries
    bob._links[alice.me].queue_message(PeerRecords((record(ALICE, mine, sequence=200),)), Priority.CONTROL)
    assert bob.send(alice.me, b"after it", Priority.CONTROL)
    assert await next_event(alice, DataReceived) == DataReceived(bob.me, b"after it")
    assert mine not in alice._book._entries
    assert not [event for line in alice.events._members.values() for event in line.events if isinstance(event, DuplicateIdentity)]


@pytest.mark.real("sockets")
async def test_records_of_strangers_are_told_to_those_who_ask_and_passed_on_to_nobody(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[], standing_of=standing(eve=PeerClass.STRANGER))
    bob, carol = await tcp.start(BOB, bootstrap=[alice.address]), await tcp.start(CAROL, bootstrap=[alice.address])
    await linked(alice, bob, carol)
    for signer in (EVE, DAVE):
        carol._links[alice.me].queue_message(PeerRecords((record(signer, free_address()),)), Priority.CONTROL)
    await until(lambda: bob.records.has_records_of(DAVE.public))
    assert alice.records.has_records_of(EVE.public) and not bob.records.has_records_of(EVE.public)
    bob._links[alice.me].queue_message(GetPeerRecords(), Priority.CONTROL)
    alice._links[bob.me].records_told_at = -math.inf
    await until(lambda: bob.records.has_records_of(EVE.public))
