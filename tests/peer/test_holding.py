"""Jobs that start from a model of people's own, at real drivers of light voters: they fetch and check it, and make the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio

from ledger.core.genesis import TRAINER
from ledger.jobs import StartJob, StopJob, job_id
from peer.runtime.storage.start_model_availability import StartModelAttester
from tests.peer.network import Network, Seat, network
from tests.waiting import patience
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import ModelSpec
from transport.blobs import blob_exchange

MODEL = ModelSpec(context=16, width=16, layers=1, heads=2, kv_heads=1, hidden=24, tied=False, rope_base=5e5)


def own(seed: int = 0) -> Float32Array:
    size = layout_of(JobSpec(name="own", data=bytes(32), model=MODEL)).size
    return np.random.default_rng(seed).normal(size=size).astype("<f4")


async def started(seat: Seat, start: bytes) -> bytes:
    spec = JobSpec(name="own", data=bytes(32), model=MODEL, initial_model=start, byzantine_max=0)
    with patience():
        return job_id(seat.public, await seat.author.submit("job/start", StartJob(spec.encode())))


async def has_model(made: Network, job: bytes, values: Float32Array) -> None:
    for seat in made.seats:
        await seat.until(lambda driver: job in driver.state.jobs.jobs)
        assert np.array_equal(seat.driver.host.open_model(job, 0).parameters, values)
    assert len({seat.driver.state.jobs.jobs[job].model_root for seat in made.seats}) == 1


async def test_voters_fetch_it_from_whoever_has_it_and_all_make_one_model(tmp_path: Path) -> None:
    values = own()
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        start = made.seats[0].blobs.add_bytes(values.tobytes())
        await has_model(made, await started(made.seats[0], start), values)
        assert all(seat.blobs.size(start) == values.nbytes for seat in made.seats)


async def test_nothing_waits_for_what_nobody_has_and_it_starts_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_exchange, "RETRY_SECONDS_MAX", 0.5)
    values, other = own(1), own(2)
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        first, second, *_ = made.seats
        start = first.blobs.add_bytes(values.tobytes())
        first.blobs.delete_blob(start)
        job = await started(first, start)
        passing = await started(second, second.blobs.add_bytes(other.tobytes()))
        await has_model(made, passing, other)
        assert [waiting.job for waiting in first.driver.state.jobs.queue] == [job]
        await second.author.submit("job/stop", StopJob(passing))
        first.blobs.add_bytes(values.tobytes())
        await has_model(made, job, values)


@pytest.mark.parametrize("bad", ["a number that is not finite", "1 parameters"])
async def test_voters_end_what_is_unsound(tmp_path: Path, bad: str) -> None:
    values = own(3)
    values[-1] = np.nan
    if bad == "1 parameters":
        values = values[:-1]
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        job = await started(made.seats[1], made.seats[1].blobs.add_bytes(values.tobytes()))
        for seat in made.seats:
            await seat.event("warning", "cannot start, and this voter wants it to end")
            await seat.until(lambda driver: not driver.state.jobs.queue)
            assert job not in seat.driver.state.jobs.jobs and seat.failure is None


async def test_bytes_of_another_digest_are_taken_by_nobody(tmp_path: Path) -> None:
    values = own(4)
    async with network(tmp_path, 4, observers=1, roles=(TRAINER,)) as made:
        *voters, damaged = made.seats
        start = damaged.blobs.add_bytes(values.tobytes())
        data = damaged.blobs.read_range(start)
        damaged.blobs.path(start).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        job = await started(voters[0], start)
        await damaged.event("peer", "lost the link")
        assert all(seat.blobs.size(start) is None for seat in voters)
        voters[0].blobs.add_bytes(values.tobytes())
        made.seats.remove(damaged)
        await has_model(made, job, values)


async def test_planted_a_quorum_that_does_not_look_whether_numbers_are_finite(tmp_path: Path) -> None:
    values = own(5)
    values[0] = np.inf
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        with mock.patch("training.parameter_blob.blob_problem", return_value=None):
            await started(made.seats[0], made.seats[0].blobs.add_bytes(values.tobytes()))
            for seat in made.seats:
                with patience():
                    await seat.ended.wait()
                assert "has a number that is not finite" in str(seat.failure)


async def test_planted_a_peer_that_takes_bytes_of_another_digest(tmp_path: Path) -> None:
    """It makes another first model than the others, and knows by the next block that its state is not the decided one."""
    values = own(6)
    async with network(tmp_path, 4, roles=(TRAINER,)) as made:
        *honest, careless = made.seats
        start = honest[0].blobs.add_bytes(values.tobytes())
        careless.blobs.path(start).write_bytes(bytes([values.tobytes()[0] ^ 1]) + values.tobytes()[1:])
        job = await started(honest[0], start)
        made.seats.remove(careless)
        await has_model(made, job, values)
        await honest[0].scratch()
        await careless.event("warning", "restoring the certified state")


async def test_what_a_fault_of_the_system_ended_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bytes] = []

    async def answer(self: StartModelAttester, key: bytes, spec: JobSpec) -> None:
        begun.append(key)
        raise OSError("too many open files")

    waiting = SimpleNamespace(spec=JobSpec(name="own", data=bytes(32), model=MODEL).encode())
    monkeypatch.setattr(StartModelAttester, "_due", lambda self: {bytes(32): waiting})
    monkeypatch.setattr(StartModelAttester, "_attest", answer)
    driver: Any = SimpleNamespace(block_applied=trio.Event())
    holding = StartModelAttester(driver, driver)
    for _ in range(2):
        with pytest.raises(ExceptionGroup), trio.fail_after(1):
            await holding.run()
    assert begun == [bytes(32)] * 2
