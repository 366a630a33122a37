from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from ledger.jobs import ClosedRound
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.identity import Signed
from rounds.round_state import RoundResult
from tests.training.replicated.support import round_of
from training import model_store as host_module
from training.job_spec import ANCHOR_ROUNDS, AuditMode, JobSpec
from training.model_store import ROUNDS_KEPT, ClosedRoundOutcome, JobModelStore
from training.replicated import model_files

JOB, TRAINER = bytes([7]) * 32, bytes([1]) * 32
SPEC = JobSpec(name="test", objective="scratch", rounds=40, byzantine_max=0).encode()
NOTHING = RoundResult({}, {}, frozenset({TRAINER}), frozenset(), {}, frozenset(), frozenset())


def no_payload(digest: bytes) -> bytes:
    raise AssertionError("a round without accepted proposals needs no payload")


def closed(number: int) -> ClosedRound:
    return ClosedRound(JOB, number, NOTHING, (), (TRAINER,))


@pytest.fixture
def host(tmp_path: Path) -> JobModelStore:
    return JobModelStore(tmp_path)


def test_what_a_specification_says_to_the_ledger(host: JobModelStore) -> None:
    scratch = host.terms_of_spec(SPEC)
    assert (scratch.name, scratch.rounds, scratch.needs_worker, scratch.audited) == ("test", 40, False, True)
    local = host.terms_of_spec(JobSpec(name="own", audit=AuditMode.OFF).encode())
    assert (local.needs_worker, local.audited) == (True, False)
    with pytest.raises(RemoteProtocolError):
        # auditors could not re-execute on text that is not shared
        host.terms_of_spec(JobSpec(name="own", audit=AuditMode.FULL).encode())


def test_two_hosts_make_the_same_model_and_a_third_reads_it_from_disk(tmp_path: Path) -> None:
    first, second = JobModelStore(tmp_path / "a"), JobModelStore(tmp_path / "b")
    root = first.create_model(JOB, SPEC)
    assert second.create_model(JOB, SPEC) == root
    assert second.create_model(bytes(32), SPEC) != root
    assert JobModelStore(tmp_path / "a").open_model(JOB, 0).root == root


def test_a_step_leaves_the_model_of_the_round_before_and_goes_on_after_a_restart(host: JobModelStore, tmp_path: Path) -> None:
    before = host.create_model(JOB, SPEC)
    after = host.apply_round(closed(0), no_payload)
    assert JobModelStore(tmp_path).open_model(JOB, 0).root == before
    assert JobModelStore(tmp_path).open_model(JOB, 1).root == after
    # the process ended before the block was noted as applied
    assert JobModelStore(tmp_path).apply_round(closed(0), no_payload) == after


def test_pruning_keeps_what_a_late_re_execution_may_read(host: JobModelStore) -> None:
    host.create_model(JOB, SPEC)
    for number in range(4):
        host.apply_round(closed(number), no_payload)
    host.prune_models(JOB, 4, JobSpec.decode(SPEC))
    assert rounds_on_disk(host) == [0, *range(4 - ROUNDS_KEPT + 1, 5)]  # the others can be computed anew from the first


def test_what_belongs_to_a_forgotten_job_is_deleted_once_no_snapshot_names_it(tmp_path: Path) -> None:
    host, other = JobModelStore(tmp_path), bytes(32)
    for job in (JOB, other):
        host.create_model(job, SPEC)
    host.discard_job(JOB)
    host.set_pinned_models(frozenset({(JOB, 0)}))
    assert host.open_model(JOB, 0).round == 0
    host.set_pinned_models(frozenset({(other, 0)}))
    assert not host.round_directory(JOB, 0).parent.exists() and JobModelStore(tmp_path).open_model(other, 0).round == 0


def rounds_on_disk(host: JobModelStore) -> list[int]:
    return sorted(int(folder.name) for folder in host.round_directory(JOB, 0).parent.iterdir() if folder.name != ".spare")


def test_models_of_rounds_that_are_still_audited_stay_the_newest_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, spec = JobModelStore(tmp_path), JobSpec.decode(SPEC)
    host.create_model(JOB, SPEC)
    for number in range(8):
        host.apply_round(closed(number), no_payload)
    host.prune_models(JOB, 7, spec, {2, 4})
    assert rounds_on_disk(host) == [0, 2, 4, 6, 7, 8]
    monkeypatch.setattr(host_module, "AUDITED_BYTES_MAX", spec.model_bytes)
    host.prune_models(JOB, 7, spec, {2, 4})
    assert rounds_on_disk(host) == [0, 4, 6, 7, 8]


def prune_as_a_peer_does(host: JobModelStore, rounds: range, spec: bytes = SPEC) -> None:
    for number in rounds:
        host.apply_round(closed(number), no_payload)
        host.prune_models(JOB, number + 1, JobSpec.decode(spec))


def test_pruning_for_a_round_whose_own_model_is_gone_by_now_touches_nothing_newer(host: JobModelStore) -> None:
    """Pruning runs in a thread beside the round's work, and may be late."""
    host.create_model(JOB, SPEC)
    prune_as_a_peer_does(host, range(6))
    before, model = rounds_on_disk(host), host.open_model(JOB, 6)
    for late in (2, 3):
        host.prune_models(JOB, late, JobSpec.decode(SPEC))
    assert rounds_on_disk(host) == before and host.open_model(JOB, 6) is model


def test_a_model_that_nobody_needs_is_written_over_by_the_next_one(tmp_path: Path) -> None:
    host, other = JobModelStore(tmp_path / "a"), JobModelStore(tmp_path / "b")
    assert host.create_model(JOB, SPEC) == other.create_model(JOB, SPEC)
    prune_as_a_peer_does(host, range(4))
    (spare,) = (folder for folder in host.round_directory(JOB, 0).parent.iterdir() if folder.name == ".spare")
    inode = (spare / "parameters.f32").stat().st_ino
    root = host.apply_round(closed(4), no_payload)
    assert (host.round_directory(JOB, 5) / "parameters.f32").stat().st_ino == inode and not spare.exists()
    assert [other.apply_round(closed(number), no_payload) for number in range(5)][-1] == root
    assert host.has_model(JOB, 5, root)


def test_a_model_that_is_still_mapped_is_never_written_over(host: JobModelStore) -> None:
    rounds = Rounds(host).play(2)
    read = host.open_verified_model(JOB, 1)
    before = bytes(read.parameters.data)
    rounds.play(4)
    assert 1 not in rounds_on_disk(host) and bytes(read.parameters.data) == before
    read.verify()
    host.open_model(JOB, 6).verify()


def test_a_file_that_was_taken_before_it_was_locked_is_not_read(host: JobModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    host.create_model(JOB, SPEC)
    directory, flock = host.round_directory(JOB, 0), fcntl.flock

    def locked_late(file: int, operation: int) -> None:
        if directory.exists():
            directory.rename(directory.with_name("00000001"))
            shutil.copytree(directory.with_name("00000001"), directory)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", locked_late)
    with pytest.raises(StorageError, match="replaced before"):
        host.open_verified_model(JOB, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked_the_folder_is_named_and_no_snapshot_is_asked_for(
    host: JobModelStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    host.create_model(JOB, SPEC)
    prune_as_a_peer_does(host, range(4))

    def refuse(file: IO[bytes], operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for attempt in (lambda: host.open_verified_model(JOB, 4), lambda: host.apply_round(closed(4), no_payload)):
        with pytest.raises(StorageError, match=f"cannot lock {host.round_directory(JOB, 0).parent}.* local disk"):
            attempt()


def test_a_finished_job_leaves_no_spare_model(tmp_path: Path) -> None:
    host, short = JobModelStore(tmp_path), JobSpec(name="test", objective="scratch", rounds=5, byzantine_max=0).encode()
    host.create_model(JOB, short)
    prune_as_a_peer_does(host, range(5), short)
    host.prune_models(JOB, 5, JobSpec.decode(short), is_over=True)
    assert not host.round_directory(JOB, 0).with_name(".spare").exists()


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_model_is_a_storage_error(host: JobModelStore, tmp_path: Path, damage: str) -> None:
    host.create_model(JOB, SPEC)
    for file in list(host.round_directory(JOB, 0).iterdir()):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError):
        JobModelStore(tmp_path).open_model(JOB, 0)


# The machine stops --------------------------------------------------------------------------------------------------


class Rounds:
    """Rounds of two trainers in a scratch job, with all payloads kept."""

    def __init__(self, host: JobModelStore) -> None:
        self._payloads: dict[bytes, bytes] = {}
        self._judged: dict[int, ClosedRoundOutcome] = {}
        self._host, self.number, self.anchors = host, 0, list[int]()
        self.roots = [host.create_model(JOB, SPEC)]

    def play(self, count: int) -> Rounds:
        for _ in range(count):
            number, self.number = self.number, self.number + 1
            items = round_of(self._host.open_model(JOB, number), 2)
            self._payloads |= {item.proposal.payload: item.payload for item in items}
            signed = tuple(Signed(codec.encode(item.proposal), item.trainer, bytes(64)) for item in items)
            self._judged[number] = ClosedRoundOutcome(JOB, number, signed, {}, frozenset())
            outcome = replace(NOTHING, absent=frozenset())
            self.roots.append(self._host.apply_round(ClosedRound(JOB, number, outcome, signed, ()), self._payloads.__getitem__))
            self._host.prune_models(JOB, number + 1, JobSpec.decode(SPEC), earlier=self.anchors)
        return self

    def back(self, anchor: int) -> Rounds:
        """Roll back while a round is open."""
        self.number += 1
        self.roots.append(self._host.roll_back(JOB, anchor, self.number))
        return self

    def recovered(self, folder: Path) -> int:
        """Return the number of rounds that a new process computed anew, to the same root."""
        host, number = JobModelStore(folder), self.number
        computed = host.recover_model(JOB, number, self.roots[-1], self._judged.__getitem__, self._payloads.__getitem__)
        model = host.open_model(JOB, number)
        model.verify()
        assert model.root == self.roots[-1]
        return computed


def power_cut(folder: Path, damage: str, only: str = "") -> None:
    """Simulate a power cut: unsynced data has not reached the disk, or only in part."""
    found = sorted((folder / JOB.hex()[:32]).glob("0*"), reverse=True)  # the last one first
    models = [path for path in found if not (path / model_files.DURABLE).exists()]
    for file in (file for model in models for file in model.iterdir() if only in file.name):
        data = bytearray(file.read_bytes())
        if damage == "gone":
            shutil.rmtree(file.parent)
            return
        if damage == "bit":
            data[len(data) // 2] ^= 1
        file.write_bytes({"empty": b"", "zeros": bytes(len(data)), "cut": data[:-3], "bit": data}[damage])


@pytest.mark.parametrize("damage", ["bit", "empty", "zeros", "cut", "gone"])
@pytest.mark.parametrize("file", ["", "momentum", "state"])
def test_a_model_that_did_not_reach_the_disk_is_computed_anew(tmp_path: Path, damage: str, file: str) -> None:
    rounds = Rounds(JobModelStore(tmp_path)).play(ANCHOR_ROUNDS + 3)
    power_cut(tmp_path, damage, file)
    assert rounds.recovered(tmp_path) == 3
    assert rounds.recovered(tmp_path) == 0


def test_what_was_applied_but_never_noted_is_not_taken_for_whole(tmp_path: Path) -> None:
    """Its state names the right root, and a step to the same root would not replace it."""
    rounds = Rounds(host := JobModelStore(tmp_path)).play(3)
    file = host.round_directory(JOB, 3) / "parameters.f32"
    file.write_bytes(bytes(file.stat().st_size))
    judged, last, rounds.number = rounds._judged.pop(2), rounds.roots.pop(), 2
    assert rounds.recovered(tmp_path) == 0
    host = JobModelStore(tmp_path)
    again = ClosedRound(JOB, 2, replace(NOTHING, absent=frozenset()), judged.accepted, ())
    assert host.apply_round(again, rounds._payloads.__getitem__) == last
    host.open_model(JOB, 3).verify()


def test_a_process_that_was_killed_computes_nothing_anew(tmp_path: Path) -> None:
    assert Rounds(JobModelStore(tmp_path)).play(5).recovered(tmp_path) == 0


def test_what_a_durable_write_left_half_done_is_no_model_to_begin_with(tmp_path: Path) -> None:
    rounds = Rounds(host := JobModelStore(tmp_path)).play(3)
    shutil.copytree(host.round_directory(JOB, 0), host.round_directory(JOB, 2).with_name(".00000002.fresh"))
    power_cut(tmp_path, "bit", "parameters")
    assert rounds.recovered(tmp_path) == 3


def test_without_a_durable_model_or_from_a_wrong_one_there_is_one_clear_error(tmp_path: Path) -> None:
    rounds = Rounds(host := JobModelStore(tmp_path)).play(2)
    host.round_directory(JOB, 2).joinpath("parameters.f32").unlink()
    with pytest.raises(StorageError, match="does not reproduce"):
        host.recover_model(JOB, 2, bytes(32), rounds._judged.__getitem__, rounds._payloads.__getitem__)
    for number in (0, 2):
        shutil.rmtree(host.round_directory(JOB, number))
    with pytest.raises(StorageError, match="no older model"):
        rounds.recovered(tmp_path)


def test_a_step_waits_for_the_disk_once_in_many_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, synced = Rounds(JobModelStore(tmp_path)), []
    monkeypatch.setattr(os, "fsync", synced.append)
    rounds.play(ANCHOR_ROUNDS - 1)
    assert not synced
    rounds.play(1)
    assert synced
    assert (JobModelStore(tmp_path).round_directory(JOB, ANCHOR_ROUNDS) / model_files.DURABLE).exists()


def test_the_last_model_of_a_job_is_durable(host: JobModelStore) -> None:
    Rounds(host).play(JobSpec.decode(SPEC).rounds)
    assert (host.round_directory(JOB, JobSpec.decode(SPEC).rounds) / model_files.DURABLE).exists()


def test_pruning_keeps_the_last_durable_model_and_no_older_one(host: JobModelStore) -> None:
    Rounds(host).play(2 * ANCHOR_ROUNDS + 5)
    last = 2 * ANCHOR_ROUNDS + 5
    assert rounds_on_disk(host) == [2 * ANCHOR_ROUNDS, *range(last - ROUNDS_KEPT + 1, last + 1)]


def test_an_older_model_that_a_power_cut_left_damaged_judges_nobody(tmp_path: Path) -> None:
    """Newer models may be undamaged, so that nothing was computed again."""
    rounds = Rounds(host := JobModelStore(tmp_path)).play(3)
    file = host.round_directory(JOB, 2) / "parameters.f32"
    file.write_bytes(bytes(file.stat().st_size))
    assert rounds.recovered(tmp_path) == 0
    with pytest.raises(StorageError, match="does not match the model root"):
        JobModelStore(tmp_path).open_verified_model(JOB, 2)


# Rollbacks ----------------------------------------------------------------------------------------------------------


def test_a_rollback_gives_the_model_of_an_anchor_a_later_number_and_forgets_what_was_left_unsaid(tmp_path: Path) -> None:
    rounds = Rounds(host := JobModelStore(tmp_path)).play(ANCHOR_ROUNDS + 3)
    before = host.open_model(JOB, ANCHOR_ROUNDS)
    rounds.back(ANCHOR_ROUNDS)
    after = host.open_model(JOB, rounds.number)
    assert all(np.array_equal(vector, after.vectors[name]) for name, vector in before.vectors.items())
    assert (after.round, after.rounds_in_model, after.root) == (ANCHOR_ROUNDS + 4, ANCHOR_ROUNDS, rounds.roots[-1])
    assert before.records and not after.records
    assert replace(after.state, round=before.round, records=before.state.records) == before.state


def test_peers_that_went_different_ways_to_a_rollback_have_the_same_root(tmp_path: Path) -> None:
    longer, shorter = (Rounds(JobModelStore(tmp_path / name)).play(ANCHOR_ROUNDS + 3) for name in ("a", "b"))
    longer.play(1)
    shorter.number += 1
    assert longer.back(ANCHOR_ROUNDS).roots[-1] == shorter.back(ANCHOR_ROUNDS).roots[-1]


def test_an_ended_job_keeps_the_anchor_itself(tmp_path: Path) -> None:
    rounds = Rounds(host := JobModelStore(tmp_path)).play(ANCHOR_ROUNDS + 3)
    assert host.roll_back(JOB, ANCHOR_ROUNDS, ANCHOR_ROUNDS) == rounds.roots[ANCHOR_ROUNDS]
    host.prune_models(JOB, ANCHOR_ROUNDS, JobSpec.decode(SPEC), is_over=True)
    assert max(rounds_on_disk(host)) == ANCHOR_ROUNDS


@pytest.mark.parametrize("rounds_after", [0, 3])
def test_a_model_behind_a_rollback_is_computed_anew_from_it(tmp_path: Path, rounds_after: int) -> None:
    rounds = Rounds(JobModelStore(tmp_path)).play(ANCHOR_ROUNDS + 3).back(ANCHOR_ROUNDS).play(rounds_after)
    power_cut(tmp_path, "zeros")
    assert rounds.recovered(tmp_path) == rounds_after


def test_rounds_behind_a_rollback_count_from_its_anchor(tmp_path: Path) -> None:
    rounds = Rounds(host := JobModelStore(tmp_path)).play(ANCHOR_ROUNDS + 3).back(ANCHOR_ROUNDS).play(ANCHOR_ROUNDS)
    model = host.open_model(JOB, rounds.number)
    assert model.rounds_in_model == 2 * ANCHOR_ROUNDS and model_files.is_durable(host.round_directory(JOB, rounds.number))


def test_pruning_keeps_anchors(tmp_path: Path) -> None:
    rounds = Rounds(host := JobModelStore(tmp_path))
    rounds.anchors += [0, ANCHOR_ROUNDS]
    rounds.play(2 * ANCHOR_ROUNDS + 5)
    assert rounds_on_disk(host)[:2] == [0, ANCHOR_ROUNDS]
