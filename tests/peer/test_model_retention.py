"""Models that only snapshots contain are deleted with the last of these snapshots, also after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ledger.jobs import Job, JobPhase
from ledger.model_anchors import ModelAnchor
from peer.runtime.model_retention import ModelPruner
from peer.runtime.round_executor import RESERVED_BYTES, DiskSpaceMonitor, RoundExecutor
from peer.runtime.telemetry.event_log import EventLog
from tests.clients.runs import client_spec
from tests.peer.chain import LANGUAGE, SCRATCH, Chain
from tests.peer.network import network, one_root, poll
from tests.peer.test_workshop import Busy, shop_of
from training.job_disk_space import job_disk_space
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated.replicated_model import ReplicatedModel

ROUNDS = 6


class Retention:
    """A job of a peer with a saved model, and a pruner beside a driver that does nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chain = folder, Chain(folder / "chain")
        self.key = self.chain.start(replace(LANGUAGE, rounds=9))
        for _ in range(ROUNDS):
            self.chain.play(self.key)
        saved = ModelAnchor(2, 2, bytes(32))
        self.job = replace(self.chain.ledger.state.jobs.jobs[self.key], phase=JobPhase.PAUSED, saved_models=(saved,))
        self.driver: Any = SimpleNamespace(host=self.chain.host, round_executor=self.executor, block_applied=trio.Event())
        self._set_job(self.job)

    @property
    def executor(self) -> RoundExecutor:
        return shop_of(self.chain, Busy())

    def _set_job(self, job: Job) -> None:
        self.driver.state = SimpleNamespace(jobs=SimpleNamespace(jobs={self.key: job}))

    async def apply_block(self, job: Job, pinned: tuple[int, ...]) -> None:
        """Apply a block after which snapshots contain the models of these rounds."""
        self._set_job(job)
        self.chain.host.set_pinned_models(frozenset((self.key, number) for number in pinned))
        applied, self.driver.block_applied = self.driver.block_applied, trio.Event()
        applied.set()
        # The deletion runs in a thread.
        with trio.fail_after(60):
            while self.driver.block_applied.statistics().tasks_waiting == 0:  # noqa: ASYNC110
                await trio.sleep(0.001)

    def rounds(self) -> list[int]:
        return self.chain.host.stored_rounds(self.key)


@asynccontextmanager
async def running(made: Retention) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ModelPruner(made.driver).run)
        yield
        nursery.cancel_scope.cancel()
    made.chain.close()


@pytest.mark.parametrize("phase", [JobPhase.PAUSED, JobPhase.FINISHED])
@pytest.mark.virtual(threads=True)
async def test_the_model_of_an_expired_checkpoint_is_deleted_although_no_round_opens(tmp_path: Path, phase: JobPhase) -> None:
    made = Retention(tmp_path)
    job = replace(made.job, phase=phase)
    made.chain.host.set_pinned_models(frozenset({(made.key, 2), (made.key, ROUNDS)}))
    async with running(made):
        await made.apply_block(job, (2, ROUNDS))
        expired = replace(job, saved_models=())
        await made.apply_block(expired, (2, ROUNDS))
        assert 2 in made.rounds(), "a snapshot contains it"
        await made.apply_block(expired, (ROUNDS,))
        await made.apply_block(expired, (ROUNDS,))
        assert made.rounds() == [0, ROUNDS - 1, ROUNDS], "the first model can replace a damaged one"


@pytest.mark.virtual(threads=True)
async def test_a_checkpoint_that_expired_before_a_restart_is_deleted_after_it(tmp_path: Path) -> None:
    made = Retention(tmp_path)
    made._set_job(replace(made.job, saved_models=()))
    async with running(made):
        await made.apply_block(replace(made.job, saved_models=()), (ROUNDS,))
        assert made.rounds() == [0, ROUNDS - 1, ROUNDS]


@pytest.mark.virtual(threads=True)
async def test_a_saved_model_stays(tmp_path: Path) -> None:
    made = Retention(tmp_path)
    async with running(made):
        for _ in range(3):
            await made.apply_block(made.job, (2, ROUNDS))
        await made.apply_block(made.job, (ROUNDS,))
        await made.apply_block(made.job, (ROUNDS,))
        assert made.rounds() == [0, 2, ROUNDS - 1, ROUNDS]


@pytest.mark.parametrize(
    ("spec", "median_norms_squared"),
    [(replace(LANGUAGE, name="untrained"), ()), (SCRATCH, (1.0,)), (client_spec(), (1.0,))],
    ids=["untrained", "scratch", "run"],
)
def test_models_of_a_job_that_was_forgotten_before_a_restart_are_deleted_unless_it_has_trained(
    tmp_path: Path, spec: JobSpec, median_norms_squared: tuple[float, ...]
) -> None:
    made, forgotten, damaged = Retention(tmp_path), b"f" * 32, b"d" * 32
    host = JobModelStore(tmp_path / "chain" / "models")
    for key in (forgotten, damaged):
        host.create_model(key, spec.encode())
        model = host.open_model(key, 0)
        state = replace(model.state, median_norms_squared=median_norms_squared)
        ReplicatedModel.from_vectors(state, {name: np.array(vector) for name, vector in model.vectors.items()}).save(
            host.round_directory(key, 0)
        )
    (host.round_directory(damaged, 0) / "state.msgpack").write_bytes(b"")
    host.discard_forgotten_jobs({forgotten})
    host.set_pinned_models(frozenset())
    assert host.stored_rounds(forgotten) == [0]
    host.discard_forgotten_jobs(set())
    host.set_pinned_models(frozenset({(forgotten, 0)}))
    assert host.stored_rounds(forgotten) == [0], "a snapshot contains it"
    host.set_pinned_models(frozenset())
    assert host.stored_rounds(forgotten) == []
    assert made.rounds() == list(range(ROUNDS + 1)) and host.stored_rounds(damaged) == [0]
    made.chain.close()


async def test_room_for_models_of_the_next_rounds_is_needed_beside_saved_ones(tmp_path: Path) -> None:
    made = Retention(tmp_path)
    spec, models = replace(LANGUAGE, rounds=9), made.chain.host.round_directory(made.key, 0).parent
    job = replace(made.job, saved_models=tuple(ModelAnchor(number, number, bytes(32)) for number in range(ROUNDS)))
    room = job_disk_space(spec, len(job.trainers), trains=True)
    here = sum(file.stat().st_size for file in models.glob("*/*"))
    # Of the six saved models, the newest is one of the models of the last rounds.
    needed = room.total_bytes(9) - room.payload_bytes(ROUNDS) + (ROUNDS - 1) * spec.model_bytes - here
    monitor = DiskSpaceMonitor(made.chain.people[0].public, tmp_path, made.chain.host, EventLog(), made.chain.ledger.applied)
    for free, is_short in ((needed, False), (needed - 1, True)):
        monitor.free = lambda _, free=free: RESERVED_BYTES + free
        await monitor.check_job(made.key, job)
        assert bool(monitor.shortage_text) is is_short
    made.chain.close()


def test_a_round_on_request_has_the_payload_of_one_trainer() -> None:
    assert job_disk_space(client_spec(), 7, trains=False).round == job_disk_space(client_spec(), 1, trains=False).round


async def test_a_peer_that_starts_again_deletes_models_of_jobs_that_are_not_in_its_state(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4) as made:
        job, again = await made.seats[0].start_job(), made.seats[2]
        await one_root(made.seats, job)
        await again.stop()
        JobModelStore(again.folder / "models").create_model(b"f" * 32, SCRATCH.encode())
        await made.start(again)
        await poll(lambda: not again.driver.host.stored_rounds(b"f" * 32))
        assert again.driver.host.stored_rounds(job)
