"""What strangers of wire version 2 say of themselves keeps no member's address from others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from protocol.messages import PeerAddress, PeerAddresses
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE
from transport import legacy_addresses
from transport.legacy_addresses import LegacyAddressGossip

ME, MEMBER, OTHER, STRANGER = ALICE.public, BOB.public, CAROL.public, DAVE.public


def test_strangers_do_not_keep_members_from_being_told_or_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PeerAddresses] = []
    book: Any = SimpleNamespace(add_heard=lambda *about, **how: None)
    records: Any = SimpleNamespace(peers=list)
    desk = LegacyAddressGossip(ME, book, records, {}, lambda: ["203.0.113.1:7700"], lambda peer: peer == STRANGER)

    def link(peer: bytes) -> Any:
        post = lambda message, priority: told.append(message)  # noqa: E731
        return SimpleNamespace(
            peer=peer, version=2, address="192.0.2.7:40000", addresses_heard=0, addresses_passed_on=0, queue_message=post
        )

    def claims(peer: bytes) -> None:
        desk.on_addresses(link(peer), PeerAddresses((PeerAddress(peer, "192.0.2.7:1"),)))

    claims(STRANGER)
    claims(MEMBER)
    monkeypatch.setattr(legacy_addresses, "ADDRESSES_MAX", 2)
    desk.on_linked(link(OTHER))
    assert [known.peer for known in told[0].known] == [ME, MEMBER]
    monkeypatch.setattr(legacy_addresses, "BOOK_MAX", 2)
    claims(OTHER)
    assert desk._claims.keys() == {MEMBER, OTHER}
