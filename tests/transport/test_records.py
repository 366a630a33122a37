"""Peer records: which one is valid, for how long, where it is sent, and which changes a forwarding peer cannot make."""

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
from transport.discovery import peer_records
from transport.discovery.peer_records import CHANGE_SECONDS, CHANGES_BURST, RENEW_SECONDS, PeerRecordBook, RecordOutcome

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
def book() -> PeerRecordBook:
    return PeerRecordBook(ALICE, CHAIN)


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


def test_the_highest_sequence_holds_whoever_brings_it_and_an_older_one_replayed_changes_nothing(book: PeerRecordBook) -> None:
    old, new = record(1, "1.1.1.1:1"), record(2, HOME)
    assert [book.accept_record(one, AddressScope.PUBLIC, 0) for one in (old, new, old, new)] == [
        RecordOutcome.NEW,
        RecordOutcome.NEW,
        RecordOutcome.STALE,
        RecordOutcome.KNOWN,
    ]
    assert book.addresses(BOB.public) == (HOME,)


def test_of_two_records_with_one_sequence_the_first_stays(book: PeerRecordBook) -> None:
    assert book.accept_record(record(1, "1.1.1.1:1"), AddressScope.PUBLIC, 0) is RecordOutcome.NEW
    assert book.accept_record(record(1, HOME), AddressScope.PUBLIC, 0) is RecordOutcome.STALE
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
def test_a_record_that_nobody_honest_passes_on_is_refused_and_leaves_nothing(
    book: PeerRecordBook, bad: Signed, reason: str
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        book.accept_record(AgedPeerRecord(bad, 0), AddressScope.LOOPBACK, 0)
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
    book: PeerRecordBook, odd: AgedPeerRecord
) -> None:
    assert book.accept_record(odd, AddressScope.LOOPBACK, 0) is RecordOutcome.KNOWN
    assert not list(book.peers())


def test_the_sequence_of_an_earlier_life_counts_even_if_its_addresses_are_none_to_this_program(book: PeerRecordBook) -> None:
    assert book.accept_record(record(7, "127.0.0.1:22", of=ALICE), AddressScope.LOOPBACK, 0) is RecordOutcome.OWN
    assert not peer_records.addresses_in_scope(PeerRecord(7, AddressScope.PUBLIC, ("127.0.0.1:22",), ()))


def test_the_longest_record_fits_its_bound() -> None:
    name = f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 60}.example:65535"
    longest = PeerRecord(2**53 - 1, AddressScope.LOOPBACK, (name[:256],) * ADVERTISED_MAX, (bytes(32),) * RELAYS_MAX)
    assert len(encode(longest)) <= PEER_RECORD_BYTES_MAX


# Scopes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "address"), [(AddressScope.LOOPBACK, "127.0.0.1:7"), (AddressScope.PRIVATE, "10.0.0.7:7")])
def test_near_addresses_come_only_from_near_and_go_only_to_near_links(
    book: PeerRecordBook, scope: AddressScope, address: str
) -> None:
    near = record(1, address, scope=scope)
    assert book.accept_record(near, AddressScope.PUBLIC, 0) is RecordOutcome.KNOWN and not list(book.peers())
    assert book.accept_record(near, scope, 0) is RecordOutcome.NEW
    assert book.accept_record(record(1), scope, 0) is RecordOutcome.NEW
    assert {aged.record for aged in book.records_for_scope(scope, 0)} == {near.record, record(1).record}
    assert [aged.record for aged in book.records_for_scope(AddressScope.PUBLIC, 0)] == [record(1).record]
    assert book.addresses(BOB.public) == (HOME, address)


def test_what_is_on_this_machine_alone_is_not_told_in_its_network(book: PeerRecordBook) -> None:
    book.accept_record(record(1, "127.0.0.1:7", scope=AddressScope.LOOPBACK), AddressScope.LOOPBACK, 0)
    assert not book.records_for_scope(AddressScope.PRIVATE, 0)


# Forgetting -----------------------------------------------------------------------------------------------------------


def test_whoever_renews_nothing_for_a_week_is_forgotten_and_its_old_record_does_not_come_back(book: PeerRecordBook) -> None:
    old = record(1)
    book.accept_record(old, AddressScope.PUBLIC, 0)
    for day in range(8):
        book.accept_record(old, AddressScope.PUBLIC, day * 86_400.0)  # a peer keeps reporting it as new
        book.drop_expired(day * 86_400.0)
    assert not book.has_records_of(BOB.public)
    assert book.accept_record(
        old, AddressScope.PUBLIC, PEER_RECORD_AGE_SECONDS_MAX + 1
    ) is RecordOutcome.KNOWN and not book.has_records_of(BOB.public)
    assert book.accept_record(record(2), AddressScope.PUBLIC, PEER_RECORD_AGE_SECONDS_MAX + 1) is RecordOutcome.NEW


def test_ages_travel_so_that_a_dead_peer_is_not_passed_on_forever(book: PeerRecordBook) -> None:
    almost = PEER_RECORD_AGE_SECONDS_MAX - 60
    assert book.accept_record(record(1, age=almost), AddressScope.PUBLIC, 0) is RecordOutcome.NEW
    assert book.records_for_scope(AddressScope.PUBLIC, 50)[0].age_seconds == almost + 50
    assert not book.records_for_scope(AddressScope.PUBLIC, 60)
    book.drop_expired(60)
    assert not book.has_records_of(BOB.public)
    assert book.accept_record(record(1, age=PEER_RECORD_AGE_SECONDS_MAX), AddressScope.PUBLIC, 61) is RecordOutcome.KNOWN


def test_nobody_makes_a_record_be_forgotten_by_calling_it_old(book: PeerRecordBook) -> None:
    book.accept_record(record(1, age=PEER_RECORD_AGE_SECONDS_MAX - 1), AddressScope.PUBLIC, 0)
    book.drop_expired(2)
    assert book.accept_record(record(1, age=5), AddressScope.PUBLIC, 3) is RecordOutcome.NEW


# Room and pace --------------------------------------------------------------------------------------------------------


def test_strangers_fill_their_own_room_alone_and_cost_no_signature_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_records, "STRANGERS_MAX", 2)
    monkeypatch.setattr(peer_records, "SIGNERS_MAX", 4)
    members = {BOB.public, CAROL.public, DAVE.public}
    book = PeerRecordBook(ALICE, CHAIN, lambda peer: peer in members)
    strangers = [Identity(bytes([n]) * 32) for n in range(100, 104)]
    told = [book.accept_record(record(1, of=stranger), AddressScope.PUBLIC, 0) for stranger in strangers]
    assert told == [RecordOutcome.NEW, RecordOutcome.NEW, RecordOutcome.KNOWN, RecordOutcome.KNOWN]
    forged = replace(record(1, of=strangers[3]).record, signature=bytes(64))
    assert book.accept_record(AgedPeerRecord(forged, 0), AddressScope.PUBLIC, 0) is RecordOutcome.KNOWN, (
        "nobody looked at the signature"
    )
    assert [book.accept_record(record(1, of=one), AddressScope.PUBLIC, 0) for one in (BOB, CAROL, DAVE)] == [
        RecordOutcome.NEW
    ] * 3
    assert set(book.peers()) >= members and len(set(book.peers())) == 4


def test_a_forged_record_of_a_member_drives_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_records, "SIGNERS_MAX", 1)
    book = PeerRecordBook(ALICE, CHAIN, lambda peer: peer == BOB.public)
    book.accept_record(record(1, of=CAROL), AddressScope.PUBLIC, 0)
    with pytest.raises(RemoteProtocolError):
        book.accept_record(AgedPeerRecord(replace(record(1).record, signature=bytes(64)), 0), AddressScope.PUBLIC, 0)
    assert book.has_records_of(CAROL.public)


def test_somebody_who_signs_record_after_record_is_not_passed_on_each_time(book: PeerRecordBook) -> None:
    told = [book.accept_record(record(n), AddressScope.PUBLIC, 0.001 * n) for n in range(1, 50)]
    assert told.count(RecordOutcome.NEW) == CHANGES_BURST
    assert book.accept_record(record(50), AddressScope.PUBLIC, 2 * CHANGE_SECONDS) is RecordOutcome.NEW


# The own record -------------------------------------------------------------------------------------------------------


def test_a_record_is_signed_anew_when_something_changes_and_once_a_day(book: PeerRecordBook) -> None:
    said = {AddressScope.PUBLIC: (HOME,)}
    assert len(book.sign_own_records(said, (), 0)) == 1
    assert not book.sign_own_records(said, (), 1)
    assert len(book.sign_own_records(said, (CAROL.public,), 2)) == 1
    assert len(book.sign_own_records(said, (CAROL.public,), 2 + RENEW_SECONDS)) == 1
    assert len(book.sign_own_records({}, (), 3 + RENEW_SECONDS)) == 1, "that it is reached nowhere any more is said, too"
    (mine,) = book.records_for_scope(AddressScope.PUBLIC, 10 * RENEW_SECONDS)
    assert mine.record == book.sign_own_records({}, (), 10 * RENEW_SECONDS)[0] or mine.age_seconds == PEER_RECORD_AGE_SECONDS_MAX


def test_a_peer_that_starts_again_signs_above_what_others_remember_of_it() -> None:
    before, now, other = PeerRecordBook(BOB, CHAIN), PeerRecordBook(BOB, CHAIN), PeerRecordBook(ALICE, CHAIN)
    for n in range(3):
        before.sign_own_records({AddressScope.PUBLIC: (f"1.1.1.{n}:1",)}, (), n)
    old = before.records_for_scope(AddressScope.PUBLIC, 3)[0]
    assert other.accept_record(old, AddressScope.PUBLIC, 3) is RecordOutcome.NEW
    now.sign_own_records({AddressScope.PUBLIC: (HOME,)}, (), 4)
    assert other.accept_record(now.records_for_scope(AddressScope.PUBLIC, 4)[0], AddressScope.PUBLIC, 4) is RecordOutcome.STALE
    (remembered,) = other.records_for_scope(AddressScope.PUBLIC, 5, [BOB.public])
    assert now.accept_record(remembered, AddressScope.PUBLIC, 5) is RecordOutcome.OWN
    now.sign_own_records({AddressScope.PUBLIC: (HOME,)}, (), 5, above=3)
    assert other.accept_record(now.records_for_scope(AddressScope.PUBLIC, 6)[0], AddressScope.PUBLIC, 6) is RecordOutcome.NEW
    assert other.addresses(BOB.public) == (HOME,)
    assert now.accept_record(remembered, AddressScope.PUBLIC, 7) is RecordOutcome.KNOWN, "said once, it is known"


def test_nobody_speaks_for_our_own_key(book: PeerRecordBook) -> None:
    book.sign_own_records({AddressScope.PUBLIC: (HOME,)}, (), 0)
    forged = replace(record(9, "1.1.1.1:1").record, signer=ALICE.public)
    with pytest.raises(RemoteProtocolError, match="bad-signature"):
        book.accept_record(AgedPeerRecord(forged, 0), AddressScope.PUBLIC, 0)
