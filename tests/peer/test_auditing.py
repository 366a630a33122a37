"""Sampled audits between whole peers in one process; the workers' arithmetic is numpy's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from ledger.audits import Result, Standing
from ledger.blobs import Blobs
from ledger.genesis import TRAINER
from ledger.jobs import Phase, Start, job_id
from peer import auditing
from peer.driver import Driver
from peer.roles.liar import Liar
from peer.roles.trainer import Trainer
from protocol.reasons import Finding
from tests.peer.network import SCRATCH, SECONDS_MAX, Network, Seat, network, poll
from training import data, proposals, tasks
from training.inner_state import InnerState
from training.spec import Audit, JobSpec, ModelSpec
from training.spec import InnerState as Kept

MODEL = ModelSpec(context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
TEXT = b"Nobody is above the others. " * 40


class Sums:
    """A worker whose inner steps add numbers that follow from round, trainer and step."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.spec: JobSpec | None = None
        self.failures = 0  # requests to come that it cannot do

    async def ask(self, request: Any) -> Any:
        self.asked.append(request)
        if isinstance(request, tasks.OpenJob):
            self.spec = JobSpec.decode(request.spec)
            return tasks.Opened(1, 1, 1)
        if self.failures and isinstance(request, tasks.Replay):
            self.failures -= 1
            raise OSError("a file went meanwhile")
        match request:
            case tasks.Propose():
                return await trio.to_thread.run_sync(proposals.propose, request, self._update)
            case tasks.Replay():
                return await trio.to_thread.run_sync(proposals.replay, request, self._inner_step)
        return await trio.to_thread.run_sync(proposals.audit, request, self._update)

    def _inner_step(
        self, parameters: Any, inner: InnerState, job: bytes, round: int, trainer: bytes, step: int
    ) -> tuple[Any, InnerState]:
        moved = np.random.default_rng([round, trainer[0], step]).standard_normal(len(parameters), dtype=np.float32)
        return parameters + moved, InnerState(inner.steps + 1, inner.moments + np.float32(1))

    def _update(
        self, parameters: Any, job: bytes, round: int, trainer: bytes, inner: InnerState | None, on_state: proposals.OnState
    ) -> tuple[Any, float]:
        assert self.spec is not None
        state, now = inner or InnerState.fresh(self.spec), parameters
        for step in range(self.spec.local_steps):
            now, state = self._inner_step(now, state, job, round, trainer, step)
            on_state(now, state)
        return parameters - now, 0.0


SPEC = JobSpec(
    name="sums",
    model=MODEL,
    rounds=2,
    local_steps=5,
    batch=1,
    micro_batch=1,
    outer_rate=0.1,
    norm_start=1e6,
    liars=1,
    audit=Audit.SAMPLED,
    auditors=3,
    audit_window=40,  # rounds here are over in no time
    held_out_permille=0,
)


class Trainers(Network):
    """Four founders, all of them with a worker; the last one may lie."""

    workers: dict[bytes, Sums]

    def role(self, seat: Seat, attack: str = "") -> Trainer:
        worker, texts = self.workers.setdefault(seat.public, Sums()), seat.folder / "texts"
        seat.folder.mkdir(exist_ok=True)
        texts.mkdir(exist_ok=True)
        return Liar(worker, texts, attack=attack) if attack else Trainer(worker, texts)  # type: ignore[arg-type]

    async def train(self, spec: JobSpec) -> bytes:
        keep = self.seats[0].blobs.add
        spec = replace(spec, data=keep(data.split(iter([TEXT]), keep).encode())).checked()
        with trio.fail_after(SECONDS_MAX):
            return job_id(self.seats[0].public, await self.seats[0].author.submit("job/start", Start(spec.encode())))


@asynccontextmanager
async def trainers(
    folder: Path, attack: str = "", serve: Callable[[Blobs], Any] = lambda blobs: blobs
) -> AsyncIterator[Trainers]:
    async with network(folder, founders=4, start=False, roles=(TRAINER,)) as made:
        made.__class__ = Trainers
        assert isinstance(made, Trainers)
        made.workers = {}
        for number, seat in enumerate(made.seats):
            lies = attack if number == 3 else ""
            await made.start(seat, made.role(seat, lies), serve if number == 3 else lambda blobs: blobs)
        yield made


def has_finished(job: bytes) -> Callable[[Driver], bool]:
    return lambda driver: job in driver.state.jobs.jobs and driver.state.jobs.jobs[job].phase is Phase.FINISHED


def settled(job: bytes) -> Callable[[Driver], bool]:
    """The job and its audits are over, and that is certified."""

    def condition(driver: Driver) -> bool:
        state = driver.state
        return has_finished(job)(driver) and job not in state.audits.jobs and driver.ledger.certified_root == state.root

    return condition


async def ended(made: Trainers, job: bytes) -> None:
    for seat in made.seats:
        await seat.until(settled(job))
    assert len({seat.driver.state.root for seat in made.seats}) == 1


def results(seat: Seat) -> list[Result]:
    return [entry.result for entry in seat.driver.state.audits.log]


def standing(made: Trainers, number: int) -> Standing:
    return made.seats[0].driver.state.audits.standings.get(made.seats[number].public, Standing())


@pytest.mark.parametrize("kept", list(Kept))
async def test_every_drawn_step_of_honest_trainers_is_replayed_and_passes(tmp_path: Path, kept: Kept) -> None:
    async with trainers(tmp_path) as made:
        await ended(made, await made.train(replace(SPEC, inner_state=kept)))
        assert set(results(made.seats[0])) == {Result.PASSED}
        standings = [standing(made, number) for number in range(4)]
        assert sum(of.reports for of in standings) == len(results(made.seats[0])) > 4
        assert [(of.rewards, of.lost, of.suspensions, of.lapsed) for of in standings] == [(SPEC.rounds, 0, 0, 0)] * 4
        received = made.seats[0].network.traffic()
        assert 0 < received.reveals_received <= received.blobs_received
        assert received.reveals_sent > 0


async def test_a_single_step_is_re_executed_whole(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        await ended(made, await made.train(replace(SPEC, local_steps=1)))
        assert set(results(made.seats[0])) == {Result.PASSED}
        kinds = {type(request) for worker in made.workers.values() for request in worker.asked}
        assert tasks.Audit in kinds and tasks.Replay not in kinds


async def test_a_lie_about_a_single_step_is_found_by_re_executing_it(tmp_path: Path) -> None:
    async with trainers(tmp_path, "wrong-steps") as made:
        job = await made.train(replace(SPEC, local_steps=1, rounds=60, auditors=2))
        for seat in made.seats:
            await seat.until(lambda driver: bool(driver.state.audits.suspended(job)))
        assert set(made.seats[0].driver.state.audits.suspended(job)) == {made.seats[3].public}


async def test_a_scratch_job_is_audited_without_any_worker(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        spec = replace(SCRATCH, rounds=2, audit=Audit.SAMPLED, audit_window=40)
        author = made.seats[1].author
        with trio.fail_after(SECONDS_MAX):
            job = job_id(made.seats[1].public, await author.submit("job/start", Start(spec.encode())))
        for seat in made.seats:
            await seat.until(settled(job))
        assert set(results(made.seats[0])) == {Result.PASSED}


@pytest.mark.parametrize(
    ("attack", "found"),
    [
        ("wrong-steps", {Finding.MISMATCH}),
        ("false-pass", {Finding.MISMATCH}),
        ("free-rider", {Finding.MISMATCH}),
        ("sign-flip", {Finding.PAYLOAD}),
        ("withhold-states", {Finding.WITHHELD}),
    ],
)
async def test_who_lies_where_nobody_looks_before_the_vote_is_suspended_by_all_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, found: set[Finding]
) -> None:
    monkeypatch.setattr(auditing, "WITHHELD_SECONDS_MIN", 0.2)
    spec = replace(SPEC, rounds=60, audit_window=4 if attack == "withhold-states" else 40, auditors=2)
    async with trainers(tmp_path, attack) as made:
        job = await made.train(spec)
        for seat in made.seats:
            await seat.until(lambda driver: Result.SUSPENDED in [entry.result for entry in driver.state.audits.log])
        (entry,) = [entry for entry in made.seats[0].driver.state.audits.log if entry.result is Result.SUSPENDED]
        assert entry.trainer == made.seats[3].public and {entry.finding} == found
        assert {standing(made, number).suspensions for number in range(3)} == {0}
        assert standing(made, 3).suspensions == 1
        heights = {
            next(entry.height for entry in seat.driver.state.audits.log if entry.result is Result.SUSPENDED)
            for seat in made.seats
        }
        assert len(heights) == 1
        told = await made.seats[3].event("warning", "suspended until round")
        assert f"replay {entry.finding.label if entry.finding else ''} found by" in told
        assert auditing.suspension(made.seats[3].public, made.seats[0].driver.state) in told
        assert made.seats[0].driver.state.audits.suspended(job)


async def test_a_suspended_trainer_trains_no_more_in_that_job(tmp_path: Path) -> None:
    async with trainers(tmp_path, "wrong-steps") as made:
        job = await made.train(replace(SPEC, rounds=60))
        liar = made.seats[3]
        await liar.until(lambda driver: bool(driver.state.audits.suspended(job)))
        job_then = liar.driver.state.jobs.jobs[job]
        await liar.until(lambda driver: driver.state.jobs.jobs[job].round >= job_then.round + 4)
        proposed = [request.round for request in made.workers[liar.public].asked if isinstance(request, tasks.Propose)]
        assert max(proposed) <= job_then.round
        assert liar.public not in liar.driver.state.jobs.jobs[job].trainers


async def test_who_challenges_honest_work_pays_and_nobody_is_suspended(tmp_path: Path) -> None:
    async with trainers(tmp_path, "false-challenge") as made:
        await made.train(replace(SPEC, auditors=2, rounds=60))
        for seat in made.seats:
            await seat.until(lambda driver: Result.REFUTED in [entry.result for entry in driver.state.audits.log])
        assert [standing(made, number).suspensions for number in range(4)] == [0] * 4
        assert standing(made, 3).refuted > 0
        assert [standing(made, number).refuted for number in range(3)] == [0] * 3


async def test_an_audit_whose_own_worker_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "RETRY_SECONDS", 0.05)
    async with trainers(tmp_path) as made:
        made.workers[made.seats[1].public].failures = 2
        await ended(made, await made.train(SPEC))
        assert made.workers[made.seats[1].public].failures == 0
        assert set(results(made.seats[0])) == {Result.PASSED}


async def test_an_auditor_that_was_away_reports_when_it_is_back(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        away = made.seats[2]
        made.workers[away.public].failures = 10_000  # it reports nothing before
        job = await made.train(SPEC)
        await made.seats[0].until(has_finished(job))
        await away.stop()
        before = standing(made, 2).reports
        made.workers[away.public].failures = 0
        await made.start(away, made.role(away))
        await ended(made, job)
        assert before == 0 < standing(made, 2).reports
        assert set(results(made.seats[0])) == {Result.PASSED}


async def test_states_are_served_while_they_may_be_asked_for_and_deleted_afterwards(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        author = made.seats[1]
        made.workers[made.seats[2].public].failures = 10_000
        job = await made.train(replace(SPEC, auditors=3))
        await author.until(has_finished(job))
        asked = auditing.asked_of(author.public, author.driver.state)
        assert asked, "seat 2 has not reported"
        for proposal in asked:
            assert proposal.trace is not None and author.blobs.size(proposal.trace) is not None
            assert author.blobs.size(proposal.buffer) is not None
        made.workers[made.seats[2].public].failures = 0
        await made.seats[2].stop()
        await made.start(made.seats[2], made.role(made.seats[2]))
        await ended(made, job)
        for seat in made.seats:
            await poll(lambda seat=seat: seat.blobs.kept_together() == [])  # type: ignore[misc]
            await poll(lambda seat=seat: list((seat.folder / "buffers").iterdir()) == [])  # type: ignore[misc]


async def test_where_nothing_is_drawn_the_states_go_with_the_round(tmp_path: Path) -> None:
    async with trainers(tmp_path) as made:
        job = await made.train(replace(SPEC, audit_rate=0.0))
        await ended(made, job)
        for seat in made.seats:
            await poll(lambda seat=seat: seat.blobs.kept_together() == [])  # type: ignore[misc]
        assert results(made.seats[0]) == []
