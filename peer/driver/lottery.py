"""A lock whose next holder is drawn by lot."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Lottery:
    """One at a time. Whoever comes late on purpose is not always last: a liar could show its buffers so that time runs out."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[trio.Event, bool] = {}  # whether it goes before those that do not

    @asynccontextmanager
    async def turn(self, is_first: bool) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        if self._is_held:
            await self._draw(is_first)
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _draw(self, is_first: bool) -> None:
        self._waiting[drawn := trio.Event()] = is_first
        try:
            await drawn.wait()
        except trio.Cancelled:
            if self._waiting.pop(drawn, None) is None:  # it was drawn meanwhile
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """To one of those that wait. The lock stays held until that one runs, so nobody comes between."""
        self._is_held = bool(self._waiting)
        if self._waiting:
            is_first = any(self._waiting.values())
            drawn = random.choice([event for event, first in self._waiting.items() if first is is_first])
            del self._waiting[drawn]
            drawn.set()
