"""Figures of the peer for monitors, read once a second at most, however often they are asked for."""

from __future__ import annotations

from typing import Final

import trio

from features.services import ServiceContext
from ledger.members import MembersState
from protocol.api import StatsView
from protocol.prometheus_metrics import PrometheusMetric, peer_metrics, why_unhealthy

STATS_CACHE_SECONDS: Final = 1.0  # a look reads the store and /proc


class StatsCache:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk, self._lock = desk, trio.Lock()
        self._looked: tuple[float, StatsView] | None = None

    async def stats(self) -> StatsView:
        async with self._lock:
            if self._looked is None or self._looked[0] + STATS_CACHE_SECONDS < trio.current_time():
                self._looked = trio.current_time(), await self._desk.api.stats()
            return self._looked[1]

    async def find_health_problem(self) -> str:
        """Why this peer does not work; empty if it does."""
        return why_unhealthy((await self.stats()).status)

    async def metrics(self) -> tuple[PrometheusMetric, ...]:
        """Those of every peer, whatever features it serves."""
        members = len(self._desk.state.module_state(MembersState).members)
        return tuple(peer_metrics(await self.stats(), members))
