"""Discovery on the local network, over loopback: announcements, found addresses, and protection against false ones."""

from __future__ import annotations

import io
import re
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing

from protocol.addresses import format_address, parse_address
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CHAIN, linked, until
from tests.waiting import patience
from transport.discovery import address_book, mdns
from transport.discovery.mdns import LOOK_SECONDS, NAMES_MAX, Mdns
from transport.wire.noise_session import chain_tag

HERE = ("127.0.0.1",)
GROUP = "224.0.0.251"


class Heard:
    """The multicast DNS of one peer, with a record of the found addresses and the messages to the operator."""

    def __init__(self, chain: bytes, listening: tuple[str, ...] = ("127.0.0.1:7001",)) -> None:
        self.found, self.told = dict[str, None](), list[str]()
        self.mdns = Mdns(
            chain, lambda: listening, lambda: HERE, lambda address: self.found.update({address: None}), self.told.append
        )


@pytest.mark.real("sockets")
async def test_peers_of_one_chain_find_one_another_and_show_its_tag_alone() -> None:
    chain = secrets.token_bytes(32)
    one, other, hidden = Heard(chain), Heard(chain, ("0.0.0.0:7002", "127.0.0.1:7003")), Heard(chain, ())
    stranger = Heard(secrets.token_bytes(32), ("127.0.0.1:7009",))
    packets = list[bytes]()
    with patience(), _ears() as ears:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hear, ears, packets)
            for peer in (stranger, one, other, hidden):
                nursery.start_soon(peer.mdns.run)
            await until(lambda: one.found.keys() == {"127.0.0.1:7002"} and other.found.keys() == {"127.0.0.1:7001"})
            await until(lambda: hidden.found.keys() == {"127.0.0.1:7001", "127.0.0.1:7002"})
            assert one.told == ["mdns: announces 127.0.0.1:7001 on the local network"]
            assert hidden.told == ["mdns: looks for peers from 127.0.0.1"]
            nursery.cancel_scope.cancel()
    shown = {label for packet in packets for label in _texts(packet)}
    tags = {b"chain=" + chain_tag(chain).hex().encode(), *(text for text in shown if text.startswith(b"chain="))}
    dns = {b"_folkmoot", b"_tcp", b"local", b"_services", b"_dns-sd", b"_udp"}
    ours = {label for packet in packets if b"_folkmoot" in packet for label in _texts(packet)}
    names = {label for label in ours if re.fullmatch(rb"[0-9a-f]{16}", label)}  # of parallel tests, too
    assert {one.mdns._instance.encode(), other.mdns._instance.encode()} <= names
    assert tags < ours | {b""} and ours <= dns | names | tags, "nothing but a random name and the tag of the chain"
    assert not stranger.found and all(len(tag) == len("chain=") + 16 for tag in tags)


def _ears() -> socket.socket:
    ears = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        ears.setsockopt(socket.SOL_SOCKET, option, 1)
    ears.bind((GROUP, 5353))
    ears.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("4s4s", *map(socket.inet_aton, (GROUP, *HERE))))
    ears.setblocking(False)
    return ears


async def _hear(ears: socket.socket, packets: list[bytes]) -> None:
    while True:
        await trio.lowlevel.wait_readable(ears)
        packets.append(ears.recv(9_000))


def _texts(packet: bytes) -> Iterator[bytes]:
    """Return all labels of names and all strings of TXT records (RFC 1035, section 4.1), without numbers and addresses."""
    questions, *counts = struct.unpack_from("!4H", packet, 4)
    at = 12
    for number in range(questions + sum(counts)):
        labels, at = _name(packet, at)
        yield from labels
        kind = struct.unpack_from("!H", packet, at)[0]
        at += 4
        if number < questions:
            continue
        size = struct.unpack_from("!H", packet, at + 4)[0]
        start, at = at + 6, at + 6 + size
        if kind in (12, 33):  # PTR; SRV, whose name is behind three numbers
            yield from _name(packet, start + 6 * (kind == 33))[0]
        while kind == 16 and start < at:
            yield packet[start + 1 : start + 1 + packet[start]]
            start += 1 + packet[start]


def _name(packet: bytes, at: int) -> tuple[list[bytes], int]:
    labels, end = list[bytes](), 0
    while size := packet[at]:
        if size >= 0xC0:
            end, at = end or at + 2, struct.unpack_from("!H", packet, at)[0] & 0x3FFF
            continue
        labels.append(packet[at + 1 : at + 1 + size])
        at += 1 + size
    return labels, end or at + 1


@pytest.mark.real("sockets")
async def test_two_that_know_no_address_are_linked(tcp: SwarmWorld) -> None:
    chain = secrets.token_bytes(32)  # of these services alone, since other tests run in parallel
    alice, bob = [await tcp.start(one, bootstrap=()) for one in (ALICE, BOB)]
    async with trio.open_nursery() as nursery:
        for one in (alice, bob):
            nursery.start_soon(
                Mdns(chain, lambda one=one: one.addresses, lambda: HERE, one.add_local_address, lambda text: None).run
            )
        await linked(alice, bob)
        nursery.cancel_scope.cancel()
    assert alice.peer_addresses().keys() | bob.peer_addresses().keys() >= {alice.me, bob.me}


class Service:
    """A service as zeroconf returns it."""

    def __init__(self, tag: bytes, port: int, *hosts: str) -> None:
        self.properties, self.port, self._hosts = {b"chain": tag}, port, list(hosts)

    def parsed_addresses(self) -> list[str]:
        return self._hosts


@pytest.mark.real("sockets")
def test_only_addresses_of_this_network_and_chain_are_taken_and_few_of_one_service() -> None:
    peer, tag = Heard(CHAIN), chain_tag(CHAIN).hex().encode()
    networks = mdns._networks(HERE)
    for service in (
        Service(tag, 7, "8.8.8.8", "192.168.7.7", "127.0.0.2", "fe80::1"),
        Service(b"0" * 16, 7, "127.0.0.3"),
        Service(tag, 0, "127.0.0.4"),
        Service(tag, 9, *(f"127.0.1.{number}" for number in range(99))),
    ):
        peer.mdns._report_addresses(service, networks)  # type: ignore[arg-type]
    assert list(peer.found) == ["127.0.0.2:7", *(f"127.0.1.{number}:9" for number in range(mdns.ADDRESSES_MAX))]


@pytest.mark.real("processes")
async def test_so_many_names_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import zeroconf

    peer, handlers = Heard(CHAIN, ()), list[Any]()
    monkeypatch.setattr(zeroconf, "ServiceBrowser", lambda *arguments, handlers: _keep(handlers))
    _keep = handlers.extend
    peer.mdns._open(HERE, None, trio.lowlevel.current_trio_token()).close()
    states = zeroconf.ServiceStateChange
    for number in range(2 * NAMES_MAX):
        handlers[0](name=f"{number}.{mdns.SERVICE}", state_change=states.Added, zeroconf=None, service_type=mdns.SERVICE)
    assert len(peer.mdns._names) == NAMES_MAX
    handlers[0](name=f"0.{mdns.SERVICE}", state_change=states.Removed, zeroconf=None, service_type=mdns.SERVICE)
    assert len(peer.mdns._names) == NAMES_MAX - 1


@pytest.mark.real("sockets")
async def test_what_is_found_is_dialed_within_bounds_and_forgotten_when_nobody_answers(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_book, "LOCAL_BOOK_MAX", 3)
    monkeypatch.setattr(address_book, "FAILURES_MAX", 1)
    alice = await tcp.start(ALICE, bootstrap=())
    for number in range(9):
        alice.add_local_address(f"127.0.0.1:{number + 1}")
    alice.add_local_address(alice.address)
    assert len(alice._book._entries) == 3
    await until(lambda: not alice._book._entries)
    bob = await tcp.start(BOB, bootstrap=())
    alice.add_local_address(format_address("127.0.0.1", parse_address(bob.address)[1]))
    await linked(alice, bob)


@pytest.mark.real("processes")
async def test_a_flood_of_news_is_looked_at_a_few_times_a_second(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, looks = Heard(CHAIN), list[float]()

    async def look(*arguments: object) -> None:
        looks.append(trio.current_time())

    monkeypatch.setattr(peer.mdns, "_look", look)
    monkeypatch.setattr(peer.mdns, "_open", lambda *arguments: io.BytesIO())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.mdns.run)
        await until(lambda: bool(looks))
        for _ in range(1_000):
            peer.mdns._wake()
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert 4 <= len(looks) <= 1 + round((looks[-1] - looks[0]) / mdns.PAUSE_SECONDS)


@pytest.mark.real("processes")
async def test_what_goes_wrong_is_one_line_and_tried_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[None]()

    def fail(*arguments: object) -> None:
        tries.append(None)
        raise OSError("No such device")

    peer = Heard(CHAIN)
    monkeypatch.setattr(Mdns, "_place", fail)
    with trio.move_on_after(10 * LOOK_SECONDS - 1):
        await peer.mdns.run()
    assert len(tries) == 10
    assert peer.told == ["mdns: multicast DNS failed: No such device; next try in 60 s"] and not peer.mdns.works


@pytest.mark.real("sockets")
async def test_without_the_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Heard(CHAIN)
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    await peer.mdns.run()
    assert peer.told == ["mdns: the package zeroconf is not installed: install the extra `mdns`"]
