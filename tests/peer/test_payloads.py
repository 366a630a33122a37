"""Payloads of old rounds are deleted. No peer needs them later, even with damaged models or after an absence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from ledger.audits.loss_commitments import LossOpening
from ledger.jobs import JobPhase
from peer.export.run_export import missing_payloads
from peer.roles.voter import Voter
from peer.runtime.blob_retention import FORGOTTEN_JOB_HEIGHTS, PayloadPruner, first_kept_round
from protocol.messages import Proposal
from storage.disk_blob_store import PIN_SUFFIX, DiskBlobStore
from tests.peer.chain import SCRATCH
from tests.peer.network import Seat, certified, network
from tests.waiting import patience
from training import job_disk_space
from training.replicated import model_files
from training.round_context import OpenRoundContext

KEPT = 20  # rounds, replaces `ROUNDS_MIN`


@pytest.fixture(autouse=True)
def rounds_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_disk_space, "ROUNDS_MIN", KEPT)


async def run(seat: Seat, job: bytes, rounds: int) -> None:
    async with trio.open_nursery() as nursery:
        seat.driver.payload_bytes = 1
        nursery.start_soon(PayloadPruner(seat.driver).run)
        await seat.until(lambda driver: job in driver.state.jobs.jobs and driver.state.jobs.jobs[job].round >= rounds)
        with patience():
            while held(seat, job, 0):  # noqa: ASYNC110 - no event announces it
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def held(seat: Seat, job: bytes, number: int) -> list[bytes]:
    named = PayloadPruner(seat.driver)._accepted(job, number)
    return [digest for digest in named or () if seat.blobs.size(digest) is not None]


async def test_payloads_of_old_rounds_go_and_what_a_restart_computes_anew_stays(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        (seat,) = made.seats
        job = await seat.start_job(rounds=60, suspension_rounds=1)
        await run(seat, job, 40)
        at = seat.driver.state.jobs.jobs[job].round
        assert all(held(seat, job, number) for number in range(at - KEPT + 1, at))
        assert missing_payloads(seat.store, seat.blobs)
        await seat.stop()
        models = seat.driver.host.round_directory(job, 0).parent
        for file in (file for model in models.iterdir() if not model_files.is_durable(model) for file in model.iterdir()):
            file.write_bytes(bytes(file.stat().st_size))
        await (await made.start(seat)).until(lambda driver: driver.state.jobs.jobs[job].phase is JobPhase.FINISHED)


class Garbage(Voter):
    """A trainer whose proposal in round 0 is refused, so no block names its payload."""

    named = b""

    async def propose(self, round: OpenRoundContext) -> None:
        async def publish(proposal: Proposal, opening: LossOpening | None) -> None:
            if round.number == 0:
                self.named = round.blobs.add_bytes(bytes(50))
                proposal = replace(proposal, payload=self.named, payload_bytes=50)
            await round.publish_proposal(proposal, opening)

        await super().propose(replace(round, publish_proposal=publish))


async def test_payloads_of_refused_proposals_go_with_their_round_and_accepted_ones_stay(tmp_path: Path) -> None:
    rounds, liar = 3, Garbage()
    async with network(tmp_path, founders=4, start=False) as made:
        for seat in made.seats:
            await made.start(seat, liar if seat is made.seats[3] else None)
        seat, author = made.seats[0], made.seats[3]
        lent, lend = list[bytes](), seat.blobs.add_round_reference

        def noted(digest: bytes, job: bytes, number: int) -> None:
            lent.append(digest)
            lend(digest, job, number)

        seat.blobs.add_round_reference = noted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(PayloadPruner(seat.driver).run)
            job = await author.start_job(rounds=rounds)
            await seat.until(certified(job))
            with patience():
                while seat.blobs.round_references():  # noqa: ASYNC110 - no event announces it
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        accepted = [digest for number in range(rounds) for digest in held(seat, job, number)]
        assert liar.named == lent[0] and seat.blobs.size(liar.named) is None
        assert accepted and set(accepted) == set(lent[1:]), "all that was accepted is here"
        assert not list((seat.folder / "blobs").glob(f"*{PIN_SUFFIX}"))


def fake(seat: Seat, jobs: dict[bytes, Any], height: int, payload_bytes: int = 1) -> PayloadPruner:
    state = SimpleNamespace(jobs=SimpleNamespace(jobs=jobs), height=height)
    driver: Any = SimpleNamespace(store=seat.store, blobs=seat.blobs, state=state, payload_bytes=payload_bytes)
    return PayloadPruner(driver)


async def test_payloads_of_a_forgotten_job_go_when_nobody_is_so_far_behind(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        (seat,) = made.seats
        job = await seat.start_job(rounds=3)
        await seat.until(certified(job))
        last, height = seat.store.last_round_by_job()[job]
        late, jobs = height + FORGOTTEN_JOB_HEIGHTS + 1, dict(seat.driver.state.jobs.jobs)
        payloads, operator_keeps_all = fake(seat, jobs, late), fake(seat, {}, late, payload_bytes=0)
        gone_early, gone = (fake(seat, {}, height).driver.state for height in (late - 1, late))
        for look, state in ((payloads, payloads.driver.state), (payloads, gone_early), (operator_keeps_all, gone)):
            look._delete_unneeded(state)
            assert last == 2 and all(held(seat, job, number) for number in range(3))
        payloads._delete_unneeded(gone)
        assert not any(held(seat, job, number) for number in range(3))


def test_what_a_late_round_names_stays_though_an_old_one_names_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that proposes an old payload again cannot make others delete it."""
    again, dropped, running = bytes(32), list[bytes](), b"j" * 32

    def accepted(of: PayloadPruner, key: bytes, number: int) -> list[bytes]:
        return [again] if number in (3, 30) else [bytes([number + 1]) * 32]

    monkeypatch.setattr(PayloadPruner, "_accepted", accepted)
    job = SimpleNamespace(round=40, phase=JobPhase.RUNNING, trainers=(b"",), spec=replace(SCRATCH, suspension_rounds=1).encode())
    state: Any = SimpleNamespace(jobs=SimpleNamespace(jobs={running: job}), audits=SimpleNamespace(jobs={}), height=50)
    driver: Any = SimpleNamespace(blobs=SimpleNamespace(size=lambda digest: 1, drop_blobs=dropped.extend), payload_bytes=1)
    PayloadPruner(driver)._delete(running, job, state)  # type: ignore[arg-type]
    assert again not in dropped and len(dropped) == 40 - KEPT - 1


async def test_after_a_restart_what_was_lent_goes_or_stays_as_its_round_was_decided(tmp_path: Path) -> None:
    async with network(tmp_path, founders=1) as made:
        (seat,) = made.seats
        job, ended = await seat.start_job(), bytes(32)
        await seat.until(certified(job))
        (accepted,) = held(seat, job, 0)
        data = seat.blobs.read_range(accepted)
        seat.blobs.drop_blobs([accepted])
        lent = {
            data: (job, 0),
            b"refused": (job, 0),
            b"open": (ended, 7),
            b"never closed": (ended, 6),
            b"before the snapshot": (ended, 4),
        }
        for blob, of in lent.items():
            seat.blobs.add_round_reference(sha256(blob).digest(), *of)
            writer = seat.blobs.open_writer(sha256(blob).digest(), len(blob))
            writer.write(blob)
            writer.finish()
        seat.blobs = DiskBlobStore(seat.folder / "blobs", seat.folder / "buffers")
        jobs: dict[bytes, Any] = {
            job: seat.driver.state.jobs.jobs[job],
            ended: SimpleNamespace(round=6, phase=JobPhase.RUNNING),
        }
        look = fake(seat, jobs, 0)
        look._delete_unneeded(look.driver.state)
        assert len(seat.blobs.round_references()) == 2
        jobs[ended].phase = JobPhase.FINISHED
        look._delete_unneeded(look.driver.state)
        assert {blob for blob in lent if seat.blobs.size(sha256(blob).digest()) is not None} == {data, b"before the snapshot"}
        assert not seat.blobs.round_references() and not list((seat.folder / "blobs").glob(f"*{PIN_SUFFIX}"))


async def test_nothing_goes_while_an_export_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(sync: Callable[..., None], *arguments: Any) -> None:
        sync(*arguments)

    state = SimpleNamespace(jobs=SimpleNamespace(jobs={b"job": SimpleNamespace(round=1)}))
    driver: Any = SimpleNamespace(block_applied=trio.Event(), running_exports=1, payload_bytes=0, state=state)
    driver.blobs = SimpleNamespace(round_references=dict)
    exports = list[int]()
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    monkeypatch.setattr(PayloadPruner, "_delete", lambda of, key, job, state: exports.append(of.driver.running_exports))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(PayloadPruner(driver).run)
        await trio.testing.wait_all_tasks_blocked()
        applied, driver.block_applied, driver.running_exports = driver.block_applied, trio.Event(), 0
        applied.set()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert exports == [0], "once it has ended"


def test_what_audits_and_trainers_go_on_from_stays_however_little_room_there_is() -> None:
    spec = replace(SCRATCH, rounds=1_000, suspension_rounds=30)
    job: Any = SimpleNamespace(spec=spec.encode(), round=500, trainers=(bytes(32),) * 4)

    def first(bytes_max: int, rounds: tuple[int, ...] = (), disputes: tuple[int, ...] = ()) -> int:
        audits = SimpleNamespace(rounds=dict.fromkeys(rounds), disputes=[SimpleNamespace(round=number) for number in disputes])
        state: Any = SimpleNamespace(audits=SimpleNamespace(jobs={b"job": audits}))
        return first_kept_round(b"job", job, state, bytes_max)

    assert first(0) == 0
    assert first(1) == 500 - 31, "a record lives for 30 rounds"
    assert first(1, rounds=(400, 499)) == 400 - 31
    assert first(1, rounds=(499,), disputes=(300,)) == 300 - 31
    round_bytes = job_disk_space.job_disk_space(spec, 4, trains=False).round
    assert first(100 * round_bytes) == 400
    assert first(1_000 * round_bytes) == 0
