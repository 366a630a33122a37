"""Links over relays between peers that accept no connections, over real sockets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from protocol.addresses import AddressScope
from protocol.identity import Identity
from protocol.messages import CircuitData, IncomingCircuit, RelayReservations
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, ERIN, digest, linked, next_event, until
from tests.transport.helpers import MemoryBlobs as Blobs
from transport import session_links, swarm
from transport.connections.peer_link import PeerLink
from transport.discovery.reachability import ReachabilityState, RelayMode
from transport.network import DataReceived, PeerDisconnected, Priority
from transport.quotas.memory_quota import MemoryAccount
from transport.relay import circuit_session, relay_client
from transport.relay.circuit_relay import WINDOW_BYTES, CircuitRelay
from transport.relay.relay_client import CircuitStream, RelayClient
from transport.swarm import Swarm
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, Inbox, Outbox

MARKER = b"a marker between two, unreadable to others"


async def start_hidden(tcp: SwarmWorld, *relays: Swarm, blobs: tuple[Blobs, Blobs] | None = None) -> tuple[Swarm, Swarm]:
    """Start Alice and Bob, which accept no connections and are linked over one of the relays."""
    alice, bob = [
        await tcp.start(identity, held, listen="none", bootstrap=[relay.address for relay in relays])
        for identity, held in zip((ALICE, BOB), blobs or (Blobs(), Blobs()), strict=True)
    ]
    await linked(alice, bob, *relays)
    return alice, bob


def recorded_relays(network: Swarm, peer: Swarm) -> set[bytes]:
    held = network.records._held.get((peer.me, AddressScope.PUBLIC))
    return set(held.record.relays) if held is not None else set()


def link(network: Swarm, peer: Swarm) -> PeerLink | None:
    return next((link for link in network.links() if link.peer == peer.me), None)


def is_over(network: Swarm, peer: Swarm, relay: Swarm | None) -> bool:
    """Return whether the link between these two peers uses this relay, or is direct if `relay` is None."""
    info = link(network, peer)
    return info is not None and info.relay == (relay.me if relay else None)


@pytest.mark.real("sockets")
async def test_two_that_accept_nothing_are_linked_over_a_third_that_cannot_read_them(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = bytearray()
    monkeypatch.setattr(CircuitRelay, "on_message", _holding(held, CircuitRelay.on_message))
    blob = MARKER * 10_000
    carol = await tcp.start(CAROL)
    alice, bob = await start_hidden(tcp, carol, blobs=(Blobs(blob), Blobs()))
    assert is_over(alice, bob, carol) and is_over(bob, alice, carol) and is_over(alice, carol, None)
    await bob.fetch_blob(digest(blob), len(blob), [alice.me])
    assert alice.send(bob.me, MARKER, Priority.VOTE)
    assert await received(bob, 1) == {alice.me: [MARKER]}
    assert len(held) > len(blob), "the blob came through the relay"
    assert MARKER not in held and MARKER[:16] not in held


def _holding(held: bytearray, take: Callable[..., None]) -> Callable[..., None]:
    def hold(relay: CircuitRelay, peer: bytes, message: Any) -> None:
        if isinstance(message, CircuitData):
            held.extend(message.data)
        take(relay, peer, message)

    return hold


async def received(network: Swarm, count: int) -> dict[bytes, list[bytes]]:
    """Return the next `count` messages by sender. The test fails if a link ends meanwhile."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    while sum(map(len, found.values())) < count:
        event = await network.events.receive()
        assert not isinstance(event, PeerDisconnected)
        if isinstance(event, DataReceived):
            found[event.peer].append(event.data)
    return found


@pytest.mark.real("sockets")
async def test_a_direct_link_takes_over_and_no_message_is_lost_or_comes_twice(tcp: SwarmWorld) -> None:
    count = 150
    carol = await tcp.start(CAROL)
    alice = await tcp.start(ALICE, listen="none", bootstrap=[carol.address])
    bob = await tcp.start(BOB, bootstrap=[carol.address], advertise=["127.0.0.1:1"])  # no peer answers there
    await linked(alice, bob, carol)
    assert is_over(alice, bob, carol)

    async def talk(speaker: Swarm, hearer: Swarm) -> None:
        for number in range(count):
            for priority in Priority:
                size = (100, 1_000, 30_000)[priority]
                assert speaker.send(hearer.me, b"%d %d " % (priority, number) + bytes(size), priority)
            await trio.sleep(0.002)

    async def hear(hearer: Swarm, speaker: Swarm) -> None:
        messages = (await received(hearer, 3 * count))[speaker.me]
        for priority in Priority:
            assert [int(one.split()[1]) for one in messages if one.startswith(b"%d " % priority)] == [*range(count)]

    async with trio.open_nursery() as nursery:
        for one, other in ((alice, bob), (bob, alice)):
            nursery.start_soon(talk, one, other)
            nursery.start_soon(hear, other, one)
        await trio.sleep(0.05)
        await alice.connect(bob.address)
        await until(lambda: is_over(alice, bob, None) and is_over(bob, alice, None))


@pytest.mark.real("sockets")
async def test_a_relay_that_is_lost_is_replaced_by_the_other(tcp: SwarmWorld) -> None:
    carol, dave = await tcp.start(CAROL), await tcp.start(DAVE)
    alice, bob = await start_hidden(tcp, carol, dave)
    await until(lambda: {alice.me, bob.me} <= reserved(carol) & reserved(dave))
    await until(lambda: recorded_relays(bob, alice) == {carol.me, dave.me})  # named by its own record
    first, second = (carol, dave) if is_over(alice, bob, carol) else (dave, carol)
    tcp.stop(first)
    with trio.fail_after(relay_client.GRACE_SECONDS * 3 + 3):
        await until(lambda: is_over(alice, bob, second) and is_over(bob, alice, second))


@pytest.mark.real("sockets")
async def test_a_relay_without_power_closes_nothing_and_is_replaced_all_the_same(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links time out after half a minute and its circuits never. Another relay replaces it long before."""
    hurry(monkeypatch)
    monkeypatch.setattr(swarm, "CIRCUIT_IDLE_SECONDS", math.inf)
    carol, dave, erin = [await tcp.start(identity) for identity in (CAROL, DAVE, ERIN)]
    alice, bob = await start_hidden(tcp, carol, dave, erin)
    relays = {relay.me: relay for relay in (carol, dave, erin)}
    await until(lambda: all(len(asked(hidden)) == relay_client.RESERVATIONS for hidden in (alice, bob)))
    before = link(alice, bob)
    assert before is not None and before.relay is not None
    lost = relays[before.relay]
    monkeypatch.setattr(lost, "deliver_message", stand_still)
    await until(lambda: is_relayed_by_another(alice, bob, lost) and is_relayed_by_another(bob, alice, lost))
    await until(lambda: all(len(asked(hidden) - {lost.me}) == relay_client.RESERVATIONS for hidden in (alice, bob)))
    assert {alice.me, bob.me} <= lost.connected_peers() and lost.me in alice.connected_peers(), "no link has ended"
    assert alice.send(bob.me, MARKER, Priority.VOTE)
    assert (await next_event(bob, DataReceived)).data == MARKER


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (relay_client, "PING", 0.1),
        (session_links, "CIRCUIT_PING", 0.1),
        (circuit_session, "WITHHELD", 0.8),
    ):
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    for module in (relay_client, circuit_session, session_links, swarm):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.4)


async def stand_still(*_: object) -> None:
    await trio.sleep_forever()


def is_relayed_by_another(network: Swarm, peer: Swarm, lost: Swarm) -> bool:
    info = link(network, peer)
    return info is not None and info.relay not in (None, lost.me)


def asked(hidden: Swarm) -> set[bytes]:
    """Return the relays that the peer believes to forward to it."""
    return {*hidden._detours._active_relays()}


@pytest.mark.real("sockets")
async def test_what_one_end_does_not_read_is_its_speaker_s_in_the_relay_and_at_that_end(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def turn(of: PeerLink, is_full: bool) -> None:
        await trio.sleep(math.inf if of.relay else 0)

    window = WINDOW_BYTES[Priority.BULK]
    carol = await tcp.start(CAROL)
    alice, bob = await start_hidden(tcp, carol)
    monkeypatch.setattr(bob, "wait_for_cpu_quota", turn)  # it reads no circuits any more
    assert alice.send(bob.me, bytes(4 * window), Priority.BULK)
    await until(lambda: carol._links[alice.me].memory_account.held > window // 2)
    end = bob._links[alice.me]
    await until(lambda: end.memory_account.held > window // 2)
    account = end.memory_account
    bob.detach(end, "memory-full")
    assert account.held == 0, "nothing waits for an end that others read later"
    carol.memory_quota._members.bytes_max = window // 2
    await until(lambda: carol.refusal_counts().get("memory-full"))


async def test_an_end_holds_what_it_has_not_read_on_the_account_of_the_link() -> None:
    carrier, peer = PeerLink(CAROL.public, "127.0.0.1:1", True, Outbox(), Inbox()), MemoryAccount()
    carrier.memory_account = MemoryAccount()
    stream = CircuitStream(b"a circuit", carrier, opens=True)
    for lane in Priority:
        stream.on_data(CircuitData(b"a circuit", lane, bytes(1_000)))
    assert carrier.memory_account.held == 3 * (1_000 + MESSAGE_OVERHEAD_BYTES)
    stream.switch_account(peer)
    await stream.receive_some()
    assert (carrier.memory_account.held, peer.held) == (0, 2 * (1_000 + MESSAGE_OVERHEAD_BYTES))
    stream.end_stream()
    stream.on_data(CircuitData(b"a circuit", Priority.VOTE, bytes(1_000)))  # it was in flight
    assert peer.held == 0


def reserved(relay: Swarm) -> set[bytes]:
    return set(relay._detours.relay.reservations.peers)


def dropping(relay: RelayClient, peer: bytes, message: Any) -> Any:
    return None


def changing(relay: RelayClient, peer: bytes, message: Any) -> Any:
    return CircuitData(message.circuit, message.priority, message.data[:-1] + bytes([message.data[-1] ^ 1]))


@pytest.mark.real("sockets")
@pytest.mark.parametrize("does", [dropping, changing])
async def test_a_relay_that_does_harm_hurts_its_circuits_alone(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]
) -> None:
    monkeypatch.setattr(swarm, "CIRCUIT_IDLE_SECONDS", 0.6)
    monkeypatch.setattr(session_links, "CIRCUIT_PING_SECONDS", 0.2)
    monkeypatch.setattr(swarm, "CIRCUIT_HANDSHAKE_SECONDS", 0.6)
    carol, dave = await tcp.start(CAROL), await tcp.start(DAVE)
    alice, bob = await start_hidden(tcp, carol, dave)
    await until(lambda: {alice.me, bob.me} <= reserved(carol) & reserved(dave))
    bad, good = (carol, dave) if is_over(alice, bob, carol) else (dave, carol)
    before = link(alice, bad)
    assert before is not None
    harm(bad, monkeypatch, does)
    await until(lambda: is_over(alice, bob, good) and is_over(bob, alice, good))
    assert alice.send(bob.me, b"a vote", Priority.VOTE)
    assert (await next_event(bob, DataReceived)).data == b"a vote"
    after = link(alice, bad)
    assert after is not None and after.since == before.since, "the direct link to the relay stays"


def harm(bad: Swarm, monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]) -> None:
    take = bad._detours.relay.on_message

    def change(peer: bytes, message: Any) -> None:
        if changed := does(bad, peer, message) if isinstance(message, CircuitData) else message:
            take(peer, changed)

    monkeypatch.setattr(bad._detours.relay, "on_message", change)


@pytest.mark.real("sockets")
@pytest.mark.parametrize("held", [{Priority.VOTE}, {Priority.BULK}], ids=["votes", "bulk"])
@pytest.mark.parametrize("speaks_first", [True, False])
async def test_a_relay_that_holds_back_what_one_end_says_is_replaced(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch, held: set[Priority], speaks_first: bool
) -> None:
    """The other direction and the other lanes look alive."""
    hurry(monkeypatch)
    monkeypatch.setattr(swarm, "CIRCUIT_IDLE_SECONDS", math.inf)
    carol, dave = await tcp.start(CAROL), await tcp.start(DAVE)
    alice, bob = await start_hidden(tcp, carol, dave)
    await until(lambda: {alice.me, bob.me} <= reserved(carol) & reserved(dave))
    await trio.sleep(2 * circuit_session.SILENT_SECONDS)
    bad, good = (carol, dave) if is_over(alice, bob, carol) else (dave, carol)
    assert is_over(alice, bob, bad), "one that works is left alone"
    speaker, hearer = (alice, bob) if speaks_first else (bob, alice)
    harm(bad, monkeypatch, lambda _, peer, said: None if peer == speaker.me and said.priority in held else said)
    assert speaker.send(hearer.me, bytes(1_000), Priority.BULK)
    await until(lambda: is_over(alice, bob, good) and is_over(bob, alice, good))


@pytest.mark.real("sockets")
async def test_handshakes_that_a_relay_has_begun_are_paid_by_its_link(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    paid: set[tuple[bool, bool]] = set()
    shake_hands = Swarm._shake_hands

    async def noted(self: Swarm, stream: Any, session: Any, deadline: float, payer: Any) -> Any:
        if isinstance(stream, CircuitStream):
            paid.add((session._initiator, payer is stream.carrier.cpu_account))
        return await shake_hands(self, stream, session, deadline, payer)

    monkeypatch.setattr(Swarm, "_shake_hands", noted)
    await start_hidden(tcp, await tcp.start(CAROL))
    assert paid == {(True, False), (False, True)}


def bare(served: Callable[..., Any], *links: PeerLink, serves: Callable[[bytes], bool] = lambda peer: True) -> RelayClient:
    """Return Alice's relay client without a network."""
    return RelayClient(
        ALICE.public,
        {link.peer: link for link in links},
        served,
        serves=serves,
        relaying=RelayMode.OFF,
        reachable=lambda: ReachabilityState.RELAYED,
        refuse=lambda reason: None,
        random=Random(1),
        changed=lambda relays: None,
    )


def to(peer: Identity) -> PeerLink:
    return PeerLink(peer.public, "127.0.0.1:1", True, Outbox(), Inbox())


async def test_circuits_that_a_relay_begins_hold_up_none_of_ours(nursery: trio.Nursery) -> None:
    bad, good = to(CAROL), to(DAVE)
    alice = bare(stand_still, bad, good)
    alice._nursery, alice._asked[bad.peer] = nursery, 0.0
    for number in range(2 * relay_client.OPENING_MAX):
        alice.on_message(bad, IncomingCircuit(bytes([number]) * 16, ERIN.public))
    assert alice._half_open(bad) == relay_client.OPENING_MAX
    alice.on_message(good, RelayReservations((BOB.public,)))
    for now in (0.0, relay_client.GRACE_SECONDS * 3):
        alice._open_circuits(nursery, now)
    await trio.testing.wait_all_tasks_blocked()
    assert alice._half_open() == 1 and good.outbox.held


class Circuit(PeerLink):
    """A circuit whose peer reports that nothing has arrived on these lanes. A ping is sent each second."""

    def __init__(self, peer: Identity, over: PeerLink, held: Collection[Priority] = ()) -> None:
        super().__init__(peer.public, over.address, False, Outbox(), Inbox())
        self.relay, self._held, self._lanes = over.peer, held, circuit_session.RelayWatchdog(0.0)

    def needs_other_relay(self, now: float) -> bool:
        sent = 100 * (1 + int(now))
        arrived = [0 if lane in self._held else sent for lane in Priority]
        self._lanes.on_arrived((arrived[0], arrived[1], arrived[2]), now)
        return self._lanes.is_withholding((sent, sent, sent), now, listens=True)


def use(alice: RelayClient, circuit: Circuit) -> None:
    """Make this circuit the current link to its peer."""
    assert circuit.relay is not None
    name = circuit.relay[:8] + circuit.peer[:8]
    stream = alice._ends[name] = CircuitStream(name, alice._links[circuit.relay], opens=True)
    stream.link = circuit
    assert isinstance(alice._links, dict)
    alice._links[circuit.peer] = circuit


def order(alice: RelayClient, peer: Identity | None, *relays: PeerLink) -> list[bytes]:
    """Return the order of choice of these relays, for circuits with this peer or, if None, for reservations."""
    return sorted((relay.peer for relay in relays), key=lambda relay: alice._rank(relay, peer.public if peer else b""))


def fail(alice: RelayClient, *circuits: Circuit) -> None:
    """Use each of these circuits, and let Alice detect that they fail."""
    for circuit in circuits:
        use(alice, circuit)
    for step in range(4 * 10):
        alice._failing_circuits(step / 4)


async def test_a_member_that_never_says_what_arrives_has_no_relay_dropped_for_others() -> None:
    first, second = to(CAROL), to(DAVE)
    alice, liar, honest = bare(stand_still, first, second), BOB, ERIN
    relays = [alice._links[relay] for relay in order(alice, None, first, second)]
    for _ in range(5):  # it returns and lies again
        fail(alice, Circuit(liar, relays[0], [Priority.VOTE]))
    for peer in (honest, None):
        assert order(alice, peer, first, second) == [relay.peer for relay in relays]
    assert order(alice, liar, first, second) == [relay.peer for relay in reversed(relays)], "its own circuits alone"


async def test_a_relay_is_forgiven_once_a_circuit_holds(autojump_clock: trio.testing.MockClock) -> None:
    first, second = to(CAROL), to(DAVE)
    holds = [relay_client.STABLE_SECONDS / 2, relay_client.STABLE_SECONDS]

    async def serve(stream: CircuitStream, peer: bytes) -> None:
        stream.link = Circuit(BOB, stream.carrier)
        await trio.sleep(holds.pop(0))

    alice = bare(serve, first, second)
    before = order(alice, BOB, first, second)
    for after in (before[::-1], before):
        await alice._dial(BOB.public, before[0], relay_client._CircuitDemand(0.0))
        assert order(alice, BOB, first, second) == after


async def test_a_relay_over_which_circuits_with_two_members_fail_is_chosen_last_unless_more_work() -> None:
    first, second = to(CAROL), to(DAVE)
    alice, peers = bare(stand_still, first, second), [Identity(bytes([100 + number]) * 32) for number in range(5)]
    relays = [alice._links[relay] for relay in order(alice, None, first, second)]
    fail(alice, *[Circuit(peer, relays[0], [Priority.VOTE]) for peer in peers[:2]])
    for peer in (ERIN, None):
        assert order(alice, peer, first, second) == [relay.peer for relay in reversed(relays)]
    for peer in peers[2:]:
        use(alice, Circuit(peer, relays[0]))
    for peer in (ERIN, None):
        assert order(alice, peer, first, second) == [relay.peer for relay in relays], "two that lie, and three that do not"


@pytest.mark.parametrize(("held", "seconds"), [(Priority.VOTE, 5.0), (Priority.CONTROL, 10.0), (Priority.BULK, 10.0)])
async def test_a_relay_that_holds_back_one_lane_of_one_member_is_replaced_in_time(
    autojump_clock: trio.testing.MockClock, held: Priority, seconds: float
) -> None:
    bad, good, start = to(CAROL), to(DAVE), trio.current_time()
    dialed = dict[bytes, float]()

    async def serve(stream: CircuitStream, peer: bytes) -> None:
        dialed.setdefault(stream.carrier.peer, trio.current_time() - start)
        await trio.sleep_forever()

    alice = bare(serve, bad, good)
    use(alice, Circuit(BOB, bad, [held]))
    async with trio.open_nursery() as nursery:
        for relay in (bad, good):
            alice.on_message(relay, RelayReservations((BOB.public,)))
        while trio.current_time() < start + seconds:
            alice._open_circuits(nursery, trio.current_time() - start)
            await trio.sleep(relay_client.CHECK_SECONDS)
        nursery.cancel_scope.cancel()
    assert [*dialed] == [good.peer]


async def test_a_relay_brings_no_strangers() -> None:
    bad = to(CAROL)
    alice = bare(stand_still, bad, serves=lambda peer: peer != ERIN.public)
    async with trio.open_nursery() as alice._nursery:
        alice._asked[bad.peer] = 0.0
        for number, peer in enumerate((ERIN, BOB)):
            alice.on_message(bad, IncomingCircuit(bytes([number]) * 16, peer.public))
        assert [*alice._ends] == [bytes([1]) * 16]
        alice._nursery.cancel_scope.cancel()


async def test_whoever_reserves_here_and_takes_it_back_is_told_to_others_once_a_second() -> None:
    other = to(DAVE)
    alice = bare(stand_still, other)
    alice._told = RelayReservations(())
    told = 0
    for number in range(400):
        alice.relay._reservations = {BOB.public} if number % 2 else set()
        before = other.outbox.held
        alice._announce_reservations(number * relay_client.CHECK_SECONDS)
        told += other.outbox.held > before
    assert told == pytest.approx(relay_client.ANNOUNCEMENTS_BURST + 100 * relay_client.ANNOUNCEMENTS_PER_SECOND, abs=3)


@pytest.mark.real("sockets")
async def test_nobody_relays_that_does_not_want_to_or_for_strangers(tcp: SwarmWorld) -> None:
    carol = await tcp.start(CAROL, relay=RelayMode.OFF)
    dave = await tcp.start(DAVE, members=lambda peer: peer != ALICE.public)
    alice, bob = [await tcp.start(one, listen="none", bootstrap=[carol.address, dave.address]) for one in (ALICE, BOB)]
    await until(lambda: dave.refusal_counts().get("relay-not-member") and reserved(dave) == {bob.me})
    assert reserved(carol) == set() and bob.me not in alice.connected_peers()


@pytest.mark.real("sockets")
async def test_by_default_a_peer_forwards_while_others_reach_it(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay keeps its reservations while its reachability is unknown, and drops them once it cannot be reached."""
    said = {CAROL.public: ReachabilityState.UNKNOWN}
    by_itself = Swarm.reachability.fget
    assert by_itself is not None
    monkeypatch.setattr(Swarm, "reachability", property(lambda network: said.get(network.me) or by_itself(network)))
    carol = await tcp.start(CAROL, relay=RelayMode.AUTO)
    alice = await tcp.start(ALICE, listen="none", bootstrap=[carol.address])
    await linked(alice, carol)
    bob = await tcp.start(BOB, listen="none", bootstrap=[carol.address])
    await linked(bob, carol)
    assert reserved(carol) == set()
    said[CAROL.public] = ReachabilityState.DIRECT
    await until(lambda: reserved(carol) == {alice.me, bob.me} and is_over(alice, bob, carol))
    said[CAROL.public] = ReachabilityState.UNKNOWN
    await tcp.start(DAVE, listen="none", bootstrap=[carol.address])
    await until(lambda: carol.refusal_counts().get("relay-off", 0) > 0)
    assert reserved(carol) == {alice.me, bob.me}
    said[CAROL.public] = ReachabilityState.RELAYED
    await until(lambda: reserved(carol) == set())
    assert is_over(alice, bob, carol), "circuits go on"


@pytest.mark.real("sockets")
async def test_two_members_that_dial_a_peer_make_it_a_relay(tcp: SwarmWorld) -> None:
    carol = await tcp.start(CAROL, relay=RelayMode.AUTO)
    alice, bob = await start_hidden(tcp, carol)
    assert carol.reachability is ReachabilityState.DIRECT and is_over(alice, bob, carol)
