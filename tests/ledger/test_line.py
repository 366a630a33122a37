"""Queued jobs."""

from __future__ import annotations

import pytest

from ledger import jobs
from ledger.core.genesis import TRAINER
from ledger.jobs import QUEUE_MAX, QUEUE_PER_MEMBER_MAX, RUNNING_MAX, StartJob, StopJob, job_id
from ledger.members import RegisterRoles
from protocol.identity import Signed
from tests.ledger.world import LANGUAGE, PEOPLE, SAMPLED, SCRATCH, UNAUDITED, World
from tests.sim.keys import FastSigner

ONE_ROUND = LANGUAGE + b":1"


@pytest.fixture
def world() -> World:
    return World()


def names(world: World) -> list[str]:
    return [waiting.name for waiting in world.state.jobs.queue]


def stop(world: World, person: FastSigner, key: bytes) -> Signed:
    return world.tx(person, "job/stop", StopJob(key))


def test_a_job_waits_while_another_trains_and_starts_in_the_block_that_ends_it(world: World) -> None:
    first, second, third = (world.start(PEOPLE[number], ONE_ROUND) for number in range(3))
    assert set(world.state.jobs.running()) == {first} and [waiting.job for waiting in world.state.jobs.queue] == [second, third]
    world.decide(closings=(world.closing(first),))
    assert set(world.state.jobs.running()) == {second} and world.job(second).opened_height == world.state.height
    assert world.job(second).model_root != jobs.MODEL_ROOT_PENDING, "its model is made with this block"
    world.decide(stop(world, PEOPLE[1], second))
    assert set(world.state.jobs.running()) == {third} and not world.state.jobs.queue


def test_what_needs_no_worker_runs_beside_and_waits_for_its_own_kind_alone(world: World) -> None:
    training = world.start(PEOPLE[0], LANGUAGE)
    world.start(PEOPLE[1], LANGUAGE)
    scratch = [world.start(PEOPLE[number % 4], SCRATCH) for number in range(RUNNING_MAX - 1)]
    assert len(world.state.jobs.running()) == RUNNING_MAX
    last = world.start(PEOPLE[2], SCRATCH)
    assert names(world) == ["language", "scratch"]
    world.decide(closings=(world.closing(scratch[0]),))
    world.decide(closings=(world.closing(scratch[0]),))
    assert last in world.state.jobs.running() and names(world) == ["language"] and training in world.state.jobs.running()


def test_who_comes_in_the_block_that_makes_a_place_does_not_pass_who_waits(world: World) -> None:
    first, second = world.start(PEOPLE[0], LANGUAGE), world.start(PEOPLE[1], LANGUAGE)
    world.decide(stop(world, PEOPLE[0], first), world.tx(PEOPLE[2], "job/start", StartJob(LANGUAGE)))
    assert set(world.state.jobs.running()) == {second}
    assert [waiting.author for waiting in world.state.jobs.queue] == [PEOPLE[2].public]


def test_the_line_and_a_member_s_part_of_it_are_bounded(world: World) -> None:
    world.start(PEOPLE[3], LANGUAGE)
    for _ in range(QUEUE_PER_MEMBER_MAX):
        world.start(PEOPLE[0], LANGUAGE)
    refusal = world.problem(world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE)))
    assert refusal is not None and f"already has {QUEUE_PER_MEMBER_MAX} queued jobs" in refusal
    for number, person in enumerate(PEOPLE[4 : 4 + QUEUE_MAX // QUEUE_PER_MEMBER_MAX - 1]):
        world.decide(world.admission(person, token=FastSigner(f"token {number}")))
        for _ in range(QUEUE_PER_MEMBER_MAX):
            world.start(person, LANGUAGE)
    assert len(world.state.jobs.queue) == QUEUE_MAX
    assert f"the queue is full with {QUEUE_MAX} jobs" in (
        world.problem(world.tx(PEOPLE[1], "job/start", StartJob(LANGUAGE))) or ""
    )


def test_its_author_alone_or_a_quorum_takes_a_job_out_of_the_line(world: World) -> None:
    world.start(PEOPLE[3], LANGUAGE)
    first, second = world.start(PEOPLE[0], LANGUAGE), world.start(PEOPLE[0], LANGUAGE)
    world.decide(stop(world, PEOPLE[0], first))
    assert [waiting.job for waiting in world.state.jobs.queue] == [second]
    for person in PEOPLE[1:3]:
        world.decide(stop(world, person, second))
    assert len(world.state.jobs.queue[0].stop_requests) == 2, "two of four are no quorum"
    world.decide(stop(world, PEOPLE[3], second))
    assert not world.state.jobs.queue and second not in world.state.jobs.jobs
    assert "is not running, paused or queued" in (world.problem(stop(world, PEOPLE[0], second)) or "")


def test_one_that_nobody_can_train_as_it_wants_lets_the_others_pass_and_keeps_its_place(world: World) -> None:
    first = world.start(PEOPLE[0], UNAUDITED)
    audited, plain = world.start(PEOPLE[1], SAMPLED), world.start(PEOPLE[1], UNAUDITED)
    world.decide(world.tx(PEOPLE[2], "member/register", RegisterRoles(())))
    world.decide(stop(world, PEOPLE[0], first))
    assert set(world.state.jobs.running()) == {plain} and [waiting.job for waiting in world.state.jobs.queue] == [audited]
    world.decide(world.tx(PEOPLE[2], "member/register", RegisterRoles((TRAINER,))))
    world.decide(stop(world, PEOPLE[1], plain))
    assert set(world.state.jobs.running()) == {audited} and audited in world.state.audits.jobs


def test_an_expelled_member_s_jobs_leave_the_line_and_a_new_key_keeps_its_own(world: World) -> None:
    world.start(PEOPLE[0], UNAUDITED)
    mine, theirs = world.start(PEOPLE[1], UNAUDITED), world.start(PEOPLE[2], UNAUDITED)
    world.decide(world.rotation(PEOPLE[1], PEOPLE[9]), evidence=(world.double(PEOPLE[2]),))
    assert [waiting.job for waiting in world.state.jobs.queue] == [mine] and theirs not in world.state.jobs.jobs
    world.decide(stop(world, PEOPLE[9], mine))
    assert not world.state.jobs.queue


def test_a_job_that_waits_is_the_job_of_its_transaction(world: World) -> None:
    world.start(PEOPLE[0], LANGUAGE)
    signed = world.tx(PEOPLE[1], "job/start", StartJob(LANGUAGE))
    world.decide(signed)
    assert world.state.jobs.queue[0].job == job_id(PEOPLE[1].public, world.rules.open_transaction(signed))
    assert world.read_back().jobs == world.state.jobs
