"""Links through third peers, over real sockets: peers that accept no connections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import trio

from protocol.messages import CircuitData
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, digest, linked, until
from tests.transport.helpers import MemoryBlobs as Blobs
from transport import detours, swarm
from transport.detours import Detours
from transport.network import Disconnected, LinkInfo, Priority, Received
from transport.relay import Relay
from transport.swarm import Swarm

SECONDS_MAX = 15.0  # of a whole test, on a loaded machine
MARKER = b"a marker between two, unreadable to others"


async def start_hidden(tcp: SwarmWorld, *relays: Swarm, blobs: tuple[Blobs, Blobs] | None = None) -> tuple[Swarm, Swarm]:
    """Alice and Bob accept nothing, and are linked over one of the relays."""
    alice, bob = [
        await tcp.start(identity, held, listen="none", bootstrap=[relay.address for relay in relays])
        for identity, held in zip((ALICE, BOB), blobs or (Blobs(), Blobs()), strict=True)
    ]
    await linked(alice, bob, *relays)
    return alice, bob


def link(network: Swarm, peer: Swarm) -> LinkInfo | None:
    return next((link for link in network.links() if link.peer == peer.me), None)


def is_over(network: Swarm, peer: Swarm, relay: Swarm | None) -> bool:
    """Whether the link between these two is over this relay now; None: whether it is direct."""
    info = link(network, peer)
    return info is not None and info.by == (relay.me if relay else None)


async def test_two_that_accept_nothing_are_linked_over_a_third_that_cannot_read_them(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = bytearray()
    monkeypatch.setattr(Relay, "data", _holding(held, Relay.data))
    blob = MARKER * 10_000
    with trio.fail_after(SECONDS_MAX):
        carol = await tcp.start(CAROL)
        alice, bob = await start_hidden(tcp, carol, blobs=(Blobs(blob), Blobs()))
        assert is_over(alice, bob, carol) and is_over(bob, alice, carol) and is_over(alice, carol, None)
        await bob.fetch(digest(blob), len(blob), [alice.me])
        assert alice.send(bob.me, MARKER, Priority.VOTE)
        assert await received(bob, 1) == {alice.me: [MARKER]}
    assert len(held) > len(blob), "the blob came through the relay"
    assert MARKER not in held and MARKER[:16] not in held


def _holding(held: bytearray, take: Callable[..., None]) -> Callable[..., None]:
    def data(relay: Relay, peer: bytes, message: CircuitData) -> None:
        held.extend(message.data)
        take(relay, peer, message)

    return data


async def received(network: Swarm, count: int) -> dict[bytes, list[bytes]]:
    """The next so many messages, by sender; a link that ends meanwhile is a failure."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    while sum(map(len, found.values())) < count:
        event = await network.events.receive()
        assert not isinstance(event, Disconnected)
        if isinstance(event, Received):
            found[event.peer].append(event.data)
    return found


async def test_a_direct_link_takes_over_and_no_message_is_lost_or_comes_twice(tcp: SwarmWorld) -> None:
    count = 150
    with trio.fail_after(SECONDS_MAX):
        carol = await tcp.start(CAROL)
        alice = await tcp.start(ALICE, listen="none", bootstrap=[carol.address])
        bob = await tcp.start(BOB, bootstrap=[carol.address], advertise=["127.0.0.1:1"])  # where nobody answers
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
                numbers = [int(one.split()[1]) for one in messages if one.startswith(b"%d " % priority)]
                assert numbers == [*range(count)]

        async with trio.open_nursery() as nursery:
            for one, other in ((alice, bob), (bob, alice)):
                nursery.start_soon(talk, one, other)
                nursery.start_soon(hear, other, one)
            await trio.sleep(0.05)
            await alice.connect(bob.address)
            await until(lambda: is_over(alice, bob, None) and is_over(bob, alice, None))


async def test_a_relay_that_is_lost_is_replaced_by_the_other(tcp: SwarmWorld) -> None:
    with trio.fail_after(SECONDS_MAX):
        carol, dave = await tcp.start(CAROL), await tcp.start(DAVE)
        alice, bob = await start_hidden(tcp, carol, dave)
        await until(lambda: {alice.me, bob.me} <= reserved(carol) & reserved(dave))
        await until(lambda: set(bob.records.relays(alice.me)) == {carol.me, dave.me})  # as its own record says
        first, second = (carol, dave) if is_over(alice, bob, carol) else (dave, carol)
        tcp.stop(first)
        with trio.fail_after(detours.GRACE_SECONDS * 3 + 3):
            await until(lambda: is_over(alice, bob, second) and is_over(bob, alice, second))


def reserved(relay: Swarm) -> set[bytes]:
    return set(relay._detours.relay.reservations.peers)


def dropping(relay: Detours, peer: bytes, message: Any) -> Any:
    return None


def changing(relay: Detours, peer: bytes, message: Any) -> Any:
    return CircuitData(message.circuit, message.lane, message.data[:-1] + bytes([message.data[-1] ^ 1]))


@pytest.mark.parametrize("does", [dropping, changing])
async def test_a_relay_that_does_harm_hurts_its_circuits_alone(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]
) -> None:
    monkeypatch.setattr(swarm, "CIRCUIT_IDLE_SECONDS", 0.6)
    monkeypatch.setattr(swarm, "CIRCUIT_PING_SECONDS", 0.2)
    monkeypatch.setattr(swarm, "CIRCUIT_HANDSHAKE_SECONDS", 0.6)
    with trio.fail_after(SECONDS_MAX):
        carol, dave = await tcp.start(CAROL), await tcp.start(DAVE)
        alice, bob = await start_hidden(tcp, carol, dave)
        await until(lambda: {alice.me, bob.me} <= reserved(carol) & reserved(dave))
        bad, good = (carol, dave) if is_over(alice, bob, carol) else (dave, carol)
        before = link(alice, bad)
        assert before is not None
        harm(bad, monkeypatch, does)
        await until(lambda: is_over(alice, bob, good) and is_over(bob, alice, good))
        assert alice.send(bob.me, b"a vote", Priority.VOTE)
        while not isinstance(event := await bob.events.receive(), Received):
            pass
        assert event.data == b"a vote"
        after = link(alice, bad)
        assert after is not None and after.connected_since == before.connected_since, "the direct link to the relay stays"


def harm(bad: Swarm, monkeypatch: pytest.MonkeyPatch, does: Callable[..., Any]) -> None:
    take = bad._detours.relay.data

    def data(peer: bytes, message: CircuitData) -> None:
        if changed := does(bad, peer, message):
            take(peer, changed)

    monkeypatch.setattr(bad._detours.relay, "data", data)


async def test_nobody_relays_that_does_not_want_to_or_for_strangers(tcp: SwarmWorld) -> None:
    with trio.fail_after(SECONDS_MAX):
        carol = await tcp.start(CAROL, relay=False)
        dave = await tcp.start(DAVE, members=lambda peer: peer != ALICE.public)
        alice, bob = [await tcp.start(one, listen="none", bootstrap=[carol.address, dave.address]) for one in (ALICE, BOB)]
        await until(lambda: dave.refused().get("relay-not-member") and reserved(dave) == {bob.me})
        assert reserved(carol) == set() and bob.me not in alice.connected()
