"""Bridge between two event loops: asyncio for aiohttp, in a thread of its own, and Trio for the peer. No other module uses both
loops. A handler in asyncio awaits a call. Trio runs the call, and the call's result or problem returns to the handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import trio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from protocol.addresses import host_subnet
from web.app import make_application
from web.calls import HttpProblem
from web.connection_limits import ConnectionSlots, LimitedRequestHandler
from web.site import Site, SiteHandlers

SHUTDOWN_SECONDS = 1.0
HANDSHAKE_SECONDS = 10.0  # time limit of a TLS handshake
SWEEP_SECONDS = 1.0  # seconds between searches for overdue connections
BACKLOG = 128  # connections that the kernel queues until they are accepted
ACCEPT_SECONDS = 0.002  # pause after each accepted connection: with at most 500 a second, a flood takes a tenth of one core
ACCEPT_RETRY_SECONDS = 0.1  # pause after a failed accept, for example while no file descriptor is free

log = logging.getLogger("site")


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for log records about malformed and aborted requests: strangers could fill the log with them."""
    return not (
        record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError | ConnectionError)
    )


log.addFilter(_is_ours)


class HttpAcceptor:
    """Acceptor of HTTP connections. It limits their rate, and gives each connection a slot."""

    def __init__(self, server: web.Server, places: ConnectionSlots, tls: Callable[[], ssl.SSLContext | None]) -> None:
        """Make an acceptor. `tls` returns the TLS context for the next connection, or None for plain HTTP."""
        self._server, self._places, self._tls = server, places, tls
        self._serving: set[asyncio.Task[None]] = set()

    async def run(self, listeners: Collection[socket.socket]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep())
            for listener in listeners:
                tasks.create_task(self._accept(listener))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._places.close_overdue()

    async def _accept(self, listener: socket.socket) -> None:
        loop, is_told = asyncio.get_running_loop(), False
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptor is free, or the client has closed the connection
                if not is_told:
                    log.error("cannot accept a connection: %s", error)
                is_told = True
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            is_told = False
            serving = loop.create_task(self._serve(connection, host_subnet(address[0].partition("%")[0])))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
            await asyncio.sleep(ACCEPT_SECONDS)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        """Give the connection to aiohttp, or close it after a failure. `host` is the client's address or network."""
        task = asyncio.current_task()
        assert task is not None
        place = self._places.acquire_slot(host, task.cancel)
        loop, tls = asyncio.get_running_loop(), self._tls()
        timeout = None if tls is None else HANDSHAKE_SECONDS
        try:
            await loop.connect_accepted_socket(
                lambda: LimitedRequestHandler(self._places, place, self._server, loop=loop, logger=log),
                connection,
                ssl=tls,
                ssl_handshake_timeout=timeout,
            )
            return
        except (OSError, asyncio.CancelledError):  # the TLS handshake failed, or a newer connection got this one's slot
            pass
        except Exception:  # a bug of ours must not close other connections
            log.exception("a connection could not be served")
        self._places.release_slot(place)
        connection.close()


class AsyncioBridge:
    """The HTTP server of a site on one address, in a thread of its own."""

    def __init__(
        self,
        site: Site,
        handlers: SiteHandlers,
        host: str,
        port: int,
        connections_max: int,
        names: Collection[str] = (),
        tls: ssl.SSLContext | None = None,
        proxies: Collection[str] = (),
    ) -> None:
        """Make a server. `names` are names of this host in addition to its addresses. `proxies` are trusted reverse proxies."""
        self._site, self._handlers = site, handlers
        self._host, self._port, self._names = host, port, names
        # Concurrent calls, one for each connection; `ConnectionSlots` limits connections of each host.
        self._calls_max = connections_max
        self.tls = tls  # TLS context of later connections: `WebService` sets it when the certificate changes
        self._places, self._proxies = ConnectionSlots(connections_max, frozenset(map(host_subnet, proxies))), proxies
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._running = 0

    async def run(self, *, task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled.

        `task_status` gets (host, port) at the start. Raises `OSError` if the peer cannot listen on the address.
        """
        opened = await trio.open_tcp_listeners(self._port, host=self._host, backlog=BACKLOG)
        listeners = [socket.socket(fileno=listener.socket.detach()) for listener in opened]
        address = listeners[0].getsockname()[:2]
        send, receive = trio.open_memory_channel[Exception | None](2)
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            threading.Thread(target=self._serve, args=(listeners, send), name="site", daemon=True).start()
            try:
                error = await receive.receive()
                if error is None:
                    task_status.started(address)
                    error = await receive.receive()  # the thread ended with an error, although its end was not requested
            finally:
                if self._loop is not None and not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._end.set)
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._ended.wait, 2 * SHUTDOWN_SECONDS)
        assert error is not None
        raise error  # raised outside the nursery, which would wrap the error in an exception group

    # In the thread of asyncio ----------------------------------------------------------------------------------------

    def _serve(self, listeners: list[socket.socket], send: trio.MemorySendChannel[Exception | None]) -> None:
        try:
            asyncio.run(self._listen(listeners, send))
        except Exception as error:  # a bug of ours ends the service
            log.exception("the web server's thread ended")
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(send.send_nowait, error)
        finally:
            for listener in listeners:
                listener.close()
            self._ended.set()

    async def _listen(self, listeners: list[socket.socket], send: trio.MemorySendChannel[Exception | None]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = make_application(self._site, self._handlers, self.call, self._names, self._proxies)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS, logger=log)
        await runner.setup()
        assert runner.server is not None
        accepting = asyncio.create_task(HttpAcceptor(runner.server, self._places, lambda: self.tls).run(listeners))
        ending = asyncio.create_task(self._end.wait())
        try:
            self._token.run_sync_soon(send.send_nowait, None)
            await asyncio.wait((accepting, ending), return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
        finally:
            accepting.cancel()
            ending.cancel()
            await runner.cleanup()

    async def call(self, do: Callable[..., Awaitable[Any]], /, *arguments: Any, **named: Any) -> Any:
        """Run a function in Trio's thread and return its result.

        Raises the function's `HttpProblem`, or another if the peer is busy or stops.
        """
        assert self._loop is not None
        if self._running >= self._calls_max:
            raise HttpProblem("too-many", "this peer is busy: try again later", 1)
        self._running += 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        try:
            self._token.run_sync_soon(self._nursery.start_soon, self._answer, partial(do, *arguments, **named), answer)
            return await answer
        except trio.RunFinishedError:
            raise HttpProblem("stopping", "this peer is stopping") from None
        finally:
            self._running -= 1
            del answer  # breaks a reference cycle: a raised exception refers to this frame, and would leave the request in memory

    # In Trio's thread ------------------------------------------------------------------------------------------------

    async def _answer(self, do: Callable[[], Awaitable[Any]], answer: asyncio.Future[Any]) -> None:
        result: Any = None
        error: HttpProblem | None = HttpProblem("stopping", "this peer is stopping")  # problem of a call that is cancelled
        try:
            result, error = await do(), None
        except HttpProblem as problem:
            error = problem
        except Exception:  # a bug of ours in one request must not stop the peer: the log describes the bug
            log.exception("an HTTP call failed")
            error = HttpProblem("internal", "internal error of this peer: its log has the details")
        finally:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_resolve_future, answer, result, error)
            del do, answer, error  # breaks a reference cycle of exception and frame, since garbage collection of cycles is rare


def _resolve_future(answer: asyncio.Future[Any], result: Any, error: HttpProblem | None) -> None:
    if answer.done():  # the client has closed the connection
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
