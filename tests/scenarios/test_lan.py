"""Links of scenarios: namespaces, packets between TUN devices, the proxy that delays bytes, and the files of a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from demo.demo_peers import DemoPeer
from protocol.errors import UserError
from protocol.identity import Identity
from scenarios import carried, lan, links, router, tun
from scenarios.emulation.link_profiles import PROFILES, SEGMENT_BYTES, AccessProfile, ProfileSegment, steady_profile
from scenarios.links import Run, judged
from scenarios.proxy import Direction, Proxy, running_proxy
from scenarios.router import Router
from tests.waiting import patience, run_process

can_make_them = pytest.mark.skipif(bool(lan.refusal()), reason="needs the right to make network namespaces")


def inside(machine: lan.Machine, *words: str) -> subprocess.CompletedProcess[str]:
    return run_process(["ip", "netns", "exec", machine.name, *words], capture_output=True, text=True)


def namespaces() -> str:
    return run_process(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.real("processes")
@can_make_them
def test_machines_have_one_address_each_no_way_out_and_move_and_nothing_is_left_of_them(tmp_path: Path) -> None:
    with lan.lan(tmp_path, 2) as made:
        first, second = made.machines
        assert inside(first, "ip", "route").stdout.split()[:3] == ["10.77.0.0/24", "dev", "eth0"]
        assert "default" not in inside(first, "ip", "route").stdout
        made.move(second, "10.77.0.102")
        assert "10.77.0.102/24" in inside(second, "ip", "-4", "-br", "address").stdout, "it has an address after the move"
        made.cut(1)
        assert "state UP" not in inside(second, "ip", "link", "show", "eth0").stdout
        made.cut(1, heal=True)
        assert first.name in namespaces()
    assert made.bridge not in namespaces() and first.name not in namespaces()


@pytest.mark.real("processes")
@can_make_them
def test_nothing_is_left_after_a_failure_either(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="half way"), lan.lan(tmp_path, 1) as made:
        raise UserError("half way")
    assert made.bridge not in namespaces()


def test_where_namespaces_cannot_be_made_it_says_so_and_has_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lan"])
    monkeypatch.setattr(lan.shutil, "which", lambda command: None)
    assert lan.main() == lan.NOT_PERMITTED
    (line,) = capsys.readouterr().err.splitlines()
    assert "no trial ran" in line and "iproute2" in line


LAN = PROFILES["lan"]


async def left(run: Run, called: str, figures: dict[str, Any] | None) -> None:
    async def measure() -> dict[str, Any]:
        if figures is None:
            raise UserError("it did not start")
        return figures

    await run.part(LAN, "proxy", called, measure)


@pytest.mark.real("processes")
async def test_what_an_ended_run_has_left_is_not_measured_again_and_what_failed_is(tmp_path: Path) -> None:
    options = argparse.Namespace(json=str(tmp_path / "links.json"))
    options.__dict__.update(peers=4, seed=0, seconds=20.0, rounds=20, trained=3, congestion="cubic")
    first = Run(options, ["proxy"], paces={"proxy": 3.0})
    await left(first, "link", {"round_trip_off": 0.5})
    await left(first, "test rounds", None)
    (trial,) = first.trials.values()
    assert trial.problems == ["round trip +50.0%", "it did not start"]
    second = Run(options, ["proxy"])
    second.resume()
    assert second.paces == first.paces and second.trials["lan proxy"].problems == ["round trip +50.0%"]
    assert not second.lacks(LAN, "proxy", "round_trip_off") and second.lacks(LAN, "proxy", "virtual_off")
    options.rounds = 5
    with pytest.raises(UserError, match="rounds"):
        Run(options, ["proxy"]).resume()


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"round_trip_off": -0.11, "up_off": 0.15, "down_off": -0.15, "virtual_off": 0.25}, ["round trip -11.0%"]),
        ({"round_trip_off": 0.10, "up_off": -0.16, "down_off": 0.16}, ["rate up -16.0%", "rate down +16.0%"]),
        ({"loss": 0.03, "loss_measured": 0.019, "virtual_off": -0.26}, ["virtual rounds -26%", "loss 1.90% instead of 3.00%"]),
        ({"join": 15.1}, ["a join took 15.1 s"]),
        ({"join": 15.0}, []),
    ],
)
def test_each_bound_counts_on_both_sides(figures: dict[str, Any], says: list[str]) -> None:
    assert judged("transatlantic kernel", figures) == says
    assert judged("dsl kernel", figures) == [one for one in says if "join" not in one]


A, B, NOBODY = "10.78.0.1", "10.78.0.2", "10.78.0.9"


def packet(number: int, whither: str = B, size: int = 100) -> bytes:
    return (b"\x45" + bytes(15) + socket.inet_aton(whither) + number.to_bytes(2, "big")).ljust(size, b"\0")


class Wire(contextlib.ExitStack):
    """A router between two ends in place of devices. Each datagram is a packet."""

    def __init__(self, folder: Path, profile: AccessProfile) -> None:
        super().__init__()
        self.router = Router()
        self.ends = {}
        for host in (A, B):
            (folder / host).write_text(json.dumps([profile.shift_seconds, list(map(astuple, profile.moments))]))
            self.router.learn(folder / host)
            self.ends[host], device = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            self.enter_context(self.ends[host])
            self.router.attach(host, device.fileno())
            self.enter_context(device)

    def hear(self, count: int) -> list[int]:
        """Return the numbers of the first packets that arrive at B."""
        self.ends[B].setblocking(False)
        numbers: list[int] = []
        while len(numbers) < count:
            self.router.step()
            with contextlib.suppress(BlockingIOError):
                while True:
                    numbers.append(int.from_bytes(self.ends[B].recv(2_000)[20:22], "big"))
        return numbers


@pytest.mark.real("processes")
def test_packets_keep_their_order_and_take_the_delay_and_those_for_nobody_go_nowhere(tmp_path: Path) -> None:
    with Wire(tmp_path, steady_profile("near", 100, 100, 20)) as wire:
        wire.ends[A].send(packet(0, NOBODY))
        wire.ends[A].send(b"\x60" + bytes(60))  # IPv6
        started = time.monotonic()
        for number in range(1, 6):
            wire.ends[A].send(packet(number))
        assert wire.hear(5) == [1, 2, 3, 4, 5]
        assert time.monotonic() - started >= 0.010
        assert wire.router.counted()["packets"] == 5


@pytest.mark.real("processes")
def test_a_full_queue_drops_and_what_the_profile_loses_is_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: now))  # all packets arrive at once on any machine
    with Wire(tmp_path, steady_profile("thin", 4, 4, 0, loss=0.5)) as wire:  # 500 kB/s
        for number in range(1, 91):
            wire.ends[A].send(packet(number, size=1_500))
            wire.router.step()
        counted = wire.router.counted()
    assert counted["packets"] == 90 and counted["dropped"] > 30
    assert 0 < counted["lost"] < 90 - counted["dropped"]


@pytest.mark.real("processes")
@pytest.mark.large
@pytest.mark.skipif(bool(tun.refusal()), reason="needs namespaces and /dev/net/tun")
def test_kernel_tcp_is_as_slow_as_it_was_asked_to_be() -> None:
    assert links.judged("dsl kernel", carried.compare(carried.over_kernel(PROFILES["dsl"], 5.0, "cubic"))) == []


@pytest.mark.real("processes")
def test_where_a_kernel_does_not_allow_it_that_is_one_line() -> None:
    why = tun.refusal("no-such-control")
    assert why and "\n" not in why


SECONDS_MAX = 35.0  # for operations that take almost no time
QUIET_SECONDS = 0.02  # after so long without progress there will be none


class Link:
    """A connection that `caller` dialed through the proxy, and its other end."""

    def __init__(self, here: trio.SocketStream, there: trio.SocketStream) -> None:
        self.here, self.there = here, there

    async def carries(self, data: bytes, *, back: bool = False) -> bool:
        """Return True if `data` arrives at the other end."""
        speaker, hearer = (self.there, self.here) if back else (self.here, self.there)
        await speaker.send_all(data)
        return await heard(hearer, len(data)) == data

    async def holds(self, data: bytes, *, back: bool = False) -> bool:
        """Return True if nothing has arrived at the other end once all tasks are blocked."""
        speaker, hearer = (self.there, self.here) if back else (self.here, self.there)
        await speaker.send_all(data)
        await wait_all_tasks_blocked(QUIET_SECONDS)
        with trio.move_on_after(QUIET_SECONDS):
            await hearer.receive_some()
            return False
        return True


async def heard(stream: trio.SocketStream, count: int) -> bytes:
    """Return the next `count` bytes, with no timeout."""
    found = b""
    while len(found) < count and (data := await stream.receive_some()):
        found += data
    return found


def peer(number: int) -> DemoPeer:
    return DemoPeer(number, Identity(bytes([number + 1]) * 32), Path(), True, False, 1, False)


class Place:
    """Two peers; the second one listens."""

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
    """Loopback segments exceed a window as small as a narrow uplink's queue, and would wait for the kernel's timers."""
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
