"""Worlds for one suite of tests: real sockets on loopback, and the in-memory transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import trio

from protocol.addresses import parse_address
from protocol.codec import encode
from protocol.identity import Identity
from protocol.messages import Ping
from scenarios.emulation.memory_network import Mesh
from tests.transport.helpers import ALICE, BOB, CHAIN, MemoryBlobs, PolicyDouble, UnhurriedClock, linked, make_session
from tests.waiting import patience
from transport.connections.connection_manager import ConnectionManager
from transport.network import Priority
from transport.swarm import Swarm
from transport.wire.framing import Channel
from transport.wire.noise_session import NoiseSession

SOCKETS = pytest.mark.real("TCP sockets")


class World:
    """A world of networks. `start` runs a network in a nursery of the test, and `stop` ends it as a crash would."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scopes: dict[ConnectionManager, trio.CancelScope] = {}
        self.networks: list[ConnectionManager] = []
        self.streams: list[trio.SocketStream] = []

    async def start(self, identity: Identity, blobs: MemoryBlobs | None = None, **options: object) -> ConnectionManager:
        return await self.serve(self.make(identity, blobs or MemoryBlobs(), **options))

    async def serve(self, network: ConnectionManager) -> ConnectionManager:
        self.networks.append(network)
        await self._nursery.start(self._run, network)
        return network

    async def pair(self, *blobs: MemoryBlobs) -> tuple[ConnectionManager, ConnectionManager]:
        """Return Alice and Bob, linked."""
        alice, bob = [await self.start(identity, held) for identity, held in zip_longest((ALICE, BOB), blobs)]
        await linked(alice, bob)
        return alice, bob

    async def join(self, identity: Identity, *known: ConnectionManager, **options: object) -> ConnectionManager:
        """Return a peer that knows the first of these and is linked with all of them."""
        joined = await self.start(identity, bootstrap=[known[0].address], **options)
        await linked(*known, joined)
        return joined

    async def _run(self, network: ConnectionManager, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as self._scopes[network]:
            await network.run(task_status=task_status)

    def stop(self, network: ConnectionManager) -> None:
        self._scopes[network].cancel()

    def make(self, identity: Identity, blobs: MemoryBlobs, **options: object) -> ConnectionManager:
        raise NotImplementedError


class SwarmWorld(World):
    def make(self, identity: Identity, blobs: MemoryBlobs, **options: object) -> ConnectionManager:
        options.setdefault("bootstrap", [network.address for network in self.networks])
        listen = options.pop("listen", "127.0.0.1:0")
        network = Swarm(identity, CHAIN, listen=listen, blobs=blobs, policy=PolicyDouble.take(options), **options)
        network._processor = lambda: 0.0  # test_effort tests the budgets of strangers; a slow machine would charge them more here
        return network

    async def connect(self, network: Swarm) -> trio.SocketStream:
        """Open a bare connection, which is closed with the world."""
        stream = await trio.open_tcp_stream(*parse_address(network.address))
        self.streams.append(stream)
        return stream

    async def confirm(self, network: Swarm, identity: Identity) -> tuple[trio.SocketStream, NoiseSession]:
        """Open a raw connection that is confirmed and sends nothing more by itself."""
        stream, session = await self.connect(network), make_session(identity, True)
        await stream.send_all(session.data_to_send())
        while session.peer is None:
            session.receive(await stream.receive_some())
        session.outbox.push(Channel.LINK, encode(Ping(1)), Priority.VOTE)
        while data := session.data_to_send():
            await stream.send_all(data)
        return stream, session


class MemoryWorld(World):
    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery)
        self.mesh = Mesh(seed=1)

    def make(self, identity: Identity, blobs: MemoryBlobs, **options: object) -> ConnectionManager:
        return self.mesh.network(identity.public, blobs, PolicyDouble.take(options), **options)


@asynccontextmanager
async def open_world(kind: type[World]) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = kind(nursery)
        yield world
        for stream in world.streams:
            await trio.aclose_forcefully(stream)
        nursery.cancel_scope.cancel()
    for network in world.networks:
        assert "internal-error" not in network.refusal_counts()


@pytest.fixture(autouse=True)
def unhurried(request: pytest.FixtureRequest) -> None:
    """Give tests with real sockets a clock that a busy machine does not advance, and tests without a mock clock a deadline."""
    if request.node.get_closest_marker("trio") is None:
        return
    is_real = request.node.get_closest_marker("real") is not None
    if is_real:
        request.node.add_marker(pytest.mark.trio(run=_run), append=False)
    if (is_real or "world" in request.fixturenames) and "autojump_clock" not in request.fixturenames:
        request.node.obj = _with_patience(request.node.obj)


def _with_patience(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def patient(**arguments: Any) -> None:
        with patience():
            await test(**arguments)

    return patient


def _run(test: partial[Any], *, clock: trio.abc.Clock | None, **options: Any) -> Any:
    return trio.run(test, clock=clock or UnhurriedClock(), **options)


@pytest.fixture(params=[pytest.param(SwarmWorld, marks=SOCKETS), MemoryWorld], ids=["swarm", "memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_world(request.param) as opened:
        yield opened


@pytest.fixture
async def tcp() -> AsyncIterator[SwarmWorld]:
    async with open_world(SwarmWorld) as opened:
        assert isinstance(opened, SwarmWorld)
        yield opened
