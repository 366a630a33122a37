"""Limits on connections of the web port: how many are open, in total and for each host, and how long a request may take.

| reached by a new connection | condition                                 | consequence                                         |
|-----------------------------|-------------------------------------------|-----------------------------------------------------|
| limit of its host           | a connection of the host has no request   | the oldest such connection is closed                |
| limit of its host           | all connections of the host have one      | the oldest of them is closed                        |
| total limit                 | proxies have at most three quarters of it | the largest host, except proxies, loses one as above |
| total limit                 | proxies have more                         | the largest host loses one as above                 |

A stranger that fills the port therefore closes its own connections, and a visitor with few connections is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

HOST_SHARE_DIVISOR: Final = 4  # a host has at most a quarter of all connections; an office shares one address
HEADER_SECONDS: Final = 15.0  # from the connection, or the last reply, to the next complete header
REQUEST_SECONDS: Final = 60.0  # from the header until the reply is sent; the longest call waits 13 seconds
FILE_SECONDS: Final = 600.0  # REQUEST_SECONDS for a file: 16 MiB over a link of 0.25 Mbit/s

SERVER_HEADER: Final = "folkmoot"  # A version would tell strangers which bugs to try.

log = logging.getLogger("site")


class ConnectionSlot:
    """Slot of one connection, from its acceptance to its end."""

    def __init__(self, host: str, close: Callable[[], object], clock: Callable[[], float]) -> None:
        self.host, self.close, self._clock = host, close, clock
        self.finish_request()

    def begin_request(self, seconds: float) -> None:
        """Start the deadline of a reply, `seconds` from now."""
        self.waits, self.deadline = False, self._clock() + seconds

    def finish_request(self) -> None:
        """Start the deadline of the next header."""
        self.waits, self.deadline = True, self._clock() + HEADER_SECONDS


class ConnectionSlots:
    """Slots of all open connections. `proxies` are hosts that forward connections of many people; they may have all slots."""

    def __init__(self, connections_max: int, proxies: Collection[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._proxies, self._clock = max(1, connections_max), proxies, clock
        self._of_host = max(1, self._most // HOST_SHARE_DIVISOR)
        self._open: dict[ConnectionSlot, None] = {}  # the oldest first

    def acquire_slot(self, host: str, close: Callable[[], object]) -> ConnectionSlot:
        """Return the slot of a new connection. At a limit, it closes another connection."""
        hosts = Counter(place.host for place in self._open)
        bound = self._most if host in self._proxies else self._of_host
        if hosts[host] >= bound:
            self._close_one({host})
        elif len(self._open) >= self._most:
            proxied = sum(hosts[host] for host in self._proxies)
            if len(self._open) - proxied > 0 and proxied <= self._most - self._of_host:
                hosts -= Counter({host: hosts[host] for host in self._proxies})
            most = max(hosts.values())
            self._close_one({host for host, count in hosts.items() if count == most})
        place = ConnectionSlot(host, close, self._clock)
        self._open[place] = None
        return place

    def release_slot(self, place: ConnectionSlot) -> None:
        self._open.pop(place, None)

    def close_overdue(self) -> None:
        now = self._clock()
        for place in [place for place in self._open if place.deadline < now]:
            self._close(place)

    def _close_one(self, hosts: Collection[str]) -> None:
        theirs = [place for place in self._open if place.host in hosts]
        self._close(next((place for place in theirs if place.waits), theirs[0]))

    def _close(self, place: ConnectionSlot) -> None:
        self.release_slot(place)
        place.close()


class LimitedRequestHandler(web.RequestHandler):
    """aiohttp's protocol of one connection, with the connection's slot."""

    __slots__ = ("_places", "place")

    def __init__(self, places: ConnectionSlots, place: ConnectionSlot, server: web.Server, **more: Any) -> None:
        super().__init__(server, access_log_class=_ReplyFinishedLogger, access_log=log, **more)
        self._places, self.place = places, place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.place.close = transport.abort
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._places.release_slot(self.place)
        super().connection_lost(exc)

    def handle_error(self, *arguments: Any, **more: Any) -> web.StreamResponse:
        """Return the reply to bytes that are no request. It does not pass through the application, which sets this header."""
        response = super().handle_error(*arguments, **more)
        response.headers["Server"] = SERVER_HEADER
        return response


class _ReplyFinishedLogger(AbstractAccessLogger):
    """Hook that aiohttp calls after each reply. It logs nothing."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if isinstance(request.protocol, LimitedRequestHandler):
            request.protocol.place.finish_request()


def set_reply_deadline(request: web.BaseRequest, seconds: float) -> None:
    """Set the deadline of the reply to this request, `seconds` from now."""
    if isinstance(request.protocol, LimitedRequestHandler):
        request.protocol.place.begin_request(seconds)
