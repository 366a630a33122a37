"""Jobs that start from parameters in a blob. They wait until a quorum of voters holds these parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger.jobs import AttestStartModel, JobTerms, StopJob
from ledger.ledger_state import core_modules
from tests.ledger.world import LANGUAGE, OTHER, PEOPLE, PlainJobs, World, admitted
from tests.sim.keys import FastSigner

START = b"start" * 6 + b".."
OWN = b"own:1"  # starts from a blob
ONE_ROUND = LANGUAGE + b":1"


class FromParameters(PlainJobs):
    def terms_of_spec(self, spec: bytes) -> JobTerms:
        kind, _, rounds = spec.partition(b":")
        terms = super().terms_of_spec(LANGUAGE + b":" + rounds if kind == b"own" else spec)
        return replace(terms, start=START) if kind == b"own" else terms


@pytest.fixture
def world() -> World:
    made = World()
    made.start_chain(made.genesis, core_modules(FromParameters()))
    return made


def hold(world: World, key: bytes, *voters: FastSigner) -> None:
    world.decide(*(world.tx(voter, "job/attest-start-model", AttestStartModel(key)) for voter in voters))


def refusal(world: World, person: FastSigner, key: bytes) -> str:
    return world.problem(world.tx(person, "job/attest-start-model", AttestStartModel(key))) or ""


def test_a_job_starts_when_a_quorum_of_voters_holds_what_it_starts_from(world: World) -> None:
    key = world.start(PEOPLE[3], OWN)
    assert not world.state.jobs.jobs and [waiting.job for waiting in world.state.jobs.queue] == [key]
    hold(world, key, PEOPLE[0])
    hold(world, key, PEOPLE[2])
    assert key not in world.state.jobs.jobs, "two of four: with one liar among them, an honest voter alone would hold it"
    hold(world, key, PEOPLE[3])
    assert key in world.state.jobs.running() and not world.state.jobs.queue
    world.decide(closings=(world.closing(key),))


def test_others_pass_it_in_the_line_meanwhile(world: World) -> None:
    key = world.start(PEOPLE[0], OWN)
    other = world.start(PEOPLE[1], ONE_ROUND)
    assert set(world.state.jobs.running()) == {other}
    hold(world, key, *PEOPLE[:3])
    assert set(world.state.jobs.running()) == {other} and [waiting.job for waiting in world.state.jobs.queue] == [key]
    world.decide(closings=(world.closing(other),))
    assert set(world.state.jobs.running()) == {key}


def test_a_voter_counts_once_and_nobody_else_does(world: World) -> None:
    key = world.start(PEOPLE[0], OWN)
    admitted(world, OTHER)
    hold(world, key, PEOPLE[0])
    assert "has already attested" in refusal(world, PEOPLE[0], key)
    assert "only voters" in refusal(world, OTHER, key)
    assert "no queued job" in refusal(world, PEOPLE[1], bytes(32))
    running, plain = world.start(PEOPLE[1], ONE_ROUND), world.start(PEOPLE[2], ONE_ROUND)
    assert running in world.state.jobs.jobs
    assert "no queued job" in refusal(world, PEOPLE[1], plain), "it starts from nothing that has to be held"


def test_voters_that_find_it_unsound_end_it(world: World) -> None:
    key = world.start(PEOPLE[0], OWN)
    world.decide(*(world.tx(voter, "job/stop", StopJob(key)) for voter in PEOPLE[1:3]))
    assert world.state.jobs.queue
    world.decide(world.tx(PEOPLE[3], "job/stop", StopJob(key)))
    assert not world.state.jobs.queue and not world.state.jobs.jobs
