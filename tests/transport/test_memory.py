"""Features of the in-memory transport alone: conditions and partitions, in virtual time."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import UserError
from protocol.limits import MESSAGE_BYTES_MAX
from scenarios.emulation.link_profiles import (
    MEGABIT_BYTES,
    PROFILES,
    QUEUE_SECONDS,
    RETRANSMISSION_SECONDS_MIN,
    SEGMENT_BYTES,
    AccessLink,
    AccessProfile,
    BottleneckQueue,
    NetworkPath,
    ProfileSegment,
    TcpFlow,
    load_profile,
    steady_profile,
)
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
        await trio.sleep(1)  # the first pings have arrived
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
    """This holds also if the blob is shorter than its longest allowed size."""
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
    """The chunks have 48 KiB, 32 ahead. With 100 ms each way the window carries 7.8 MB/s, so that the bandwidth is the limit."""
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
    """A store that records the longest stall of a reveal."""

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
    """Eight chunks at once would carry 1.3 of 12.5 MB/s."""
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.15, bytes_per_second=12.5e6))
        alice, bob = await world.pair(Revealing(), MemoryBlobs(*REVEALS))
        start = trio.current_time()
        await fetch_reveals(alice, bob.me)
        assert trio.current_time() - start < 3.0 * sum(map(len, REVEALS)) / 12.5e6 + 1.0


async def test_reveals_over_a_slow_link_come_once_and_make_no_queue(autojump_clock: MockClock) -> None:
    rate = 83_000  # a third of 2 Mbit/s
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.15, bytes_per_second=rate))
        alice, bob = await world.pair(blobs := Revealing(), MemoryBlobs(*REVEALS))
        await world.start(CAROL)  # another peer could be asked, and has nothing
        await linked(alice, bob)
        start, count = trio.current_time(), sum(map(len, REVEALS))
        await fetch_reveals(alice, bob.me)
        assert blobs.longest < 2 * STALL_SECONDS
        assert trio.current_time() - start < 1.1 * count / rate + 2.0
        assert alice.traffic().audit_bytes_received < 1.01 * count, "what was on its way was asked for again"


async def test_reveals_one_after_another_come_once_over_a_link_slower_than_the_patience(autojump_clock: MockClock) -> None:
    rate = 25_000  # a chunk takes longer than a second
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.15, bytes_per_second=rate))
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
    """The chunks of the first fetch come before those of the second one, which cannot use them."""
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(latency_seconds=0.15, bytes_per_second=rate))
        alice, bob = await world.pair(blobs := Revealing(), MemoryBlobs(*REVEALS))
        await linked(alice, bob, await world.start(CAROL))
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
        assert [int.from_bytes((await next_event(bob, DataReceived)).data, "big") for _ in range(300)] == list(range(300))


# Profiles of links ----------------------------------------------------------------------------------------------------


SWINGS = AccessProfile(
    "swings", (ProfileSegment(1.0, 1000, 2000, 0.1), ProfileSegment(0.5, 0, 0, 0.1), ProfileSegment(2.0, 4000, 500, 0.3))
)


def way(profile: AccessProfile) -> NetworkPath:
    return NetworkPath(AccessLink(profile), AccessLink(profile))


@pytest.mark.parametrize(
    ("begin", "size", "end"), [(0, 1000, 1.0), (0.5, 500, 1.0), (0, 5000, 2.5), (1.2, 400, 1.6), (0, 10_000, 4.5)]
)
def test_bytes_take_the_rates_of_the_moments_and_wait_for_the_end_of_a_drop_out(begin: float, size: int, end: float) -> None:
    for turns in (0, 3):  # it begins again at its end
        assert SWINGS.finish_time(begin + 3.5 * turns, size, up=True) == pytest.approx(end + 3.5 * turns)
    assert SWINGS.shifted(begin).finish_time(0.0, size, up=True) == pytest.approx(end - begin)


def test_all_links_of_a_peer_share_its_uplink_and_its_downlink_is_another_one() -> None:
    access = AccessLink(steady_profile("thin", 8, 80, 20))  # 1 MB/s up
    assert access.up.queue_bytes(10.0, 500_000) == pytest.approx(10.5)
    assert access.up.queue_bytes(10.0, 500_000) == pytest.approx(11.0)
    assert access.down.queue_bytes(10.0, 500_000) == pytest.approx(10.05)


def test_a_packet_that_would_wait_longer_than_the_queue_is_dropped_and_takes_no_room() -> None:
    gate = BottleneckQueue(steady_profile("thin", 8, 8, 20), up=True)
    passed = sum(gate.queue_packet(0.0, 1_000) is not None for _ in range(200))
    assert passed == pytest.approx(QUEUE_SECONDS * 1_000_000 / 1_000, abs=2)
    assert gate.queue_packet(1.0, 1_000) == pytest.approx(1.001)


def test_nothing_passes_in_a_drop_out_longer_than_the_queue() -> None:
    gate = BottleneckQueue(SWINGS, up=True)
    assert gate.queue_packet(1.1, 100) is None and gate.queue_packet(1.5, 100) is not None


def carry(flow: TcpFlow, count: int, now: float = 0.0) -> float:
    """Return the arrival time of the last of `count` bytes, sent as fast as window and uplink allow."""
    arrival, size = now, 4 * SEGMENT_BYTES
    for _ in range(-(-count // size)):
        while (at := flow.next_send_at(now)) > now:
            now = at
        arrival = flow.send(now, size, more=True)
    return arrival


def test_a_window_begins_with_ten_segments_and_doubles_with_each_round_trip() -> None:
    """10 + 20 + 40 + 80 segments take four round trips. The acknowledgement of the last ones is not awaited."""
    took = carry(TcpFlow(way(steady_profile("fast", math.inf, math.inf, 100)), Random(0)), 150 * SEGMENT_BYTES)
    assert took == pytest.approx(0.35, abs=0.001)


def test_without_loss_a_flow_fills_its_link_after_some_round_trips() -> None:
    took = carry(TcpFlow(way(PROFILES["transatlantic"]), Random(0)), 20_000_000)
    assert 0 < took - 20_000_000 / (100 * MEGABIT_BYTES) < 8 * 0.09


def test_a_window_that_was_not_used_for_long_begins_anew() -> None:
    flow = TcpFlow(way(PROFILES["transatlantic"]), Random(0))
    carry(flow, 5_000_000)
    before = flow.window
    carry(flow, SEGMENT_BYTES, 1_000.0)
    assert flow.window < 20 < before


@pytest.mark.parametrize("loss", [0.002, 0.01, 0.03])
def test_a_flow_that_loses_is_about_as_fast_as_cubic_is(loss: float) -> None:
    """The reference is the mean window of RFC 9438, equations 5 and 6, and that of Reno where it is larger."""
    trip, size = 0.1, 20_000_000
    flow = TcpFlow(way(steady_profile("lossy", math.inf, math.inf, 1e3 * trip, loss)), Random(1))
    rate = size / SEGMENT_BYTES / carry(flow, size)
    expected = max(1.17 * (trip / loss) ** 0.75, math.sqrt(1.5 / loss)) / trip
    assert 0.6 < rate / expected < 1.6, (rate, expected)
    assert flow.lost / flow.segments == pytest.approx(loss, rel=0.5)


def test_a_lost_segment_comes_late_and_what_follows_comes_after_it() -> None:
    profile = AccessProfile(
        "lost", (ProfileSegment(1.0, round_trip_seconds=0.1, loss=1.0), ProfileSegment(1.0, round_trip_seconds=0.1))
    )
    flow = TcpFlow(way(profile), Random(0))
    late = flow.send(0.5, 100)
    assert late == pytest.approx(0.5 + 0.05 + 0.1 + RETRANSMISSION_SECONDS_MIN)
    assert flow.send(0.55, 10 * SEGMENT_BYTES) == late  # of many segments, the later ones reveal the missing one
    assert flow.send(1.5, 100) == pytest.approx(1.55)


def test_a_lost_tail_is_sent_again_by_a_probe_where_it_was_not_alone_in_flight() -> None:
    moments = ProfileSegment(1.0, round_trip_seconds=0.05), ProfileSegment(1.0, round_trip_seconds=0.05, loss=1.0)
    flow = TcpFlow(way(AccessProfile("lost", moments)), Random(0))
    flow.send(0.99, SEGMENT_BYTES)
    assert flow.send(1.0, 100) == pytest.approx(1.0 + 0.025 + 2 * 0.05)
    assert flow.send(1.5, 2 * SEGMENT_BYTES) == pytest.approx(1.5 + 0.025 + 3 * 0.05), "the probe repairs one of them"


def test_what_would_wait_longer_than_the_queue_is_lost_and_the_window_shrinks() -> None:
    flow = TcpFlow(way(PROFILES["dsl"]), Random(0))
    first = flow.send(0.0, 4 * SEGMENT_BYTES, more=True)
    flow.send(0.0, 10 * SEGMENT_BYTES, more=True)
    assert not flow.lost and flow.window == 10
    late = flow.send(0.0, SEGMENT_BYTES, more=True)
    assert flow.lost == 1 and flow.window < 10
    assert late - first == pytest.approx(11 * SEGMENT_BYTES / (2 * MEGABIT_BYTES) + 0.03)


def test_order_is_kept_where_the_round_trip_swings() -> None:
    flow, random = TcpFlow(way(PROFILES["flaky"]), Random(0)), Random(1)
    times = [flow.send(at, 1_000) for at in sorted(random.uniform(0, 240) for _ in range(2_000))]
    assert times == sorted(times)


def test_flaky_is_what_it_says() -> None:
    moments = PROFILES["flaky"].moments
    trips, losses = [moment.round_trip_seconds for moment in moments], [moment.loss for moment in moments]
    assert 0.05 <= min(trips) < 0.08 and 0.25 < max(trips) <= 0.3
    assert min(losses) == 0 and 0.04 < max(losses) <= 0.05
    assert any(moment.up == 0 for moment in moments)


def test_a_trace_file_is_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "train.trace"
    file.write_text("# s up down ms %\n2 1 10 80 0.5\n\n1 0 0 80 0 # a tunnel\n")
    profile = load_profile(str(file))
    assert profile == load_profile(profile.name) and profile.segment_at(4.0) == ProfileSegment(
        2.0, MEGABIT_BYTES, 10 * MEGABIT_BYTES, 0.08, 0.005
    )
    assert profile.segment_at(5.5).up == 0


@pytest.mark.parametrize(
    "line", ["1 2 3", "0 1 1 1 1", "1 1 1 1 100", "1 nan 1 1 1", "1 -1 1 1 1", "a b c d e", "1 inf 1 1 1", "1 0 0 1 1"]
)
def test_a_bad_trace_is_one_line_that_names_the_file(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad"
    file.write_text(line)
    with pytest.raises(UserError) as error:
        load_profile(str(file))
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="lan, dsl"):
        load_profile(str(tmp_path / "nosuch"))
