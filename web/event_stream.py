"""Server-sent events: one look at the peer for all who listen."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiohttp import web

from web.calls import HttpProblem, Json
from web.routes import EventFeed

LISTENERS_MAX: Final = 100  # each holds a connection; the host with most of them then loses its oldest
LISTENERS_OF_HOST_MAX: Final = 20  # tabs of the people of one address
LISTENER_QUEUE_MAX: Final = 32  # looks that a listener has not read yet: then it is dropped
REPLAY_EVENTS_MAX: Final = 512  # events, for those who come again
KEEPALIVE_SECONDS: Final = 15.0  # a comment is sent that often, so that nothing on the way takes the connection for dead


class _Event(NamedTuple):
    number: int
    is_live: bool  # only for listeners that ask for live events
    text: str  # written once, however many hear it, and however often they come again

    @classmethod
    def of(cls, number: int, is_live: bool, kind: str, data: Json) -> _Event:
        return cls(number, is_live, f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n")


@dataclass
class _Listener:
    host: str
    is_live: bool
    queue: asyncio.Queue[str | None]

    def hears(self, event: _Event) -> bool:
        return self.is_live or not event.is_live


@dataclass
class _Feed:
    declared: EventFeed
    now: Json = field(default_factory=dict)
    looking: asyncio.Task[None] | None = None


class EventStreams:
    def __init__(self, feeds: Iterable[EventFeed], call: Callable[..., Awaitable[Any]], headers: Mapping[str, str]) -> None:
        """`call` runs a function of a feed in the thread of the peer."""
        self._call = call
        self._headers = headers
        self._listeners: dict[asyncio.Task[Any], _Listener] = {}
        self._number = time.time_ns() // 1_000_000  # so that events of a process that is started again have higher numbers
        self._kept: deque[_Event] = deque(maxlen=REPLAY_EVENTS_MAX)
        self._feeds = [_Feed(feed) for feed in feeds]

    async def stream_events(self, request: web.Request, is_live: bool, host: str = "") -> web.StreamResponse:
        # A reverse proxy such as nginx keeps what it reads until a buffer is full, unless it is told not to.
        response = web.StreamResponse(headers={**self._headers, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        if request.method == "HEAD":
            return response
        feeds = [feed for feed in self._feeds if is_live or not feed.declared.is_on_request]
        for feed in feeds:
            if feed.looking is None:
                # Another may have begun to listen meanwhile.
                self._tell(self._take(feed, await self._call(feed.declared.wait_for_look, {})))
        self._make_room(host)  # nothing is awaited from here until this one is counted
        me, mine = asyncio.current_task(), _Listener(host, is_live, asyncio.Queue(LISTENER_QUEUE_MAX))
        assert me is not None
        self._listeners[me] = mine
        if text := self._first(feeds, mine, request.headers.get("Last-Event-ID", "")):
            mine.queue.put_nowait(text)
        try:
            for feed in feeds:
                feed.looking = feed.looking or asyncio.create_task(self._look(feed))
            await response.prepare(request)
            while True:
                try:
                    said = await asyncio.wait_for(mine.queue.get(), KEEPALIVE_SECONDS)
                except TimeoutError:
                    said = ": nothing new\n\n"
                if said is None:
                    return response
                await response.write(said.encode())
        except ConnectionError:  # it is gone
            return response
        finally:
            self._listeners.pop(me, None)

    def _make_room(self, host: str) -> None:
        """Raises `HttpProblem` where there are too many, and no host has more of them than this one would have."""
        hosts = Counter(listener.host for listener in self._listeners.values())
        if hosts[host] >= LISTENERS_OF_HOST_MAX:
            raise HttpProblem("too-many", f"{LISTENERS_OF_HOST_MAX} others listen at this address already", 60)
        if len(self._listeners) >= LISTENERS_MAX:
            most, count = hosts.most_common(1)[0]
            if count <= hosts[host] + 1:
                raise HttpProblem("too-many", f"{LISTENERS_MAX} others listen already", 60)
            oldest = next(task for task, listener in self._listeners.items() if listener.host == most)
            del self._listeners[oldest]
            oldest.cancel()

    def _first(self, feeds: list[_Feed], mine: _Listener, last: str) -> str:
        """Whoever comes again goes on behind the last event that it has seen. The newest state stands for all that came before:
        for whoever comes for the first time, and where that event is not known any more."""
        number = int(last) if re.fullmatch(r"[0-9]{1,16}", last) else -1
        if self._kept and self._kept[0].number - 1 <= number <= self._number:
            return "".join(event.text for event in self._kept if event.number > number and mine.hears(event))
        said = (item for feed in feeds for item in feed.declared.events_between({}, feed.now))
        return "".join(_Event.of(self._number, False, kind, data).text for kind, data in said)

    def _take(self, feed: _Feed, now: Json) -> list[_Event]:
        """The events that lead to this look; none if a later one is known."""
        declared = feed.declared
        if feed.now and now[declared.order] <= feed.now[declared.order]:
            return []
        events = []
        for kind, data in declared.events_between(feed.now, now):
            self._number += 1
            events.append(_Event.of(self._number, declared.is_on_request, kind, data))
        self._kept += events
        feed.now = now
        return events

    async def _look(self, feed: _Feed) -> None:
        try:
            while any(listener.is_live or not feed.declared.is_on_request for listener in self._listeners.values()):
                self._tell(self._take(feed, await self._call(feed.declared.wait_for_look, feed.now)))
        except HttpProblem:  # the peer is busy, or stops: whoever comes again goes on
            self._drop()
        finally:
            feed.looking = None

    def _tell(self, events: list[_Event]) -> None:
        for task, listener in list(self._listeners.items()):
            if listener.queue.full():
                task.cancel()
            elif text := "".join(event.text for event in events if listener.hears(event)):
                listener.queue.put_nowait(text)

    def _drop(self) -> None:
        for task, listener in self._listeners.items():
            if listener.queue.full():
                task.cancel()
            else:
                listener.queue.put_nowait(None)

    async def close_streams(self, app: web.Application) -> None:
        self._drop()
        for feed in self._feeds:
            if feed.looking is not None:
                feed.looking.cancel()
