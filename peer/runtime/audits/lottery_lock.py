"""A lock whose next holder is drawn by lot."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio


class LotteryLock:
    """A lock. The next holder is drawn by lot, so a liar that shows its buffers late is not always last."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[trio.Event, Callable[[], bool]] = {}  # by who waits: whether it goes before the others

    @asynccontextmanager
    async def hold(self, is_first: Callable[[], bool]) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        if self._is_held:
            await self._draw(is_first)
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _draw(self, is_first: Callable[[], bool]) -> None:
        self._waiting[drawn := trio.Event()] = is_first
        try:
            await drawn.wait()
        except trio.Cancelled:
            if self._waiting.pop(drawn, None) is None:  # it was drawn meanwhile
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Draws the next holder. The lock stays held until that task runs, so that no other takes it meanwhile."""
        self._is_held = bool(self._waiting)
        if self._waiting:
            first = [event for event, is_first in self._waiting.items() if is_first()]
            drawn = random.choice(first or list(self._waiting))
            del self._waiting[drawn]
            drawn.set()
