"""When silence is suspicious: after a fixed time, or after as long as the link's own history says."""

from __future__ import annotations

import pytest

from transport.silence import SILENCES_MIN, Pace, Silence

PACE = Pace()


def after(silences: list[float]) -> tuple[Silence, float]:
    """A link that has survived these, and the time."""
    now, silence = 100.0, Silence(PACE, 100.0)
    for seconds in silences:
        now += seconds
        silence.heard(now)
        silence.listens(now)
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
    assert not silence.is_suspicious(now + suspected - 0.02)
    assert silence.is_suspicious(now + suspected + 0.02)


def test_a_link_that_is_not_read_is_not_silent() -> None:
    silence = Silence(PACE, 0.0)
    silence.heard(1.0)
    assert silence.seconds(100.0) == 0.0
    silence.listens(100.0)
    assert silence.seconds(103.0) == 3.0


def test_a_ping_goes_sooner_where_an_answer_is_overdue() -> None:
    silence = Silence(PACE, 0.0)
    assert silence.next_ping(1.0, due=5.0) == 5.0
    assert silence.next_ping(5.0, due=10.0) == 6.0
    assert silence.next_ping(9.0, due=13.0) == 9.0, "at once"
