from __future__ import annotations

from pathlib import Path

import pytest

from consensus.ballots import Outcome
from ledger.jobs import ClosedRound
from protocol.errors import RemoteProtocolError, StorageError
from training.host import ROUNDS_KEPT, ModelHost
from training.spec import Audit, JobSpec, Objective

JOB, TRAINER = bytes([7]) * 32, bytes([1]) * 32
SPEC = JobSpec(name="test", objective=Objective.SCRATCH, rounds=9, liars=0).encode()
NOTHING = Outcome({}, {}, frozenset({TRAINER}), frozenset())


def no_payload(digest: bytes) -> bytes:
    raise AssertionError("a round without accepted proposals needs no payload")


def closed(number: int) -> ClosedRound:
    return ClosedRound(JOB, number, NOTHING, (), (TRAINER,))


def test_what_a_specification_says_to_the_ledger(tmp_path: Path) -> None:
    host = ModelHost(tmp_path)
    scratch = host.terms(SPEC)
    assert (scratch.name, scratch.rounds, scratch.needs_worker, scratch.audited) == ("test", 9, False, True)
    local = host.terms(JobSpec(name="own", audit=Audit.OFF).encode())
    assert (local.needs_worker, local.audited) == (True, False)
    with pytest.raises(RemoteProtocolError):
        host.terms(JobSpec(name="own", audit=Audit.FULL).encode())  # nobody could re-execute on text that is not shared


def test_two_hosts_make_the_same_model_and_a_third_reads_it_from_disk(tmp_path: Path) -> None:
    first, second = ModelHost(tmp_path / "a"), ModelHost(tmp_path / "b")
    root = first.create(JOB, SPEC)
    assert second.create(JOB, SPEC) == root
    assert second.create(bytes(32), SPEC) != root
    assert ModelHost(tmp_path / "a").model(JOB, 0).root == root


def test_a_step_leaves_the_model_of_the_round_before_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    host = ModelHost(tmp_path)
    before = host.create(JOB, SPEC)
    after = host.step(closed(0), no_payload)
    assert ModelHost(tmp_path).model(JOB, 0).root == before
    assert ModelHost(tmp_path).model(JOB, 1).root == after
    assert ModelHost(tmp_path).step(closed(0), no_payload) == after  # the process ended before the block was noted as applied


def test_pruning_keeps_what_a_late_re_execution_may_read(tmp_path: Path) -> None:
    host = ModelHost(tmp_path)
    host.create(JOB, SPEC)
    for number in range(4):
        host.step(closed(number), no_payload)
    host.prune(JOB, 4)
    kept = sorted(int(folder.name) for folder in host.directory(JOB, 0).parent.iterdir())
    assert kept == list(range(4 - ROUNDS_KEPT + 1, 5))


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_model_is_a_storage_error(tmp_path: Path, damage: str) -> None:
    host = ModelHost(tmp_path)
    host.create(JOB, SPEC)
    for file in list(host.directory(JOB, 0).iterdir()):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError):
        ModelHost(tmp_path).model(JOB, 0)
