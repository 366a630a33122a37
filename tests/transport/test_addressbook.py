"""The address book: its limits per source, when it forgets or dials an address, and its messages to the operator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.addresses import NO_LISTEN_ADDRESS
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, ERIN
from transport.discovery import address_book
from transport.discovery.address_book import (
    BACKOFF_SECONDS_MAX,
    DIRECT_SECONDS_MAX,
    FAILURES_MAX,
    LOCAL_BOOK_MAX,
    SOURCE_BOOK_MAX,
    STABLE_SECONDS,
    STRANGERS_BOOK_MAX,
    AddressBook,
    AddressEntry,
    parse_bootstrap,
)
from transport.discovery.reachability import OwnAddresses

ME, MEMBER, OTHER, STRANGER = ALICE.public, BOB.public, CAROL.public, DAVE.public
STRANGERS = {STRANGER, ERIN.public}
OWN = "10.0.0.1:7700"


@dataclass
class Desk:
    """An address book with a record of its callbacks."""

    first: tuple[AddressEntry, ...] = ()
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    links: dict[bytes, Any] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = AddressBook(
            ME,
            self.first,
            self.links,
            is_stranger=STRANGERS.__contains__,
            has_gone=self.gone.__contains__,
            is_own=lambda address: address == OWN,
            added=lambda entry: self.added.append(entry.address),
            tell=self.told.append,
            random=self.draw,
        )

    def link(self, peer: bytes, address: str, *, dialed: bool = True, by: bytes | None = None) -> None:
        self.links[peer] = SimpleNamespace(peer=peer, address=address, dialed=dialed, relay=by)

    def entry(self, address: str) -> AddressEntry:
        entry = self.book.get(address)
        assert entry is not None
        return entry

    def fail(self, address: str, times: int = 1, reason: str = "connection refused") -> None:
        entry = self.entry(address)
        for _ in range(times):
            entry.end_attempt(reason)
            self.book.count_attempt(entry, 0.0, over_relay=False)
            self.book.schedule_retry(entry, 100.0)


class Highs(random.Random):
    """A random source that records each upper bound and draws 0, so that no pause is made."""

    def __init__(self) -> None:
        super().__init__(0)
        self.highs: list[float] = []

    def uniform(self, low: float, high: float) -> float:
        assert low == 0
        self.highs.append(high)
        return 0.0


def address(number: int) -> str:
    return f"10.1.{number >> 8}.{number & 255}:7700"


# Limits per source ----------------------------------------------------------------------------------------------------


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize(("by", "most"), [(MEMBER, SOURCE_BOOK_MAX), (STRANGER, STRANGERS_BOOK_MAX), (None, LOCAL_BOOK_MAX)])
def test_each_source_has_a_share_of_the_book_and_takes_none_of_others(desk: Desk, by: bytes | None, most: int) -> None:
    for number in range(most + 5):
        if by is None:
            desk.book.add_local(address(number))
        else:
            desk.book.add_signed(address(number), by)
    assert len(desk.book._entries) == len(desk.added) == most
    desk.book.add_signed(address(9999), OTHER)
    assert address(9999) in desk.book._entries
    desk.book.remove_address(address(0))
    if by is not None:
        desk.book.add_signed(address(9998), by)
        assert address(9998) in desk.book._entries, "one has become free"


def test_strangers_share_one_part_of_the_book_however_many_keys_they_make(desk: Desk) -> None:
    for number in range(STRANGERS_BOOK_MAX):
        desk.book.add_signed(address(number), STRANGER)
    desk.book.add_signed(address(9999), ERIN.public)
    assert address(9999) not in desk.book._entries


def test_a_full_book_takes_nothing_more_and_tells_the_operator_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "BOOK_MAX", 1)
    desk = Desk((parse_bootstrap("h:1"),))
    desk.book.add_signed("h:2", MEMBER)
    with pytest.raises(UserError, match=r"cannot add h:3: the address book is full \(1 addresses\)"):
        desk.book.add_configured("h:3")
    assert desk.book.add_configured("h:1") is desk.entry("h:1") and len(desk.book._entries) == 1


def test_what_a_member_names_too_no_longer_counts_among_those_of_strangers(desk: Desk) -> None:
    for peer in (STRANGER, MEMBER, STRANGER):
        desk.book.add_signed("h:1", peer)
    desk.fail("h:1")
    assert "h:1" in desk.book._entries and desk.added == ["h:1"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["learn", "found", "insist", "take_out", "fail"]), st.integers(0, 5), st.integers(0, 3)))
)
def test_whatever_happens_each_source_counts_just_its_own_addresses(steps: list[tuple[str, int, int]]) -> None:
    desk = Desk()
    for step, number, who in steps:
        where, by = f"h:{number + 1}", (MEMBER, OTHER, STRANGER, ERIN.public)[who]
        match step:
            case "learn":
                desk.book.add_signed(where, by)
            case "found":
                desk.book.add_local(where)
            case "insist":
                desk.book.add_configured(where)
            case "take_out":
                desk.book.remove_address(where)
            case "fail" if where in desk.book._entries:
                desk.fail(where)
    entries = desk.book.entries()
    for source in (*desk.book._members.values(), desk.book._strangers, desk.book._neighbours):
        assert source.address_count == sum(entry.source is source for entry in entries)


# Ownership of an address ----------------------------------------------------------------------------------------------


def test_who_has_left_is_dialed_once_more_unless_the_operator_names_it() -> None:
    """Discovery dials the addresses in its record, as it does for strangers, until that record expires."""
    names = [f"{peer_id(peer)}@h:{number}" for number, peer in enumerate((OTHER, MEMBER, ERIN.public), 1)]
    desk = Desk((parse_bootstrap(names[0]), *(parse_bootstrap(name, remembered=True) for name in names[1:])))
    desk.book.add_signed(address(1), MEMBER)
    for number in range(1, 4):
        desk.fail(f"h:{number}", 2 * FAILURES_MAX)
    desk.fail(address(1))
    assert len(desk.book._entries) == 4, "nobody has gone"
    desk.gone |= {OTHER, MEMBER}
    for where in ("h:1", "h:2", "h:3", address(1)):
        desk.fail(where)
    assert {entry.address for entry in desk.book.entries()} == {"h:1", "h:3"}
    desk.book.add_configured(names[1])
    desk.link(ERIN.public, "h:3")
    desk.book.add_configured(names[2])
    desk.gone.add(ERIN.public)
    for again in ("h:2", "h:3"):
        desk.fail(again, 2 * FAILURES_MAX)
        assert again in desk.book._entries


def test_what_is_remembered_gives_way_to_what_the_operator_names() -> None:
    desk = Desk((parse_bootstrap("h:1"), parse_bootstrap(f"{peer_id(OTHER)}@h:1", remembered=True)))
    assert desk.entry("h:1").peer is None and not desk.entry("h:1").pinned


def test_the_address_of_my_own_key_is_dialed_where_it_may_be_another_machine(desk: Desk) -> None:
    desk.book.record_own_address("10.0.0.2:7700")
    for where in (OWN, "10.0.0.2:7700", "10.0.0.3:7700"):
        desk.book.add_signed(where, ME)
        desk.book.add_local(where)
    assert desk.added == ["10.0.0.3:7700"]


@pytest.mark.parametrize(
    ("linked_at", "dialed", "gives_way"),
    [(None, True, False), ("h:1", True, False), ("h:1", False, True), ("h:2", True, True)],
    ids=["not linked", "linked over it", "from there", "elsewhere"],
)
def test_whoever_only_claims_an_address_gives_way_to_the_signed_record_of_another(
    desk: Desk, linked_at: str | None, dialed: bool, gives_way: bool
) -> None:
    desk.book.add_signed("h:1", MEMBER)
    if linked_at is not None:
        desk.link(MEMBER, linked_at, dialed=dialed)
    desk.book.add_signed("h:1", OTHER)
    assert desk.entry("h:1").peer == (OTHER if gives_way else MEMBER)


def test_the_operator_is_believed_unless_the_wanted_peer_is_linked_over_this_very_address(desk: Desk) -> None:
    desk.book.add_signed("h:1", MEMBER)
    desk.link(MEMBER, "h:1")
    linked = desk.entry("h:1")
    assert desk.book.add_configured("h:1") is desk.book.add_configured(f"{peer_id(MEMBER)}@h:1") is linked
    other = desk.book.add_configured(f"{peer_id(OTHER)}@h:1")
    assert other is not linked and other.pinned and not desk.book.has_entry(linked) and linked.retry_now.is_set()


@pytest.mark.parametrize(
    ("who", "reason", "stays", "is_free"),
    [
        ("operator", "wrong-peer", True, False),
        ("operator", "self", False, False),
        ("remembered", "wrong-peer", True, False),
        ("member", "wrong-peer", False, True),
        ("member", "self", False, False),
        ("member", "bad-tag", True, False),
    ],
)
def test_an_address_where_somebody_else_answers_is_forgotten_if_it_was_only_heard_of(
    who: str, reason: str, stays: bool, is_free: bool
) -> None:
    pinned = f"{peer_id(OTHER)}@h:1"
    desk = Desk({"operator": (parse_bootstrap(pinned),), "remembered": (parse_bootstrap(pinned, remembered=True),)}.get(who, ()))
    desk.book.add_signed("h:1", OTHER)
    freed = desk.book.record_wrong_peer("h:1", reason)
    assert ("h:1" in desk.book._entries, freed is not None) == (stays, is_free)
    if stays:
        assert desk.entry("h:1").pinned == (who != "remembered"), "whoever is where another was remembered is met"


# Results of attempts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "failures"), [(MEMBER, FAILURES_MAX), (STRANGER, 0), (None, FAILURES_MAX)])
def test_an_address_that_fails_so_often_in_a_row_is_forgotten(desk: Desk, by: bytes | None, failures: int) -> None:
    if by is None:
        desk.book.add_local("h:1")
    else:
        desk.book.add_signed("h:1", by)
    desk.fail("h:1", failures)
    assert "h:1" in desk.book._entries
    if failures:
        desk.book.count_attempt(desk.entry("h:1"), STABLE_SECONDS, over_relay=False)
        desk.fail("h:1", failures)
    desk.book.count_attempt(desk.entry("h:1"), 0.0, over_relay=True)
    assert "h:1" in desk.book._entries, "it was a better way to a peer that is linked over a relay"
    desk.fail("h:1")
    assert "h:1" not in desk.book._entries


def test_what_the_operator_names_is_never_forgotten() -> None:
    desk = Desk((parse_bootstrap("h:1"),))
    desk.fail("h:1", 10 * FAILURES_MAX)
    desk.book.add_signed("h:2", STRANGER)
    desk.book.add_configured("h:2")
    desk.fail("h:2", 10 * FAILURES_MAX)
    assert "h:1" in desk.book._entries and "h:2" in desk.book._entries


def test_dialing_backs_off_with_full_jitter() -> None:
    """The pauses are drawn from 0..0.4, 0..0.8, and so on up to the cap."""
    draw = Highs()
    desk = Desk((parse_bootstrap(f"{peer_id(OTHER)}@h:1"),), draw)
    desk.fail("h:1", 12)
    assert draw.highs[:4] == [0.4, 0.8, 1.6, 3.2] and draw.highs[11] == BACKOFF_SECONDS_MAX
    desk.link(OTHER, "", by=MEMBER)
    desk.fail("h:1")
    assert draw.highs[12] == DIRECT_SECONDS_MAX, "a direct way is only better"
    desk.book.count_attempt(desk.entry("h:1"), STABLE_SECONDS, over_relay=False)
    desk.book.schedule_retry(desk.entry("h:1"), 0.0)
    assert draw.highs[13] == 0.2


def test_a_person_hears_of_a_failure_at_1_2_4_8_tries_of_another_reason_and_of_the_end() -> None:
    desk = Desk((parse_bootstrap("h:1"),), Highs())
    desk.book.add_signed("h:2", OTHER)
    desk.fail("h:1", 8)
    desk.fail("h:2", 8)
    desk.fail("h:1", reason="unknown host name")
    desk.book.record_success("h:1")
    desk.book.record_success("h:1")
    refused = [
        f"cannot reach h:1: connection refused ({tries}), next try in 0 s" for tries in ("1 try", "2 tries", "4 tries", "8 tries")
    ]
    assert desk.told == [*refused, "cannot reach h:1: unknown host name (9 tries), next try in 0 s", "reached h:1"]


def test_whoever_is_expected_at_an_address_is_named_where_it_cannot_be_reached() -> None:
    entry = AddressEntry("h:1", ALICE.public, reason="connection refused", failures=2, next_at=1.5)
    assert (
        entry.describe_failure(0.0)
        == f"cannot reach h:1: connection refused ({short_id(ALICE.public)}, 2 tries), next try in 2 s"
    )
    entry.reason = f"peer {short_id(BOB.public)} answers there, expected {short_id(ALICE.public)}"
    assert entry.describe_failure(0.0) == f"cannot reach h:1: {entry.reason} (2 tries), next try in 2 s"


def test_the_end_of_a_link_or_of_one_more_to_the_same_peer_is_no_failure() -> None:
    desk = Desk((parse_bootstrap("h:1"),))
    desk.book.record_end("h:1", "gone")
    assert [dial.address for dial in desk.book.unreachable_addresses()] == ["h:1"]
    desk.book.record_success("h:1")
    desk.book.record_end("h:1", "gone")
    assert not desk.book.unreachable_addresses()
    desk.book.record_end("h:1", "this peer left", was_linked=False)
    assert [dial.reason for dial in desk.book.unreachable_addresses()] == ["this peer left"]
    desk.book.confirm_peer("h:1", OTHER)
    desk.link(OTHER, "h:9")
    assert not desk.book.unreachable_addresses(), "it is reached elsewhere"
    desk.book.record_end("h:1", "closed", was_linked=False)
    assert not desk.entry("h:1").reason


@pytest.mark.parametrize(
    ("peer", "named", "stays"),
    [(STRANGER, False, False), (OTHER, False, True), (STRANGER, True, True)],
    ids=["stranger", "member", "named by the operator"],
)
def test_a_stranger_that_was_told_no_is_forgotten_though_a_member_has_named_it(
    desk: Desk, peer: bytes, named: bool, stays: bool
) -> None:
    for signer in (peer, MEMBER):
        desk.book.add_signed(address(1), signer)
    desk.entry(address(1)).is_persistent = named
    desk.book.record_refusal(address(1))
    assert (address(1) in desk.book._entries) == stays


# Own addresses --------------------------------------------------------------------------------------------------------


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
