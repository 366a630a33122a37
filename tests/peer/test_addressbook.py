"""Addresses that a peer remembers, and whom a typed name or id means: never silently one of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from features.name_resolution import resolve_peer
from features.peer_names import SHORT_ID_LENGTH, PeerNames
from ledger.members import Member, MembersState
from peer.settings import address_book_file
from peer.settings.address_book_file import ADDRESSES_KEPT, SAVE_SECONDS
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from tests.ledger.world import PEOPLE, World


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int, port: int) -> str:
    return f"{peer_id(key(number))}@127.0.0.1:{port}"


async def test_members_addresses_are_on_disk_soon_and_forgotten_ones_stay(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # virtual time does not wait for threads
    file, known, gone = tmp_path / "addresses", {key(1): "127.0.0.1:1"}, set[bytes]()
    assert address_book_file.load_addresses(file) == ()
    async with trio.open_nursery() as nursery:
        members = SimpleNamespace(members=known, is_departed_key=gone.__contains__)
        network, applied = (
            SimpleNamespace(peer_addresses=lambda: known),
            SimpleNamespace(current=SimpleNamespace(members=members)),
        )
        nursery.start_soon(address_book_file.save_addresses_periodically, file, network, applied)
        await trio.sleep(SAVE_SECONDS / 2)
        assert address_book_file.load_addresses(file) == (entry(1, 1),)
        known.clear()
        known |= {key(2): "127.0.0.1:2"}
        await trio.sleep(SAVE_SECONDS)
        assert set(address_book_file.load_addresses(file)) == {entry(1, 1), entry(2, 2)}, (
            "who is away now may be the one to dial later"
        )
        known[key(1)] = "127.0.0.1:9"
        await trio.sleep(SAVE_SECONDS)
        assert set(address_book_file.load_addresses(file)) == {entry(1, 9), entry(2, 2)}, "one address a peer, the last one"
        del known[key(1)]
        known[key(3)] = "127.0.0.1:9"
        await trio.sleep(SAVE_SECONDS)
        assert set(address_book_file.load_addresses(file)) == {entry(3, 9), entry(2, 2)}, "one peer an address, the last one"
        known |= {key(number): f"127.0.0.1:{number}" for number in range(3, 3 + 2 * ADDRESSES_KEPT)}
        await trio.sleep(SAVE_SECONDS)
        assert len(address_book_file.load_addresses(file)) == ADDRESSES_KEPT
        for number in range(4, 3 + 2 * ADDRESSES_KEPT):
            del known[key(number)]
        assert {entry(2, 2), entry(4, 4)} <= set(address_book_file.load_addresses(file))
        gone |= {key(2), key(4)}
        await trio.sleep(SAVE_SECONDS)
        assert not {entry(2, 2), entry(4, 4)} & set(address_book_file.load_addresses(file)), (
            "one that is linked, and one of earlier"
        )
        nursery.cancel_scope.cancel()


def test_what_cannot_be_read_of_the_file_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    lines = (entry(1, 1), f"{peer_id(key(2))}@[fe80::1%a b]:7700", "nonsense", f"nobody@{entry(3, 3)}", "", entry(4, 4))
    file.write_bytes("".join(f"{line}\n" for line in lines).encode() + b"\xff\xfe\n")
    told: list[str] = []
    assert address_book_file.load_addresses(file, told.append) == (entry(1, 1), entry(4, 4))
    (line,) = told
    assert str(file) in line and "5 lines" in line and "\n" not in line
    file.write_text(f"{entry(1, 1)}\n")
    address_book_file.load_addresses(file, told.append)
    assert len(told) == 1


KEYS = [person.public for person in PEOPLE[:4]]


def known(*names: str) -> MembersState:
    members = World().state.members
    called = {key: replace(members.members[key], name=name) for key, name in zip(KEYS, names, strict=False)}
    return replace(members, members={**members.members, **called})


def test_a_name_is_enough_and_so_are_the_first_letters_of_an_id() -> None:
    members = known("anna", "ben", "carl ä", "dora")
    assert [resolve_peer(text, members) for text in (" ben ", "carl ä")] == [KEYS[1], KEYS[2]]
    assert resolve_peer(short_id(KEYS[3]).upper(), members) == resolve_peer(peer_id(KEYS[3]), members) == KEYS[3]


def test_a_name_of_two_is_refused_with_the_ids_of_both() -> None:
    with pytest.raises(UserError, match=rf"'ben' fits 2 peers: .*{short_id(KEYS[1])} is called ben.*; type more of the peer id"):
        resolve_peer("ben", known("anna", "ben", "ben", "dora"))


@pytest.mark.parametrize("text", ["", " ", "xyz", "Ben"])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no member is called"):
        resolve_peer(text, known("anna", "ben"))


def test_whoever_takes_anothers_id_for_a_name_is_never_meant_by_it() -> None:
    members = known("anna", peer_id(KEYS[0]), short_id(KEYS[0]))
    assert resolve_peer(peer_id(KEYS[0]), members) == KEYS[0]
    with pytest.raises(UserError, match="fits 2 peers"):
        resolve_peer(short_id(KEYS[0]), members)
    stranger = PEOPLE[9].public
    assert resolve_peer(peer_id(stranger), known(peer_id(stranger))) == stranger


def test_a_key_that_was_changed_means_its_owner_and_an_expelled_one_has_no_name() -> None:
    world = World()
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    assert resolve_peer(short_id(KEYS[0]), world.state.members) == PEOPLE[8].public
    members = known("anna", "ben")
    members = replace(members, members={**members.members, KEYS[1]: replace(members.members[KEYS[1]], expelled=3)})
    with pytest.raises(UserError, match="no member is called 'ben'"):
        resolve_peer("ben", members)
    assert resolve_peer(short_id(KEYS[1]), members) == KEYS[1]


def test_a_long_list_of_namesakes_is_cut() -> None:
    world = World(voters=12)
    with pytest.raises(UserError) as caught:
        resolve_peer("founder", world.state.members)
    assert "fits 12 peers" in str(caught.value) and str(caught.value).count("founder") == 9 and ", …;" in str(caught.value)


@pytest.mark.parametrize("characters", [1, 6, SHORT_ID_LENGTH - 1, SHORT_ID_LENGTH, SHORT_ID_LENGTH + 1, 20, 51, 52])
@pytest.mark.parametrize("change", [str, str.upper])
def test_no_advice_names_a_peer_as_another_s_id_reads(characters: int, change: Callable[[str], str]) -> None:
    """Commands take an id, or the beginning of one, for that id: the advice would act on whom the liar chose."""
    victim, liar = PEOPLE[0].public, PEOPLE[1].public
    looks = change(peer_id(victim)[:characters])
    table = {victim: Member("anna", (), 0, None, 0), liar: Member(looks, (), 0, None, 0)}
    members = MembersState(table, (victim,), (victim,), (victim,))
    assert short_id(liar) in PeerNames(present_of(members))[peer_id(liar)]
    advice = PeerNames(present_of(members)).replace_ids(f"`peer retire {short_id(liar)}` says so, too")
    assert resolve_peer(advice.split("`")[1].split()[-1], members) == liar


def present_of(members: MembersState) -> dict[str, str]:
    return {peer_id(key): member.name for key, member in members.members.items()}


def test_an_id_of_nobody_is_no_name_either() -> None:
    me = PEOPLE[0].public
    members = MembersState({me: Member(peer_id(PEOPLE[5].public), (), 0, None, 0)}, (me,), (me,), (me,))
    assert short_id(me) in PeerNames(present_of(members))[peer_id(me)]
