"""Pings in virtual time: minutes here, an hour by `python -m tests.sim --heartbeats`."""

from __future__ import annotations

import pytest

from tests.sim import heartbeats
from transport import silence


@pytest.mark.parametrize("links", heartbeats.LINKS)
def test_a_silent_peer_is_suspected_in_time_and_nobody_else(links: str) -> None:
    outcome = heartbeats.one(1, 3, heartbeats.LINKS[links], seconds=600.0)
    assert outcome.holds, outcome


def test_without_more_pings_where_an_answer_is_overdue_lost_pings_look_like_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: three pings alone, and no history."""
    monkeypatch.setattr(silence.Silence, "next_ping", lambda silence, now, due: due)
    monkeypatch.setattr(silence, "SILENCES_MIN", silence.SILENCES_KEPT + 1)
    outcome = heartbeats.one(0, 7, heartbeats.LINKS["a fifth of all pings lost, 300 ms"], seconds=600.0)
    assert outcome.falsely > 0
