"""Shares of an uplink, in virtual time: strangers use its free rate, and little while others wait."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from protocol.identity import Identity
from scenarios.emulation.link_profiles import PROFILES, steady_profile
from scenarios.emulation.memory_network import Mesh
from tests.transport.conftest import MemoryWorld, open_world
from tests.transport.helpers import linked
from transport.connections.connection_manager import ConnectionManager
from transport.network import DataReceived
from transport.peer_policy import PeerClass
from transport.wire.framing import Priority

SERVER, MEMBER, *STRANGERS = [Identity(bytes([210 + n]) * 32) for n in range(8)]
SIZE = 30_000
COUNT = 16


async def arrives(network: ConnectionManager, count: int) -> float:
    """Return the time at which `count` messages have arrived."""
    while count:
        count -= isinstance(await network.events.receive(), DataReceived)
    return trio.current_time()


async def seconds(of: Identity, *takers: Identity, priority: Priority = Priority.BULK, others: int = 4) -> float:
    """Return the seconds until `of` has its messages over an uplink of 2 Mbit/s. Others are sent `others` times as many."""
    async with open_world(MemoryWorld) as world:
        assert isinstance(world, MemoryWorld)
        world.mesh = Mesh(seed=1)
        networks = {}
        for peer in (SERVER, *takers):
            world.mesh.set_profile(peer.public, PROFILES["dsl"] if peer is SERVER else steady_profile("", 100.0, 100.0, 30.0))
            networks[peer] = await world.start(peer, standing_of=standing)
        await linked(*networks.values())
        start, server = trio.current_time(), networks[SERVER]
        for peer in takers:
            for _ in range(COUNT if peer is of else others * COUNT):
                assert server.send(peer.public, bytes(SIZE), priority if peer is of else Priority.BULK)
        with trio.fail_after(600.0):
            return await arrives(networks[of], COUNT) - start


def standing(peer: bytes) -> PeerClass:
    return PeerClass.STRANGER if peer in [stranger.public for stranger in STRANGERS] else PeerClass.MEMBER


async def test_strangers_cost_a_member_that_is_sent_something_little(autojump_clock: MockClock) -> None:
    alone = await seconds(MEMBER, MEMBER)
    assert alone == pytest.approx(COUNT * SIZE / 250_000, rel=0.2)
    for priority in (Priority.VOTE, Priority.BULK):
        assert await seconds(MEMBER, MEMBER, *STRANGERS, priority=priority) < 1.3 * alone


async def test_a_stranger_has_the_uplink_where_nobody_else_waits_and_an_eighth_at_least(autojump_clock: MockClock) -> None:
    one, *_ = STRANGERS
    alone = await seconds(one, one)
    assert alone == pytest.approx(COUNT * SIZE / 250_000, rel=0.2)
    assert await seconds(one, one, MEMBER, others=20) < 8 * 1.3 * alone
