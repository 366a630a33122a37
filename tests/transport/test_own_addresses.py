"""Where others reach a peer, by where it listens, what is advertised, and what a router forwards."""

from __future__ import annotations

import pytest

from protocol.addresses import NO_LISTEN_ADDRESS
from transport.discovery.reachability import OwnAddresses

HOSTS = ("192.0.2.1", "2001:db8::1")


@pytest.mark.parametrize(
    ("listen", "advertise", "outside", "reached"),
    [
        ("10.0.0.1:1", (), None, ("10.0.0.1:1",)),
        ("0.0.0.0:1", (), None, ("203.0.113.9:1", "192.0.2.1:1", "198.51.100.2:1")),
        ("[::]:1", (), None, ("[2001:db8::1]:1",)),
        ("0.0.0.0:1", ("peer.example:7",), None, ("peer.example:7",)),
        ("10.0.0.1:1", (), "203.0.113.9:7700", ("203.0.113.9:7700", "10.0.0.1:1")),
        (NO_LISTEN_ADDRESS, (), None, ()),
    ],
)
def test_a_wildcard_stands_for_the_hosts_of_its_version_and_what_is_advertised_goes_before_all_but_the_router(
    listen: str, advertise: tuple[str, ...], outside: str | None, reached: tuple[str, ...]
) -> None:
    own = OwnAddresses(listen, advertise, lambda: HOSTS)
    own.external_address = outside
    assert own.reachable_addresses("203.0.113.9", ["198.51.100.2"]) == reached


@pytest.mark.parametrize(
    ("listen", "outside", "host", "port"),
    [
        ("0.0.0.0:1", None, "192.0.2.1", 1),
        ("0.0.0.0:1", None, "2001:db8::1", None),
        ("0.0.0.0:1,[::]:2", None, "2001:db8::1", 2),
        ("0.0.0.0:1", "203.0.113.9:7700", "203.0.113.9", 7700),
        ("0.0.0.0:1", "203.0.113.9:7700", "192.0.2.1", 1),
        ("0.0.0.0:1", None, None, 1),
        (NO_LISTEN_ADDRESS, None, None, None),
    ],
)
def test_the_port_is_that_of_an_address_of_the_same_version(
    listen: str, outside: str | None, host: str | None, port: int | None
) -> None:
    own = OwnAddresses(listen, (), lambda: HOSTS)
    own.external_address = outside
    assert own.port_at(host) == port


def test_the_first_and_what_is_said_to_be_there() -> None:
    own = OwnAddresses("10.0.0.1:1,10.0.0.2:2", ("peer.example:7",), tuple)
    assert own.listening[0] == "10.0.0.1:1" and own.reachable_addresses(None, ()) == ("peer.example:7",)
    assert "10.0.0.2:2" in own and "peer.example:7" in own and "10.0.0.3:3" not in own
    assert not OwnAddresses(NO_LISTEN_ADDRESS, (), tuple).listening
