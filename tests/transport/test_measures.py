"""The measured rate of links, and the size of pieces that it sets: a vote waits at most 25 ms for each piece."""

from __future__ import annotations

import random
import socket

import pytest
import trio
from trio.testing import MockClock

from protocol.identity import Identity
from scenarios.emulation.memory_network import LinkConditions
from tests.transport.conftest import MemoryWorld, SwarmWorld, open_world
from tests.transport.helpers import ALICE, BOB, linked, next_event, until
from transport.connections import connection_manager
from transport.network import DataReceived, Priority
from transport.wire.failure_detector import SILENCES_MIN, KeepaliveConfig, LinkFailureDetector
from transport.wire.framing import FRAME_PLAINTEXT_MAX
from transport.wire.link_measurements import (
    MINUTE_SECONDS,
    MINUTES_KEPT,
    PIECE_BYTES_MIN,
    PIECE_BYTES_START,
    TCP_INFO_BYTES,
    UNSENT_BYTES_MAX,
    LinkHistory,
    LinkMeter,
    TcpInfo,
)

MEGABIT_BYTES = 125_000


class Line:
    """A link with a given rate. `busy` sends over it for some seconds, one frame every 10 ms."""

    def __init__(self, bytes_per_second: float) -> None:
        self.rate, self.now, self.delivered, self.meter = bytes_per_second, 0.0, 0.0, LinkMeter(LinkHistory())

    def busy(self, seconds: float, unsent: int = 1) -> float:
        for _ in range(round(seconds / 0.01)):
            self.meter.on_busy(TcpInfo(int(self.delivered), unsent, 0, 0), self.now)
            self.now += 0.01
            self.delivered += 0.01 * self.rate
        assert self.meter.bytes_per_second is not None
        return self.meter.bytes_per_second / MEGABIT_BYTES

    def idle(self) -> None:
        self.meter.on_idle(TcpInfo(int(self.delivered), 0, 0, 0), self.now)


def test_pieces_follow_the_rate_between_their_bounds() -> None:
    for megabit, frame, unsent in [
        (0.1, 4096, 4096),
        (2, 6250, 6250),
        (20, 62500, 62500),
        (1000, FRAME_PLAINTEXT_MAX, UNSENT_BYTES_MAX),
    ]:
        line = Line(megabit * MEGABIT_BYTES)
        assert (line.meter.frame_bytes, line.meter.unsent_bytes) == (PIECE_BYTES_START, PIECE_BYTES_START)
        line.busy(3.0)
        assert abs(line.meter.frame_bytes - frame) <= frame / 50 and abs(line.meter.unsent_bytes - unsent) <= unsent / 50
        assert line.meter.frame_bytes >= PIECE_BYTES_MIN


def test_a_link_that_becomes_slow_is_noticed_and_one_that_becomes_fast_again() -> None:
    line = Line(100 * MEGABIT_BYTES)
    assert abs(line.busy(2.0) - 100) < 1
    line.rate = 2 * MEGABIT_BYTES
    assert abs(line.busy(1.5) - 2) < 0.2
    line.rate = 100 * MEGABIT_BYTES
    assert abs(line.busy(1.5) - 100) < 10


def test_a_peer_that_is_slow_itself_takes_its_link_for_no_slower() -> None:
    line = Line(50 * MEGABIT_BYTES)
    line.busy(2.0)
    line.rate = MEGABIT_BYTES  # the peer's own rate, which leaves the kernel's buffer empty
    assert line.busy(5.0, unsent=0) > 49
    history = line.meter.history.bytes_per_second(line.now)
    assert history is not None and history > 49 * MEGABIT_BYTES


def test_a_burst_says_what_a_link_carries_at_least() -> None:
    line = Line(80 * MEGABIT_BYTES)
    for _ in range(5):
        line.meter.on_busy(TcpInfo(int(line.delivered), 0, 0, 0), line.now)
        line.now, line.delivered = line.now + 0.01, line.delivered + 100_000
    line.idle()
    assert line.meter.bytes_per_second == pytest.approx(80 * MEGABIT_BYTES)
    assert line.meter.history.bytes_per_second(line.now) == pytest.approx(80 * MEGABIT_BYTES)


def test_small_messages_say_nothing_of_the_throughput() -> None:
    line = Line(1_000)
    for _ in range(1_000):
        line.meter.on_busy(TcpInfo(int(line.delivered), 0, 0, 0), line.now)
        line.now, line.delivered = line.now + 0.006, line.delivered + 500
        line.idle()
    assert line.meter.bytes_per_second is None


def test_an_hour_is_kept_and_no_more() -> None:
    history = LinkHistory()
    for minute in range(3 * MINUTES_KEPT):
        for trip in (0.1, 0.2, 0.6):
            history.minute_at(minute * MINUTE_SECONDS).add_round_trip(trip)
    kept = history.minutes(3 * MINUTES_KEPT * MINUTE_SECONDS - 1)
    assert len(kept) == MINUTES_KEPT == len(history._minutes)
    assert (kept[0].trips, kept[0].trip_least, kept[0].trip_most) == (3, 0.1, 0.6) and kept[0].trip_sum == pytest.approx(0.9)
    assert not history.minutes(5 * MINUTES_KEPT * MINUTE_SECONDS), (
        "what is older is not shown, also of a peer that is silent since"
    )


def test_a_round_trip_is_the_median_of_the_last_pings() -> None:
    meter = LinkMeter(LinkHistory())
    for seconds in (9.0, 0.1, 0.1, 0.9, 0.1, 0.1):
        meter.add_round_trip(seconds, 0.0)
    assert meter.round_trip_seconds == 0.1


def test_what_the_kernel_sent_twice_is_counted_once() -> None:
    meter = LinkMeter(LinkHistory())
    for sent, retransmitted in ((1_000, 20), (1_000, 20), (3_000, 60)):
        meter.count_retransmissions(TcpInfo(0, 0, sent, retransmitted), 0.0)
    assert meter.history.retransmitted(0.0) == 0.02
    assert LinkHistory().retransmitted(0.0) is None


@pytest.mark.real("sockets")
def test_the_kernel_is_understood() -> None:
    if (told := getattr(socket, "TCP_INFO", None)) is None:
        pytest.skip("this kernel has no TCP_INFO")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            one.sendall(bytes(70_000))
            other.recv(70_000, socket.MSG_WAITALL)
            other.sendall(b"!")  # carries the acknowledgement
            one.recv(1)
            found = TcpInfo.parse(one.getsockopt(socket.IPPROTO_TCP, told, TCP_INFO_BYTES))
    assert found is not None and (found.delivered, found.unsent) == (70_001, 0) and 1 <= found.sent - found.retransmitted <= 100
    assert TcpInfo.parse(bytes(TCP_INFO_BYTES - 1)) is None


async def test_a_vote_waits_for_25_ms_of_bulk_on_a_slow_link(autojump_clock: MockClock) -> None:
    async with open_world(MemoryWorld) as world:
        world.mesh.set_conditions(ALICE.public, BOB.public, LinkConditions(0.01, bytes_per_second=2 * MEGABIT_BYTES))
        alice, bob = await world.pair()
        alice.send(bob.me, bytes(4 << 20), Priority.BULK)
        await trio.sleep(2)
        for _ in range(10):
            await trio.sleep(random.Random(1).random())
            start = trio.current_time()
            alice.send(bob.me, b"vote", Priority.VOTE)
            await next_event(bob, DataReceived)
            assert trio.current_time() - start < 0.01 + 2 * 0.025 + 0.001, "the frame being sent, and its own"
        rate = alice.links()[0].meter.history.bytes_per_second(trio.current_time())
        assert rate == pytest.approx(2 * MEGABIT_BYTES, rel=0.01)


@pytest.mark.real("sockets")
async def test_the_kernel_is_told_how_much_it_may_hold(tcp: SwarmWorld) -> None:
    if not hasattr(socket, "TCP_NOTSENT_LOWAT"):
        pytest.skip("this kernel has no TCP_NOTSENT_LOWAT")
    alice, bob = await tcp.pair()
    (link,) = alice._links.values()
    link.meter.bytes_per_second = 2.0 * MEGABIT_BYTES
    alice.send(bob.me, b"x")
    await next_event(bob, DataReceived)
    assert link._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == link.meter.unsent_bytes == 6250
    await until(lambda: alice.links()[0].meter.round_trip_seconds is not None)
    assert alice.links()[0].meter.history.retransmitted(trio.current_time()) == 0.0


@pytest.mark.real("sockets")
async def test_a_history_outlives_its_links_and_they_are_bounded(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = await tcp.pair()
    await until(lambda: alice.links()[0].meter.round_trip_seconds is not None)
    history = alice.links()[0].meter.history
    tcp.stop(bob)
    await until(lambda: not alice.connected_peers())
    await linked(alice, await tcp.start(BOB))
    assert alice.links()[0].meter.history is history and history.minutes(trio.current_time())
    monkeypatch.setattr(connection_manager, "HISTORIES_MAX", 3)
    for number in range(10):
        alice._history(Identity(bytes([number]) * 32).public)
    assert len(alice._histories) == 3 and bob.me in alice._histories, "whoever is linked is never forgotten"


# Silence --------------------------------------------------------------------------------------------------------------


PACE = KeepaliveConfig()


def after(silences: list[float]) -> tuple[LinkFailureDetector, float]:
    """Return the failure detector of a link after these silences, and the time."""
    now, silence = 100.0, LinkFailureDetector(PACE, 100.0)
    for seconds in silences:
        now += seconds
        silence.record_arrival(now)
        silence.resume_listening(now)
    return silence, now


@pytest.mark.parametrize(
    ("silences", "suspected"),
    [
        ([], 15.0),
        ([5.0] * 100, 15.0),  # a clean link
        ([1.0, 14.0] * (SILENCES_MIN // 2 - 1), 15.0),  # too few to estimate their spread
        ([5.0, 5.0, 5.0, 10.0] * 10, 6.25 + 5.61 * 2.165),  # mean and deviation by hand
        ([1.0, 14.0] * 50, 30.0),  # nobody earns more than twice as long
        ([3.0] * 50 + [20.0], 15.0),  # an outage changes no estimate
        ([0.5] * 300 + [5.0] * 3, 15.0),  # frames of bulk are not silences
        ([1.0, 14.0] * 50 + [5.0] * 200, 15.0),  # the last quarter of an hour counts
    ],
)
def test_suspicion_waits_as_long_as_the_links_history_says(silences: list[float], suspected: float) -> None:
    silence, now = after(silences)
    assert silence.suspect_seconds == pytest.approx(suspected, abs=0.01)
    assert not silence.is_suspected(now + suspected - 0.02)
    assert silence.is_suspected(now + suspected + 0.02)


def test_a_link_that_is_not_read_is_not_silent() -> None:
    silence = LinkFailureDetector(PACE, 0.0)
    silence.record_arrival(1.0)
    assert silence.silent_seconds(100.0) == 0.0
    silence.resume_listening(100.0)
    assert silence.silent_seconds(103.0) == 3.0


def test_a_ping_goes_sooner_where_an_answer_is_overdue() -> None:
    silence = LinkFailureDetector(PACE, 0.0)
    assert silence.next_ping_at(1.0, due=5.0) == 5.0
    assert silence.next_ping_at(5.0, due=10.0) == 6.0
    assert silence.next_ping_at(9.0, due=13.0) == 9.0, "at once"
