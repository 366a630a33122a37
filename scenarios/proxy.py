"""A proxy for all links of a network, which can cut them, in one direction or both, restore them, or slow them down.

A peer started as `python -m scenarios.proxy peer.cli run …` dials only this proxy, with one line that names itself and its
target. A cut holds bytes back without loss, as TCP does when packets do not arrive. It can also close the connections. With a
profile, every peer has an uplink and a downlink that all its links share, and bytes arrive as late as with TCP
(`scenarios/emulation/link_profiles.py`).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import trio

from demo.demo_peers import DemoPeer
from scenarios.alarm import Alarm
from scenarios.emulation.link_profiles import (
    QUEUE_SECONDS,
    SEGMENT_BYTES,
    SHIFT_SECONDS,
    UNLIMITED,
    AccessLink,
    AccessProfile,
    NetworkPath,
    TcpFlow,
)

VARIABLE = "FOLKMOOT_PROXY"  # port of the proxy and this peer's name
GREETING_BYTES_MAX = 256
READ_BYTES = 64 << 10
# With a profile: the kernel's buffer for one connection before a speaker waits, equal to its uplink's queue. Linux' windows close
# below the minimum.
BUFFER_BYTES_MIN, BUFFER_BYTES_MAX = 16 << 10, 1 << 20
READ_SECONDS = 0.002  # read size in uplink time, so that the links of one peer take turns
READ_BYTES_MIN = 3 * SEGMENT_BYTES
FLYING_MAX = 8_192  # reads on their way: 64 MiB, more than any uplink here sends in a round trip

Direction = tuple[str, str]  # names of the speaking and the hearing peer


class Place(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...


@dataclass
class Proxy:
    """The proxy; start `run` in a nursery. Peers are known by name, and their addresses become known after their start."""

    profile: AccessProfile | None = None  # for peers without a profile of their own; None: no delay
    port: int = 0
    random: Random = field(default_factory=lambda: Random(0))
    flows: dict[TcpFlow, Direction] = field(default_factory=dict)  # of all links so far
    _accesses: dict[str, AccessLink] = field(default_factory=dict)  # by name of the peer
    _peers: list[Place] = field(default_factory=list)
    _cut: frozenset[Direction] = frozenset()
    _changed: trio.Event = field(default_factory=trio.Event)
    _links: dict[trio.CancelScope, Direction] = field(default_factory=dict)

    def dress(self, peer: DemoPeer, profile: AccessProfile | None = None) -> None:
        self.add(peer, profile)
        peer.module = ("scenarios.proxy", *peer.module)
        peer.environment[VARIABLE] = f"{self.port} {peer.name}"

    def add(self, place: Place, profile: AccessProfile | None = None) -> None:
        """Add a peer with a profile of its own, or with the proxy's profile at another start."""
        if profile is None and self.profile is not None:
            profile = self.profile.shifted(SHIFT_SECONDS * len(self._peers))
        if profile is not None:
            self._accesses[place.name] = AccessLink(profile)
        self._peers.append(place)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        _speak_in_segments(listener.socket)
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            task_status.started()

    def cut(self, directions: Iterable[Direction], *, close: bool = False) -> None:
        """Hold back all bytes in these directions, and none in others."""
        self._cut = frozenset(directions)
        changed, self._changed = self._changed, trio.Event()
        changed.set()
        for scope, (speaker, hearer) in list(self._links.items()):
            if close and {(speaker, hearer), (hearer, speaker)} & self._cut:
                scope.cancel()

    @property
    def cut_directions(self) -> frozenset[Direction]:
        return self._cut

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
                if self.is_shaped:  # the first round trip of a connection
                    await trio.sleep(self._way((speaker, self._name(address))).round_trip(trio.current_time()))
                host, _, port = address.rpartition(":")
                async with await _connected(host, int(port)) as onward, trio.open_nursery() as nursery:
                    pump = self._pump_shaped if self.is_shaped else self._pump
                    nursery.start_soon(pump, stream, onward, lambda: (speaker, self._name(address)), scope)
                    nursery.start_soon(pump, onward, stream, lambda: (self._name(address), speaker), scope)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ValueError):
                pass  # the dialing peer notices it and dials again
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
        scope.cancel()  # if one end closes, so does the other

    async def _pump_shaped(
        self, source: trio.SocketStream, sink: trio.SocketStream, direction: Callable[[], Direction], scope: trio.CancelScope
    ) -> None:
        """Forward bytes like `_pump`. Each read waits for the flow's window, its delay and the hearer's downlink."""
        put, flying = trio.open_memory_channel[tuple[float, bytes]](FLYING_MAX)
        flow = TcpFlow(self._way(direction()), self.random)
        queue = min(BUFFER_BYTES_MAX, max(BUFFER_BYTES_MIN, QUEUE_SECONDS * flow.way.speaker.profile.up_max))
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(queue))
        at_once = int(min(READ_BYTES, max(READ_BYTES_MIN, READ_SECONDS * flow.way.speaker.profile.up_max)))
        self.flows[flow] = direction()

        async def land() -> None:
            with Alarm() as alarm:
                async for at, data in flying:
                    await alarm.sleep_until(at)
                    await alarm.sleep_until(flow.way.hearer.down.queue_bytes(trio.current_time(), len(data)))
                    await sink.send_all(data)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(land)
                async with put:
                    while data := await source.receive_some(at_once):
                        while direction() in self._cut:
                            await self._changed.wait()
                        flow.way = self._way(direction())  # the hearer's name is known after its start
                        while (at := flow.next_send_at(trio.current_time())) > trio.current_time():  # noqa: ASYNC110
                            await trio.sleep_until(at)
                        arrival = flow.send(trio.current_time(), len(data), more=len(data) == at_once)
                        await put.send((arrival, data))
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    @property
    def is_shaped(self) -> bool:
        return self.profile is not None or bool(self._accesses)

    def _way(self, direction: Direction) -> NetworkPath:
        speaker, hearer = (self._accesses.setdefault(name, AccessLink(self.profile or UNLIMITED)) for name in direction)
        return NetworkPath(speaker, hearer)


@asynccontextmanager
async def running_proxy(profile: AccessProfile | None = None) -> AsyncIterator[Proxy]:
    async with trio.open_nursery() as nursery:
        proxy = Proxy(profile)
        await nursery.start(proxy.run)
        yield proxy
        nursery.cancel_scope.cancel()


async def _connected(host: str, port: int) -> trio.SocketStream:
    sock = trio.socket.socket()
    try:
        _speak_in_segments(sock)
        await sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _speak_in_segments(sock: trio.socket.SocketType) -> None:
    """Make the other end send in Ethernet segments.

    Segments on loopback hold 64 KiB. A window as small as an uplink's queue has no room for one, and the kernel then waits up to
    0.2 s before it sends less.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)


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
    """Run a peer whose connections all go through the proxy. The first argument is the module that runs it."""
    from demo import lying_trainer
    from peer import cli

    module, *arguments = sys.argv[1:]
    port, name = os.environ[VARIABLE].split()
    direct = trio.open_tcp_stream

    async def through_proxy(host: str, wanted: int, **_: Any) -> trio.SocketStream:
        stream = await direct("127.0.0.1", int(port))
        await stream.send_all(f"{name} {host}:{wanted}\n".encode())
        return stream

    setattr(trio, "open_tcp_stream", through_proxy)  # noqa: B010 - the swarm dials with this function
    return lying_trainer.main(arguments) if module == lying_trainer.__name__ else cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
