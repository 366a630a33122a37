"""Who is a stranger, a guest, a member, a voter: by the state and by invitations that were shown."""

from __future__ import annotations

import pytest

from ledger.members import ResignAsVoter, RevokeInvitation, token_preimage
from peer.runtime.membership.membership import PeerClassifier
from protocol.errors import RemoteProtocolError
from protocol.messages import GuestInvitation
from tests.ledger.world import FAR_MS, PEOPLE, TOKEN, World
from tests.sim.keys import FastSigner, FastVerifier
from transport.peer_policy import PeerClass

ME, OTHER, NEW, THIRD = PEOPLE[0], PEOPLE[1], PEOPLE[8], PEOPLE[9]


def standings(world: World, me: FastSigner = ME) -> PeerClassifier:
    return PeerClassifier(me.public, world.chain, FastVerifier(), world.ledger.applied)


def shown(world: World, holder: FastSigner, by: FastSigner = ME, expires: int = FAR_MS) -> GuestInvitation:
    return GuestInvitation(world.invitation(by, TOKEN, expires), TOKEN.sign(token_preimage(world.chain, holder.public)))


def test_whoever_shows_an_open_invitation_is_a_guest_until_it_is_used_and_a_member_then() -> None:
    world = World()
    of = standings(world)
    assert of.classify(OTHER.public) is PeerClass.VOTER
    assert of.classify(NEW.public) is PeerClass.STRANGER
    of.admit_guest(NEW.public, shown(world, NEW))
    assert of.classify(NEW.public) is PeerClass.GUEST
    world.decide(world.admission(NEW))
    assert of.classify(NEW.public) is PeerClass.MEMBER


def test_one_invitation_makes_one_guest() -> None:
    world = World()
    of = standings(world)
    for holder in (NEW, THIRD):
        of.admit_guest(holder.public, shown(world, holder))
    assert (of.classify(NEW.public), of.classify(THIRD.public)) == (PeerClass.STRANGER, PeerClass.GUEST)


@pytest.mark.parametrize("wrong", ["a member that does not vote", "revoked", "expired"])
def test_an_invitation_that_admits_nobody_makes_no_guest(wrong: str) -> None:
    world = World()
    of, by, expires = standings(world), ME, FAR_MS
    if wrong == "revoked":
        world.decide(world.tx(ME, "member/revoke", RevokeInvitation(world.invitation())))
    elif wrong == "expired":
        expires = 1
        world.decide()
    else:
        by = THIRD
    of.admit_guest(NEW.public, shown(world, NEW, by, expires))
    assert of.classify(NEW.public) is PeerClass.STRANGER


def test_an_invitation_in_the_hands_of_somebody_else_is_no_honest_peers() -> None:
    world = World()
    of = standings(world)
    with pytest.raises(RemoteProtocolError) as caught:
        of.admit_guest(THIRD.public, shown(world, NEW))
    assert caught.value.reason == "bad-signature"
    assert of.classify(THIRD.public) is PeerClass.STRANGER


def test_a_guest_whose_invitation_is_revoked_is_a_stranger_again() -> None:
    world = World()
    of = standings(world)
    of.admit_guest(NEW.public, shown(world, NEW))
    world.decide(world.tx(ME, "member/revoke", RevokeInvitation(world.invitation())))
    assert of.classify(NEW.public) is PeerClass.STRANGER


def test_to_a_newcomer_nobody_is_a_stranger_and_a_voter_that_left_stays_a_member() -> None:
    world = World()
    assert standings(world, NEW).classify(THIRD.public) is PeerClass.MEMBER
    of = standings(world)
    world.decide(world.tx(OTHER, "member/resign", ResignAsVoter()))
    for _ in range(3):
        world.decide()
    assert of.classify(OTHER.public) is PeerClass.MEMBER
