"""Server-sent events: one look at the site a block, for all who listen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from web.problems import Problem
from web.site import Json, Site

LISTENERS_MAX: Final = 64  # each holds a connection; whoever comes then is told to come again
WAITING_MAX: Final = 32  # blocks that a listener has not read yet: then it is dropped
BEAT_SECONDS: Final = 15.0  # a comment is sent that often, so that nothing on the way takes the connection for dead


class Listening:
    def __init__(self, site: Site, headers: Mapping[str, str]) -> None:
        self._site, self._headers = site, headers
        self._listeners: dict[asyncio.Task[Any], asyncio.Queue[str | None]] = {}
        self._news: Json = {}
        self._looking: asyncio.Task[None] | None = None

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**self._headers, "Content-Type": "text/event-stream"})
        if request.method == "HEAD":
            return response
        if not self._news:
            news = await self._site.news(-1)
            self._news = self._news or news
        if len(self._listeners) >= LISTENERS_MAX:  # nothing is awaited from here until this one is counted
            raise Problem("too-many", f"{LISTENERS_MAX} others listen already", 60)
        me, mine = asyncio.current_task(), asyncio.Queue[str | None](WAITING_MAX)
        assert me is not None
        self._listeners[me] = mine
        # Whoever comes, or comes again, sees the newest state first: what it missed is in it.
        mine.put_nowait(_written({}, self._news))
        try:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            await response.prepare(request)
            while True:
                try:
                    text = await asyncio.wait_for(mine.get(), BEAT_SECONDS)
                except TimeoutError:
                    text = ": nothing new\n\n"
                if text is None:
                    return response
                await response.write(text.encode())
        except ConnectionError:  # it is gone
            return response
        finally:
            del self._listeners[me]

    async def _look(self) -> None:
        """As long as somebody listens."""
        try:
            while self._listeners:
                before, self._news = self._news, await self._site.news(self._news["height"])
                text = _written(before, self._news)
                for task, queue in list(self._listeners.items()):
                    if queue.full():
                        task.cancel()
                    elif text:
                        queue.put_nowait(text)
        except Problem:  # the peer is busy, or stops: whoever comes again starts anew
            self._drop()
        finally:
            self._looking, self._news = None, {}

    def _drop(self) -> None:
        for task, queue in self._listeners.items():
            if queue.full():
                task.cancel()
            else:
                queue.put_nowait(None)

    async def end(self, app: web.Application) -> None:
        self._drop()
        if self._looking is not None:
            self._looking.cancel()


def _written(before: Json, now: Json) -> str:
    return "".join(f"id: {now['height']}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in _events(before, now))


def _events(before: Json, now: Json) -> Iterator[tuple[str, Json]]:
    if before.get("height") == now["height"]:
        return
    yield "block", {name: now[name] for name in ("height", "state_root", "time_ms")}
    known = {row["project"]: row for row in before.get("projects", ())}
    for row in now["projects"]:
        if known.get(row["project"]) != row:
            yield "project", {"height": now["height"], **row}
    if before.get("settled") != now["settled"]:
        yield "settled", {"height": now["height"], "settled": now["settled"]}
