"""Where a peer believes that others reach it."""

from __future__ import annotations

import pytest

from peer.daemon import host_addresses
from peer.daemon.host_addresses import own_addresses
from protocol.limits import ADVERTISED_MAX


def test_what_the_operator_advertises_is_said_as_it_is() -> None:
    assert own_addresses(("0.0.0.0:7700",), ("home.example.org:9000",)) == ("home.example.org:9000",)


@pytest.mark.real("sockets")
def test_who_listens_on_one_host_is_reached_there_also_on_loopback() -> None:
    assert own_addresses(("127.0.0.1:7700",), ()) == ("127.0.0.1:7700",)


def test_a_wildcard_becomes_all_hosts_of_this_machine_but_loopback_the_routed_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_addresses, "_routed", lambda: iter(["10.0.1.5"]))
    monkeypatch.setattr(host_addresses, "_of_interfaces", lambda: iter(["127.0.0.1", "192.168.7.2", "10.0.1.5"]))
    assert own_addresses(("0.0.0.0:7700",), ()) == ("10.0.1.5:7700", "192.168.7.2:7700")


def test_a_wildcard_on_a_machine_with_loopback_alone_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_addresses, "_routed", lambda: iter([]))
    monkeypatch.setattr(host_addresses, "_of_interfaces", lambda: iter(["127.0.0.1"]))
    assert own_addresses(("0.0.0.0:7700",), ()) == ()


@pytest.mark.real("sockets")
def test_no_more_addresses_are_said_than_an_invitation_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_addresses, "_of_interfaces", lambda: (f"10.0.0.{n}" for n in range(1, 40)))
    assert len(own_addresses(("0.0.0.0:7700",), ())) == ADVERTISED_MAX


@pytest.mark.real("sockets")
def test_the_interfaces_of_this_machine_are_read() -> None:
    assert "127.0.0.1" in list(host_addresses._of_interfaces())


@pytest.mark.real("sockets")
def test_the_address_outside_is_the_first_that_others_are_told() -> None:
    assert own_addresses(["10.0.0.1:7700"], [], "1.1.1.1:7701") == ("1.1.1.1:7701", "10.0.0.1:7700")
    assert own_addresses(["0.0.0.0:7700"], ["1.1.1.1:7701"], "1.1.1.1:7701") == ("1.1.1.1:7701",)
