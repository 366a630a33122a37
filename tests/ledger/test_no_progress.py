"""A job without accepted updates ends, and costs nobody anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from ledger.core.genesis import TRAINER
from ledger.jobs import NO_PROGRESS_ROUNDS, Job, JobPhase, StopJob
from ledger.members import RegisterRoles
from ledger.model_anchors import UndoReason
from protocol.verdicts import Verdict
from tests.ledger.court import A, B, C, D
from tests.ledger.test_rollbacks import DialModule, accuse, anchored, court_of, place, turn, verdict
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, UNAUDITED, World, world_with_job

ACCEPT, NORM, UNJUDGED = Verdict.ACCEPT, Verdict.NORM, Verdict.UNJUDGED
ANN, BEN, CID, DEE = PEOPLE[:4]


def started(spec: bytes = UNAUDITED) -> tuple[World, bytes]:
    return world_with_job(spec + b":200", trainers=4)


def close(world: World, key: bytes, verdict: Verdict = NORM, of: Collection[bytes] = (), times: int = 1) -> Job:
    """Close rounds in which the updates of these trainers (default: of all) have this verdict, and the others are absent."""
    for _ in range(times):
        world.decide(closings=(world.closing(key, dict.fromkeys(of or world.job(key).trainers, verdict)),))
    return world.job(key)


# Which rounds count -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LANGUAGE, UNAUDITED])
@pytest.mark.parametrize("verdict", [NORM, Verdict.STALE, Verdict.REPLAY])
def test_the_eighth_round_in_a_row_whose_updates_are_all_refused_ends_a_job(spec: bytes, verdict: Verdict) -> None:
    assert NO_PROGRESS_ROUNDS == 8
    world, key = started(spec)
    close(world, key, ACCEPT, times=3)
    job = close(world, key, verdict, times=NO_PROGRESS_ROUNDS - 1)
    assert job.phase is JobPhase.RUNNING and job.refused_rounds == 7 and not job.made_no_progress
    job = close(world, key, verdict)
    assert job.phase is JobPhase.FINISHED and job.made_no_progress and job.opened_height == world.state.height
    assert (job.round, job.rounds_in_model, job.rounds) == (11, 11, 200) and not world.ledger.rounds and not job.undone_rounds


def test_one_accepted_update_is_progress() -> None:
    world, key = started()
    for _ in range(3):
        close(world, key, times=NO_PROGRESS_ROUNDS - 1)
        world.decide(closings=(world.closing(key, {A: NORM, B: NORM, C: NORM, D: ACCEPT}),))
        assert not world.job(key).refused_rounds
    assert world.job(key).phase is JobPhase.RUNNING


@pytest.mark.parametrize("verdicts", [{}, {A: NORM}, dict.fromkeys((A, B, C, D), UNJUDGED), {A: NORM, B: UNJUDGED}])
def test_rounds_that_say_nothing_of_honest_updates_neither_count_nor_begin_anew(verdicts: Mapping[bytes, Verdict]) -> None:
    """At night honest trainers and re-executors may be absent. A liar alone must not end the job then."""
    world, key = started()
    close(world, key, times=5)
    for _ in range(2 * NO_PROGRESS_ROUNDS):
        world.decide(closings=(world.closing(key, verdicts),))
    assert world.job(key).refused_rounds == 5 and world.job(key).phase is JobPhase.RUNNING
    assert close(world, key, of=(A, B), times=3).made_no_progress, "two of four cannot both lie"


def test_a_job_with_fewer_trainers_than_may_lie_ends_when_all_of_them_are_refused() -> None:
    world, invited = World(trainers=1), PEOPLE[6]
    world.decide(world.admission(invited))
    world.decide(world.tx(invited, "member/register", RegisterRoles((TRAINER,))))
    key = world.start(spec=UNAUDITED + b":200")
    assert set(world.job(key).trainers) == {A, invited.public}, "of whom one votes"
    assert close(world, key, of=(A,), times=NO_PROGRESS_ROUNDS).made_no_progress


def test_trainers_that_a_liar_has_invited_end_no_job() -> None:
    """The honest trainers are absent. `f` is a bound for voters, and any member may be a liar."""
    invited = PEOPLE[6]
    world = World(trainers=4)
    world.decide(world.admission(invited))
    world.decide(world.tx(invited, "member/register", RegisterRoles((TRAINER,))))
    key = world.start(spec=UNAUDITED + b":200")
    assert invited.public in world.job(key).trainers
    assert close(world, key, of=(A, invited.public), times=2 * NO_PROGRESS_ROUNDS).refused_rounds == 0
    assert world.job(key).rejected[A] == {"norm": 16}


def test_a_job_that_is_stopped_with_its_eighth_refused_round_was_stopped() -> None:
    world, key = started()
    close(world, key, times=NO_PROGRESS_ROUNDS - 1)
    world.decide(world.tx(ANN, "job/stop", StopJob(key)), closings=(world.closing(key, dict.fromkeys((A, B, C, D), NORM)),))
    job = world.job(key)
    assert job.phase is JobPhase.FINISHED and job.round == 8 and not job.made_no_progress


def test_two_keys_of_one_member_are_one_trainer() -> None:
    """The member rotates in the round. Its trainers are renewed, since one of four voters is missing."""
    new = PEOPLE[5]
    world, key = started()
    world.decide(world.rotation(ANN, new))
    assert {A, new.public} <= set(world.job(key).trainers)
    assert not close(world, key, of=(A, new.public)).refused_rounds


def test_a_job_without_workers_is_not_watched() -> None:
    """Its author alone supplies its updates."""
    world, key = world_with_job(SCRATCH + b":200")
    assert close(world, key, times=2 * NO_PROGRESS_ROUNDS).phase is JobPhase.RUNNING


def test_refused_updates_count_against_nobody() -> None:
    world, key = started(LANGUAGE)
    for _ in range(NO_PROGRESS_ROUNDS):
        job = world.job(key)
        assert set(job.trainers) == set(job.awaited) == {A, B, C, D} and not job.suspended_trainers
        job = close(world, key)
        assert not job.trainer_records and not job.vouch_records and not job.timeout_doublings
    assert not any(world.state.members.is_expelled(person.public) for person in PEOPLE[:4])
    court = court_of()
    close(court, court.key, times=NO_PROGRESS_ROUNDS)
    assert not court.state.audits.member_records and not court.log


def test_the_state_calls_too_large_updates_diverging_where_most_trainers_have_them() -> None:
    world, key = started()
    close(world, key, NORM, of=(A,))
    assert close(world, key).rejected[A] == {"norm": 1, "diverging": 1}
    assert world.job(key).rejected[B] == {"absent": 1, "diverging": 1}


# How it ends --------------------------------------------------------------------------------------------------------------


def test_the_next_job_of_the_line_has_its_place() -> None:
    world, key = started()
    close(world, key, times=NO_PROGRESS_ROUNDS - 1)
    waiting = world.start(BEN, UNAUDITED + b":200")
    assert waiting not in world.state.jobs.jobs
    close(world, key)
    assert world.job(waiting).phase is JobPhase.RUNNING and not world.job(waiting).refused_rounds


def test_a_job_with_sampled_audits_ends_with_its_newest_final_model() -> None:
    court = court_of(window=40, rounds=5)
    assert anchored(court)[0] == (0, 0) and place(court.job(court.key)) == (6, 6)
    job = close(court, court.key, times=NO_PROGRESS_ROUNDS)
    assert job.made_no_progress and place(job) == (0, 0) and job.rounds == 200
    assert (job.undone_rounds[-1].first, job.undone_rounds[-1].last, job.undone_rounds[-1].reason) == (0, 13, UndoReason.STOPPED)
    assert job.last_closed == 13 and not job.anchors


def test_the_last_round_of_a_job_is_its_end_whatever_was_refused() -> None:
    world, key = world_with_job(spec=UNAUDITED + b":8", trainers=4)
    job = close(world, key, times=8)
    assert job.phase is JobPhase.FINISHED and job.rounds_in_model == job.rounds == 8 and job.made_no_progress


def test_a_job_that_is_held_ends_all_the_same() -> None:
    court = court_of(modules=(DialModule(),))
    close(court, court.key, times=NO_PROGRESS_ROUNDS - 1)
    court.decide(turn(court, is_held=True), closings=(court.closing(court.key, dict.fromkeys((A, B, C, D), NORM)),))
    assert court.job(court.key).made_no_progress


# Rollbacks and restarts ---------------------------------------------------------------------------------------------------


def test_after_a_rollback_the_rounds_are_counted_anew() -> None:
    court = court_of(rounds=5)
    close(court, court.key, times=NO_PROGRESS_ROUNDS - 1)
    accuse(court, DEE, 3, A)
    court.decide(verdict(court, CID, 3, A))
    job = court.job(court.key)
    assert job.undone_rounds and job.refused_rounds == 0
    assert close(court, court.key, times=NO_PROGRESS_ROUNDS - 1).phase is JobPhase.RUNNING
    assert close(court, court.key).made_no_progress


def test_a_rollback_in_the_block_of_the_eighth_round_lets_the_job_go_on() -> None:
    court = court_of(rounds=5)
    close(court, court.key, times=NO_PROGRESS_ROUNDS - 1)
    accuse(court, DEE, 3, A)
    last = court.closing(court.key, dict.fromkeys(court.job(court.key).trainers, NORM))
    court.decide(verdict(court, CID, 3, A), closings=(last,))
    job = court.job(court.key)
    assert job.phase is JobPhase.RUNNING and job.undone_rounds and not job.refused_rounds


def test_whoever_begins_from_a_snapshot_counts_on() -> None:
    court = court_of()
    close(court, court.key, times=NO_PROGRESS_ROUNDS - 1)
    again = court.read_back()
    assert again.state_root == court.state.state_root
    court.ledger.applied.current = again
    assert close(court, court.key).made_no_progress
