"""Jobs that start from the model of another job."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ledger import jobs
from ledger.core.genesis import ModuleVersion
from ledger.jobs import BASES_MAX, RUNNING_MAX, JobPhase, JobTerms, ModelReference, StartJob, StopJob
from ledger.ledger_state import core_modules
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, PlainJobs, World

ONE_ROUND = LANGUAGE + b":1"


class FromOthers(PlainJobs):
    """`SPEC@JOB,ROUND,ROOT` starts from a job; `SPEC!MODULE` needs a module that the network does not run."""

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        plain, at, of = spec.partition(b"@")
        plain, needs, module = plain.partition(b"!")
        terms = super().terms_of_spec(plain)
        if needs:
            return replace(terms, requires=(ModuleVersion(module.decode(), 1),))
        return replace(terms, base=ModelReference(of[:32], of[32], of[33:])) if at else terms

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        return "it is a scratch job" if base.startswith(SCRATCH) else None


@pytest.fixture
def world() -> World:
    made = World()
    made.start_chain(made.genesis, core_modules(FromOthers()))
    return made


def finished(world: World, spec: bytes = ONE_ROUND) -> bytes:
    key = world.start(PEOPLE[0], spec)
    world.decide(closings=(world.closing(key),))
    assert world.job(key).phase is JobPhase.FINISHED
    return key


def on(world: World, key: bytes, spec: bytes = ONE_ROUND, **other: Any) -> bytes:
    job = world.job(key)
    wanted = {"job": key, "round": job.round, "root": job.model_root} | other
    return spec + b"@" + wanted["job"] + bytes([wanted["round"]]) + wanted["root"]


def refusal(world: World, spec: bytes) -> str:
    return world.problem(world.tx(PEOPLE[0], "job/start", StartJob(spec))) or ""


def test_a_job_starts_from_a_finished_one_with_that_round_and_root(world: World) -> None:
    base = finished(world)
    assert world.job(world.start(PEOPLE[1], on(world, base))).base_job == base


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"job": bytes(32)}, "no finished job"),
        ({"round": 0}, "which is that of round 1"),
        ({"root": bytes(32)}, "which is that of round 1"),
    ],
)
def test_another_job_round_or_root_is_refused(world: World, other: dict[str, Any], why: str) -> None:
    assert why in refusal(world, on(world, finished(world), **other))


def test_a_job_that_runs_or_does_not_fit_is_no_base(world: World) -> None:
    scratch, running = finished(world, SCRATCH + b":1"), world.start(PEOPLE[0])
    assert "no finished job" in refusal(world, on(world, running))
    assert re.search(r"this job cannot start from job '.*': it is a scratch job", refusal(world, on(world, scratch)))


def test_a_base_stays_while_a_job_that_rests_on_it_runs_or_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TRAINED_KEPT_MAX", 1)
    base = finished(world)
    first = world.start(PEOPLE[1], on(world, base))
    second = world.start(PEOPLE[1], on(world, base))
    assert world.state.jobs.queue[0].base_job == base
    world.decide(closings=(world.closing(first),))
    assert base in world.state.jobs.jobs and second in world.state.jobs.running()
    world.decide(closings=(world.closing(second),))
    assert base not in world.state.jobs.jobs, "nothing rests on it any more, and newer ones have its place"


def test_so_many_models_are_kept_for_that_and_no_more(world: World) -> None:
    bases = [finished(world) for _ in range(BASES_MAX + 1)]
    world.start(PEOPLE[0], LANGUAGE)
    people = [PEOPLE[number % 4] for number in range(BASES_MAX)]
    for person, base in zip(people, bases, strict=False):
        world.start(person, on(world, base))
    live = (*world.state.jobs.unfinished().values(), *world.state.jobs.queue)
    assert len({job.base_job for job in live} - {None}) == BASES_MAX > RUNNING_MAX // 2
    assert f"already use {BASES_MAX} models of finished jobs" in refusal(world, on(world, bases[-1]))
    world.decide(world.tx(people[0], "job/stop", StopJob(world.state.jobs.queue[0].job)))
    assert "models of finished jobs" not in refusal(world, on(world, bases[-1]))


def test_an_objective_whose_module_the_network_does_not_run_is_refused_by_every_program(world: World) -> None:
    assert "which this network does not run" in refusal(world, LANGUAGE + b"!curation")
    assert refusal(world, LANGUAGE + b"!jobs") == ""
