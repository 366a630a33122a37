"""Peers over the in-memory network of a profile, in virtual time that goes on while they compute. Part of `scenarios.links`.

Time jumps where everybody waits, and runs while somebody computes: at the speed at which this machine's cores would get
through the work of all peers, of which one thread does it here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import trio
from trio.testing import MockClock

from scenarios.probe import PING, PING_BYTES, POUR, POUR_BYTES, WARM_SECONDS, Pings, Poured, Server
from tests.peer.network import Network, has_finished
from tests.transport.helpers import MemoryBlobs, linked
from transport.blobs import BlobStore
from transport.memory import MemoryNetwork, Mesh
from transport.network import Priority, Received
from transport.profiles import PROFILES, Profile, profile_of

PINGS = 4_000  # as many as make a loss of some per cent certain within half a point
PAUSE_SECONDS = 0.05
FAST = 2  # peers with a fast link
HEARERS, HEARERS_OF_LOSS = 2, 16  # one flow alone is slowed by its losses
QUEUED_BYTES = 1 << 20  # for each link: more than any carries in a pause
DRAINED_SECONDS = 300.0  # of virtual time, after which nothing is queued any more
VIRTUAL_SECONDS_MAX = 3_600.0


@dataclass
class Place:
    """An end of a link, as the proxy knows it."""

    name: str
    address: str


# A link -----------------------------------------------------------------------------------------------------------------


def measured(profile: Profile, seconds: float) -> tuple[Pings, Poured, Poured]:
    """Between two peers of a profile: pings, what one can say to many, and what it can hear of faster ones."""
    hearers = HEARERS_OF_LOSS if any(moment.loss for moment in profile.moments) else HEARERS
    return trio.run(_measured, profile, seconds, hearers, clock=MockClock(autojump_threshold=0))


async def _measured(profile: Profile, seconds: float, hearers: int) -> tuple[Pings, Poured, Poured]:
    mesh, server = Mesh(seed=0), Server(trio.current_time)
    keys = [bytes([number]) * 32 for number in range(hearers + 1 + FAST)]
    networks = [mesh.network(key, cast(BlobStore, MemoryBlobs())) for key in keys]
    for number, key in enumerate(keys):
        mesh.set_profile(key, profile if number <= hearers else PROFILES["lan"])
    a, b, fast = networks[0], networks[1], networks[-FAST:]
    async with trio.open_nursery() as nursery:
        for one in networks:
            await nursery.start(one.run)
        await linked(*networks)
        for one in networks[1:]:
            nursery.start_soon(_answer, one, server)
        pings = await _pings(a, b)
        await _pour([(a, one.me) for one in networks[1 : hearers + 1]], seconds + WARM_SECONDS)
        up = server.poured()
        await trio.sleep(DRAINED_SECONDS)
        server.arrivals.clear()
        await _pour([(one, b.me) for one in fast], seconds + WARM_SECONDS)
        down = server.poured()
        nursery.cancel_scope.cancel()
    return pings, up, down


async def _answer(network: MemoryNetwork, server: Server) -> None:
    async for event in network.events:
        if isinstance(event, Received) and event.data[:1] == PING:
            network.send(event.peer, event.data, Priority.VOTE)
        elif isinstance(event, Received):
            server.note(len(event.data))


async def _pings(a: MemoryNetwork, b: MemoryNetwork) -> Pings:
    found = Pings()
    for _ in range(PINGS):
        sent = trio.current_time()
        a.send(b.me, PING + bytes(PING_BYTES), Priority.VOTE)
        async for event in a.events:
            if isinstance(event, Received):
                break
        found.note(sent, trio.current_time() - sent)
        await trio.sleep(PAUSE_SECONDS)
    return found


async def _pour(links: list[tuple[MemoryNetwork, bytes]], seconds: float) -> None:
    """Keeps some messages queued for each."""
    end, given = trio.current_time() + seconds, Counter[bytes]()
    while trio.current_time() < end:
        for speaker, hearer in links:
            sent = next(link.sent[Priority.BULK] for link in speaker.links() if link.peer == hearer)
            while given[speaker.me + hearer] - sent < QUEUED_BYTES:
                speaker.send(hearer, POUR + bytes(POUR_BYTES - 1), Priority.BULK)
                given[speaker.me + hearer] += POUR_BYTES
        await trio.sleep(PAUSE_SECONDS)


# Rounds -----------------------------------------------------------------------------------------------------------------


def rounds(profile: Profile, peers: int, count: int) -> list[float]:
    """Seconds of test rounds, one after another, from the order to the applied round at the peer that ordered it."""
    clock = MockClock(rate=1 / min(peers, os.cpu_count() or 1), autojump_threshold=0)
    with _one_thread(), tempfile.TemporaryDirectory(prefix="folkmoot-virtual-") as folder:
        return trio.run(_rounds, profile, peers, count, Path(folder), clock=clock)


@contextmanager
def _one_thread() -> Iterator[None]:
    """What would run in a thread runs in the event loop: virtual time must not jump over it."""

    async def inline(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    with mock.patch("trio.to_thread.run_sync", inline):
        yield


async def _rounds(profile: Profile, peers: int, count: int, folder: Path) -> list[float]:
    network, found = Network(folder, peers), list[float]()
    for seat in network.seats:
        network.mesh.set_profile(seat.public, profile)
    with trio.fail_after(VIRTUAL_SECONDS_MAX):
        async with trio.open_nursery() as network._nursery:
            for seat in network.seats:
                await network.start(seat)
            first = network.seats[0]
            await linked(*(seat.network for seat in network.seats))
            for _ in range(count):
                begun = trio.current_time()
                await first.until(has_finished(await first.scratch()))
                found.append(trio.current_time() - begun)
            network._nursery.cancel_scope.cancel()
    return found


def main() -> int:
    """Prints them, for `PROFILE PEERS COUNT`."""
    name, peers, count = sys.argv[1:]
    print(json.dumps(rounds(profile_of(name), int(peers), int(count))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
