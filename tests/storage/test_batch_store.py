"""The kept data of rounds: their bound, the order of deletions, restarts and damaged files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from protocol.blob_digest import blob_digest
from protocol.errors import MissingBlobError
from storage.batch_store import BatchStore, KeptRound

JOB, OTHER = b"j" * 32, b"o" * 32


def file(folder: Path, data: bytes) -> dict[bytes, Path]:
    """Write a blob, and return it as the file of a round."""
    path = folder / f"blob-{blob_digest(data).hex()}"
    path.write_bytes(data)
    return {blob_digest(data): path}


def keep(store: BatchStore, folder: Path, round: int, height: int, data: bytes, job: bytes = JOB) -> list[KeptRound]:
    store.add_open_round(job, round, file(folder, data))
    return store.keep_round(job, round, height)


def test_the_files_of_a_round_stay_when_their_blobs_are_deleted(tmp_path: Path) -> None:
    store, blobs = BatchStore(tmp_path / "batches", 100), file(tmp_path, b"body") | file(tmp_path, b"manifest")
    store.add_open_round(JOB, 3, blobs)
    for path in blobs.values():
        path.unlink()
    assert store.open_rounds() == {(JOB, 3)} and store.kept_rounds() == [] and store.bytes_left == 88
    assert store.keep_round(JOB, 3, 7) == []
    (kept,) = store.kept_rounds()
    assert (kept, store.open_rounds(), store.bytes_left) == (KeptRound(7, JOB, 3), set(), 88)
    assert store.read_round(kept) == {blob_digest(data): data for data in (b"body", b"manifest")}


def test_a_round_without_an_accepted_update_is_dropped(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", 100)
    store.add_open_round(JOB, 3, file(tmp_path, b"body"))
    store.drop_open_round(JOB, 3)
    assert store.open_rounds() == set() and list((tmp_path / "batches").iterdir()) == [] and store.bytes_left == 100


def test_the_rounds_that_were_closed_first_are_deleted_first(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", 25)
    assert keep(store, tmp_path, 9, 12, b"1" * 10) == []
    assert keep(store, tmp_path, 0, 5, b"2" * 10, OTHER) == [], "the block of height 5 is older, though it is added later"
    assert keep(store, tmp_path, 10, 100, b"3" * 10) == [KeptRound(5, OTHER, 0)]
    assert keep(store, tmp_path, 11, 101, b"4" * 25) == [KeptRound(12, JOB, 9), KeptRound(100, JOB, 10)]
    assert store.kept_rounds() == [KeptRound(101, JOB, 11)] and store.bytes_left == 0
    assert keep(store, tmp_path, 12, 102, b"5" * 26) == [KeptRound(101, JOB, 11), KeptRound(102, JOB, 12)], "it is too large"
    assert store.kept_rounds() == [] and list((tmp_path / "batches").iterdir()) == []


def test_a_restarted_store_has_all_rounds_and_obeys_a_smaller_bound(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", 100)
    for number in range(3):
        keep(store, tmp_path, number, number + 1, bytes([number]) * 10)
    store.add_open_round(OTHER, 1, file(tmp_path, b"open"))
    (tmp_path / "batches" / ".DS_Store").write_bytes(b"of a file manager")
    again = BatchStore(tmp_path / "batches", 100)
    assert (again.kept_rounds(), again.open_rounds(), again.bytes_left) == (store.kept_rounds(), {(OTHER, 1)}, 66)
    smaller = BatchStore(tmp_path / "batches", 20)
    assert [kept.round for kept in smaller.kept_rounds()] == [1, 2] and smaller.open_rounds() == {(OTHER, 1)}
    none = BatchStore(tmp_path / "batches", 0)
    assert (none.kept_rounds(), none.open_rounds()) == ([], set())
    assert [path.name for path in (tmp_path / "batches").iterdir()] == [".DS_Store"]


def test_a_crash_leaves_whole_rounds_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path / "batches", 15)
    keep(store, tmp_path, 0, 1, b"1" * 10)

    class Crash(Exception):
        pass

    def crash(*arguments: object) -> None:
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr("storage.batch_store.sync_directory", crash)
        store.add_open_round(JOB, 1, file(tmp_path, b"2" * 10))
    assert BatchStore(tmp_path / "batches", 15).kept_rounds() == [KeptRound(1, JOB, 0)]
    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr("shutil.rmtree", crash)
        store._delete(tmp_path / "batches" / KeptRound(1, JOB, 0).folder_name)
    assert BatchStore(tmp_path / "batches", 15).kept_rounds() == [] and list((tmp_path / "batches").iterdir()) == []


def test_a_round_with_a_missing_blob_is_not_added(tmp_path: Path) -> None:
    store, blobs = BatchStore(tmp_path / "batches", 100), file(tmp_path, b"body")
    blobs |= {b"m" * 32: tmp_path / "missing"}
    with pytest.raises(MissingBlobError):
        store.add_open_round(JOB, 0, blobs)
    assert store.open_rounds() == set() and list((tmp_path / "batches").iterdir()) == []


def test_a_damaged_or_deleted_round_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = BatchStore(tmp_path / "batches", 100)
    keep(store, tmp_path, 0, 1, b"body")
    (kept,) = store.kept_rounds()
    (path,) = (tmp_path / "batches" / kept.folder_name).iterdir()
    path.write_bytes(b"Body")
    with caplog.at_level(logging.WARNING):
        assert store.read_round(kept) is None
    assert f"{path} is damaged" in caplog.text
    assert store.read_round(KeptRound(2, JOB, 0)) is None


def test_a_file_of_another_program_does_not_damage_a_round(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", 100)
    keep(store, tmp_path, 0, 1, b"body")
    (kept,) = store.kept_rounds()
    (tmp_path / "batches" / kept.folder_name / ".DS_Store").write_bytes(b"of a file manager")
    assert store.read_round(kept) == {blob_digest(b"body"): b"body"}


def test_a_peer_that_keeps_nothing_makes_no_folder(tmp_path: Path) -> None:
    assert BatchStore(tmp_path / "batches", 0).bytes_left == 0 and not (tmp_path / "batches").exists()
