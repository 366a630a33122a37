"""The service `metrics`: `/healthz` and `/metrics` on loopback, for monitors on this machine.

The module implements the part of HTTP/1.1 that monitors need: one GET or HEAD, one reply, and the connection ends. It runs in
Trio's loop without a library, so that peers of every role can serve metrics.
"""

from __future__ import annotations

import logging
import shutil
from http import HTTPStatus
from typing import Final

import trio

from features.services import ServiceContext
from ledger.members import MembersState
from protocol.addresses import format_address, parse_address
from protocol.api import StatsView
from protocol.errors import RemoteProtocolError
from protocol.prometheus_metrics import (
    CONTENT_TYPE,
    PrometheusMetric,
    format_exposition,
    format_labels,
    link_metrics,
    peer_metrics,
    why_unhealthy,
)

STATS_CACHE_SECONDS: Final = 1.0  # time for which statistics are reused: to make them, the peer reads its store and /proc
ADDRESS_FILE = "address"  # name of a file with the address, which exists while metrics are served
REQUEST_BYTES_MAX: Final = 8_192  # largest request: monitors send a few hundred bytes
REQUEST_SECONDS_MAX: Final = 5.0  # longest time from the connection until the reply is sent: monitors run on this machine
CONNECTIONS_MAX: Final = 16  # concurrent connections: a monitor has one
log = logging.getLogger("metrics")


class StatsCache:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk, self._lock = desk, trio.Lock()
        self._looked: tuple[float, StatsView] | None = None

    async def stats(self) -> StatsView:
        async with self._lock:
            if self._looked is None or self._looked[0] + STATS_CACHE_SECONDS < trio.current_time():
                self._looked = trio.current_time(), await self._desk.api.stats()
            return self._looked[1]

    async def find_health_problem(self) -> str:
        """Return the reason why this peer does not work, or an empty string if it works."""
        return why_unhealthy((await self.stats()).status)

    async def metrics(self) -> tuple[PrometheusMetric, ...]:
        """Return the metrics that every peer has, independent of its features."""
        return tuple(peer_metrics(await self.stats(), len(self._desk.state.module_state(MembersState).members)))


class MetricsEndpoint:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk, self._stats, self._open = desk, StatsCache(desk), 0

    async def run(self) -> None:
        written = self._desk.folder / ADDRESS_FILE
        written.unlink(missing_ok=True)
        if not (listen := str(self._desk.get_setting("metrics"))):
            return
        host, port = parse_address(listen)
        try:
            listeners = await trio.open_tcp_listeners(port, host=host)
        except OSError as error:
            # A voter must not end because metrics cannot be served. `peer doctor` and the log report the missing endpoint.
            why = (error.strerror or str(error)).lower()
            self._desk.log_warning(f"metrics are not served at {listen}: {why}; choose another address with --metrics, or port 0")
            return
        address = format_address(host, listeners[0].socket.getsockname()[1])
        written.write_text(address)
        self._desk.log_event(f"metrics are served at http://{address}/metrics")
        await trio.serve_listeners(self._answer, listeners)

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            if self._open >= CONNECTIONS_MAX:
                return
            self._open += 1
            try:
                with trio.move_on_after(REQUEST_SECONDS_MAX):
                    await stream.send_all(await self._response(stream))
            except trio.BrokenResourceError:
                pass  # the monitor has closed the connection
            finally:
                self._open -= 1

    async def _response(self, stream: trio.SocketStream) -> bytes:
        is_head = False
        try:
            method, path = _asked(await _head(stream))
            is_head = method == "HEAD"
            status, text = await self._reply(method, path)
            body = text.encode()
        except RemoteProtocolError as error:
            status, body = HTTPStatus.BAD_REQUEST, f"{error}\n".encode()
        except trio.BrokenResourceError:
            raise  # the monitor has closed the connection
        except Exception:  # a voter must not end because of a failed reply
            log.exception("a reply to a monitor failed")
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, b"the peer failed; its log says why\n"
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {CONTENT_TYPE}; charset=utf-8",
            f"Content-Length: {len(body)}",
            *(("Allow: GET, HEAD",) if status is HTTPStatus.METHOD_NOT_ALLOWED else ()),
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + (b"" if is_head else body)

    async def _reply(self, method: str, path: str) -> tuple[HTTPStatus, str]:
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed: use GET or HEAD\n"
        if path == "/healthz":
            why = await self._stats.find_health_problem()
            return (HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n") if why else (HTTPStatus.OK, "ok\n")
        if path == "/metrics":
            return HTTPStatus.OK, format_exposition(await self._metrics())
        return HTTPStatus.NOT_FOUND, "not found: try /healthz or /metrics\n"

    async def _metrics(self) -> tuple[PrometheusMetric, ...]:
        alerts = await self._desk.api.alerts()
        free = (await trio.to_thread.run_sync(shutil.disk_usage, self._desk.folder)).free
        told = {format_labels(cause=alert.cause, severity=alert.severity, about=alert.about): 1 for alert in alerts}
        return (
            *await self._stats.metrics(),
            *link_metrics(await self._desk.api.peers()),
            PrometheusMetric("alert", "1 for each active alert, as in `peer alerts`", told),
            PrometheusMetric("disk_free_bytes", "free bytes on the disk of the data directory", {"": free}),
        )


async def _head(stream: trio.abc.ReceiveStream) -> bytes:
    """Return a request up to its empty line.

    Raises `RemoteProtocolError` if the request ends earlier or exceeds REQUEST_BYTES_MAX.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > REQUEST_BYTES_MAX:
            raise RemoteProtocolError("oversized", f"the request is larger than {REQUEST_BYTES_MAX} bytes")
        if not (part := await stream.receive_some(REQUEST_BYTES_MAX)):
            raise RemoteProtocolError("cut-short", "the request ended within its header")
        data += part
    return data


def _asked(head: bytes) -> tuple[str, str]:
    """Return the method and the path of a request. Raises `RemoteProtocolError` if the bytes are not an HTTP/1 request."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise RemoteProtocolError("malformed", "not an HTTP/1 request")
    return words[0], words[1].partition("?")[0]
