"""Whether what goes out over a circuit arrives, lane by lane: a relay may hold one back and let others pass. Sans-IO.

| lane | it is held back, if the peer says of nothing new that it has arrived |
|---|---|
| votes | for SILENT_SECONDS: a ping goes out each second |
| control, bulk | for WITHHELD_SECONDS, while something is under way |
"""

from __future__ import annotations

from transport.wire.framing import ByPriority, Priority

SILENT_SECONDS = 2.0  # of a relay in use, or a circuit: two pings; then another one is reserved at, or opened
WITHHELD_SECONDS = 8.0  # an uplink of 2 Mbit/s that 64 circuits share carries a record of each in four


class RelayWatchdog:
    """One direction of a circuit, as its speaker sees it."""

    def __init__(self, now: float) -> None:
        self._arrived = [0, 0, 0]  # bytes
        self._since = [now, now, now]  # when more of it had arrived, or nothing was under way

    def on_arrived(self, arrived: ByPriority, now: float) -> None:
        for lane in Priority:
            if arrived[lane] > self._arrived[lane]:
                self._arrived[lane], self._since[lane] = arrived[lane], now

    def is_withholding(self, sent: ByPriority, now: float, *, listens: bool) -> bool:
        """To be asked a few times a second. `listens`: what the peer says is being read; else nothing is known."""
        for lane in Priority:
            if not listens or (lane is not Priority.VOTE and sent[lane] <= self._arrived[lane]):
                self._since[lane] = now
        limits = (SILENT_SECONDS, WITHHELD_SECONDS, WITHHELD_SECONDS)
        return any(now - since >= limit for since, limit in zip(self._since, limits, strict=True))
