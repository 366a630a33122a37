"""Pings in virtual time: minutes here, an hour by `python -m tests.sim --heartbeats`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim import heartbeats
from transport.wire import failure_detector

LINKS = heartbeats.LINKS | {"worse": replace(heartbeats.LINKS["clean, 300 ms"], lost_pings=0.4)}


@pytest.mark.virtual
@pytest.mark.parametrize("links", LINKS)
def test_a_silent_peer_is_suspected_in_time_and_nobody_else(links: str) -> None:
    outcome = heartbeats.one(0, 3, LINKS[links], seconds=300.0)
    assert outcome.holds, outcome


@pytest.mark.virtual
def test_with_three_pings_alone_lost_ones_look_like_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: no more pings where an answer is overdue, and no history."""
    monkeypatch.setattr(failure_detector.LinkFailureDetector, "next_ping_at", lambda silence, now, due: due)
    monkeypatch.setattr(failure_detector, "SILENCES_MIN", failure_detector.SILENCES_KEPT + 1)
    assert heartbeats.one(0, 3, LINKS["worse"], seconds=300.0).falsely > 0
