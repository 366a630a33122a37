"""The router's forwarding: with the library against a router of our own on loopback, and over hours of a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from protocol.addresses import parse_address
from scenarios.gateway import Router, running
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import until
from transport.discovery import upnp
from transport.discovery.reachability import ASK_AGAIN_SECONDS, DIAL_BACK_SECONDS, Reachability
from transport.discovery.upnp import LEASE_SECONDS, RENEW_SECONDS, Gateway, PortMapping, RouterError, Upnp

HERE = ("127.0.0.1:7700",)


def forwarding(router: Router) -> PortMapping:
    return PortMapping(Gateway(description=router.url), Random(1))


@pytest.mark.real("sockets")
def test_a_router_forwards_the_port_with_a_lease_until_that_is_taken_back() -> None:
    with running(Router()) as router:
        made = forwarding(router)
        assert made.renew(HERE) == made.renew(HERE) == "1.1.1.1:7700"
        assert router.table == {7700: ("127.0.0.1", 7700, LEASE_SECONDS)} and router.asked.count("AddPortMapping") == 2
        made.close()
        assert router.table == {}
        with pytest.raises(RouterError, match="stopping"):
            made.renew(HERE)
        assert router.table == {}, "a renewal that comes late leaves nothing behind"


@pytest.mark.real("sockets")
def test_a_router_is_found_by_multicast() -> None:
    with running(Router(), searched=True) as router:
        assert PortMapping(Gateway("127.0.0.1", discover_ms=4_000), Random(1)).renew(HERE) == "1.1.1.1:7700"
        assert router.table


@pytest.mark.real("sockets")
def test_another_port_is_asked_for_where_another_machine_has_this_one() -> None:
    with running(Router(taken=frozenset([7700]))) as router:
        made = forwarding(router)
        address = made.renew(HERE)
        assert parse_address(address)[1] in upnp.OTHER_PORTS and made.renew(HERE) == address
        assert [to[:2] for to in router.table.values()] == [("127.0.0.1", 7700)]


@pytest.mark.real("sockets")
def test_a_router_without_leases_forwards_until_the_end() -> None:
    with running(Router(has_leases=False)) as router:
        made = forwarding(router)
        made.renew(HERE)
        assert router.table == {7700: ("127.0.0.1", 7700, 0)} and not made.lease_seconds
        made.close()
        assert router.table == {}


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("router", "listening", "why"),
    [
        (Router(forbids=True), HERE, "refuses to forward port 7700: Action not authorized"),
        (Router(taken=frozenset(range(65_536))), HERE, "ports 7700, .* are in use"),
        (Router(outside="100.64.0.9"), HERE, "'100.64.0.9' is not public"),
        (Router(outside="example.org"), HERE, "'example.org' is not public"),
        (Router(), ("192.168.7.7:7700",), "only to 127.0.0.1, but this peer listens at 192.168.7.7:7700"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing_behind(router: Router, listening: tuple[str, ...], why: str) -> None:
    with running(router), pytest.raises(RouterError, match=why):
        forwarding(router).renew(listening)
    assert router.table == {}


@pytest.mark.real("sockets")
def test_an_address_that_is_no_longer_public_takes_the_forwarding_back() -> None:
    with running(Router()) as router:
        made = forwarding(router)
        made.renew(HERE)
        router.outside = "10.0.0.1"
        with pytest.raises(RouterError):
            made.renew(HERE)
        assert router.table == {} and made.port is None


def test_no_router_is_one_line() -> None:
    with pytest.raises(RouterError, match="no router answers"):
        Gateway(description="http://127.0.0.1:9/root.xml").discover_router()


class Near:
    """A simulated router with the interface of the library."""

    def __init__(self) -> None:
        self.router, self.is_there = Router(), True

    def discover_router(self) -> str:
        if not self.is_there:
            raise RouterError("no router answers")
        return "192.168.7.2"

    def external_address(self) -> str:
        return self.router.outside

    def add_mapping(self, port: int, host: str, own_port: int, lease_seconds: int) -> None:
        self.router.asked.append("AddPortMapping")
        self.router.table[port] = host, own_port, lease_seconds

    def delete_mapping(self, port: int) -> None:
        del self.router.table[port]


async def at_once(call: Callable[..., Any], *arguments: Any, **options: object) -> Any:
    await trio.lowlevel.checkpoint()
    return call(*arguments)


async def test_the_lease_is_renewed_a_router_may_be_away_for_its_length_and_the_end_takes_it_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    near, said, told = Near(), list[str | None](), list[str]()
    upnp = Upnp(lambda: ["0.0.0.0:7700"], said.append, told.append, lambda: near, at_once)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upnp.run)
        await trio.sleep(10 * RENEW_SECONDS + 1)
        assert near.router.asked.count("AddPortMapping") == 11 and set(said) == {"1.1.1.1:7700"}
        assert told == ["upnp: the router forwards 1.1.1.1:7700 to this peer"] and upnp.works
        near.is_there = False
        await trio.sleep(LEASE_SECONDS - RENEW_SECONDS)
        assert None not in said and not upnp.works, "it forwards as long as it has said"
        await trio.sleep(RENEW_SECONDS)
        assert said[-1] is None and told[1:] == ["upnp: no router answers; this peer tries again every 10 minutes"]
        near.is_there = True
        await trio.sleep(RENEW_SECONDS)
        assert said[-1] == "1.1.1.1:7700" and near.router.table and upnp.works
        nursery.cancel_scope.cancel()
    assert near.router.table == {}


async def test_a_router_that_hangs_is_one_line_too(autojump_clock: trio.testing.MockClock) -> None:
    async def hang(*arguments: Any, **options: object) -> None:
        await trio.sleep_forever()

    told = list[str]()
    with trio.move_on_after(RENEW_SECONDS):
        await Upnp(lambda: HERE, lambda address: None, told.append, Near, hang).run()
    assert told == ["upnp: no answer from the router within 30 s; this peer tries again every 10 minutes"]


@pytest.mark.real("sockets")
async def test_without_the_library_or_a_port_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    await Upnp(lambda: HERE, lambda address: None, told.append).run()
    await Upnp(list, lambda address: None, told.append).run()
    assert told == [
        "upnp: the package miniupnpc is not installed: install the extra `upnp`",
        "upnp: this peer accepts no connections, so the router has nothing to forward",
    ]


@pytest.mark.real("sockets")
async def test_others_are_told_where_the_router_forwards_and_no_longer_when_it_does_not(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.pair()
    for outside in ("1.1.1.1:7701", None):
        alice.set_external_address(outside)
        await until(lambda outside=outside: ("1.1.1.1:7701" in bob.records.addresses(alice.me)) is (outside is not None))
    assert alice.address in bob.records.addresses(alice.me)


def test_whoever_missed_a_peer_is_asked_again_soon_after_it_moved() -> None:
    reach, peers = Reachability(True, members=lambda peer: True), [b"a", b"b"]
    for peer in peers:
        reach.on_observed(peer, "1.1.1.1:5000", False)
    assert reach.choose_dialers(1_000) == peers
    for peer in peers:
        reach.on_dial_back_failed(peer)
    assert reach.choose_dialers(1_000 + ASK_AGAIN_SECONDS - 1) == []
    reach.on_address_changed()
    assert reach.choose_dialers(1_000 + DIAL_BACK_SECONDS - 1) == [] and reach.choose_dialers(1_000 + DIAL_BACK_SECONDS) == peers
