"""Peers over the in-memory network of a profile, in virtual time that also passes while they compute. Part of `scenarios.links`.

Time jumps while all peers wait. While one computes it passes with the processor time of this thread, divided as if all cores of
the machine shared the work of all peers. Other load and waits for the disk are therefore not charged. `pace` multiplies the time
of computation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import trio
from trio.testing import MockClock

from scenarios.emulation.link_profiles import PROFILES, UNLIMITED, AccessProfile, load_profile
from scenarios.emulation.memory_network import MemoryNetwork, Mesh
from scenarios.probe import PING, PING_BYTES, POUR, POUR_BYTES, WARM_SECONDS, Pings, Poured, Server
from tests.peer.network import Network, has_finished
from tests.transport.helpers import MemoryBlobs, linked
from transport.blobs.blob_store import BlobStore
from transport.network import DataReceived, Priority

PINGS, PINGS_OF_LOSS = 200, 4_000  # enough to measure a loss of some per cent within half a point
PAUSE_SECONDS = 0.05
FLOWS, FLOWS_OF_LOSS = 2, 16  # parallel bulk flows; the losses of a single one would slow it down
QUEUED_BYTES = 1 << 20  # for each link: more than any carries in a pause
VIRTUAL_SECONDS_MAX = 3_600.0


@dataclass
class Place:
    """An end of a link, as the proxy knows it."""

    name: str
    address: str


# A link -----------------------------------------------------------------------------------------------------------------


def measured(profile: AccessProfile, seconds: float) -> tuple[Pings, Poured, Poured]:
    """Measure pings between two peers of a profile, the first one's upload to many, and its download from faster ones."""
    loses = any(moment.loss for moment in profile.moments)
    flows, pings = (FLOWS_OF_LOSS, PINGS_OF_LOSS) if loses else (FLOWS, PINGS)
    return trio.run(_measured, profile, seconds, flows, pings, clock=MockClock(autojump_threshold=0))


async def _measured(profile: AccessProfile, seconds: float, flows: int, count: int) -> tuple[Pings, Poured, Poured]:
    async with _linked(profile, {0: profile, 1: profile}) as ((a, b), _):
        pings = await _pings(a, b, count)
    async with _linked(profile, dict.fromkeys(range(flows + 1), profile)) as ((a, *hearers), server):
        await _pour([(a, one.me) for one in hearers], seconds + WARM_SECONDS)
        up = server.poured()
    faster = dict.fromkeys(range(2, flows + 2), PROFILES["lan"])
    async with _linked(profile, {1: profile, **faster}) as ((b, *fast), server):
        await _pour([(one, b.me) for one in fast], seconds + WARM_SECONDS)
        down = server.poured()
    return pings, up, down


@asynccontextmanager
async def _linked(profile: AccessProfile, of: dict[int, AccessProfile]) -> AsyncIterator[tuple[list[MemoryNetwork], Server]]:
    """Run peers by number, which sets their start in the profile, and count the bulk bytes between them."""
    mesh, server = Mesh(seed=0), Server(trio.current_time)
    keys = [bytes([number]) * 32 for number in range(max(of) + 1)]
    for number, key in enumerate(keys):
        mesh.set_profile(key, of.get(number, profile))
    networks = [mesh.network(keys[number], cast(BlobStore, MemoryBlobs())) for number in of]
    async with trio.open_nursery() as nursery:
        for one in networks:
            await nursery.start(one.run)
        await linked(*networks)
        for one in networks:
            if one.me != keys[0]:  # the first peer hears its own pings
                nursery.start_soon(_answer, one, server)
        yield networks, server
        nursery.cancel_scope.cancel()


async def _answer(network: MemoryNetwork, server: Server) -> None:
    async for event in network.events:
        if isinstance(event, DataReceived) and event.data[:1] == PING:
            network.send(event.peer, event.data, Priority.VOTE)
        elif isinstance(event, DataReceived):
            server.note(len(event.data))


async def _pings(a: MemoryNetwork, b: MemoryNetwork, count: int) -> Pings:
    found = Pings()
    for _ in range(count):
        sent = trio.current_time()
        a.send(b.me, PING + bytes(PING_BYTES), Priority.VOTE)
        async for event in a.events:
            if isinstance(event, DataReceived):
                break
        found.note(sent, trio.current_time() - sent)
        await trio.sleep(PAUSE_SECONDS)
    return found


async def _pour(links: list[tuple[MemoryNetwork, bytes]], seconds: float) -> None:
    """Keep some messages queued for each link."""
    end, given = trio.current_time() + seconds, Counter[bytes]()
    while trio.current_time() < end:
        for speaker, hearer in links:
            sent = next(link.outbox.sent[Priority.BULK] for link in speaker.links() if link.peer == hearer)
            while given[speaker.me + hearer] - sent < QUEUED_BYTES:
                speaker.send(hearer, POUR + bytes(POUR_BYTES - 1), Priority.BULK)
                given[speaker.me + hearer] += POUR_BYTES
        await trio.sleep(PAUSE_SECONDS)


# Rounds -----------------------------------------------------------------------------------------------------------------


def rounds(profile: AccessProfile, peers: int, count: int, seconds: float, begins: float, pace: float) -> list[float]:
    """Return the seconds of successive test rounds, from the command to the applied round at the peer that got it.

    At least `count` rounds run, for at least `seconds`. They begin `begins` seconds into the profile.
    """
    clock = MockClock(autojump_threshold=0)
    clock._real_clock = time.thread_time
    clock.rate = pace / min(peers, os.cpu_count() or 1)
    with _one_thread(), tempfile.TemporaryDirectory(prefix="folkmoot-virtual-") as folder:
        return trio.run(_rounds, profile, peers, count, seconds, begins, Path(folder), clock=clock)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run threaded functions in the event loop, because virtual time must not jump over them."""

    async def inline(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    with mock.patch("trio.to_thread.run_sync", inline):
        yield


async def _rounds(profile: AccessProfile, peers: int, count: int, seconds: float, begins: float, folder: Path) -> list[float]:
    network, found = Network(folder, peers), list[float]()
    for seat in network.seats:
        network.mesh.set_profile(seat.public, profile)
    with trio.fail_after(VIRTUAL_SECONDS_MAX):
        async with trio.open_nursery() as network._nursery:
            for seat in network.seats:
                await network.start(seat)
            first = network.seats[0]
            await linked(*(seat.network for seat in network.seats))
            await trio.sleep((begins - trio.current_time()) % profile.seconds)
            began = trio.current_time()
            while len(found) < count or trio.current_time() - began < seconds:
                begun = trio.current_time()
                await first.until(has_finished(await first.start_job()))
                found.append(trio.current_time() - begun)
            network._nursery.cancel_scope.cancel()
    return found


def main() -> int:
    """Print the result of `link PROFILE SECONDS` or `rounds PROFILE PEERS COUNT SECONDS BEGINS PACE`."""
    what, name, *numbers = sys.argv[1:]
    profile = UNLIMITED if name == UNLIMITED.name else load_profile(name)
    if what == "link":
        print(json.dumps([asdict(one) for one in measured(profile, float(numbers[0]))]))
    else:
        peers, count = map(int, numbers[:2])
        print(json.dumps(rounds(profile, peers, count, *map(float, numbers[2:]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
