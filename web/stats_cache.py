"""What a peer says of itself, for whoever watches it: it looks once a second, however often it is asked."""

from __future__ import annotations

from typing import Final

import trio

from protocol.api import PeerApi, StatsView

STATS_CACHE_SECONDS: Final = 1.0  # a look reads the store and /proc


class StatsCache:
    def __init__(self, api: PeerApi) -> None:
        self._api, self._lock = api, trio.Lock()
        self._looked: tuple[float, StatsView] | None = None

    async def stats(self) -> StatsView:
        async with self._lock:
            if self._looked is None or self._looked[0] + STATS_CACHE_SECONDS < trio.current_time():
                self._looked = trio.current_time(), await self._api.stats()
            return self._looked[1]
