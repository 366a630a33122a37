"""When silence is suspicious: after a fixed time, or after as long as the link's own history says."""

from __future__ import annotations

import pytest

from transport.wire.failure_detector import SILENCES_MIN, KeepaliveConfig, LinkFailureDetector

PACE = KeepaliveConfig()


def after(silences: list[float]) -> tuple[LinkFailureDetector, float]:
    """A link that has survived these, and the time."""
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
        ([1.0, 14.0] * (SILENCES_MIN // 2 - 1), 15.0),  # too few to say how they spread
        ([5.0, 5.0, 5.0, 10.0] * 10, 6.25 + 5.61 * 2.165),  # mean and deviation by hand
        ([1.0, 14.0] * 50, 30.0),  # nobody earns more than twice as long
        ([3.0] * 50 + [20.0], 15.0),  # an outage is no habit
        ([0.5] * 300 + [5.0] * 3, 15.0),  # frames of bulk are no silences
        ([1.0, 14.0] * 50 + [5.0] * 200, 15.0),  # the last quarter of an hour is what counts
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
