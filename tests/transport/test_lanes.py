"""When a circuit's end believes that its relay holds something back."""

from __future__ import annotations

import pytest

from transport.relay.circuit_session import SILENT_SECONDS, WITHHELD_SECONDS, RelayWatchdog
from transport.wire.framing import Priority

STEP_SECONDS = 0.25


def noticed(*dropped: Priority, listens: bool = True, seconds: float = 60.0) -> float | None:
    """Seconds until it is seen that these lanes bring nothing; a ping goes out each second, and the others bring all."""
    lanes, sent, arrived = RelayWatchdog(0.0), [0, 0, 0], [0, 0, 0]
    for step in range(int(seconds / STEP_SECONDS)):
        now = step * STEP_SECONDS
        if now % 1.0 == 0:
            sent = [sent[lane] + 100 for lane in Priority]
            arrived = [arrived[lane] if lane in dropped else sent[lane] for lane in Priority]
            lanes.on_arrived((arrived[0], arrived[1], arrived[2]), now)
        if lanes.is_withholding((sent[0], sent[1], sent[2]), now, listens=listens):
            return now
    return None


def test_nothing_is_held_back_where_all_arrives() -> None:
    assert noticed() is None


@pytest.mark.parametrize("lane", Priority)
def test_whoever_holds_back_one_lane_is_found_out(lane: Priority) -> None:
    assert noticed(lane) == (SILENT_SECONDS if lane is Priority.VOTE else WITHHELD_SECONDS)


def test_a_peer_that_does_not_read_knows_nothing() -> None:
    assert noticed(*Priority, listens=False) is None


def test_a_slow_lane_is_none_that_is_held_back_and_an_idle_one_neither() -> None:
    lanes = RelayWatchdog(0.0)
    for second in range(600):  # a megabyte on its way, of which a record arrives now and then
        lanes.on_arrived((second, 0, second // int(WITHHELD_SECONDS - 1) << 14), float(second))
        assert not lanes.is_withholding(
            (second + 100, 0, 1 << 20 if second < 300 else 300 // 7 << 14), float(second), listens=True
        )
