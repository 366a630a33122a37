"""Connections of the web port: how many are open at once, of all hosts and of each one, and how long a request may take.

| a connection comes              | and                                        | then                                           |
|---------------------------------|--------------------------------------------|------------------------------------------------|
| of a host at its bound          | it has one that waits for a request        | the oldest of those is closed                  |
| of a host at its bound          | all of its connections have a request      | its oldest one is closed                       |
| when as many are open as may be | some hosts have more than others           | the host with most closes one, as above        |
| the same                        | proxies have three quarters of all at most | the host with most of the others closes one    |

So a stranger that fills the port closes its own connections, and a visitor with few of them is served.
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

HOST_SHARE_DIVISOR: Final = 4  # a host has a quarter of all connections at most: an office has one address
HEADER_SECONDS: Final = 15.0  # from the connection, or the last reply, to the next complete header
REQUEST_SECONDS: Final = 60.0  # from the header until the reply is taken; the longest call waits 13 seconds
FILE_SECONDS: Final = 600.0  # the same with a file of 16 MiB, over a link of a quarter of a megabit

SERVER_HEADER: Final = "folkmoot"  # the header: a version in it would tell a stranger which faults to try

log = logging.getLogger("site")


class ConnectionSlot:
    """The place of one connection, from its acceptance to its end."""

    def __init__(self, host: str, close: Callable[[], object], clock: Callable[[], float]) -> None:
        self.host, self.close, self._clock = host, close, clock
        self.finish_request()

    def begin_request(self, seconds: float) -> None:
        """A request has come, and its reply may take so long."""
        self.waits, self.deadline = False, self._clock() + seconds

    def finish_request(self) -> None:
        """It waits for the next header."""
        self.waits, self.deadline = True, self._clock() + HEADER_SECONDS


class ConnectionSlots:
    """`proxies`: hosts that bring the connections of many people, and may have all."""

    def __init__(self, connections_max: int, proxies: Collection[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._proxies, self._clock = max(1, connections_max), proxies, clock
        self._of_host = max(1, self._most // HOST_SHARE_DIVISOR)
        self._open: dict[ConnectionSlot, None] = {}  # the oldest first

    def acquire_slot(self, host: str, close: Callable[[], object]) -> ConnectionSlot:
        """Another connection is closed where there are too many."""
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
    """The library's protocol of one connection, with its place."""

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
        """The reply to bytes that are no request: it has not come by the application."""
        response = super().handle_error(*arguments, **more)
        response.headers["Server"] = SERVER_HEADER
        return response


class _ReplyFinishedLogger(AbstractAccessLogger):
    """The library calls it after each reply; nothing is logged."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if isinstance(request.protocol, LimitedRequestHandler):
            request.protocol.place.finish_request()


def set_reply_deadline(request: web.BaseRequest, seconds: float) -> None:
    """The reply to this request may take so long."""
    if isinstance(request.protocol, LimitedRequestHandler):
        request.protocol.place.begin_request(seconds)
