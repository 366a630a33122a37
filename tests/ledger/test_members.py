"""Membership: every rule of its transactions, and the heights at which they act."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger import members
from ledger.core.genesis import TRAINER, Founder, Genesis
from ledger.ledger_state import BlockBody
from ledger.members import (
    AdmitMember,
    ApproveVoter,
    RegisterRoles,
    RenameMember,
    ResignAsVoter,
    RevokeInvitation,
    StandAsVoter,
    warning_for_removal,
)
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, sign_message
from protocol.limits import TRANSACTION_LIFETIME_HEIGHTS
from protocol.messages import Transaction
from tests.ledger.world import NEW, OTHER, PEOPLE, World, admitted, stood
from tests.sim.keys import FastSigner

ADMITTED = "member/admit"


@pytest.fixture
def world() -> World:
    return World()


def approved(world: World, *voters: int, candidate: FastSigner = NEW) -> None:
    world.decide(*(world.tx(PEOPLE[i], "member/approve", ApproveVoter(candidate.public)) for i in voters))


def voting(world: World) -> list[bool]:
    """Return whether the newcomer votes at the next height and at the one after it."""
    return [NEW.public in world.state.members.voters, NEW.public in world.state.members.upcoming]


# Nonces and expiry ----------------------------------------------------------------------------------------------------


def test_each_nonce_of_a_member_is_used_once_and_in_order(world: World) -> None:
    first, second, third = (world.tx(PEOPLE[0], "member/register", RegisterRoles(()), ahead=i) for i in (1, 2, 3))
    assert "nonce 2" in (world.problem(second) or "") and "nonce 2" in (world.problem(second, first) or "")
    assert world.problem(first, second) is None and "nonce 1" in (world.problem(first, first) or "")
    world.decide(first)
    assert "nonce 1" in (world.problem(first) or "") and "nonce 3" in (world.problem(third) or "")
    assert world.problem(second) is None


@pytest.mark.parametrize(
    "expires, height, fine",
    [(5, 5, True), (4, 5, False), (5 + TRANSACTION_LIFETIME_HEIGHTS, 5, True), (6 + TRANSACTION_LIFETIME_HEIGHTS, 5, False)],
)
def test_a_transaction_is_decided_up_to_its_last_height_and_not_too_long_before(
    world: World, expires: int, height: int, fine: bool
) -> None:
    world.decide_empty(height - 1)
    found = world.problem(world.tx(PEOPLE[0], "member/register", RegisterRoles(()), expires=expires))
    assert (found is None) == fine and (fine or f"expires at height {expires}" in str(found))


def test_only_members_speak_and_strangers_can_do_nothing_but_join(world: World) -> None:
    assert "is not a member" in (world.problem(world.tx(NEW, "member/register", RegisterRoles(()))) or "")
    assert world.problem(world.admission(NEW)) is None


def test_a_transaction_of_another_chain_with_a_foreign_signature_or_of_no_known_kind_is_refused(world: World) -> None:
    signed = world.tx(PEOPLE[0], "member/register", RegisterRoles(()))
    transaction = world.rules.open_transaction(signed)
    wrong = {
        "bad-signature": [sign_message(PEOPLE[0], bytes(32), transaction), replace(signed, signer=PEOPLE[1].public)],
        "unknown-transaction": [sign_message(PEOPLE[0], world.chain, replace(transaction, kind="member/rule"))],
        "unknown-message": [sign_message(PEOPLE[0], world.chain, members.Invitation(bytes(32), 1))],
        "mistyped": [sign_message(PEOPLE[0], world.chain, replace(transaction, content=codec.encode(ResignAsVoter())))],
    }
    for reason, cases in wrong.items():
        for case in cases:
            assert (world.problem(case) or "").startswith(reason)


# Invitations ----------------------------------------------------------------------------------------------------------


def test_an_invitation_admits_one_member_who_trains_and_votes_only_when_it_says_so(world: World) -> None:
    admitted(world, NEW)
    member = world.state.members.members[NEW.public]
    assert (member.invited_by, member.admitted, member.nonce) == (PEOPLE[0].public, 1, 1)
    assert NEW.public not in world.state.members.voters


def test_nobody_invites_more_than_its_share_of_all_members(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one voter alone could leave no room for new members, nor for a new key of a member."""
    monkeypatch.setattr(members, "PRESENT_MEMBERS_MAX", 11)
    for person, token in ((PEOPLE[8], PEOPLE[10]), (PEOPLE[9], PEOPLE[11])):
        world.decide(world.admission(person, token=token))
    assert "has already invited 2 members, the maximum" in (world.problem(world.admission(PEOPLE[7])) or "")
    assert world.problem(world.admission(PEOPLE[7], by=PEOPLE[1])) is None
    world.decide(world.rotation(PEOPLE[8], PEOPLE[6]))
    world.decide(world.rotation(PEOPLE[0], PEOPLE[5]))
    while PEOPLE[5].public not in world.state.members.voters:
        world.decide()
    assert "has already invited 2 members, the maximum" in (world.problem(world.admission(PEOPLE[7], by=PEOPLE[5])) or "")


def test_there_is_always_room_for_voters_new_keys(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invited members can rotate their keys too, and must not take the last places for old keys."""
    monkeypatch.setattr(members, "OLD_KEYS_MAX", 1)
    world.decide(world.admission(PEOPLE[8]))
    world.decide(world.rotation(PEOPLE[8], PEOPLE[9]))
    assert "no room for further old keys" in (world.problem(world.rotation(PEOPLE[9], PEOPLE[10])) or "")
    assert world.problem(world.rotation(PEOPLE[0], PEOPLE[11])) is None


def test_an_invitation_is_used_once(world: World) -> None:
    world.decide(world.admission(NEW))
    assert "the invitation was used: ask" in (world.problem(world.admission(OTHER)) or "")
    assert world.problem(world.admission(OTHER, token=FastSigner("another token"))) is None


def test_an_invitation_is_used_once_within_a_block_too(world: World) -> None:
    assert "the invitation was used" in (world.problem(world.admission(NEW), world.admission(OTHER)) or "")


def test_a_used_invitation_is_forgotten_only_when_it_has_expired(world: World) -> None:
    expires = world.state.time_ms + 2
    world.decide(world.admission(NEW, expires=expires))
    while world.state.time_ms <= expires:
        assert "the invitation was used" in (world.problem(world.admission(OTHER, expires=expires)) or "")
        world.decide()
    world.decide()
    assert world.state.members.used_tokens == {}
    assert "the invitation has expired" in (world.problem(world.admission(OTHER, expires=expires)) or "")


def test_an_invitation_lives_by_the_time_of_the_parent_block(world: World) -> None:
    """It expires by block time, so that two hundred empty blocks in a second do not expire it, and no clock is read."""
    world.decide_empty(200)
    now = world.state.time_ms
    assert world.problem(world.admission(NEW, expires=now)) is None
    assert "the invitation has expired" in (world.problem(world.admission(NEW, expires=now - 1)) or "")


def test_its_own_voter_revokes_an_invitation(world: World) -> None:
    world.decide(world.tx(PEOPLE[0], "member/revoke", RevokeInvitation(world.invitation())))
    assert "the invitation was revoked: ask" in (world.problem(world.admission(NEW)) or "")
    assert world.problem(world.admission(NEW, token=FastSigner("another token"))) is None
    assert "was revoked, so" in (world.problem(world.tx(PEOPLE[0], "member/revoke", RevokeInvitation(world.invitation()))) or "")


def test_nobody_revokes_what_another_has_signed_nor_its_token(world: World) -> None:
    """All peers see the token's public key while an admission waits. A second signature must not exclude the newcomer."""
    assert "only its signer can revoke it" in (
        world.problem(world.tx(PEOPLE[1], "member/revoke", RevokeInvitation(world.invitation()))) or ""
    )
    forged = replace(world.invitation(PEOPLE[1]), signer=PEOPLE[0].public)
    assert (world.problem(world.tx(PEOPLE[0], "member/revoke", RevokeInvitation(forged))) or "").startswith("bad-signature")
    world.decide(world.tx(PEOPLE[1], "member/revoke", RevokeInvitation(world.invitation(PEOPLE[1]))))
    assert world.problem(world.admission(NEW)) is None


def test_only_voters_revoke(world: World) -> None:
    admitted(world, NEW)
    assert "is not a voter" in (world.problem(world.tx(NEW, "member/revoke", RevokeInvitation(world.invitation(NEW, NEW)))) or "")


def test_what_was_used_or_has_expired_needs_no_revoking(world: World) -> None:
    expired = world.invitation(token=FastSigner("old"), expires=world.state.time_ms - 1)
    world.decide(world.admission(NEW))
    for invitation, why in ((world.invitation(), "was used, so"), (expired, "has expired, so")):
        assert why in (world.problem(world.tx(PEOPLE[0], "member/revoke", RevokeInvitation(invitation))) or "")


def test_a_revoked_invitation_stays_so_until_it_has_expired_and_is_then_forgotten(world: World) -> None:
    expires = world.state.time_ms + 2
    world.decide(world.tx(PEOPLE[0], "member/revoke", RevokeInvitation(world.invitation(expires=expires))))
    while world.state.time_ms <= expires:
        assert "was revoked" in (world.problem(world.admission(NEW, expires=expires)) or "")
        world.decide()
    world.decide()
    assert world.state.members.revoked_tokens == {}
    assert "has expired" in (world.problem(world.admission(NEW, expires=expires)) or "")


def test_one_voter_fills_only_its_own_part_of_what_was_revoked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "REVOKED_INVITATIONS_MAX", 2)

    def revoke(person: FastSigner, token: str) -> Signed:
        return world.tx(person, "member/revoke", RevokeInvitation(world.invitation(person, FastSigner(token), 2**53 - 1)))

    for token in ("a", "b"):
        world.decide(revoke(PEOPLE[0], token))
    assert "has already revoked 2 unexpired invitations" in (world.problem(revoke(PEOPLE[0], "c")) or "")
    assert world.problem(revoke(PEOPLE[1], "c")) is None


def test_a_key_that_goes_takes_what_it_revoked_with_it_and_its_invitations_admit_nobody(world: World) -> None:
    """Otherwise the table would grow by one key after the other."""
    world.decide(world.tx(PEOPLE[0], "member/revoke", RevokeInvitation(world.invitation())))
    world.decide(world.tx(PEOPLE[1], "member/revoke", RevokeInvitation(world.invitation(PEOPLE[1]))))
    world.decide(world.rotation(PEOPLE[0], OTHER), evidence=(world.double(PEOPLE[1]),))
    assert world.state.members.revoked_tokens == {}
    for inviter in PEOPLE[:2]:
        assert "is not a voter" in (world.problem(world.admission(NEW, by=inviter)) or "")


def test_whoever_overhears_an_invitation_cannot_use_it_without_the_tokens_key(world: World) -> None:
    assert "bad-signature: invitation token" in (world.problem(world.admission(OTHER, holder=NEW)) or "")


def test_only_voters_invite(world: World) -> None:
    admitted(world, NEW)
    stranger = world.admission(OTHER, by=PEOPLE[7], token=FastSigner("a"))
    for signed in (stranger, world.admission(OTHER, by=NEW, token=FastSigner("b"))):
        assert "is not a voter" in (world.problem(signed) or "")


def test_nobody_joins_twice_or_with_roles_out_of_order(world: World) -> None:
    assert "is already a member" in (world.problem(world.admission(PEOPLE[1])) or "")
    for roles in ((TRAINER, "annotator"), (TRAINER, TRAINER)):
        assert "bad-roles" in (world.problem(world.tx(PEOPLE[1], "member/register", RegisterRoles(roles))) or "")


def test_roles_change_with_a_registration(world: World) -> None:
    world.decide(world.tx(PEOPLE[0], "member/register", RegisterRoles(())))
    assert world.state.members.members[PEOPLE[0].public].roles == ()


# Names ----------------------------------------------------------------------------------------------------------------


def test_a_member_names_itself_and_only_its_name_changes(world: World) -> None:
    before = world.state.members.members
    world.decide(world.tx(PEOPLE[1], "member/rename", RenameMember("ben")))
    after = world.state.members.members
    assert after[PEOPLE[1].public] == replace(before[PEOPLE[1].public], name="ben", nonce=1)
    assert {**after, PEOPLE[1].public: before[PEOPLE[1].public]} == before
    world.decide(world.tx(PEOPLE[2], "member/rename", RenameMember("ben")))
    assert world.state.members.members[PEOPLE[2].public].name == "ben", "two may have one name"


def test_a_new_key_keeps_the_name(world: World) -> None:
    world.decide(world.tx(PEOPLE[1], "member/rename", RenameMember("ben")))
    world.decide(world.rotation(PEOPLE[1], OTHER))
    assert world.state.members.members[OTHER.public].name == "ben"


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\u202eb", " ben"])
def test_a_name_that_a_screen_shows_otherwise_is_refused_from_members_newcomers_and_founders(world: World, name: str) -> None:
    assert (world.problem(world.tx(PEOPLE[0], "member/rename", RenameMember(name))) or "").startswith("bad-name")
    admit = codec.decode(AdmitMember, world.rules.open_transaction(world.admission(NEW)).content)
    assert (world.problem(world.tx(NEW, ADMITTED, replace(admit, name=name))) or "").startswith("bad-name")
    for wrong in (replace(world.genesis, network=name), replace(world.genesis, founders={bytes(32): Founder(name, ())})):
        with pytest.raises(RemoteProtocolError, match="bad-name"):
            Genesis.decode(codec.encode(wrong))


# Voters ---------------------------------------------------------------------------------------------------------------


def test_a_candidate_with_a_quorum_of_approvals_decides_two_heights_later(world: World) -> None:
    stood(world)
    approved(world, 0, 1)
    assert voting(world) == [False, False] and not members.is_voter_change_due(world.state.members)
    approved(world, 2)
    assert voting(world) == [False, True], "decided in h: not yet a voter of h+1, a voter of h+2"
    world.decide()
    assert voting(world) == [True, True] and NEW.public not in world.state.members.candidates


def test_one_voter_joins_a_block(world: World) -> None:
    for person in (NEW, OTHER):
        stood(world, person)
    both = [
        world.tx(PEOPLE[i], "member/approve", ApproveVoter(person.public), j)
        for i in (0, 1, 2)
        for j, person in ((1, NEW), (2, OTHER))
    ]
    before = set(world.state.members.upcoming)
    world.decide(*both)
    assert len(set(world.state.members.upcoming) - before) == 1
    assert members.is_voter_change_due(world.state.members)
    world.decide()
    assert set(world.state.members.upcoming) - before == {NEW.public, OTHER.public}


def test_the_same_voter_approves_once_and_who_does_not_vote_not_at_all(world: World) -> None:
    stood(world)
    for _ in range(4):
        approved(world, 0)
    assert world.state.members.candidates == {NEW.public: (PEOPLE[0].public,)} and voting(world) == [False, False]
    admitted(world, OTHER, "o")
    assert "is not a voter" in (world.problem(world.tx(OTHER, "member/approve", ApproveVoter(NEW.public))) or "")
    assert "is not a candidate" in (world.problem(world.tx(PEOPLE[0], "member/approve", ApproveVoter(OTHER.public))) or "")
    assert "is already a voter" in (world.problem(world.tx(PEOPLE[0], "member/approve", ApproveVoter(PEOPLE[1].public))) or "")


def test_standing_again_keeps_the_approvals(world: World) -> None:
    stood(world)
    approved(world, 0)
    world.decide(world.tx(NEW, "member/stand", StandAsVoter(1, world.state.certified_roots[1])))
    assert world.state.members.candidates[NEW.public] == (PEOPLE[0].public,)


def test_a_candidate_shows_a_recent_root_that_was_certified(world: World) -> None:
    admitted(world, NEW)
    roots = world.state.certified_roots
    for stand in (StandAsVoter(0, bytes(32)), StandAsVoter(1, world.state.state_root), StandAsVoter(7, roots[0])):
        assert "must show a recent certified root" in (world.problem(world.tx(NEW, "member/stand", stand)) or ""), stand
    assert world.problem(world.tx(NEW, "member/stand", StandAsVoter(0, roots[0]))) is None
    assert "is already a voter" in (world.problem(world.tx(PEOPLE[0], "member/stand", StandAsVoter(0, roots[0]))) or "")
    world.decide_empty(100)
    assert "must show a recent certified root" in (world.problem(world.tx(NEW, "member/stand", StandAsVoter(0, roots[0]))) or "")


def test_approvals_of_a_voter_that_left_do_not_count(world: World) -> None:
    stood(world)
    approved(world, 0, 1)
    world.decide(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()), empty_after=3)
    # 3 voters need 2 approvals for a quorum; one of the two given is gone
    assert voting(world) == [False, False] and len(world.state.members.voters) == 3
    approved(world, 2)
    assert voting(world)[1] or members.is_voter_change_due(world.state.members)


def test_who_leaves_stops_deciding_two_heights_later_and_stays_a_member(world: World) -> None:
    world.decide(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    now = world.state.members
    assert PEOPLE[0].public in now.voters and PEOPLE[0].public not in now.upcoming
    world.decide()
    assert PEOPLE[0].public not in world.state.members.voters and PEOPLE[0].public in world.state.members.members
    assert "is not a voter" in (world.problem(world.tx(PEOPLE[0], "member/resign", ResignAsVoter())) or "")


def test_those_who_leave_leave_one_by_one_and_the_last_voter_stays() -> None:
    world = World(voters=3)
    leave = [world.tx(person, "member/resign", ResignAsVoter()) for person in PEOPLE[:3]]
    assert "last voter" in (world.problem(*leave) or "")
    world.decide(*leave[:2])
    sizes = []
    while members.is_voter_change_due(world.state.members):
        sizes.append(len(world.state.members.upcoming))
        world.decide()
    assert sizes == [2, 1, 1] and world.state.members.voters == (PEOPLE[2].public,)
    assert "last voter" in (world.problem(leave[2]) or "")


def test_leaving_twice_is_refused(world: World) -> None:
    twice = [world.tx(PEOPLE[0], "member/resign", ResignAsVoter(), ahead) for ahead in (1, 2)]
    assert "is not a voter" in (world.problem(*twice) or "")


def test_a_full_voter_set_makes_no_change_due_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that cannot join would otherwise cost one empty block after the other."""
    stood(world)
    monkeypatch.setattr(members, "VOTERS_MAX", 4)
    approved(world, 0, 1, 2)
    assert voting(world) == [False, False] and not members.is_voter_change_due(world.state.members)


def test_people_are_warned_where_one_voter_less_tolerates_fewer_liars() -> None:
    assert warning_for_removal(4) == "3 voters tolerate 0 faulty, 4 tolerate 1"
    assert warning_for_removal(5) is None


# Genesis --------------------------------------------------------------------------------------------------------------


def test_the_chain_id_is_that_of_the_genesis_bytes_and_every_field_counts(world: World) -> None:
    genesis = world.genesis
    assert Genesis.decode(codec.encode(genesis)).chain_id == genesis.chain_id
    others = (replace(genesis, network="w"), replace(genesis, created_ms=2), replace(genesis, salt=b"s" * 16))
    assert len({genesis.chain_id, *(other.chain_id for other in others)}) == 4
    with pytest.raises(RemoteProtocolError, match="bad-roles"):
        Genesis.decode(codec.encode(replace(genesis, founders={bytes(32): Founder("f", ("b", "a"))})))


def test_transactions_travel_in_a_body_as_they_were_signed(world: World) -> None:
    signed = world.tx(PEOPLE[0], "member/register", RegisterRoles(()))
    body = codec.decode(BlockBody, codec.encode(BlockBody((), (), (signed,))))
    assert body.transactions == (signed,)
    assert isinstance(world.rules.open_transaction(body.transactions[0]), Transaction)
