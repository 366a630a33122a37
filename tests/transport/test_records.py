"""Which record of a peer holds, how long, and who hears of it: what others cannot do with records that they pass on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.addresses import AddressScope, scope_of
from protocol.codec import encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity, Signed, sign_message
from protocol.limits import ADVERTISED_MAX, PEER_RECORD_AGE_SECONDS_MAX, PEER_RECORD_BYTES_MAX, RELAYS_MAX
from protocol.messages import AgedPeerRecord, PeerRecord
from tests.transport.helpers import ALICE, BOB, CAROL, CHAIN, DAVE, digest
from transport import records
from transport.records import CHANGE_SECONDS, CHANGES_AT_ONCE, RENEW_SECONDS, RecordBook, Told

HOME = "8.8.8.8:7700"


def record(
    sequence: int,
    *addresses: str,
    of: Identity = BOB,
    scope: AddressScope = AddressScope.PUBLIC,
    age: int = 0,
    chain: bytes = CHAIN,
) -> AgedPeerRecord:
    return AgedPeerRecord(sign_message(of, chain, PeerRecord(sequence, scope, addresses or (HOME,), ())), age)


@pytest.fixture
def book() -> RecordBook:
    return RecordBook(ALICE, CHAIN)


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("127.0.0.1:1", AddressScope.LOOPBACK),
        ("127.9.9.9:1", AddressScope.LOOPBACK),
        ("[::1]:1", AddressScope.LOOPBACK),
        ("[::ffff:127.0.0.1]:1", AddressScope.LOOPBACK),
        ("localhost:1", AddressScope.LOOPBACK),
        ("10.0.0.1:1", AddressScope.PRIVATE),
        ("192.168.1.1:1", AddressScope.PRIVATE),
        ("172.16.0.1:1", AddressScope.PRIVATE),
        ("100.64.0.1:1", AddressScope.PRIVATE),
        ("169.254.169.254:1", AddressScope.PRIVATE),
        ("0.0.0.0:1", AddressScope.PRIVATE),
        ("[fd00::1]:1", AddressScope.PRIVATE),
        ("[fe80::1]:1", AddressScope.PRIVATE),
        ("[::ffff:10.0.0.1]:1", AddressScope.PRIVATE),
        ("8.8.8.8:1", AddressScope.PUBLIC),
        ("[2a00::1]:1", AddressScope.PUBLIC),
        ("example.org:1", AddressScope.PUBLIC),
    ],
)
def test_each_address_has_the_scope_of_those_who_reach_it(address: str, scope: AddressScope) -> None:
    assert scope_of(address) is scope


# Replays --------------------------------------------------------------------------------------------------------------


def test_the_highest_sequence_holds_whoever_brings_it_and_an_older_one_replayed_changes_nothing(book: RecordBook) -> None:
    old, new = record(1, "1.1.1.1:1"), record(2, HOME)
    assert [book.take(one, AddressScope.PUBLIC, 0) for one in (old, new, old, new)] == [
        Told.NEW,
        Told.NEW,
        Told.STALE,
        Told.KNOWN,
    ]
    assert book.addresses(BOB.public) == (HOME,)


def test_of_two_records_with_one_sequence_the_first_stays(book: RecordBook) -> None:
    assert book.take(record(1, "1.1.1.1:1"), AddressScope.PUBLIC, 0) is Told.NEW
    assert book.take(record(1, HOME), AddressScope.PUBLIC, 0) is Told.STALE
    assert book.addresses(BOB.public) == ("1.1.1.1:1",)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(record(1).record, signer=CAROL.public), "bad-signature"),
        (replace(record(1).record, body=record(2).record.body), "bad-signature"),
        (record(1, chain=digest(b"another")).record, "bad-signature"),
        (replace(record(1).record, body=bytes(PEER_RECORD_BYTES_MAX + 1)), "oversized"),
        (record(1, *[HOME] * (ADVERTISED_MAX + 1)).record, "oversized"),
        (sign_message(BOB, CHAIN, PeerRecord(1, AddressScope.PUBLIC, (), (bytes(32),) * (RELAYS_MAX + 1))), "oversized"),
        (Signed(b"\x01", BOB.public, bytes(64)), "unknown-message"),
    ],
)
def test_a_record_that_nobody_honest_passes_on_is_refused_and_leaves_nothing(book: RecordBook, bad: Signed, reason: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        book.take(AgedPeerRecord(bad, 0), AddressScope.LOOPBACK, 0)
    assert caught.value.reason == reason
    assert not list(book.peers())


@pytest.mark.parametrize(
    "odd",
    [
        record(1, "127.0.0.1:22"),
        record(1, "192.168.1.1:80"),
        record(1, HOME, "nowhere"),
        record(1, HOME, scope=AddressScope.PRIVATE),
    ],
)
def test_addresses_that_another_program_may_take_for_good_ones_are_not_taken_and_ban_nobody(
    book: RecordBook, odd: AgedPeerRecord
) -> None:
    assert book.take(odd, AddressScope.LOOPBACK, 0) is Told.KNOWN
    assert not list(book.peers())


def test_the_sequence_of_an_earlier_life_counts_even_if_its_addresses_are_none_to_this_program(book: RecordBook) -> None:
    odd = record(7, "127.0.0.1:22", of=ALICE)
    assert book.take(odd, AddressScope.LOOPBACK, 0) is Told.OWN
    assert not records.fitting(PeerRecord(7, AddressScope.PUBLIC, ("127.0.0.1:22",), ()))


def test_the_longest_record_fits_its_bound() -> None:
    name = f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 60}.example:65535"
    longest = PeerRecord(2**53 - 1, AddressScope.LOOPBACK, (name[:256],) * ADVERTISED_MAX, (bytes(32),) * RELAYS_MAX)
    assert len(encode(longest)) <= PEER_RECORD_BYTES_MAX


# Scopes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "address"), [(AddressScope.LOOPBACK, "127.0.0.1:7"), (AddressScope.PRIVATE, "10.0.0.7:7")])
def test_near_addresses_come_only_from_near_and_go_only_to_near_links(
    book: RecordBook, scope: AddressScope, address: str
) -> None:
    near = record(1, address, scope=scope)
    assert book.take(near, AddressScope.PUBLIC, 0) is Told.KNOWN and not list(book.peers())
    assert book.take(near, scope, 0) is Told.NEW
    assert book.take(record(1), scope, 0) is Told.NEW
    assert {aged.record for aged in book.told(scope, 0)} == {near.record, record(1).record}
    assert [aged.record for aged in book.told(AddressScope.PUBLIC, 0)] == [record(1).record]
    assert book.addresses(BOB.public) == (HOME, address)


def test_what_is_on_this_machine_alone_is_not_told_in_its_network(book: RecordBook) -> None:
    book.take(record(1, "127.0.0.1:7", scope=AddressScope.LOOPBACK), AddressScope.LOOPBACK, 0)
    assert not book.told(AddressScope.PRIVATE, 0)


# Forgetting -----------------------------------------------------------------------------------------------------------


def test_whoever_renews_nothing_for_a_week_is_forgotten_and_its_old_record_does_not_come_back(book: RecordBook) -> None:
    old = record(1)
    book.take(old, AddressScope.PUBLIC, 0)
    for day in range(8):
        book.take(old, AddressScope.PUBLIC, day * 86_400.0)  # somebody keeps saying that it is new
        book.forget(day * 86_400.0)
    assert not book.knows(BOB.public)
    assert book.take(old, AddressScope.PUBLIC, PEER_RECORD_AGE_SECONDS_MAX + 1) is Told.KNOWN and not book.knows(BOB.public)
    assert book.take(record(2), AddressScope.PUBLIC, PEER_RECORD_AGE_SECONDS_MAX + 1) is Told.NEW


def test_ages_travel_so_that_a_dead_peer_is_not_passed_on_forever(book: RecordBook) -> None:
    almost = PEER_RECORD_AGE_SECONDS_MAX - 60
    assert book.take(record(1, age=almost), AddressScope.PUBLIC, 0) is Told.NEW
    assert book.told(AddressScope.PUBLIC, 50)[0].age_seconds == almost + 50
    assert not book.told(AddressScope.PUBLIC, 60)
    book.forget(60)
    assert not book.knows(BOB.public)
    assert book.take(record(1, age=PEER_RECORD_AGE_SECONDS_MAX), AddressScope.PUBLIC, 61) is Told.KNOWN


def test_nobody_makes_a_record_be_forgotten_by_calling_it_old(book: RecordBook) -> None:
    book.take(record(1, age=PEER_RECORD_AGE_SECONDS_MAX - 1), AddressScope.PUBLIC, 0)
    book.forget(2)
    assert book.take(record(1, age=5), AddressScope.PUBLIC, 3) is Told.NEW


# Room and pace --------------------------------------------------------------------------------------------------------


def test_strangers_fill_their_own_room_alone_and_cost_no_signature_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "STRANGERS_MAX", 2)
    monkeypatch.setattr(records, "SIGNERS_MAX", 4)
    members = {BOB.public, CAROL.public, DAVE.public}
    book = RecordBook(ALICE, CHAIN, members=lambda peer: peer in members)
    strangers = [Identity(bytes([n]) * 32) for n in range(100, 104)]
    told = [book.take(record(1, of=stranger), AddressScope.PUBLIC, 0) for stranger in strangers]
    assert told == [Told.NEW, Told.NEW, Told.KNOWN, Told.KNOWN]
    forged = replace(record(1, of=strangers[3]).record, signature=bytes(64))
    assert book.take(AgedPeerRecord(forged, 0), AddressScope.PUBLIC, 0) is Told.KNOWN, "nobody looked at the signature"
    assert [book.take(record(1, of=one), AddressScope.PUBLIC, 0) for one in (BOB, CAROL, DAVE)] == [Told.NEW] * 3
    assert set(book.peers()) >= members and len(set(book.peers())) == 4


def test_a_forged_record_of_a_member_drives_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SIGNERS_MAX", 1)
    book = RecordBook(ALICE, CHAIN, members=lambda peer: peer == BOB.public)
    book.take(record(1, of=CAROL), AddressScope.PUBLIC, 0)
    with pytest.raises(RemoteProtocolError):
        book.take(AgedPeerRecord(replace(record(1).record, signature=bytes(64)), 0), AddressScope.PUBLIC, 0)
    assert book.knows(CAROL.public)


def test_somebody_who_signs_record_after_record_is_not_passed_on_each_time(book: RecordBook) -> None:
    told = [book.take(record(n), AddressScope.PUBLIC, 0.001 * n) for n in range(1, 50)]
    assert told.count(Told.NEW) == CHANGES_AT_ONCE
    assert book.take(record(50), AddressScope.PUBLIC, 2 * CHANGE_SECONDS) is Told.NEW


def test_records_of_an_expelled_key_are_not_taken_and_those_held_are_dropped() -> None:
    expelled: set[bytes] = set()
    book = RecordBook(ALICE, CHAIN, allow=lambda peer: peer not in expelled)
    book.take(record(1), AddressScope.PUBLIC, 0)
    expelled |= {BOB.public, CAROL.public}
    book.forget(1)
    assert book.take(record(1, of=CAROL), AddressScope.PUBLIC, 1) is Told.KNOWN
    assert not list(book.peers())


# The own record -------------------------------------------------------------------------------------------------------


def test_a_record_is_signed_anew_when_something_changes_and_once_a_day(book: RecordBook) -> None:
    said = {AddressScope.PUBLIC: (HOME,)}
    assert len(book.say(said, (), 0)) == 1
    assert not book.say(said, (), 1)
    assert len(book.say(said, (CAROL.public,), 2)) == 1
    assert len(book.say(said, (CAROL.public,), 2 + RENEW_SECONDS)) == 1
    assert len(book.say({}, (), 3 + RENEW_SECONDS)) == 1, "that it is reached nowhere any more is said, too"
    (mine,) = book.told(AddressScope.PUBLIC, 10 * RENEW_SECONDS)
    assert mine.record == book.say({}, (), 10 * RENEW_SECONDS)[0] or mine.age_seconds == PEER_RECORD_AGE_SECONDS_MAX


def test_a_peer_that_starts_again_signs_above_what_others_remember_of_it() -> None:
    before, now, other = RecordBook(BOB, CHAIN), RecordBook(BOB, CHAIN), RecordBook(ALICE, CHAIN)
    for n in range(3):
        before.say({AddressScope.PUBLIC: (f"1.1.1.{n}:1",)}, (), n)
    old = before.told(AddressScope.PUBLIC, 3)[0]
    assert other.take(old, AddressScope.PUBLIC, 3) is Told.NEW
    now.say({AddressScope.PUBLIC: (HOME,)}, (), 4)
    assert other.take(now.told(AddressScope.PUBLIC, 4)[0], AddressScope.PUBLIC, 4) is Told.STALE
    (remembered,) = other.told(AddressScope.PUBLIC, 5, [BOB.public])
    assert now.take(remembered, AddressScope.PUBLIC, 5) is Told.OWN
    now.say({AddressScope.PUBLIC: (HOME,)}, (), 5, above=3)
    assert other.take(now.told(AddressScope.PUBLIC, 6)[0], AddressScope.PUBLIC, 6) is Told.NEW
    assert other.addresses(BOB.public) == (HOME,)
    assert now.take(remembered, AddressScope.PUBLIC, 7) is Told.KNOWN, "said once, it is known"


def test_nobody_speaks_for_our_own_key(book: RecordBook) -> None:
    book.say({AddressScope.PUBLIC: (HOME,)}, (), 0)
    forged = replace(record(9, "1.1.1.1:1").record, signer=ALICE.public)
    with pytest.raises(RemoteProtocolError, match="bad-signature"):
        book.take(AgedPeerRecord(forged, 0), AddressScope.PUBLIC, 0)
