"""Leases that a page holds: the peer releases a lease whose page sends no heartbeat any more.

Heartbeats are no transactions. A client that sends none keeps its leases until they expire.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

HEARTBEAT_SECONDS_MAX: Final = 45.0  # between two of a page, which sends one each 15 seconds: a lease is free within a minute


class LeaseHeartbeats:
    """Times are the caller's, in seconds. Callers name leases alone, of which an annotator has eight at most."""

    def __init__(self) -> None:
        self._last: dict[bytes, float] = {}  # the oldest first

    def record_heartbeats(self, assignments: Iterable[bytes], now: float) -> None:
        for assignment in assignments:
            self._last.pop(assignment, None)
            self._last[assignment] = now

    def __contains__(self, assignment: bytes) -> bool:
        return assignment in self._last

    def pop_lapsed(self, now: float) -> list[bytes]:
        """Takes out the assignments without a heartbeat for too long."""
        found = [assignment for assignment, last in self._last.items() if now - last >= HEARTBEAT_SECONDS_MAX]
        for assignment in found:
            del self._last[assignment]
        return found

    def seconds_left(self, now: float) -> float:
        """Return the time until a lease may lapse. Heartbeats wake no caller, so it is at most HEARTBEAT_SECONDS_MAX."""
        return next((max(0.0, last + HEARTBEAT_SECONDS_MAX - now) for last in self._last.values()), HEARTBEAT_SECONDS_MAX)
