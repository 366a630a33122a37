"""Measurement of a link from its two ends. `python -m scenarios.links` starts it on each carrier.

The serving end returns every ping and counts the bytes of bulk transfers. The other end sends both. Pings use TCP, or UDP where
packets can be lost.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import trio

PING, POUR = b"p", b"b"
PING_BYTES = 64
PING_SECONDS_MAX = 3.0  # after this a ping counts as lost; no link here is slower
PAUSE_SECONDS = 0.05  # between the pings of one connection, or between datagrams
PINGERS = 20  # connections; pings behind a late segment are late, too, so each connection has few of them
POUR_BYTES = 64 << 10
READ_BYTES = 256 << 10
WARM_SECONDS = 3.0  # start of a transfer that does not count: slow start
DATAGRAM_BYTES = 1_472  # of 1,500 with its headers
_PING = struct.Struct(">d")

Dial = Callable[[], Awaitable[trio.SocketStream]]


@dataclass
class Pings:
    """Times on the clock of the sending end."""

    sent: list[float] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)  # None: no answer

    def note(self, sent: float, seconds: float | None) -> None:
        self.sent.append(sent)
        self.seconds.append(seconds)

    def median(self) -> float:
        return statistics.median(took for took in self.seconds if took is not None)


@dataclass
class Poured:
    begin: float = 0.0  # on the clock of the counting end
    end: float = 0.0
    bytes: int = 0

    @property
    def rate(self) -> float:
        return self.bytes / (self.end - self.begin) if self.end > self.begin else 0.0


class Server:
    """A counter of the bytes in `POUR` connections and datagrams."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.arrivals: list[tuple[float, int]] = []

    def note(self, count: int) -> None:
        self.arrivals.append((self._clock(), count))

    def poured(self, warm: float = WARM_SECONDS) -> Poured:
        """Return the bytes between the end of the warm-up and the last arrival, and reset the counter."""
        arrivals, self.arrivals = self.arrivals, []
        begin = arrivals[0][0] + warm if arrivals else 0.0
        counted = [(at, count) for at, count in arrivals if at > begin]
        return Poured(begin, counted[-1][0], sum(count for _, count in counted)) if counted else Poured()

    async def serve_stream(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                kind = await stream.receive_some(1)
                while data := await stream.receive_some(READ_BYTES):
                    if kind == PING:
                        await stream.send_all(data)
                    else:
                        self.note(len(data))
        except trio.BrokenResourceError:
            pass

    async def serve_datagrams(self, socket: trio.socket.SocketType) -> None:
        while True:
            data, whence = await socket.recvfrom(READ_BYTES)
            if data[:1] == PING:
                await socket.sendto(data, whence)
            else:
                self.note(len(data) + 28)  # with its headers, which links count


async def ping_streams(dial: Dial, clock: Callable[[], float], seconds: float, pingers: int = PINGERS) -> Pings:
    """Send pings over several connections. Each sends its next ping when the previous one has returned."""
    found, end = Pings(), trio.current_time() + seconds

    async def one(pause: float) -> None:
        await trio.sleep(pause)
        async with await dial() as stream:
            await stream.send_all(PING)
            while trio.current_time() < end:
                sent, left = clock(), PING_BYTES
                await stream.send_all(bytes(PING_BYTES))
                while left:
                    left -= len(await stream.receive_some(left))
                found.note(sent, clock() - sent)
                await trio.sleep(PAUSE_SECONDS)

    async with trio.open_nursery() as nursery:
        for number in range(pingers):
            nursery.start_soon(one, number * PAUSE_SECONDS / pingers)
    return found


async def ping_datagrams(host: str, port: int, clock: Callable[[], float], seconds: float) -> Pings:
    waiting, found = dict[float, float](), Pings()
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as socket:
        await socket.connect((host, port))

        async def hear() -> None:
            while True:
                data = await socket.recv(PING_BYTES)
                (sent,) = _PING.unpack_from(data, 1)
                if waiting.pop(sent, None) is not None:
                    found.note(sent, clock() - sent)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            end = trio.current_time() + seconds
            while trio.current_time() < end:
                sent = clock()
                waiting[sent] = sent
                await socket.send(PING + _PING.pack(sent) + bytes(PING_BYTES - 9))
                await trio.sleep(PAUSE_SECONDS / 2)
            await trio.sleep(PING_SECONDS_MAX)
            nursery.cancel_scope.cancel()
    for sent in waiting:
        found.note(sent, None)
    return found


async def pour_streams(dial: Dial, seconds: float, streams: int) -> None:
    async def one() -> None:
        async with await dial() as stream:
            await stream.send_all(POUR)
            while True:
                await stream.send_all(bytes(POUR_BYTES))

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(streams):
                nursery.start_soon(one)


async def pour_datagrams(host: str, port: int, seconds: float, rate: float) -> None:
    """Send datagrams at a rate in bytes per second, headers included."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as socket:
        await socket.connect((host, port))
        begin, sent = trio.current_time(), 0
        while (now := trio.current_time()) < begin + seconds:
            while sent < rate * (now - begin):
                await socket.send(POUR + bytes(DATAGRAM_BYTES - 1))
                sent += DATAGRAM_BYTES + 28
            await trio.sleep(0.002)


# As a process, inside a namespace ---------------------------------------------------------------------------------------


async def serve(host: str, port: int) -> None:
    """Serve until standard input ends, and print the counted bytes after each line on it."""
    server = Server(time.monotonic)
    listeners = await trio.open_tcp_listeners(port, host=host)
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as socket:
        await socket.bind((host, port))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, server.serve_stream, listeners)
            nursery.start_soon(server.serve_datagrams, socket)
            print("ready", flush=True)
            async with trio.lowlevel.FdStream(0) as lines:
                while await lines.receive_some(1):
                    print(json.dumps(asdict(server.poured())), flush=True)
            nursery.cancel_scope.cancel()


async def ask(what: str, host: str, port: int, seconds: float, much: float) -> None:
    dial = partial(trio.open_tcp_stream, host, port)
    if what == "ping":
        print(json.dumps(asdict(await ping_datagrams(host, port, time.monotonic, seconds))), flush=True)
    elif what == "datagrams":
        await pour_datagrams(host, port, seconds, much)
    else:
        await pour_streams(dial, seconds, int(much))


def main(arguments: list[str] | None = None) -> int:
    what, host, port, *more = sys.argv[1:] if arguments is None else arguments
    if what == "serve":
        trio.run(serve, host, int(port))
    else:
        seconds, much = map(float, more)
        trio.run(ask, what, host, int(port), seconds, much)
    return 0


if __name__ == "__main__":
    sys.exit(main())
