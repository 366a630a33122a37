"""Server-sent events. A look is a JSON object with the peer's state, and its changes are events for all listeners."""

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

# Listeners, each with a connection: at the limit, the host with most listeners loses its oldest listener.
LISTENERS_MAX: Final = 100
LISTENERS_OF_HOST_MAX: Final = 20  # listeners of one host: browser tabs of all people behind one address
LISTENER_QUEUE_MAX: Final = 32  # unread messages after which a listener is disconnected
REPLAY_EVENTS_MAX: Final = 512  # last events that are stored for listeners that reconnect
# Seconds without an event after which a comment is sent, so that reverse proxies do not close an idle connection.
KEEPALIVE_SECONDS: Final = 15.0


class _Event(NamedTuple):
    number: int
    is_live: bool  # True if only listeners of live events get the event
    text: str  # the encoded event, the same for all listeners

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
        """Make the streams of these feeds. `call` runs a function of a feed in Trio's thread."""
        self._call = call
        self._headers = headers
        self._listeners: dict[asyncio.Task[Any], _Listener] = {}
        # Number of the last event; it starts with the time in ms, so that numbers also grow when the process restarts.
        self._number = time.time_ns() // 1_000_000
        self._kept: deque[_Event] = deque(maxlen=REPLAY_EVENTS_MAX)
        self._feeds = [_Feed(feed) for feed in feeds]

    async def stream_events(self, request: web.Request, is_live: bool, host: str = "") -> web.StreamResponse:
        # Without X-Accel-Buffering, a reverse proxy such as nginx sends nothing until its buffer is full.
        response = web.StreamResponse(headers={**self._headers, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        if request.method == "HEAD":
            return response
        feeds = [feed for feed in self._feeds if is_live or not feed.declared.is_on_request]
        for feed in feeds:
            if feed.looking is None:
                # Other listeners may have registered during this call, so they get the events of this look, too.
                self._tell(self._take(feed, await self._call(feed.declared.wait_for_look, {})))
        self._make_room(host)  # no `await` between this call and the listener's registration: the room must stay free
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
                    said = ": keepalive\n\n"
                if said is None:
                    return response
                await response.write(said.encode())
        except ConnectionError:  # the listener has closed the connection
            return response
        finally:
            self._listeners.pop(me, None)

    def _make_room(self, host: str) -> None:
        """Make room for one more listener of this host.

        Above LISTENERS_MAX, the host with most listeners loses its oldest listener. Raises `HttpProblem` if this host is at its
        limit, or if no host has more listeners than this host would have.
        """
        hosts = Counter(listener.host for listener in self._listeners.values())
        if hosts[host] >= LISTENERS_OF_HOST_MAX:
            raise HttpProblem(
                "too-many", f"your address already has {LISTENERS_OF_HOST_MAX} event streams: close one, or try again later", 60
            )
        if len(self._listeners) >= LISTENERS_MAX:
            most, count = hosts.most_common(1)[0]
            if count <= hosts[host] + 1:
                raise HttpProblem("too-many", f"this peer already has {LISTENERS_MAX} event streams: try again later", 60)
            oldest = next(task for task, listener in self._listeners.items() if listener.host == most)
            del self._listeners[oldest]
            oldest.cancel()

    def _first(self, feeds: list[_Feed], mine: _Listener, last: str) -> str:
        """Return the first text for a listener that reconnects after the event `last`: all later events.

        If the event `last` is unknown or not stored, the text has the newest state, which replaces all earlier events.
        """
        number = int(last) if re.fullmatch(r"[0-9]{1,16}", last) else -1
        if self._kept and self._kept[0].number - 1 <= number <= self._number:
            return "".join(event.text for event in self._kept if event.number > number and mine.hears(event))
        said = (item for feed in feeds for item in feed.declared.events_between({}, feed.now))
        return "".join(_Event.of(self._number, False, kind, data).text for kind, data in said)

    def _take(self, feed: _Feed, now: Json) -> list[_Event]:
        """Store a new look, and return the events that lead to it from the last look. A look that is not newer has no events."""
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
        except HttpProblem:  # the peer is busy or stops: listeners are disconnected, and continue when they connect again
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
