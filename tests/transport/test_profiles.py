"""Profiles of links: when bytes are through, what TCP makes of a link, and files that say it."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

from protocol.errors import UserError
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
    """When the last of so many bytes arrives, sent as fast as window and uplink allow."""
    arrival, size = now, 4 * SEGMENT_BYTES
    for _ in range(-(-count // size)):
        while (at := flow.next_send_at(now)) > now:
            now = at
        arrival = flow.send(now, size, more=True)
    return arrival


def test_a_window_begins_with_ten_segments_and_doubles_with_each_round_trip() -> None:
    """10 + 20 + 40 + 80 segments go in four round trips; of the last it is not waited for the acknowledgement."""
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
    """The mean window of RFC 9438, equations 5 and 6, and that of Reno where it is larger."""
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
    assert flow.send(0.55, 10 * SEGMENT_BYTES) == late  # of many, the missing one is told of by those behind
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
