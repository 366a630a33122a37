"""Whom a typed text means: a name, or the beginning of an id, and never silently one of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from features.name_resolution import resolve_peer
from features.peer_names import SHORT_ID_LENGTH, PeerNames
from ledger.members import Member, MembersState
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from tests.ledger.world import PEOPLE, World

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
