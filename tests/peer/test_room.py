"""A peer without disk space for a job reports so and does not train it. It trains as soon as there is space."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from peer.runtime import round_executor
from peer.runtime.round_executor import RESERVED_BYTES, ROUNDS_AHEAD, DiskSpaceMonitor
from storage.batch_store import BatchStore
from tests.peer.chain import LANGUAGE, Chain
from tests.peer.test_workshop import Busy, shop_of
from training.job_disk_space import ROUNDS_MIN, job_disk_space
from training.job_spec import OPENING_BITS, AuditMode, InnerStatePolicy, JobSpec, OuterOptimizerKind
from training.replicated.codec import payload_bytes
from training.replicated.error_feedback import ESTIMATE_BITS
from training.replicated.tensor_layout import layout_of

SIZE = layout_of(LANGUAGE).size
PAYLOAD = payload_bytes(layout_of(LANGUAGE), LANGUAGE.bits)


def spec_of(**fields: object) -> JobSpec:
    return replace(LANGUAGE, **{"audit": AuditMode.OFF, "outer": OuterOptimizerKind.NESTEROV, **fields})  # type: ignore[arg-type]


def test_a_job_takes_its_models_what_its_trainers_go_on_from_and_the_payloads_of_all_rounds() -> None:
    model = 8 * SIZE  # parameters and momentum
    assert job_disk_space(spec_of(), 3, trains=False).total_bytes(10) == 4 * model + 3 * 10 * PAYLOAD
    long = job_disk_space(spec_of(), 3, trains=False)
    assert long.payload_bytes(10**9, 1_000 * long.round) == 1_000 * long.round, "of older rounds they go"
    assert long.payload_bytes(10**9, 1) == ROUNDS_MIN * long.round and long.payload_bytes(10, 1) == 10 * long.round
    opened = job_disk_space(spec_of(compression_warmup_rounds=2), 3, trains=False)
    assert opened.payload_bytes(1) == 3 * payload_bytes(layout_of(LANGUAGE), OPENING_BITS)
    assert opened.payload_bytes(10) == long.payload_bytes(10) + 2 * (opened.payload_bytes(1) - long.round)
    for opening in (2, 300, 10**6):
        for allowed in (400 * opened.payload_bytes(1), 401 * opened.payload_bytes(1) - 1):
            kept = job_disk_space(spec_of(compression_warmup_rounds=opening), 3, trains=False).payload_bytes(10**9, allowed)
            assert allowed - opened.payload_bytes(1) < kept <= allowed, "planted: rounds are counted by what later ones say"
    buffer = payload_bytes(layout_of(LANGUAGE), ESTIMATE_BITS)
    assert SIZE < buffer < 1.1 * SIZE
    assert job_disk_space(spec_of(), 3, trains=True).own == 2 * buffer
    assert job_disk_space(spec_of(feedback_decay=0.0), 3, trains=True).own == 0
    assert job_disk_space(spec_of(audit=AuditMode.FULL), 3, trains=True).own == 3 * 2 * buffer
    assert job_disk_space(spec_of(inner_state=InnerStatePolicy.KEEP), 3, trains=True).own == 2 * (buffer + 8 * SIZE)
    sampled = spec_of(audit=AuditMode.SAMPLED, local_steps=4)
    assert job_disk_space(sampled, 3, trains=True).own > sampled.audit_bytes - (sampled.rounds_audited + 1) * model > 0
    assert job_disk_space(sampled, 3, trains=False).models == (sampled.rounds_audited + 4) * model, "and an anchor"


class Disk:
    def __init__(self, free: int) -> None:
        self.free, self.asked = free, 0

    def __call__(self, folder: Path) -> int:
        self.asked += 1
        return self.free


async def test_a_peer_that_lacks_room_does_not_train_and_does_as_soon_as_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_executor, "CHECK_SECONDS", 0.01)
    chain, role = Chain(tmp_path / "chain"), Busy()
    key = chain.start(replace(LANGUAGE, rounds=3))
    job, shop, disk = chain.ledger.state.jobs.jobs[key], shop_of(chain, role), Disk(RESERVED_BYTES)
    shop.disk_space.free = disk
    await shop.disk_space.check_job(key, job)
    assert (
        "free some space, until then this peer does not train it" in shop.disk_space.shortage_text
        and shop.disk_space.is_short_for(key)
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(shop.run)
            shop.open_round((key, 0), job, False)
            while disk.asked < 4:  # noqa: ASYNC110
                await trio.sleep(0.005)
            assert role.begun == 0, "planted: whoever trains without looking is seen here"
            disk.free = RESERVED_BYTES << 2
            await role.began.wait()
            nursery.cancel_scope.cancel()
    assert not shop.disk_space.shortage_text
    told = [event.text for event in await shop.disk_space.events.wait_for_events(-10, 0.0)]
    assert (
        any("more on the disk of this peer" in text for text in told)
        and f"job {job.name} has enough disk space at this peer now" in told
    )
    chain.close()


async def test_a_long_job_is_trained_while_there_is_room_for_the_next_rounds(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "chain")
    key = chain.start(replace(LANGUAGE, rounds=10 * ROUNDS_AHEAD))
    job = chain.ledger.state.jobs.jobs[key]
    looked = DiskSpaceMonitor(
        chain.people[0].public, tmp_path, chain.host, shop_of(chain, Busy()).disk_space.events, chain.ledger.applied
    )
    of = job_disk_space(replace(LANGUAGE, rounds=job.rounds), len(job.trainers), trains=True)
    looked.free = Disk(RESERVED_BYTES + of.total_bytes(ROUNDS_AHEAD))
    await looked.check_job(key, job)
    assert "free some space before the disk is full" in looked.shortage_text and not looked.is_short_for(key)
    here = sum(file.stat().st_size for file in chain.host.round_directory(key, 0).iterdir())
    looked.free = Disk(RESERVED_BYTES + of.total_bytes(ROUNDS_AHEAD) - here - 1)
    await looked.check_job(key, job)
    assert looked.is_short_for(key)
    looked.free = Disk(RESERVED_BYTES + of.total_bytes(job.rounds))
    await looked.check_job(key, job)
    assert not looked.shortage_text
    looked.batches = BatchStore(tmp_path / "batches", 10**9)
    await looked.check_job(key, job)
    assert "free some space before the disk is full" in looked.shortage_text and not looked.is_short_for(key)
    looked.free = Disk(RESERVED_BYTES + of.total_bytes(job.rounds) + 10**9)
    await looked.check_job(key, job)
    assert not looked.shortage_text
    chain.close()


def test_a_folder_that_goes_while_bytes_are_counted_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"12345")
    lstat = os.lstat

    def gone(path: str) -> os.stat_result:
        (tmp_path / "folder" / "file").unlink(missing_ok=True)
        (tmp_path / "folder").rmdir()
        return lstat(path)

    monkeypatch.setattr(round_executor.os, "lstat", gone)
    assert round_executor._size(tmp_path) == 3
