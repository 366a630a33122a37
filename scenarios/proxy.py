"""All links of a network go through here, so that they can be cut: for all, in one direction only, and again.

A peer started as `python -m scenarios.proxy run …` dials nobody itself: it tells this proxy, in one line, who it is and whom it
wants. What is cut is held back and not lost, as TCP does with packets that do not arrive; or the connections are closed as well.
"""

from __future__ import annotations

import os
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

Direction = tuple[str, str]  # names of the peer that speaks and the one that hears


@dataclass
class Proxy:
    """`run` it in a nursery. Peers are known by name; their addresses become known when they have started."""

    port: int = 0
    _peers: list[DemoPeer] = field(default_factory=list)
    _cut: frozenset[Direction] = frozenset()
    _changed: trio.Event = field(default_factory=trio.Event)
    _links: dict[trio.CancelScope, Direction] = field(default_factory=dict)

    def dress(self, peer: DemoPeer) -> None:
        self._peers.append(peer)
        peer.module = ("scenarios.proxy",)
        peer.environment[VARIABLE] = f"{self.port} {peer.name}"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
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
                    nursery.start_soon(self._pump, stream, onward, lambda: (speaker, self._name(address)), scope)
                    nursery.start_soon(self._pump, onward, stream, lambda: (self._name(address), speaker), scope)
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


@asynccontextmanager
async def running_proxy() -> AsyncIterator[Proxy]:
    async with trio.open_nursery() as nursery:
        proxy = Proxy()
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
    """A peer whose every connection goes through the proxy."""
    from peer import cli

    port, name = os.environ[VARIABLE].split()
    direct = trio.open_tcp_stream

    async def through_proxy(host: str, wanted: int, **_: Any) -> trio.SocketStream:
        stream = await direct("127.0.0.1", int(port))
        await stream.send_all(f"{name} {host}:{wanted}\n".encode())
        return stream

    setattr(trio, "open_tcp_stream", through_proxy)  # noqa: B010 - the swarm dials with this function
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
