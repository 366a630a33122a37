"""Limits on connections of the web port: their number, in total and for each host, and the duration of a request.

| reached by a new connection | condition                                 | consequence                                         |
|-----------------------------|-------------------------------------------|-----------------------------------------------------|
| limit of its host           | a connection of the host has no request   | the oldest such connection is closed                |
| limit of its host           | all connections of the host have one      | the oldest of them is closed                        |
| total limit                 | proxies have at most three quarters of it | the largest host, except proxies, loses one as above |
| total limit                 | proxies have more                         | the largest host loses one as above                 |

A stranger that fills the port therefore closes its own connections, and a visitor with few connections is served.

A connection does not count for its host's limit until it, or its present request, is `YOUNG_SECONDS` old.

A connection with a held reply belongs to a program that the peer serves and that may wait for hundreds of results at once. It is
never closed for a new connection, and counts for no host. All connections but one in `VISITOR_SHARE_DIVISOR` may be held. A call
beyond them takes the place of a held one of the token with the most, whose program is told at once to ask again. If its own token
then had the most, the call is refused, so that its program asks again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from web.calls import HttpProblem

# Divisor of all connections that gives the limit of one host: a quarter, since an office shares one address.
HOST_SHARE_DIVISOR: Final = 4
# Divisor of all connections that gives those without held replies: 64 of 512, since six are enough for a browser. The other 448
# are enough for the 400 requests that one session of the SDK `tinker` sends at once.
VISITOR_SHARE_DIVISOR: Final = 8
# Longest time from the begin of a connection or a request during which the connection does not count for its host: programs that
# start together send some hundred calls at once, each of which takes milliseconds.
YOUNG_SECONDS: Final = 5.0
HELD_RETRY_SECONDS: Final = 1  # time after which a program may ask again for a result that it cannot wait for
HEADER_SECONDS: Final = 15.0  # longest time from the connection, or from the last reply, to the next complete header of a request
REQUEST_SECONDS: Final = 60.0  # longest time from a header until the reply is sent: the longest calls wait 30 seconds
FILE_SECONDS: Final = 600.0  # longest time from a header until a file is sent or received: 16 MiB over a link of 0.25 Mbit/s

SERVER_HEADER: Final = "folkmoot"  # header `Server` without a version, which would show strangers the bugs to try

log = logging.getLogger("site")


class ConnectionSlot:
    """The slot of one connection, from acceptance to end, with the deadline of the present request."""

    def __init__(self, host: str, close: Callable[[], object], clock: Callable[[], float]) -> None:
        self.host, self.close, self._clock = host, close, clock
        self.is_held, self.token = False, ""
        self.end_hold: Callable[[], object] = lambda: None
        self.finish_request()
        self._young_until = clock() + YOUNG_SECONDS

    def begin_request(self, seconds: float) -> None:
        """Set the deadline of a reply to `seconds` from now."""
        self.waits, self.deadline = False, self._clock() + seconds
        self._young_until = self._clock() + YOUNG_SECONDS

    def finish_request(self) -> None:
        """Set the deadline of the next header to `HEADER_SECONDS` from now."""
        self.waits, self.deadline = True, self._clock() + HEADER_SECONDS
        self._young_until = self._clock()

    @property
    def is_young(self) -> bool:
        return self._clock() < self._young_until


class ConnectionSlots:
    """The slots of all open connections. `proxies` are hosts that forward connections of many people and may have all slots."""

    def __init__(self, connections_max: int, proxies: Collection[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._proxies, self._clock = max(1, connections_max), proxies, clock
        self._of_host = max(1, self._most // HOST_SHARE_DIVISOR)
        self._held_max = self._most - max(1, self._most // VISITOR_SHARE_DIVISOR)
        self._open: dict[ConnectionSlot, None] = {}  # slots of open connections, the oldest first

    def acquire_slot(self, host: str, close: Callable[[], object]) -> ConnectionSlot:
        """Return the slot of a new connection of `host`.

        At a limit, another connection is closed. `close` closes the new connection.
        """
        hosts = Counter(place.host for place in self._open if not place.is_held)
        counted = [place for place in self._open if place.host == host and not (place.is_held or place.is_young)]
        if len(counted) >= (self._most if host in self._proxies else self._of_host):
            self._close_one_of(counted)
        elif len(self._open) >= self._most:
            proxied = sum(hosts[host] for host in self._proxies)
            if hosts.total() > proxied and proxied <= self._most - self._of_host:
                hosts -= Counter({host: hosts[host] for host in self._proxies})
            most = max(hosts.values())
            largest = {host for host, count in hosts.items() if count == most}
            self._close_one_of([place for place in self._open if place.host in largest and not place.is_held])
        place = ConnectionSlot(host, close, self._clock)
        self._open[place] = None
        return place

    def release_slot(self, place: ConnectionSlot) -> None:
        self._open.pop(place, None)

    @contextmanager
    def hold_slot(self, place: ConnectionSlot, token: str, end_hold: Callable[[], object]) -> Iterator[None]:
        """Keep a connection in the `with` block from being closed for others.

        `end_hold` is called if the connection has to give way to one of another token. Raises `HttpProblem` if too many are held.
        """
        held = Counter(place.token for place in self._open if place.is_held)
        if held.total() >= self._held_max:
            largest = max(held, key=held.__getitem__, default=token)
            if held[largest] <= held[token] + 1:  # The two tokens would then change places.
                raise HttpProblem("too-many", "too many calls wait for results: ask again later", HELD_RETRY_SECONDS)
            oldest = next(place for place in self._open if place.is_held and place.token == largest)
            oldest.is_held = False
            oldest.end_hold()
        place.is_held, place.token, place.end_hold = True, token, end_hold
        try:
            yield
        finally:
            place.is_held = False

    def close_overdue(self) -> None:
        now = self._clock()
        for place in [place for place in self._open if place.deadline < now]:
            self._close(place)

    def _close_one_of(self, places: Sequence[ConnectionSlot]) -> None:
        self._close(next((place for place in places if place.waits), places[0]))

    def _close(self, place: ConnectionSlot) -> None:
        self.release_slot(place)
        place.close()


class LimitedRequestHandler(web.RequestHandler):
    """aiohttp's handler of one connection, extended by the connection's slot."""

    __slots__ = ("holding", "place", "places")

    def __init__(self, places: ConnectionSlots, place: ConnectionSlot, server: web.Server, **more: Any) -> None:
        super().__init__(server, access_log_class=_ReplyFinishedLogger, access_log=log, **more)
        self.places, self.place = places, place
        self.holding: asyncio.Task[Any] | None = None  # task that waits for the result of a held reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.place.close = transport.abort
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.places.release_slot(self.place)
        if self.holding is not None:
            self.holding.cancel()
        super().connection_lost(exc)

    def handle_error(self, *arguments: Any, **more: Any) -> web.StreamResponse:
        """Return the reply to bytes that are no request.

        The application, which sets the header `Server` of other replies, does not see it.
        """
        response = super().handle_error(*arguments, **more)
        response.headers["Server"] = SERVER_HEADER
        return response


class _ReplyFinishedLogger(AbstractAccessLogger):
    """A hook that aiohttp calls after each reply. It logs nothing, but sets the deadline of the next header."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if isinstance(request.protocol, LimitedRequestHandler):
            request.protocol.place.finish_request()


def set_reply_deadline(request: web.BaseRequest, seconds: float) -> None:
    """Set the deadline of the reply to this request to `seconds` from now."""
    if isinstance(request.protocol, LimitedRequestHandler):
        request.protocol.place.begin_request(seconds)


@contextmanager
def held_connection(request: web.BaseRequest, token: str) -> Iterator[asyncio.Timeout]:
    """Keep the connection for the result that the current task waits for, and cancel the task when the client closes it.

    The wait must be in the yielded timeout, which ends when the connection has to give way to one of another token. Raises
    `HttpProblem` if too many connections are held.
    """
    handler, task, limit = request.protocol, asyncio.current_task(), asyncio.timeout(None)
    assert isinstance(handler, LimitedRequestHandler) and task is not None
    if request.transport is None:  # the connection is closed already
        task.cancel()
    handler.holding = task
    try:
        with handler.places.hold_slot(handler.place, token, lambda: limit.reschedule(0.0)):
            yield limit
    finally:
        handler.holding = None
