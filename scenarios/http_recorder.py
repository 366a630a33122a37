"""A proxy between an HTTP client and a server, which records every exchange and can delay both directions.

It speaks HTTP/1.1 with a Content-Length. A client keeps its connection, and each of its requests gets a new connection to the
server, so a server that is restarted at the same address serves the client again. While the server is down, the proxy closes the
client's connection, as a dead server would.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

READ_BYTES = 64 << 10
HEAD_BYTES_MAX = 64 << 10
IDS = re.compile(r"[0-9a-f]{24}[^/]*")  # ids of sessions, and of models, in a path


@dataclass(frozen=True, slots=True)
class Exchange:
    call: str  # method and path, without the ids in it
    status: int  # status of the reply; 0: the connection broke before the reply
    retry: int  # number of the client's earlier attempts, as it counts them


@dataclass
class HttpRecorder:
    server: tuple[str, int]
    prefix: str = ""  # path that `Exchange.call` leaves out
    delay_seconds: float = 0.0  # in each direction
    port: int = 0
    exchanges: list[Exchange] = field(default_factory=list)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            task_status.started()

    async def _serve(self, client: trio.SocketStream) -> None:
        reader = _MessageReader(client)
        async with client:
            while (request := await reader.read_message()) is not None:
                await trio.sleep(self.delay_seconds)
                try:
                    async with await trio.open_tcp_stream(*self.server) as server:
                        await server.send_all(request)
                        reply = await _MessageReader(server).read_message()
                except (OSError, trio.BrokenResourceError):
                    reply = None
                self._record(request, reply)
                if reply is None:
                    return
                await trio.sleep(self.delay_seconds)
                try:
                    await client.send_all(reply)
                except trio.BrokenResourceError:  # the client gave up
                    return

    def _record(self, request: bytes, reply: bytes | None) -> None:
        method, path, _ = request.partition(b"\r\n")[0].decode().split()
        call = f"{method} {IDS.sub('{id}', path.partition('?')[0].removeprefix(self.prefix))}"
        status = int(reply.split(None, 2)[1]) if reply else 0
        self.exchanges.append(Exchange(call, status, int(_header(request, b"x-stainless-retry-count") or 0)))


class _MessageReader:
    """A reader of the requests or replies of one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream, self._read = stream, bytearray()

    async def read_message(self) -> bytes | None:
        """Return a whole message; None if the connection ends before its end."""
        while (end := self._read.find(b"\r\n\r\n")) < 0:
            if len(self._read) > HEAD_BYTES_MAX or not await self._read_more():
                return None
        length = end + 4 + int(_header(bytes(self._read[:end]), b"content-length") or 0)
        while len(self._read) < length:
            if not await self._read_more():
                return None
        message = bytes(self._read[:length])
        del self._read[:length]
        return message

    async def _read_more(self) -> bool:
        try:
            data = await self._stream.receive_some(READ_BYTES)
        except trio.BrokenResourceError:
            return False
        self._read += data
        return bool(data)


def _header(message: bytes, name: bytes) -> bytes | None:
    head = message.partition(b"\r\n\r\n")[0]
    found = re.search(rb"(?im)^" + re.escape(name) + rb":\s*([^\r\n]*)", head)
    return found[1] if found else None


@asynccontextmanager
async def running_recorder(server: tuple[str, int], prefix: str, delay_seconds: float = 0.0) -> AsyncIterator[HttpRecorder]:
    async with trio.open_nursery() as nursery:
        recorder = HttpRecorder(server, prefix, delay_seconds)
        await nursery.start(recorder.run)
        yield recorder
        nursery.cancel_scope.cancel()
