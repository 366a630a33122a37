"""Links go through the proxy unchanged, stand still while they are cut, and nothing of what was held back is lost."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from demo.demo_peers import DemoPeer
from protocol.identity import Identity
from scenarios.proxy import Direction, Proxy, running_proxy
from tests.waiting import patience
from transport.emulation.link_profiles import SEGMENT_BYTES, AccessProfile, ProfileSegment

SECONDS_MAX = 35.0  # for what takes no time
QUIET_SECONDS = 0.02  # nothing moves for so long: nothing will


class Link:
    """A connection that `caller` dialed through the proxy, and its other end."""

    def __init__(self, here: trio.SocketStream, there: trio.SocketStream) -> None:
        self.here, self.there = here, there

    async def carries(self, data: bytes, *, back: bool = False) -> bool:
        """Whether this arrives at the other end."""
        speaker, hearer = (self.there, self.here) if back else (self.here, self.there)
        await speaker.send_all(data)
        return await heard(hearer, len(data)) == data

    async def holds(self, data: bytes, *, back: bool = False) -> bool:
        """Whether nothing has arrived at the other end when nothing moves any more."""
        speaker, hearer = (self.there, self.here) if back else (self.here, self.there)
        await speaker.send_all(data)
        await wait_all_tasks_blocked(QUIET_SECONDS)
        with trio.move_on_after(QUIET_SECONDS):
            await hearer.receive_some()
            return False
        return True


async def heard(stream: trio.SocketStream, count: int) -> bytes:
    """The next so many bytes, however late they are."""
    found = b""
    while len(found) < count and (data := await stream.receive_some()):
        found += data
    return found


def peer(number: int) -> DemoPeer:
    return DemoPeer(number, Identity(bytes([number + 1]) * 32), Path(), True, False, 1, False)


class Place:
    """Two peers, of which the second listens."""

    def __init__(self, proxy: Proxy, listener: trio.SocketListener) -> None:
        self.proxy, self.listener = proxy, listener
        self.a, self.b = peer(0), peer(1)
        for each in (self.a, self.b):
            proxy.dress(each)
        self.streams = AsyncExitStack()
        self.b.address = f"127.0.0.1:{listener.socket.getsockname()[1]}"

    async def dial(self) -> trio.SocketStream:
        stream = await self.streams.enter_async_context(await trio.open_tcp_stream("127.0.0.1", self.proxy.port))
        await stream.send_all(f"{self.a.name} {self.b.address}\n".encode())
        return stream

    async def accept(self) -> trio.SocketStream:
        return await self.streams.enter_async_context(await self.listener.accept())

    async def link(self) -> Link:
        return Link(await self.dial(), await self.accept())

    def directions(self, *pairs: tuple[DemoPeer, DemoPeer]) -> Iterable[Direction]:
        return [(one.name, other.name) for one, other in pairs]


@asynccontextmanager
async def place(profile: AccessProfile | None = None) -> AsyncIterator[Place]:
    with patience():
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener, running_proxy(profile) as proxy:
            made = Place(proxy, listener)
            async with made.streams:
                yield made


@pytest.mark.real("sockets")
async def test_bytes_pass_unchanged_both_ways() -> None:
    async with place() as made:
        link = await made.link()
        assert await link.carries(b"\x00\xffhello\n") and await link.carries(b"back", back=True)


@pytest.mark.real("sockets")
async def test_what_is_cut_waits_and_comes_whole_when_the_link_is_healed() -> None:
    async with place() as made:
        link = await made.link()
        made.proxy.cut(made.directions((made.a, made.b), (made.b, made.a)))
        assert await link.holds(b"one") and await link.holds(b"two") and await link.holds(b"x", back=True)
        made.proxy.heal()
        assert await heard(link.there, 6) == b"onetwo" and await heard(link.here, 1) == b"x"


@pytest.mark.real("sockets")
async def test_one_direction_is_cut_and_the_other_is_not() -> None:
    async with place() as made:
        link = await made.link()
        made.proxy.cut(made.directions((made.b, made.a)))
        assert await link.carries(b"there") and await link.holds(b"back", back=True)


@pytest.mark.real("sockets")
async def test_a_cut_that_closes_ends_the_links_between_those_and_no_others() -> None:
    async with place() as made:
        link = await made.link()
        made.proxy.cut([("somebody", "else")], close=True)
        assert await link.carries(b"still")
        made.proxy.cut(made.directions((made.a, made.b)), close=True)
        assert await link.here.receive_some() == b"" == await link.there.receive_some()


@pytest.mark.real("sockets")
async def test_whoever_dials_across_a_cut_waits_for_its_end() -> None:
    async with place() as made:
        made.proxy.cut(made.directions((made.b, made.a)))
        await (await made.dial()).send_all(b"early")
        await wait_all_tasks_blocked(QUIET_SECONDS)
        with pytest.raises(trio.TooSlowError), trio.fail_after(QUIET_SECONDS):
            await made.accept()
        made.proxy.heal()
        assert await heard(await made.accept(), 5) == b"early"


@pytest.mark.real("sockets")
async def test_both_ends_send_it_segments_of_an_ethernet() -> None:
    """Those of the loopback do not fit a window as small as a narrow uplink's queue: bytes would wait for the kernel's timers."""
    async with place() as made:
        link = await made.link()
        assert await link.carries(b"there") and await link.carries(b"back", back=True)
        for stream in (link.here, link.there):
            assert 0 < stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= SEGMENT_BYTES


@pytest.mark.real("sockets")
async def test_a_byte_takes_its_delay_and_many_bytes_wait_for_the_uplink_that_all_links_share() -> None:
    delay, rate, count = 0.1, 1 << 20, 1 << 18
    async with place(AccessProfile("slow", (ProfileSegment(up=rate, round_trip_seconds=2 * delay),))) as made:
        one, other = await made.link(), await made.link()
        started = trio.current_time()
        await one.here.send_all(b"x")
        assert await one.there.receive_some() == b"x" and trio.current_time() - started >= delay

        async def carry(link: Link) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.here.send_all, bytes(count))
                left = count
                while left:
                    left -= len(await link.there.receive_some())

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, one)
            nursery.start_soon(carry, other)
        assert trio.current_time() - started >= 2 * count / rate + delay
