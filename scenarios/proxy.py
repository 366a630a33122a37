"""All links of a network go through here, so that they can be cut: for all, in one direction only, and again; or be slow.

A peer started as `python -m scenarios.proxy peer.cli run …` dials nobody itself: it tells this proxy, in one line, who it is and
whom it wants. What is cut is held back and not lost, as TCP does with packets that do not arrive; or the connections are closed
as well. Where `Conditions` say so, every peer has an uplink of its own, which all its links share, and bytes take time to arrive.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from peer.demo.cast import DemoPeer

VARIABLE = "FOLKMOOT_PROXY"  # port of the proxy and this peer's name
GREETING_BYTES_MAX = 256
READ_BYTES = 64 << 10
# Of a slow uplink: what the kernel holds of one connection before a speaker waits, and what is read of it at once, so that the
# links of one peer take turns.
SLOW_BUFFER_BYTES = 64 << 10
SLOW_READ_BYTES = 8 << 10
FLYING_MAX = 8_192  # reads on their way: 64 MiB, more than any uplink here sends in a round trip

Direction = tuple[str, str]  # names of the peer that speaks and the one that hears


@dataclass(frozen=True, slots=True)
class Conditions:
    """What each peer's way to the others is like."""

    uplink_bytes: float = math.inf  # a second
    delay_seconds: float = 0.0  # one way

    @property
    def are_slow(self) -> bool:
        return self != Conditions()


@dataclass
class Proxy:
    """`run` it in a nursery. Peers are known by name; their addresses become known when they have started."""

    conditions: Conditions = Conditions()
    port: int = 0
    _free_at: dict[str, float] = field(default_factory=dict)  # by speaker: when its uplink has sent what it was given
    _peers: list[DemoPeer] = field(default_factory=list)
    _cut: frozenset[Direction] = frozenset()
    _changed: trio.Event = field(default_factory=trio.Event)
    _links: dict[trio.CancelScope, Direction] = field(default_factory=dict)

    def dress(self, peer: DemoPeer) -> None:
        self._peers.append(peer)
        peer.module = ("scenarios.proxy", *peer.module)
        peer.environment[VARIABLE] = f"{self.port} {peer.name}"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        if self.conditions.are_slow:  # before anybody connects: the window of a connection follows from it
            listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            task_status.started()

    def cut(self, directions: Iterable[Direction], *, close: bool = False) -> None:
        """From now on nothing goes in these directions, and in all others everything does."""
        self._cut = frozenset(directions)
        changed, self._changed = self._changed, trio.Event()
        changed.set()
        for scope, (speaker, hearer) in list(self._links.items()):
            if close and {(speaker, hearer), (hearer, speaker)} & self._cut:
                scope.cancel()

    def heal(self) -> None:
        self.cut(())

    def _name(self, address: str) -> str:
        return next((peer.name for peer in self._peers if peer.address == address), address)

    async def _serve(self, stream: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            try:
                speaker, address = await _greeting(stream)
                self._links[scope] = speaker, self._name(address)
                await self._open(speaker, address)  # a connection needs both directions
                host, _, port = address.rpartition(":")
                async with await trio.open_tcp_stream(host, int(port)) as onward, trio.open_nursery() as nursery:
                    pump = self._pump_slowly if self.conditions.are_slow else self._pump
                    nursery.start_soon(pump, stream, onward, lambda: (speaker, self._name(address)), scope)
                    nursery.start_soon(pump, onward, stream, lambda: (self._name(address), speaker), scope)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ValueError):
                pass  # whoever dialed sees that, and dials again
        self._links.pop(scope, None)
        await trio.aclose_forcefully(stream)

    async def _open(self, speaker: str, address: str) -> None:
        while {(speaker, self._name(address)), (self._name(address), speaker)} & self._cut:
            await self._changed.wait()

    async def _pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, direction: Callable[[], Direction], scope: trio.CancelScope
    ) -> None:
        try:
            while data := await source.receive_some(READ_BYTES):
                while direction() in self._cut:
                    await self._changed.wait()
                await sink.send_all(data)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()  # either end closed: so does the other

    async def _pump_slowly(
        self, source: trio.SocketStream, sink: trio.SocketStream, direction: Callable[[], Direction], scope: trio.CancelScope
    ) -> None:
        """As `_pump`; each read waits for the speaker's uplink, and then flies."""
        put, flying = trio.open_memory_channel[tuple[float, bytes]](FLYING_MAX)
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)

        async def land() -> None:
            async for at, data in flying:
                await trio.sleep_until(at)
                await sink.send_all(data)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(land)
                async with put:
                    while data := await source.receive_some(SLOW_READ_BYTES):
                        while direction() in self._cut:
                            await self._changed.wait()
                        sent = await self._sent(direction()[0], len(data))
                        await put.send((sent + self.conditions.delay_seconds, data))
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    async def _sent(self, speaker: str, count: int) -> float:
        """Returns, with the time, when the speaker's uplink has sent so many bytes more."""
        begun = max(trio.current_time(), self._free_at.get(speaker, 0.0))
        self._free_at[speaker] = sent = begun + count / self.conditions.uplink_bytes
        await trio.sleep_until(sent)
        return sent


@asynccontextmanager
async def running_proxy(conditions: Conditions = Conditions()) -> AsyncIterator[Proxy]:
    async with trio.open_nursery() as nursery:
        proxy = Proxy(conditions)
        await nursery.start(proxy.run)
        yield proxy
        nursery.cancel_scope.cancel()


async def _greeting(stream: trio.SocketStream) -> tuple[str, str]:
    line = b""
    while not line.endswith(b"\n"):
        byte = await stream.receive_some(1)
        if not byte or len(line) > GREETING_BYTES_MAX:
            raise ValueError("no greeting")
        line += byte
    name, address = line.decode().split()
    return name, address


def main() -> int:
    """A peer whose every connection goes through the proxy; the first argument is the module that runs it."""
    from peer import cli, liar

    module, *arguments = sys.argv[1:]
    port, name = os.environ[VARIABLE].split()
    direct = trio.open_tcp_stream

    async def through_proxy(host: str, wanted: int, **_: Any) -> trio.SocketStream:
        stream = await direct("127.0.0.1", int(port))
        await stream.send_all(f"{name} {host}:{wanted}\n".encode())
        return stream

    setattr(trio, "open_tcp_stream", through_proxy)  # noqa: B010 - the swarm dials with this function
    return liar.main(arguments) if module == liar.__name__ else cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
