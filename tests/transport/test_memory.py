"""What only the in-memory twin has: conditions and partitions, in virtual time."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from protocol.limits import MESSAGE_BYTES_MAX
from scenarios.emulation.link_profiles import PROFILES, steady_profile
from scenarios.emulation.memory_network import LinkConditions, MemoryNetwork
from tests.transport.conftest import MemoryWorld, open_world
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, MemoryBlobs, digest, linked, next_event
from transport.blobs.blob_exchange import STALL_SECONDS
from transport.network import DataReceived, PeerConnected, PeerDisconnected, Priority


async def pair(world: MemoryWorld, conditions: LinkConditions) -> tuple[MemoryNetwork, MemoryNetwork]:
    world.mesh.set_conditions(ALICE.public, BOB.public, conditions)
    alice, bob = await world.pair()
    return alice, bob


async def test_a_message_takes_the_latency(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        alice, bob = await pair(world, LinkConditions(latency_seconds=0.25))
        start = trio.current_time()
        alice.send(bob.me, b"far")
        await next_event(bob, DataReceived)
        assert abs(trio.current_time() - start - 0.25) < 1e-6
        await trio.sleep(1)
        assert abs(alice.links()[0].meter.round_trip_seconds - 0.5) < 1e-6


async def test_bulk_takes_its_time_and_a_vote_waits_for_one_frame_of_it(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        alice, bob = await pair(world, LinkConditions(latency_seconds=0.01, bytes_per_second=1e6))
        await trio.sleep(1)  # the first pings are through
        start = trio.current_time()
        alice.send(bob.me, bytes(MESSAGE_BYTES_MAX), Priority.BULK)
        await trio.sleep(1)
        alice.send(bob.me, b"vote", Priority.VOTE)
        assert await next_event(bob, DataReceived) == DataReceived(alice.me, b"vote")
        assert trio.current_time() - start < 1.0 + 0.01 + 2 * 65536 / 1e6
        assert len((await next_event(bob, DataReceived)).data) == MESSAGE_BYTES_MAX
        assert trio.current_time() - start >= MESSAGE_BYTES_MAX / 1e6


@pytest.mark.parametrize("times", [1, 3])
async def test_a_blob_of_several_chunks_comes_within_one_round_trip(autojump_clock: MockClock, times: int) -> None:
    """Also if it is shorter than it might be."""
    held = bytes(range(256)) * 1_000
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.25))
        alice, bob = await world.pair(MemoryBlobs(), MemoryBlobs(held))
        start = trio.current_time()
        await alice.fetch_blob(digest(held), times * len(held), [bob.me])
        assert abs(trio.current_time() - start - 0.5) < 1e-6


async def test_lost_messages_are_lost_and_the_rest_stays_in_order(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        alice, bob = await pair(world, LinkConditions(loss=0.3, jitter_seconds=0.05))
        for n in range(1000):
            assert alice.send(bob.me, n.to_bytes(2, "big"))
        await trio.sleep(1)
        seen = []
        with trio.move_on_after(1):
            while True:
                seen.append(int.from_bytes((await next_event(bob, DataReceived)).data, "big"))
        assert 600 < len(seen) < 800
        assert seen == sorted(seen)


async def test_a_partition_cuts_and_healing_joins(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        networks = [await world.start(identity) for identity in (ALICE, BOB, CAROL, DAVE)]
        await linked(*networks)
        alice, bob, carol, dave = networks
        world.mesh.partition([alice.me, bob.me], [carol.me])
        assert alice.connected_peers() == {bob.me}
        assert not carol.connected_peers() and not dave.connected_peers()
        await trio.sleep(100)
        assert alice.connected_peers() == {bob.me}
        assert not alice.send(carol.me, b"x")
        world.mesh.heal_partition()
        await linked(*networks)
        events = []
        with trio.move_on_after(1):
            while True:
                events.append(await alice.events.receive())
        of_carol = [type(event) for event in events if event.peer == carol.me]
        assert of_carol == [PeerConnected, PeerDisconnected, PeerConnected]


async def test_a_blob_crosses_a_slow_and_a_fast_link(autojump_clock: MockClock) -> None:
    """48 KiB chunks, 32 ahead: with 100 ms each way the window carries 7.8 MB/s, so the bandwidth is what limits."""
    blob = bytes(range(256)) * 20_000
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.1, bytes_per_second=2e6))
        await world.start(ALICE, MemoryBlobs(blob))
        bob = await world.start(BOB, store := MemoryBlobs())
        start = trio.current_time()
        await bob.fetch_blob(digest(blob), len(blob))
        assert store.blobs[digest(blob)] == blob
        assert len(blob) / 2e6 < trio.current_time() - start < 1.3 * len(blob) / 2e6 + 1


REVEALS = [bytes([n]) * 1_600_000 for n in range(4)]


class Revealing(MemoryBlobs):
    """Knows the longest time for which one of them stood still."""

    def __init__(self) -> None:
        super().__init__()
        self.reveals |= {digest(blob) for blob in REVEALS}
        self.watch()

    def watch(self) -> None:
        self.longest, self._last = 0.0, dict.fromkeys(self.reveals, trio.current_time())

    def wrote(self, digest: bytes) -> None:
        self.longest = max(self.longest, trio.current_time() - self._last[digest])
        self._last[digest] = trio.current_time()


async def fetch_reveals(network: MemoryNetwork, holder: bytes) -> None:
    async with trio.open_nursery() as nursery:
        for blob in REVEALS:
            nursery.start_soon(network.fetch_blob, digest(blob), len(blob), [holder])


async def test_reveals_fill_a_fast_link_with_a_long_round_trip(autojump_clock: MockClock) -> None:
    """Eight chunks at once would carry 1.3 MB/s of 12.5."""
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.15, bytes_per_second=12.5e6))
        alice, bob = await world.pair(Revealing(), MemoryBlobs(*REVEALS))
        start = trio.current_time()
        await fetch_reveals(alice, bob.me)
        assert trio.current_time() - start < 3.0 * sum(map(len, REVEALS)) / 12.5e6 + 1.0


async def test_reveals_over_a_slow_link_come_once_and_make_no_queue(autojump_clock: MockClock) -> None:
    rate = 83_000  # a third of 2 Mbit/s
    async with open_world(MemoryWorld) as world:
        slow = LinkConditions(latency_seconds=0.15, bytes_per_second=rate)
        world.mesh.set_conditions(ALICE.public, BOB.public, slow)
        alice, bob = await world.pair(blobs := Revealing(), MemoryBlobs(*REVEALS))
        await world.start(CAROL)  # somebody else could be asked, and has nothing
        await linked(alice, bob)
        start, count = trio.current_time(), sum(map(len, REVEALS))
        await fetch_reveals(alice, bob.me)
        assert blobs.longest < 2 * STALL_SECONDS
        assert trio.current_time() - start < 1.1 * count / rate + 2.0
        assert alice.traffic().audit_bytes_received < 1.01 * count, "what was on its way was asked for again"


async def test_reveals_one_after_another_come_once_over_a_link_slower_than_the_patience(autojump_clock: MockClock) -> None:
    rate = 25_000  # a chunk takes longer than a second
    async with open_world(MemoryWorld) as world:
        slow = LinkConditions(latency_seconds=0.15, bytes_per_second=rate)
        world.mesh.set_conditions(ALICE.public, BOB.public, slow)
        alice, bob = await world.pair(Revealing(), MemoryBlobs(*REVEALS))
        carol = await world.start(CAROL)  # has nothing
        await linked(alice, bob, carol)
        start, count = trio.current_time(), sum(map(len, REVEALS))
        for blob in REVEALS:
            await alice.fetch_blob(digest(blob), len(blob), [bob.me])
        assert trio.current_time() - start < 1.02 * count / rate + 2.0
        assert alice.traffic().audit_bytes_received == count
        assert carol.traffic().received[Priority.CONTROL] == 0, "somebody else was asked"


@pytest.mark.parametrize(("rate", "seconds"), [(125_000, 1.0), (250_000, 2.0), (1.25e6, 1.0)])
async def test_a_reveal_that_is_given_up_and_wanted_again_does_not_stand_still(
    rate: float, seconds: float, autojump_clock: MockClock
) -> None:
    """What the first fetch had asked for comes before the first chunk of the second one, which cannot use it."""
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.15, bytes_per_second=rate))
        alice, bob = await world.pair(blobs := Revealing(), MemoryBlobs(*REVEALS))
        carol = await world.start(CAROL)
        await linked(alice, bob, carol)
        with trio.move_on_after(seconds):
            await alice.fetch_blob(digest(REVEALS[0]), len(REVEALS[0]), [bob.me])
        blobs.watch()
        async with trio.open_nursery() as nursery:
            for blob in REVEALS[:2]:
                nursery.start_soon(alice.fetch_blob, digest(blob), len(blob), [bob.me])
        assert blobs.longest < 2 * STALL_SECONDS


async def test_an_hour_of_silence_keeps_the_link(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        alice, bob = await pair(world, LinkConditions())
        await trio.sleep(3600)
        assert alice.links()[0].since < 1
        assert [await alice.events.receive()] == [PeerConnected(bob.me)]


async def test_the_twin_is_as_quiet_as_the_swarm(autojump_clock: MockClock) -> None:
    """An idle link carries pings and nothing else: less than ten bytes a second."""
    async with open_world(MemoryWorld) as world:
        alice, _ = await pair(world, LinkConditions())
        before = sum(alice.traffic().sent)
        await trio.sleep(3600)
        assert sum(alice.traffic().sent) - before < 36_000


async def test_links_of_a_profile_have_its_round_trip_and_all_of_a_peer_share_its_uplink(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        for identity in (ALICE, BOB, CAROL):
            world.mesh.set_profile(identity.public, PROFILES["dsl"])
        alice, bob, carol = [await world.start(identity) for identity in (ALICE, BOB, CAROL)]
        await linked(alice, bob, carol)
        await trio.sleep(1)
        assert alice.links()[0].meter.round_trip_seconds == pytest.approx(0.03, rel=0.1)
        start = trio.current_time()
        for one in (bob, carol):
            alice.send(one.me, bytes(250_000), Priority.BULK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(next_event, bob, DataReceived)
            nursery.start_soon(next_event, carol, DataReceived)
        assert trio.current_time() - start == pytest.approx(2 * 250_000 * 8 / 2e6, rel=0.05)


async def test_a_profile_that_loses_delays_and_loses_nothing(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        for identity in (ALICE, BOB):
            world.mesh.set_profile(identity.public, steady_profile("lossy", 10, 10, 100, loss=0.1))
        alice, bob = await world.pair()
        for n in range(300):
            assert alice.send(bob.me, n.to_bytes(2, "big"))
            await trio.sleep(0.1)
        seen = [int.from_bytes((await next_event(bob, DataReceived)).data, "big") for _ in range(300)]
        assert seen == list(range(300))
