"""Retirement of an absent member: its conditions, its effects, and the return of the member."""

from __future__ import annotations

import random

import pytest

from consensus.voter_set import VoterSet, faults_tolerated
from ledger import members
from ledger.core.genesis import TRAINER
from ledger.jobs import JobPhase, StartJob
from ledger.members import ApproveVoter, MembersState, RegisterRoles, ResignAsVoter, RetireMember, StandAsVoter
from protocol.identity import Signed
from tests.ledger.world import FAR_MS, PEOPLE, SCRATCH, UNAUDITED, World
from tests.sim.keys import FastSigner

SUBJECT = PEOPLE[4]  # five voters: f stays 1 when one of them leaves
NEW = PEOPLE[9]


@pytest.fixture
def world() -> World:
    return World(voters=5, trainers=5)


def wish(
    world: World, voter: int, subject: FastSigner = SUBJECT, lower: bool = False, ahead: int = 1, expires: int = FAR_MS
) -> Signed:
    return world.tx(PEOPLE[voter], "member/retire", RetireMember(subject.public, lower, expires), ahead)


def wished(world: World, *voters: int, subject: FastSigner = SUBJECT, lower: bool = False) -> None:
    world.decide(*(wish(world, voter, subject, lower) for voter in voters))


def settled(world: World) -> MembersState:
    """Decide blocks until no change of the voters is pending."""
    for _ in range(20):
        if not members.is_voter_change_due(world.state.members):
            return world.state.members
        world.decide()
    raise AssertionError("changes for ever")


def stood(world: World, person: FastSigner) -> None:
    height = world.state.height - 1
    world.decide(world.tx(person, "member/stand", StandAsVoter(height, world.state.certified_roots[height])))


# Conditions -----------------------------------------------------------------------------------------------------------


def test_a_quorum_of_wishes_takes_the_vote_two_heights_later_and_the_roles_at_once(world: World) -> None:
    nonces = {key: member.nonce for key, member in world.state.members.members.items()}
    wished(world, 0, 1, 2)
    now = world.state.members
    assert SUBJECT.public in now.upcoming and now.members[SUBJECT.public].roles == (TRAINER,), "three of five are no quorum"
    wished(world, 3)
    now = world.state.members
    assert SUBJECT.public in now.voters and SUBJECT.public not in now.upcoming, "decided in h: acts at h + 2, as a leave does"
    member = now.members[SUBJECT.public]
    assert (member.roles, member.retired, member.expelled, member.nonce) == ((), 2, None, 0)
    assert now.is_current_key(SUBJECT.public) and now.retirement_votes == {}
    others = {key: member.nonce for key, member in now.members.items()}
    assert others == {key: nonce + (key != SUBJECT.public) for key, nonce in nonces.items()}
    world.decide()
    assert len(world.state.members.voters) == 4


def test_one_voter_counts_once_and_a_later_wish_takes_the_place_of_its_earlier_one(world: World) -> None:
    for _ in range(5):
        wished(world, 0)
    wished(world, 1, 2)
    wished(world, 0, subject=PEOPLE[3])
    wished(world, 4, subject=PEOPLE[3])
    wishes = {voter: wish.subject for voter, wish in world.state.members.retirement_votes.items()}
    assert len(settled(world).voters) == 5
    assert [wishes[PEOPLE[voter].public] for voter in (0, 1, 2, 4)] == [
        PEOPLE[3].public,
        SUBJECT.public,
        SUBJECT.public,
        PEOPLE[3].public,
    ]


def test_only_voters_have_wishes_and_only_about_others_that_have_something_to_lose(world: World) -> None:
    world.decide(world.admission(NEW))
    assert "is not a voter" in (world.problem(world.tx(NEW, "member/retire", RetireMember(SUBJECT.public, False, FAR_MS))) or "")
    wrong = {"resign": PEOPLE[0], "not the current key of a member": PEOPLE[8], "has no vote, no candidacy and no role": NEW}
    for why, subject in wrong.items():
        assert why in (world.problem(wish(world, 0, subject)) or ""), why


def test_wishes_of_those_that_lost_their_vote_do_not_count(world: World) -> None:
    wished(world, 0, 1)
    world.decide(world.tx(PEOPLE[0], "member/resign", ResignAsVoter()))
    settled(world)
    assert PEOPLE[0].public not in world.state.members.retirement_votes
    wished(world, 2, lower=True)
    assert SUBJECT.public in settled(world).upcoming, "of the four voters left two want it"


@pytest.mark.parametrize("how", ["expelled", "rotated"])
def test_a_key_that_goes_takes_its_wishes_and_those_about_it_with_it(world: World, how: str) -> None:
    wished(world, 0, 1)
    wished(world, 2, subject=PEOPLE[0])
    if how == "expelled":
        world.decide(evidence=(world.double(PEOPLE[0]),))
    else:
        world.decide(world.rotation(PEOPLE[0], NEW))
    assert set(world.state.members.retirement_votes) == {PEOPLE[1].public}


def test_a_wish_counts_until_it_expires(world: World) -> None:
    """A member that returned must not be retired years later by the last missing vote."""
    expires = world.state.time_ms + 2
    world.decide(*(wish(world, voter, expires=expires) for voter in (0, 1, 2)))
    while world.state.time_ms <= expires:
        assert len(world.state.members.retirement_votes) == 3
        world.decide()
    world.decide()
    assert world.state.members.retirement_votes == {}
    wished(world, 3)
    assert "has already expired" in (world.problem(wish(world, 0, expires=expires)) or "")
    assert SUBJECT.public in settled(world).upcoming


def test_fewer_voters_need_fewer_wishes_without_anybody_saying_it_again(world: World) -> None:
    world = World(voters=6)  # q = 4; when two have left q = 3
    for person in (PEOPLE[0], PEOPLE[1]):
        world.decide(world.tx(person, "member/resign", ResignAsVoter()))
    wished(world, 2, 3, 4, subject=PEOPLE[5], lower=True)
    assert set(settled(world).voters) == {person.public for person in PEOPLE[2:5]}


# Number of tolerated liars --------------------------------------------------------------------------------------------


def test_f_falls_only_when_all_of_a_quorum_say_so() -> None:
    world = World(voters=4)
    assert "3 voters tolerate 0 faulty, 4 tolerate 1" in (world.problem(wish(world, 0, PEOPLE[3])) or "")
    wished(world, 0, 1, subject=PEOPLE[3], lower=True)
    assert len(settled(world).voters) == 4
    wished(world, 2, subject=PEOPLE[3], lower=True)
    assert len(settled(world).voters) == 3


def test_changes_that_wait_already_count(world: World) -> None:
    """Five voters, one leaves: the wishes made for five voters retire none of the remaining four."""
    wished(world, 0, 1, 2)
    world.decide(wish(world, 3), world.tx(PEOPLE[3], "member/resign", ResignAsVoter(), 2))
    assert len(settled(world).voters) == 4 and SUBJECT.public in world.state.members.voters
    wished(world, 0, 1, 2, lower=True)
    assert len(settled(world).voters) == 3


def test_an_expulsion_that_waits_counts_too(world: World) -> None:
    wished(world, 0, 1, 2)
    world.decide(evidence=(world.double(PEOPLE[3]),))
    assert "tolerate 0 faulty" in (world.problem(wish(world, 0)) or "")
    assert len(settled(world).voters) == 4


def test_the_last_voter_is_never_retired() -> None:
    world = World(voters=2)
    wished(world, 0, subject=PEOPLE[1], lower=True)
    assert len(settled(world).voters) == 2, "both are a quorum of two"
    world = World(voters=3)
    wishes = [wish(world, voter, PEOPLE[2], True) for voter in (0, 1)]
    world.decide(*wishes, *(world.tx(PEOPLE[voter], "member/resign", ResignAsVoter(), 2) for voter in (0, 1)))
    assert settled(world).voters == (PEOPLE[2].public,), "who wants it leaves, too"


# Return of a retired member -------------------------------------------------------------------------------------------


def test_whoever_was_retired_comes_back_by_standing_and_a_quorum_of_approvals(world: World) -> None:
    assert not world.state.members.is_departed_key(SUBJECT.public)
    wished(world, 0, 1, 2, 3)
    assert settled(world).is_departed_key(SUBJECT.public) and not world.state.members.is_departed_key(NEW.public)
    stood(world, SUBJECT)
    assert not world.state.members.is_departed_key(SUBJECT.public)
    world.decide(world.tx(SUBJECT, "member/register", RegisterRoles((TRAINER,))))
    world.decide(*(world.tx(PEOPLE[voter], "member/approve", ApproveVoter(SUBJECT.public)) for voter in (0, 1)))
    assert SUBJECT.public not in settled(world).upcoming
    world.decide(world.tx(PEOPLE[2], "member/approve", ApproveVoter(SUBJECT.public)))
    now = settled(world)
    assert SUBJECT.public in now.voters and now.members[SUBJECT.public].roles == (TRAINER,)
    assert now.members[SUBJECT.public].retired is not None, "no policy approves it unseen"


def test_a_candidate_is_retired_with_the_approvals_that_it_had(world: World) -> None:
    world.decide(world.admission(NEW))
    stood(world, NEW)
    world.decide(*(world.tx(PEOPLE[voter], "member/approve", ApproveVoter(NEW.public)) for voter in (0, 1)))
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert NEW.public not in world.state.members.candidates
    stood(world, NEW)
    assert world.state.members.candidates == {NEW.public: ()}


def test_a_trainer_without_a_vote_loses_its_place_until_it_registers_again(world: World) -> None:
    world.decide(world.admission(NEW))
    world.decide(world.tx(NEW, "member/register", RegisterRoles((TRAINER,))))
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert world.state.members.members[NEW.public].roles == () and len(world.state.members.voters) == 5
    assert NEW.public not in world.job(world.start()).trainers
    world.decide(world.tx(NEW, "member/register", RegisterRoles((TRAINER,))))
    assert world.state.members.members[NEW.public].roles == (TRAINER,)


def alone_in_training(newcomers: int) -> tuple[World, bytes]:
    """Start a job whose only trainer is NEW, one of `newcomers` members without a vote. Return the world and the id."""
    world = World(voters=5, trainers=0)
    for number, person in enumerate(PEOPLE[9 : 9 + newcomers]):
        world.decide(world.admission(person, token=FastSigner(f"token {number}")))
    world.decide(world.tx(NEW, "member/register", RegisterRoles((TRAINER,))))
    return world, world.start(spec=UNAUDITED)


def test_a_job_whose_only_trainer_is_retired_ends(world: World) -> None:
    world, key = alone_in_training(1)
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert world.job(key).phase is JobPhase.FINISHED


def test_a_round_whose_only_trainer_is_retired_goes_on_with_who_registered_since() -> None:
    world, key = alone_in_training(2)
    other = PEOPLE[10]
    world.decide(world.tx(other, "member/register", RegisterRoles((TRAINER,))))
    assert world.job(key).trainers == (NEW.public,), "the round is open already"
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert other.public in world.job(key).awaited and NEW.public not in world.job(key).awaited
    wished(world, 0, 1, 2, 3, subject=other)
    assert world.job(key).phase is JobPhase.FINISHED, "nobody is left, whoever was retired first"


def test_a_scratch_job_whose_author_is_retired_ends() -> None:
    world, _ = alone_in_training(1)
    key = world.start(NEW, SCRATCH)
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert world.job(key).phase is JobPhase.FINISHED


@pytest.mark.parametrize("comes_back", ["registers", "stands"])
def test_who_was_retired_trains_no_job_alone_until_it_is_back(comes_back: str) -> None:
    """Such a job would end with its own block, without a message to anybody."""
    world, _ = alone_in_training(1)
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert "was retired" in (world.problem(world.tx(NEW, "job/start", StartJob(SCRATCH))) or "")
    assert "no member has the role trainer" in (world.problem(world.tx(NEW, "job/start", StartJob(UNAUDITED))) or "")
    if comes_back == "registers":
        world.decide(world.tx(NEW, "member/register", RegisterRoles((TRAINER,))))
    else:
        stood(world, NEW)
    key = world.start(NEW, SCRATCH)
    world.decide()
    assert world.job(key).phase is JobPhase.RUNNING and world.job(key).trainers == (NEW.public,)
    wished(world, 0, 1, 2, 3, subject=NEW)
    assert world.job(key).phase is JobPhase.FINISHED, "and again it is gone"


def test_a_key_that_waits_for_its_turn_or_leaves_is_not_retired_meanwhile(world: World) -> None:
    """One of three changes acts per block."""
    changed = [world.rotation(PEOPLE[2], PEOPLE[8]), world.rotation(SUBJECT, NEW)]
    world.decide(*changed, world.tx(PEOPLE[3], "member/resign", ResignAsVoter()))
    assert "is rotating its key" in (world.problem(wish(world, 0, NEW)) or "")
    assert "is already leaving the voters" in (world.problem(wish(world, 0, PEOPLE[3])) or "")
    settled(world)
    assert world.problem(wish(world, 0, NEW, lower=True)) is None
    assert "has no vote, no candidacy" not in (world.problem(wish(world, 0, PEOPLE[3])) or ""), "it still trains"


# Random sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_whatever_people_wish_a_quorum_wants_each_retirement_and_f_falls_only_with_consent(seed: int) -> None:
    """Random wishes, resignations, candidacies and approvals, compared with a separate count of the wishes."""
    source = random.Random(seed)
    world = World(voters=source.randint(2, 7))
    said: dict[bytes, tuple[bytes, bool]] = {}
    for _ in range(60):
        before = world.state.members
        person, subject = source.choice(PEOPLE[:7]), PEOPLE[source.randrange(2)]
        lower = source.random() < 0.5
        kinds = {
            "member/retire": RetireMember(subject.public, lower, FAR_MS),
            "member/resign": ResignAsVoter(),
            "member/stand": StandAsVoter(
                world.state.height - 1, world.state.certified_roots.get(world.state.height - 1, bytes(32))
            ),
            "member/approve": ApproveVoter(subject.public),
        }
        kind = source.choice(["member/retire"] * 4 + list(kinds)[1:] + ["member/approve"] * 2)
        signed = world.tx(person, kind, kinds[kind])
        fine = world.problem(signed) is None
        world.decide(*([signed] * fine))
        if fine and kind == "member/retire":
            said[person.public] = (subject.public, lower)
        now = world.state.members
        assert now.upcoming and set(now.retirement_votes) <= set(now.voters)
        for key, member in now.members.items():
            assert member.nonce == before.members[key].nonce + (fine and key == person.public)
            if member.retired == before.members[key].retired:
                continue
            about = [consents for voter, (of, consents) in said.items() if of == key and voter in before.voters]
            quorum = VoterSet(before.voters).quorum
            assert len(about) >= quorum, "retired by too few"
            staying = [other for other in before.upcoming if other not in before.resigning_voters]
            if key in staying and faults_tolerated(len(staying) - 1) < faults_tolerated(len(staying)):
                assert sum(about) >= quorum, "f fell without consent"
            said = {voter: item for voter, item in said.items() if item[0] != key}
    settled(world)
