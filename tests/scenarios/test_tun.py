"""Packets between TUN devices: the router's delay, order and queues; and the kernel's own TCP, where namespaces can be made."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from scenarios import carried, links, router, tun
from scenarios.emulation.link_profiles import PROFILES, AccessProfile, steady_profile
from scenarios.router import Router

A, B, NOBODY = "10.78.0.1", "10.78.0.2", "10.78.0.9"


def packet(number: int, whither: str = B, size: int = 100) -> bytes:
    return (b"\x45" + bytes(15) + socket.inet_aton(whither) + number.to_bytes(2, "big")).ljust(size, b"\0")


class Wire(contextlib.ExitStack):
    """A router between two ends that stand for devices: each datagram is a packet."""

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
        """The numbers of the first packets that come to B."""
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
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: now))  # all come at once, however busy the machine is
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
