"""Replies that wait for a result in asyncio's thread, so that long waits take none of the bridge's calls."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from web.calls import HeldReply

if TYPE_CHECKING:
    import asyncio

# Longest wait for a result in seconds. Clients and proxies give up after 45 to 60 seconds.
HOLD_SECONDS: Final = 30.0


class HeldReplies:
    """The waiting replies of one feature, by the name of the result that they wait for."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def announce(self, name: str) -> None:
        """Let the replies that wait for this result ask for it again. Any thread may call this method."""
        with self._lock:
            events, loop = tuple(self._waiting.get(name, ())), self._loop
        for event in events:
            assert loop is not None, "an event waits in a loop"
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(event.set)

    async def hold(self, name: str, ask: Callable[[], Awaitable[Any]], seconds: float = HOLD_SECONDS) -> Any:
        """Call `ask` until it returns another reply than a `HeldReply`, at each announcement of `name`.

        After `seconds`, return the last held reply.
        """
        import asyncio  # The daemon imports this module before it serves pages, and has no other event loop until then.

        self._loop = asyncio.get_running_loop()
        ends, event = self._loop.time() + seconds, asyncio.Event()
        with self._lock:
            self._waiting[name].add(event)
        try:
            while isinstance(reply := await ask(), HeldReply) and (left := ends - self._loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left)
                event.clear()
            return reply
        finally:
            with self._lock:
                self._waiting[name].discard(event)
                if not self._waiting[name]:
                    del self._waiting[name]
