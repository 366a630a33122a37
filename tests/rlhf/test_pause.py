"""Paused plans in blocks: after the open round nothing begins until the author resumes the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger.jobs import JobHold, JobLaunch, JobPhase, JobsModule, StartJob, StopJob, job_id
from protocol import codec
from rlhf.ledger import tuning_plans
from rlhf.ledger.rlhf_module import RlhfModule
from rlhf.ledger.tuning_plans import CancelPlan, PausePlan, ResumePlan, StartPlan, TuningPlan
from tests.ledger.court import Court
from tests.ledger.world import PEOPLE
from tests.rlhf.test_plans import AUTHOR, BASE, OTHER, OWN, POLICY, REWARD, Tuned

MARKS = {JobPhase.RUNNING: "", JobPhase.PAUSED: "=", JobPhase.FINISHED: "."}


@pytest.fixture
def world(tmp_path: Path) -> Tuned:
    return Tuned(tmp_path)


def say(world: Tuned, what: type, key: bytes) -> Any:
    kind = next(kind for kind, content in RlhfModule.contents.items() if content is what)
    return world.tx(AUTHOR, kind, what(key))


def job_of(world: Tuned, key: bytes, stage: int) -> str:
    job = world.state.jobs.jobs.get(tuning_plans.stage_job_id(key, stage))
    return "-" if job is None else f"{job.round}{MARKS[job.phase]}"


def paused(world: Tuned) -> str:
    """Return, for each block, the round and the phase of both stages' jobs.

    Both jobs pause in their first round, and the first job in its last one, too. Each pause lasts for two idle blocks.
    """
    key, told = world.planned(), []
    for pauses in (True, True, True, False, False):
        if pauses and world.plan(key).paused_at is None:
            world.decide(say(world, PausePlan, key))
        world.decide(closings=tuple(world.closing(job) for job in world.state.jobs.running()))
        for _ in range(2 * pauses):
            world.decide()
            told.append(job_of(world, key, 0) + job_of(world, key, 1))
        if pauses:
            world.decide(say(world, ResumePlan, key))
        world.decide()
        told.append(job_of(world, key, 0) + job_of(world, key, 1))
    return " ".join(told) + f" {world.plan(key).phase}"


GOES = "1=- 1=- 1- 2.- 2.- 2.0 2.1= 2.1= 2.1 2.2. 2.2. finished"


def test_the_open_round_is_closed_and_nothing_begins_before_the_plan_goes_on(world: Tuned) -> None:
    assert paused(world) == GOES


def without_holding(plan: TuningPlan, author: bytes) -> Iterator[Any]:
    return (fact for fact in ASKED(plan, author) if not isinstance(fact, JobHold))


def without_launching(plan: TuningPlan, author: bytes) -> Iterator[Any]:
    """Keep a stage from starting, as after a refusal."""
    return (fact for fact in ASKED(plan, author) if not isinstance(fact, JobLaunch))


def starting_stages(plan: TuningPlan, author: bytes) -> Iterator[Any]:
    yield from ASKED(plan, author)
    yield from ASKED(replace(plan, paused_at=None), author)


def as_if_not_held(self: JobsModule, *said: Any) -> Any:
    return GO_ON(self, *said[:5], False, *said[6:])


ASKED, GO_ON = tuning_plans.plan_requests, JobsModule._go_on
PLANTED = {
    "rounds go on": (tuning_plans, "plan_requests", without_holding),
    "stages begin": (tuning_plans, "plan_requests", starting_stages),
    "jobs ignore it": (JobsModule, "_go_on", as_if_not_held),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_pause_that_stops_less_is_found_out(world: Tuned, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    monkeypatch.setattr(*PLANTED[planted])
    assert paused(world) != GOES


@pytest.fixture
def key(world: Tuned) -> bytes:
    return world.planned()


def test_a_stage_in_line_waits_on_and_one_that_is_paused_leaves_its_place_to_others(world: Tuned) -> None:
    other = world.start(OTHER, replace(BASE, name="other", rounds=2).encode())
    key = world.planned()
    reward = tuning_plans.stage_job_id(key, 0)
    world.decide(say(world, PausePlan, key))
    world.close(other, blocks=1)
    assert [waiting.job for waiting in world.state.jobs.queue] == [reward] and not world.state.jobs.running()
    world.decide(say(world, ResumePlan, key))
    third = world.tx(OTHER, "job/start", StartJob(replace(BASE, name="third").encode()))
    world.decide(third)
    world.decide(say(world, PausePlan, key))
    world.decide(closings=(world.closing(reward),))
    then = job_id(OTHER.public, world.rules.open_transaction(third))
    assert list(world.state.jobs.running()) == [then] and world.job(reward).phase is JobPhase.PAUSED
    world.decide(say(world, ResumePlan, key))
    assert world.job(reward).phase is JobPhase.PAUSED, "its place is taken"
    world.close(then)
    assert world.job(reward).phase is JobPhase.RUNNING


@pytest.mark.parametrize("how", ["rlhf/cancel", "job/stop"])
def test_a_paused_plan_can_be_ended(world: Tuned, how: str, key: bytes) -> None:
    job = tuning_plans.stage_job_id(key, 0)
    world.decide(say(world, PausePlan, key), closings=(world.closing(job),))
    assert world.job(job).phase is JobPhase.PAUSED
    world.decide(world.tx(AUTHOR, how, CancelPlan(key) if how == "rlhf/cancel" else StopJob(job)))
    assert world.job(job).phase is JobPhase.FINISHED and world.plan(key).phase is tuning_plans.PlanPhase.CANCELLED
    assert "no such plan" in (world.problem(say(world, ResumePlan, key)) or "")


def test_a_plan_that_nobody_resumes_is_cancelled(world: Tuned, monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    monkeypatch.setattr(tuning_plans, "PAUSED_HEIGHTS_MAX", 3)
    job = tuning_plans.stage_job_id(key, 0)
    world.decide(say(world, PausePlan, key), closings=(world.closing(job),))
    for phase in (tuning_plans.PlanPhase.RUNNING, tuning_plans.PlanPhase.RUNNING, tuning_plans.PlanPhase.CANCELLED):
        world.decide()
        assert world.plan(key).phase is phase
    assert world.job(job).phase is JobPhase.FINISHED and job not in world.state.jobs.unfinished()


@pytest.mark.parametrize("clock", ["REFUSED_HEIGHTS_MAX", "PAUSED_HEIGHTS_MAX"])
def test_nobody_keeps_a_place_by_pausing_and_resuming(world: Tuned, monkeypatch: pytest.MonkeyPatch, clock: str) -> None:
    """A pause stops the clock of a stage that is refused, and all pauses together have a clock of their own."""
    monkeypatch.setattr(tuning_plans, clock, 4)
    monkeypatch.setattr(tuning_plans, "plan_requests", without_launching)
    key, blocks = world.planned(), 0
    while world.plan(key).phase is tuning_plans.PlanPhase.RUNNING:
        what = PausePlan if world.plan(key).paused_at is None else ResumePlan
        world.decide(say(world, what, key))
        world.decide()
        blocks += 2
        assert blocks < 30, "it goes on for ever"
    assert blocks >= 8, "half of them count"


def test_a_quorum_of_the_voters_ends_a_plan_that_has_no_job_yet(world: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_plans, "plan_requests", without_launching)
    key = world.planned()
    for voter, phase in zip(
        PEOPLE[1:4],
        (tuning_plans.PlanPhase.RUNNING, tuning_plans.PlanPhase.RUNNING, tuning_plans.PlanPhase.CANCELLED),
        strict=True,
    ):
        world.decide(world.tx(voter, "rlhf/cancel", CancelPlan(key)))
        assert world.plan(key).phase is phase
    assert world.plan(key).stop_requests == tuple(sorted(voter.public for voter in PEOPLE[1:4]))


def test_who_wants_a_plan_to_end_still_does_with_another_key(world: Tuned) -> None:
    key, newer = world.planned(), PEOPLE[6]
    world.decide(world.tx(OTHER, "rlhf/cancel", CancelPlan(key)))
    world.decide(world.rotation(OTHER, newer))
    assert world.plan(key).stop_requests == (newer.public,)


def test_what_an_expelled_author_has_paused_ends(world: Tuned, key: bytes) -> None:
    job = tuning_plans.stage_job_id(key, 0)
    world.decide(say(world, PausePlan, key), closings=(world.closing(job),))
    assert world.job(job).phase is JobPhase.PAUSED
    world.decide(evidence=(world.double(AUTHOR),))
    world.decide()
    assert world.plan(key).phase is tuning_plans.PlanPhase.CANCELLED and world.job(job).phase is JobPhase.FINISHED


def test_a_job_that_a_rule_rewards_is_a_plan_that_is_paused_like_others(world: Tuned) -> None:
    key = world.planned(StartPlan(world.on(replace(POLICY, objective_settings=codec.encode(replace(OWN, reward="rule:vowels"))))))
    job = tuning_plans.stage_job_id(key, 0)
    world.decide(say(world, PausePlan, key), closings=(world.closing(job),))
    assert world.job(job).phase is JobPhase.PAUSED
    world.decide(say(world, ResumePlan, key))
    world.close(job)
    assert world.plan(key).phase is tuning_plans.PlanPhase.FINISHED and world.plan(key).base == world.base


def test_only_its_author_pauses_a_plan_and_only_once(world: Tuned) -> None:
    key = world.planned(world.begin(REWARD))
    assert "is not paused" in (world.problem(say(world, ResumePlan, key)) or "")
    assert "only its author" in (world.problem(world.tx(OTHER, "rlhf/pause", PausePlan(key))) or "")
    world.decide(say(world, PausePlan, key))
    assert "is paused already" in (world.problem(say(world, PausePlan, key)) or "")
    assert "only its author" in (world.problem(world.tx(OTHER, "rlhf/resume", ResumePlan(key))) or "")


def test_audits_of_a_paused_job_go_on_as_those_of_one_that_runs() -> None:
    """A proposal may still be drawn for re-execution. A forgotten one would never be audited."""
    kept = []
    for phase in (JobPhase.RUNNING, JobPhase.PAUSED):
        court = Court(rate=0.5)
        court.round()
        court.ledger.applied.current = court.state.with_modules(
            jobs=replace(court.state.jobs, jobs={court.key: replace(court.job(court.key), phase=phase)})
        )
        court.say(*court.due()[0])
        kept.append({trainer: len(drawn.pending_auditors) for trainer, drawn in court.audits.rounds[1].proposals.items()})
    assert kept[0] == kept[1] and 0 in kept[0].values()
