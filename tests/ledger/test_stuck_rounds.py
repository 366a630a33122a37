"""Open rounds whose voters or trainers have left: they get the current ones, and their earlier messages still count."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consensus.voter_set import quorum
from ledger import jobs as jobs_module
from ledger.core.genesis import TRAINER
from ledger.jobs import Job, JobPhase
from ledger.ledger_state import BlockBody, StateTransition
from ledger.members import RegisterRoles, ResignAsVoter
from protocol.identity import Signed
from protocol.verdicts import Verdict
from rounds.round_state import OpenRoundState
from tests.ledger.blocks import compute_transition
from tests.ledger.world import PEOPLE, SCRATCH, TIMERS, UNAUDITED, World, world_with_job

ACCEPT = Verdict.ACCEPT


def empty_blocks(world: World) -> None:
    world.decide_empty(4)


def transition_of(world: World, *transactions: Signed) -> StateTransition:
    state = world.state
    return compute_transition(
        world.rules, state, state.height + 1, state.time_ms + 1, state.state_root, BlockBody((), (), transactions)
    )


def can_be_closed(world: World, job: Job) -> bool:
    """Return whether the current voters can close the round, even if the largest tolerated number of them is absent."""
    voters = world.state.members.round_voters
    voting = len(set(voters) & set(job.voters)) - (len(voters) - quorum(len(voters)))
    return voting >= job.round_terms(bytes(32)).quorum and any(map(world.state.members.is_current_key, job.trainers))


def test_a_round_survives_the_rotation_of_more_than_n_minus_q_of_its_voters() -> None:
    world, key = world_with_job()
    for old, new in zip(PEOPLE[:2], PEOPLE[8:10], strict=True):  # max(1, f) a block, as the rules allow
        world.decide(world.rotation(old, new))
        empty_blocks(world)
    assert can_be_closed(world, world.job(key)) and {PEOPLE[8].public, PEOPLE[9].public} < set(world.job(key).voters)
    world.decide(closings=(world.closing(key),))
    assert world.job(key).round == 1


@pytest.mark.parametrize("spec", [UNAUDITED, SCRATCH])
def test_a_round_survives_the_rotation_of_its_only_trainer(spec: bytes) -> None:
    world, key = world_with_job(spec=spec, trainers=1)
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    job = world.job(key)
    assert PEOPLE[8].public in job.trainers and job.awaited == (PEOPLE[8].public,)
    assert (job.phase, job.round) == (JobPhase.RUNNING, 0)


def test_a_voter_that_rotates_again_and_again_in_a_round_has_one_update_in_it() -> None:
    """Otherwise one member would be more trainers than f."""
    world, key = world_with_job(spec=UNAUDITED, trainers=4)
    for old, new in pairwise(PEOPLE[3:10]):
        world.decide(world.rotation(old, new))
        empty_blocks(world)
    job = world.job(key)
    keys = [person.public for person in PEOPLE[3:10]]
    assert set(job.trainers) == {*keys, *(person.public for person in PEOPLE[:3])}
    assert job.successors == dict(pairwise(keys))
    world.decide(closings=(world.closing(key, dict.fromkeys(job.trainers, ACCEPT)),))
    job = world.job(key)
    assert set(job.accepted) == {keys[-1], *(person.public for person in PEOPLE[:3])} == set(job.trainers)
    assert not job.successors and not job.rejected


def test_a_key_without_room_among_the_trainers_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "TRAINERS_MAX", 4)
    world, key = world_with_job(spec=UNAUDITED, trainers=4)
    world.decide(world.rotation(PEOPLE[3], PEOPLE[8]))
    assert PEOPLE[8].public not in world.job(key).trainers and not world.job(key).successors
    empty_blocks(world)
    monkeypatch.setattr(jobs_module, "TRAINERS_MAX", 5)
    world.decide(world.rotation(PEOPLE[8], PEOPLE[9]))
    assert world.job(key).successors == {PEOPLE[3].public: PEOPLE[9].public}


def test_a_rotation_and_f_silent_voters_together_do_not_stop_a_round() -> None:
    world, key = world_with_job()
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    assert can_be_closed(world, world.job(key)), "PEOPLE[8] and any two others"


def test_a_round_of_which_enough_voters_are_left_goes_on_as_it_was_opened() -> None:
    world, key = world_with_job(voters=6)
    before = world.job(key)
    world.decide(world.tx(PEOPLE[5], "member/resign", ResignAsVoter()))
    empty_blocks(world)
    assert len(world.state.members.voters) == 5 and world.job(key) == before


@pytest.mark.parametrize("voters", range(2, 9))
@pytest.mark.parametrize("goes", ["leaves", "is expelled"])
def test_one_voter_goes_and_the_round_still_closes_with_every_quorum_that_decides_blocks(voters: int, goes: str) -> None:
    world, key = world_with_job(spec=UNAUDITED, voters=voters, trainers=1)
    gone = PEOPLE[voters - 1]
    if goes == "leaves":
        world.decide(world.tx(gone, "member/resign", ResignAsVoter()))
    else:
        world.decide(evidence=(world.double(gone),))
    empty_blocks(world)
    present, taking_part = world.state.members.round_voters, set(world.job(key).voters)
    assert len(present) == voters - 1
    for silent in combinations(present, len(present) - quorum(len(present))):
        assert len(taking_part & set(present) - set(silent)) >= world.job(key).round_terms(key).quorum


def test_voters_that_leave_make_a_round_the_affair_of_the_others() -> None:
    world, key = world_with_job(spec=UNAUDITED, voters=7)
    world.decide(*(world.tx(person, "member/resign", ResignAsVoter()) for person in PEOPLE[4:7]))
    empty_blocks(world)
    assert set(world.job(key).voters) == {person.public for person in PEOPLE[:4]}


def test_ballots_and_proposals_of_before_count_after_the_terms_were_renewed() -> None:
    world, key = world_with_job(spec=UNAUDITED, trainers=1)
    verdicts = {PEOPLE[0].public: ACCEPT}
    world.vote(key, verdicts, (PEOPLE[1].public, PEOPLE[2].public))
    old = world.ledger.rounds[key]
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    renewed = OpenRoundState(world.job(key).round_terms(key), PEOPLE[3].public, 9.0, TIMERS)
    renewed.import_from(old)
    world.ledger.rounds[key] = renewed
    world.vote(key, verdicts, (PEOPLE[8].public,))
    closing = renewed.certificate()
    assert closing is not None and [signed.signer for signed in closing.proposals] == [PEOPLE[0].public]
    world.decide(closings=(closing,))
    assert world.job(key).accepted == {PEOPLE[0].public: 1} and world.job(key).awaited == (PEOPLE[8].public,)


def test_a_ballot_by_the_old_key_does_not_close_a_round_whose_terms_were_renewed() -> None:
    world, key = world_with_job()
    closing = world.closing(key)
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    assert "not-a-voter" in (world.problem(closings=(closing,)) or "")


def test_renewing_changes_nothing_but_who_takes_part() -> None:
    world, key = world_with_job()
    before, transition = world.job(key), transition_of(world, world.rotation(PEOPLE[0], PEOPLE[8]))
    after = transition.state.jobs.jobs[key]
    assert (transition.started_jobs, transition.closed_rounds) == ((), ())
    assert after.opened_height == world.state.height + 1 and after.voters != before.voters
    same = ("round", "model_root", "spec", "timeout_doublings", "accepted", "rejected", "phase", "fully_audited", "stop_requests")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]


def test_old_trainers_keep_their_places_and_new_ones_get_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "TRAINERS_MAX", 3)
    world, key = world_with_job(spec=UNAUDITED, voters=4, trainers=2)
    world.decide(*(world.tx(person, "member/register", RegisterRoles((TRAINER,))) for person in PEOPLE[2:4]))
    world.decide(*(world.rotation(PEOPLE[i], PEOPLE[8 + i]) for i in range(2)))
    trainers = set(world.job(key).trainers)
    assert {PEOPLE[0].public, PEOPLE[1].public} < trainers and len(trainers) == 3


def test_a_job_ends_whose_trainers_are_all_gone_and_for_whom_no_other_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "TRAINERS_MAX", 1)
    world, key = world_with_job(spec=UNAUDITED, trainers=1)
    world.decide(world.rotation(PEOPLE[0], PEOPLE[8]))
    assert world.job(key).phase is JobPhase.FINISHED
    assert world.start(PEOPLE[8], UNAUDITED) in world.state.jobs.running()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_whatever_becomes_of_its_members_a_running_round_can_be_closed_by_those_who_vote(seed: int, voters: int) -> None:
    draw = random.Random(seed)
    world = World(voters, trainers=draw.randint(1, voters))
    key = world.start(spec=draw.choice((UNAUDITED, SCRATCH)))
    spare = PEOPLE[voters:]
    for _ in range(8):
        before = world.job(key)
        person = draw.choice([person for person in PEOPLE if world.state.members.is_current_key(person.public)])
        change: tuple[Signed, ...] = ()
        if draw.random() < 0.6 and spare:
            change = (world.rotation(person, spare[0]),)
        elif draw.random() < 0.5:
            change = (world.tx(person, "member/resign", ResignAsVoter()),)
        evidence = (world.double(person),) if draw.random() < 0.1 else ()
        if world.problem(*change, evidence=evidence) is None:
            world.decide(*change, evidence=evidence)
            spare = [new for new in spare if new.public not in world.state.members.members]
        else:
            world.decide()
        job = world.job(key)
        if job.phase is not JobPhase.RUNNING:
            return
        assert (job.round, job.model_root) == (before.round, before.model_root)
        assert can_be_closed(world, job) and set(before.trainers) <= set(job.trainers)
        assert (job.opened_height == before.opened_height) == (job.round_terms(key) == before.round_terms(key))
    world.decide(closings=(world.closing(key, dict.fromkeys(world.job(key).trainers, ACCEPT)),))
    assert world.job(key).round == 1
