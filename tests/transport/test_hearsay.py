"""Unsigned addresses: what a peer says of itself is passed on for wire version 2, what it says of others is dialed alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from protocol.addresses import AddressScope
from protocol.errors import RemoteProtocolError
from protocol.messages import PeerAddress, PeerAddresses
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, ERIN
from transport.legacy_addresses import CLAIMS_MAX, HEARD_MAX, LegacyAddressGossip
from transport.wire.framing import Priority

ME, PEER, OTHER, STRANGER, FAR = (identity.public for identity in (ALICE, BOB, CAROL, DAVE, ERIN))


@dataclass
class FakeLink:
    peer: bytes
    version: int
    address: str = "192.0.2.7:40000"
    dialed: bool = False
    address_scope: AddressScope = AddressScope.PUBLIC
    addresses_heard: int = 0
    addresses_passed_on: int = 0
    sent: list[tuple[bytes, str]] = field(default_factory=list)

    def queue_message(self, message: PeerAddresses, priority: Priority) -> bool:
        self.sent += [(item.peer, item.address) for item in message.known]
        return True


class FakeBook:
    def __init__(self) -> None:
        self.learned: list[tuple[str, bytes, bytes, bool]] = []

    def add_heard(self, address: str, peer: bytes, by: bytes, *, first_hand: bool = False) -> None:
        self.learned.append((address, peer, by, first_hand))


class FakeRecords:
    def peers(self) -> list[bytes]:
        return [FAR]

    def addresses(self, peer: bytes) -> tuple[str, ...]:
        return ("far.example:7700", "10.0.0.9:7700") if peer == FAR else ()


class Desk:
    def __init__(self, *links: FakeLink) -> None:
        self.book = FakeBook()
        known = {link.peer: link for link in links}
        own = ("203.0.113.1:7700",)
        self.hearsay = LegacyAddressGossip(ME, self.book, FakeRecords(), known, lambda: own, lambda peer: peer == STRANGER)  # type: ignore[arg-type]

    def hear(self, link: FakeLink, *known: tuple[bytes, str]) -> None:
        self.hearsay.on_addresses(link, PeerAddresses(tuple(PeerAddress(*one) for one in known)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer", "version", "passed"), [(PEER, 2, CLAIMS_MAX), (STRANGER, 2, 1), (PEER, 3, 0)], ids=["member", "stranger", "newer"]
)
def test_so_many_addresses_of_its_own_a_peer_has_passed_on(peer: bytes, version: int, passed: int) -> None:
    link, other = FakeLink(peer, version), FakeLink(OTHER, 3)
    desk = Desk(link, other)
    for number in range(2 * CLAIMS_MAX):
        desk.hear(link, (peer, f"192.0.2.7:{number + 1}"))
    assert other.sent == [(peer, f"192.0.2.7:{number + 1}") for number in range(passed)] and not link.sent
    assert len(desk.book.learned) == 2 * CLAIMS_MAX, "all of them are dialed"


def test_of_several_addresses_of_its_own_the_first_is_passed_on_and_of_others_none() -> None:
    link, other = FakeLink(PEER, 2), FakeLink(OTHER, 2)
    desk = Desk(link, other)
    desk.hear(link, (FAR, "192.0.2.5:1"), (PEER, "192.0.2.7:1"), (PEER, "192.0.2.7:2"))
    assert other.sent == [(PEER, "192.0.2.7:1")]
    assert [(address, first_hand) for address, _, _, first_hand in desk.book.learned] == [
        ("192.0.2.5:1", False),
        ("192.0.2.7:1", True),
        ("192.0.2.7:2", True),
    ]


def test_whoever_listens_on_all_hosts_is_at_the_one_that_it_is_seen_at() -> None:
    link = FakeLink(PEER, 2)
    desk = Desk(link)
    desk.hear(link, (PEER, "0.0.0.0:7700"))
    assert desk.book.learned == [("192.0.2.7:7700", PEER, PEER, True)] and desk.hearsay.peer_addresses()[PEER] == "192.0.2.7:7700"


def test_what_is_no_address_costs_the_link() -> None:
    link = FakeLink(PEER, 2)
    with pytest.raises(RemoteProtocolError, match="nowhere"):
        Desk(link).hear(link, (OTHER, "nowhere"))


def test_nobody_is_listened_to_without_end() -> None:
    link = FakeLink(PEER, 2, addresses_heard=HEARD_MAX - 1)
    desk = Desk(link)
    desk.hear(link, (OTHER, "192.0.2.5:1"))
    desk.hear(link, (OTHER, "192.0.2.5:2"))
    assert len(desk.book.learned) == 1


def test_a_peer_of_version_2_is_told_all_that_it_may_reach_and_a_newer_one_who_signs_no_records() -> None:
    claims = FakeLink(PEER, 2)
    desk = Desk(claims)
    desk.hear(claims, (PEER, "192.0.2.7:7700"))
    old, new = FakeLink(OTHER, 2), FakeLink(OTHER, 3)
    desk.hearsay.on_linked(old)  # type: ignore[arg-type]
    desk.hearsay.on_linked(new)  # type: ignore[arg-type]
    assert old.sent == [(ME, "203.0.113.1:7700"), (PEER, "192.0.2.7:7700"), (FAR, "far.example:7700")]
    assert new.sent == [(PEER, "192.0.2.7:7700")]


def test_where_a_peer_was_reached_counts_more_than_what_it_says() -> None:
    dialed = FakeLink(FAR, 3, address="192.0.2.44:7700", dialed=True)
    assert Desk().hearsay.peer_addresses() == {FAR: "far.example:7700"}
    assert Desk(dialed).hearsay.peer_addresses() == {FAR: "192.0.2.44:7700"}
