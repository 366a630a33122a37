"""Content-addressed files: a file is complete or absent, with several writers at once. Temporary files expire."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from pathlib import Path

import pytest

from protocol.blob_digest import BlobHasher
from protocol.errors import MissingBlobError, RemoteProtocolError, StorageError
from storage import disk_blob_store as blobs_module
from storage.disk_blob_store import JOB_BYTES, BlobFileWriter, DiskBlobStore
from tests.ledger.power import Disk, PowerCut
from tests.storage.records import add_temporary, release

DATA = b"some payload" * 100
DIGEST = hashlib.sha256(DATA).digest()


@pytest.fixture
def blobs(tmp_path: Path) -> DiskBlobStore:
    return DiskBlobStore(tmp_path / "kept", tmp_path / "passing")


def files(tmp_path: Path) -> list[str]:
    return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())


def test_what_was_added_is_read_whole_and_in_parts_also_after_a_restart(blobs: DiskBlobStore, tmp_path: Path) -> None:
    assert blobs.size(DIGEST) is None
    assert blobs.add_bytes(DATA) == DIGEST == blobs.add_bytes(DATA)
    again = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    assert (again.size(DIGEST), again.read_range(DIGEST), again.read_range(DIGEST, 5, 7)) == (len(DATA), DATA, DATA[5:12])
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}"]


@pytest.fixture
def writer(blobs: DiskBlobStore) -> BlobFileWriter:
    return blobs.open_writer(DIGEST, len(DATA))


def test_a_blob_is_not_there_before_it_is_whole_and_a_crash_leaves_nothing_behind(
    writer: BlobFileWriter, blobs: DiskBlobStore, tmp_path: Path
) -> None:
    writer.write(DATA[:10])
    assert blobs.size(DIGEST) is None and len(files(tmp_path)) == 1
    again = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    assert files(tmp_path) == [] and again.size(DIGEST) is None
    writer.abort()


def test_an_aborted_blob_leaves_nothing(writer: BlobFileWriter, blobs: DiskBlobStore, tmp_path: Path) -> None:
    writer.write(DATA)
    writer.abort()
    assert files(tmp_path) == []


@pytest.mark.parametrize("written", [b"x" + DATA[1:], DATA[:-1], b""])
def test_other_bytes_than_the_digests_are_refused_and_leave_nothing(
    writer: BlobFileWriter, blobs: DiskBlobStore, tmp_path: Path, written: bytes
) -> None:
    writer.write(written)
    with pytest.raises(RemoteProtocolError, match="bad-blob"):
        writer.finish()
    assert files(tmp_path) == [] and blobs.size(DIGEST) is None


def test_more_bytes_than_announced_are_refused_before_they_fill_the_disk(blobs: DiskBlobStore) -> None:
    writer = blobs.open_writer(DIGEST, 10)
    writer.write(DATA[:10])
    with pytest.raises(RemoteProtocolError, match="larger than the announced 10 bytes"):
        writer.write(b"x")
    writer.abort()


def test_two_writers_of_one_blob_do_not_disturb_each_other(blobs: DiskBlobStore, tmp_path: Path) -> None:
    """A cancelled fetch may still complete while the next one has begun."""
    first, second = blobs.open_writer(DIGEST, len(DATA)), blobs.open_writer(DIGEST, len(DATA))
    first.write(DATA)
    second.write(DATA[:5])
    first.finish()
    second.write(DATA[5:])
    assert blobs.read_range(DIGEST) == DATA
    second.finish()
    assert blobs.read_range(DIGEST) == DATA and files(tmp_path) == [f"kept/{DIGEST.hex()}"]
    third, fourth = blobs.open_writer(DIGEST, len(DATA)), blobs.open_writer(DIGEST, len(DATA))
    third.write(DATA)
    fourth.abort()
    third.finish()
    assert blobs.read_range(DIGEST) == DATA


def test_a_blob_is_durable_before_it_is_visible(blobs: DiskBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, replace = blobs_module.os.fsync, blobs_module.os.replace
    monkeypatch.setattr(blobs_module.os, "fsync", lambda descriptor: (happened.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(blobs_module.os, "replace", lambda *paths: (happened.append("replace"), replace(*paths)))
    blobs.add_bytes(DATA)
    assert happened == ["fsync", "replace", "fsync"], "the file, its name, and the folder that holds the name"


def test_a_full_disk_is_a_storage_error_that_names_the_file_and_leaves_nothing(
    blobs: DiskBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs_module.os, "fsync", full)
    with pytest.raises(StorageError, match=rf"cannot write .*{DIGEST.hex()}.*No space left.*free some space"):
        blobs.add_bytes(DATA)
    monkeypatch.undo()
    assert files(tmp_path) == [] and blobs.size(DIGEST) is None
    assert blobs.add_bytes(DATA) == DIGEST


def test_a_disk_that_fills_while_a_blob_is_written_is_a_storage_error(writer: BlobFileWriter, blobs: DiskBlobStore) -> None:
    writer._file.close()
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the writer closes it
    writer._file = full  # type: ignore[assignment]
    with pytest.raises(StorageError, match="No space left"):
        writer.write(DATA)
    writer.abort()
    assert full.closed


def test_a_blob_that_is_not_there_is_said_to_be_missing(blobs: DiskBlobStore) -> None:
    with pytest.raises(MissingBlobError, match=rf"cannot read .*{DIGEST.hex()}: No such file"):
        blobs.read_range(DIGEST)


def test_a_finished_file_is_taken_over(blobs: DiskBlobStore, tmp_path: Path) -> None:
    (tmp_path / "worker").write_bytes(DATA)
    blobs.adopt_file(tmp_path / "worker", DIGEST)
    assert blobs.read_range(DIGEST) == DATA and files(tmp_path) == [f"kept/{DIGEST.hex()}"]
    with pytest.raises(StorageError, match="cannot write"):
        blobs.adopt_file(tmp_path / "worker", DIGEST)


# Temporary blobs ------------------------------------------------------------------------------------------------------


def test_what_passes_is_deleted_when_its_owner_has_let_go_and_nobody_keeps_it(blobs: DiskBlobStore, tmp_path: Path) -> None:
    add_temporary(blobs, DIGEST, DATA, "round 1")
    assert blobs.read_range(DIGEST) == DATA
    blobs.delete_unowned(set())
    assert blobs.size(DIGEST) is not None, "its owner still needs it"
    release(blobs, "round 2")
    assert blobs.size(DIGEST) is not None
    release(blobs, "round 1", {DIGEST})
    assert blobs.size(DIGEST) is not None, "it is needed for the next round"
    blobs.delete_unowned(set())
    assert blobs.size(DIGEST) is None and files(tmp_path) == []


def test_what_two_owners_expect_stays_until_both_have_let_go(blobs: DiskBlobStore) -> None:
    add_temporary(blobs, DIGEST, DATA, "audit 1")
    blobs.mark_temporary(DIGEST, "audit 2")
    release(blobs, "audit 1")
    assert blobs.size(DIGEST) is not None
    release(blobs, "audit 2")
    assert blobs.size(DIGEST) is None


def test_what_was_let_go_and_is_expected_again_before_it_is_deleted_stays(blobs: DiskBlobStore) -> None:
    add_temporary(blobs, DIGEST, DATA, "audit 1")
    blobs.release_owner("audit 1")
    blobs.mark_temporary(DIGEST, "audit 2")
    blobs.delete_unowned(set())
    assert blobs.read_range(DIGEST) == DATA


def test_what_is_expected_while_it_is_on_its_way_already_is_found(writer: BlobFileWriter, blobs: DiskBlobStore) -> None:
    blobs.mark_temporary(DIGEST, "audit 1")
    writer.write(DATA)
    writer.finish()
    assert blobs.size(DIGEST) == len(DATA) and blobs.read_range(DIGEST) == DATA


def test_only_what_serves_audits_is_a_reveal(blobs: DiskBlobStore, tmp_path: Path) -> None:
    state = hashlib.sha256(b"state").digest()
    keep(blobs, 3, b"state")
    blobs.add_bytes(DATA)
    passing = hashlib.sha256(b"buffer").digest()
    blobs.mark_temporary(passing, "round 1")
    assert [blobs.is_audit_data(digest) for digest in (state, passing, DIGEST)] == [True, True, False]


def test_single_rounds_that_were_kept_together_are_named_and_deleted(blobs: DiskBlobStore, tmp_path: Path) -> None:
    digests = [hashlib.sha256(data).digest() for data in (b"three", b"four")]
    keep(blobs, 3, b"three")
    keep(blobs, 4, b"four")
    assert sorted(blobs.retained_rounds()) == [(JOB[:JOB_BYTES], 3), (JOB[:JOB_BYTES], 4)]
    blobs.delete_rounds([(JOB[:JOB_BYTES], 3)])
    assert blobs.retained_rounds() == [(JOB[:JOB_BYTES], 4)]
    assert [blobs.size(digest) for digest in digests] == [None, 4]


def test_what_is_kept_already_does_not_pass(blobs: DiskBlobStore) -> None:
    blobs.add_bytes(DATA)
    blobs.mark_temporary(DIGEST, "round 1")
    assert blobs.size(DIGEST) == len(DATA)
    release(blobs, "round 1")
    assert blobs.read_range(DIGEST) == DATA


def test_what_is_to_be_kept_stays_although_a_liar_named_it_as_a_buffer_of_its_own(blobs: DiskBlobStore, tmp_path: Path) -> None:
    add_temporary(blobs, DIGEST, DATA, "round 1")
    blobs.pin_blob(DIGEST)
    assert blobs.read_range(DIGEST) == DATA
    release(blobs, "round 1")
    assert blobs.read_range(DIGEST) == DATA and files(tmp_path) == [f"kept/{DIGEST.hex()}"]


def test_a_temporary_blob_that_is_kept_has_both_lives(blobs: DiskBlobStore, tmp_path: Path) -> None:
    add_temporary(blobs, DIGEST, DATA, "round 1")
    blobs.keep_temporary(DIGEST)
    blobs.keep_temporary(DIGEST)
    release(blobs, "round 1")
    assert blobs.read_range(DIGEST) == DATA
    blobs.drop_blobs([DIGEST])
    assert blobs.size(DIGEST) is None and files(tmp_path) == []
    add_temporary(blobs, DIGEST, DATA, "round 2")
    blobs.keep_temporary(DIGEST)
    blobs.drop_blobs([DIGEST])
    assert blobs.read_range(DIGEST) == DATA, "round 2 still needs it"
    release(blobs, "round 2")
    assert files(tmp_path) == []


def test_a_blob_that_is_being_received_is_not_deleted_with_what_passed(blobs: DiskBlobStore) -> None:
    blobs.mark_temporary(DIGEST, "round 1")
    writer = blobs.open_writer(DIGEST, len(DATA))
    writer.write(DATA)
    release(blobs, "round 1")
    writer.finish()
    assert blobs.read_range(DIGEST) == DATA


# Retained rounds ------------------------------------------------------------------------------------------------------

JOB = hashlib.sha256(b"job").digest()


def keep(blobs: DiskBlobStore, number: int, *contents: bytes) -> None:
    """Retain these blobs for the audits of a round, as their only owner."""
    digests = [hashlib.sha256(content).digest() for content in contents]
    for digest, content in zip(digests, contents, strict=True):
        add_temporary(blobs, digest, content, "made")
    blobs.retain_round(JOB, number, digests)
    release(blobs, "made")


def started(tmp_path: Path) -> DiskBlobStore:
    """Return the store as a new process opens it, with its retained files verified."""
    blobs = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    blobs.verify_retained()
    return blobs


def test_what_a_round_keeps_together_stays_over_restarts_until_the_round_is_long_past(
    blobs: DiskBlobStore, tmp_path: Path
) -> None:
    state = hashlib.sha256(b"state").digest()
    keep(blobs, 3, b"state", DATA)
    for there in (blobs, started(tmp_path)):
        there.delete_rounds([(JOB[:JOB_BYTES], 2)])
        assert (there.read_range(state), there.read_range(DIGEST)) == (b"state", DATA), (
            "the buffer passed, but its round may be audited"
        )
    blobs.delete_rounds([(bytes(JOB_BYTES), 3)])
    assert blobs.size(state) == 5, "of another job"
    blobs.delete_rounds([(JOB[:JOB_BYTES], 3)])
    assert blobs.size(state) is None and blobs.size(DIGEST) is None and files(tmp_path) == []


def test_what_two_rounds_keep_goes_with_the_later_one(blobs: DiskBlobStore, tmp_path: Path) -> None:
    add_temporary(blobs, DIGEST, DATA, "round 3")
    for number in (4, 3):
        blobs.retain_round(JOB, number, [DIGEST])
    release(blobs, "round 3")
    blobs.delete_rounds([(JOB[:JOB_BYTES], 3)])
    assert blobs.read_range(DIGEST) == DATA


def test_a_round_that_is_done_again_after_a_crash_keeps_what_is_the_same_in_it(tmp_path: Path, blobs: DiskBlobStore) -> None:
    for there in (blobs, started(tmp_path)):
        there.delete_unowned(set())  # as at the opening of a round, before the blob is retained
        there.mark_temporary(DIGEST, "round 3")
        (tmp_path / "buffer").write_bytes(DATA)
        there.adopt_file(tmp_path / "buffer", DIGEST)
        there.retain_round(JOB, 3, [DIGEST])
        release(there, "round 3")
        assert there.read_range(DIGEST) == DATA
    assert started(tmp_path).retained_rounds() == [(JOB[:JOB_BYTES], 3)]


def test_what_is_kept_is_shown_also_while_others_are_expected_to_send_it(tmp_path: Path, blobs: DiskBlobStore) -> None:
    keep(blobs, 3, b"state")
    state, again = hashlib.sha256(b"state").digest(), DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    again.mark_temporary(state, "an audit of somebody who names our state as its own")
    assert again.size(state) is None
    again.verify_retained()
    assert again.read_range(state) == b"state"


def test_what_cannot_be_read_is_damaged(tmp_path: Path, blobs: DiskBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(blobs, 3, b"state")

    def unreadable(hasher: BlobHasher, stream: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(BlobHasher, "update_from_stream", unreadable)
    assert started(tmp_path).size(hashlib.sha256(b"state").digest()) is None


def test_a_round_that_is_done_again_after_a_crash_replaces_what_it_left(blobs: DiskBlobStore, tmp_path: Path) -> None:
    keep(blobs, 3, b"first")
    keep(blobs, 3, b"second")
    blobs.retain_round(JOB, 3, [hashlib.sha256(b"second").digest(), bytes(32)])
    assert blobs.size(hashlib.sha256(b"second").digest()) == 6
    assert blobs.size(hashlib.sha256(b"first").digest()) is None


@pytest.mark.parametrize("names_stay", [True, False])
def test_a_power_cut_takes_nothing_of_what_is_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_stay: bool
) -> None:
    disk = Disk(monkeypatch)
    blobs = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    add_temporary(blobs, DIGEST, DATA, "round 3")
    blobs.retain_round(JOB, 3, [DIGEST])
    (tmp_path / "passing" / DIGEST.hex()).unlink()  # it has expired, except for the audits of its round
    disk.cut(tmp_path / "passing", names_stay)
    assert started(tmp_path).read_range(DIGEST) == DATA


@pytest.mark.parametrize("names_stay", [True, False])
@pytest.mark.parametrize("syncs", range(8, 16))
def test_what_has_its_name_is_whole_whenever_the_power_is_cut(
    blobs: DiskBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: int, names_stay: bool
) -> None:
    contents = [b"state %d" % number for number in range(6)]
    digests = [hashlib.sha256(content).digest() for content in contents]
    disk = Disk(monkeypatch, syncs)
    with contextlib.suppress(PowerCut):
        for digest, content in zip(digests, contents, strict=True):
            blobs.mark_temporary(digest, "round 3")
            (tmp_path / "buffer").write_bytes(content)
            blobs.adopt_file(tmp_path / "buffer", digest)
        blobs.retain_round(JOB, 3, digests)
    disk.cut(tmp_path / "passing", names_stay)
    held = [file for folder in (tmp_path / "passing").iterdir() if folder.is_dir() for file in folder.iterdir()]
    assert all(hashlib.sha256(file.read_bytes()).hexdigest() == file.name for file in held)
    assert len(held) == 6 or syncs < 14, "six files, each with its folder; the folder of all six and the one above"


def test_a_sync_that_fails_is_a_storage_error(blobs: DiskBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blobs_module.os, "fsync", failing)
    with pytest.raises(StorageError, match=r"cannot write .*Input/output error"):
        blobs.retain_round(JOB, 3, [])
    assert not blobs.retained_rounds()


@pytest.mark.parametrize("left", [b"", b"stat", b"other", None])
def test_what_the_disk_has_damaged_is_deleted_at_the_start_and_never_held(
    blobs: DiskBlobStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, left: bytes | None
) -> None:
    state, whole = hashlib.sha256(b"state").digest(), hashlib.sha256(b"whole").digest()
    keep(blobs, 3, b"state", b"whole")
    file = blobs.path(state)
    file.unlink() if left is None else file.write_bytes(left)
    again = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    assert again.size(state) is None and again.size(whole) is None, "whoever asks before they were read is asked to come again"
    again.verify_retained()
    assert again.size(state) is None and again.read_range(whole) == b"whole" and not file.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged: this peer deletes it and can no longer show it to auditors"
    ] * (left is not None)


def test_a_damaged_buffer_is_not_gone_on_from_either(blobs: DiskBlobStore, tmp_path: Path) -> None:
    add_temporary(blobs, DIGEST, DATA, "round 3")
    blobs.retain_round(JOB, 3, [DIGEST])
    blobs.path(DIGEST).write_bytes(DATA[:-1])
    assert started(tmp_path).size(DIGEST) is None and files(tmp_path) == []


def test_where_a_kept_file_is_damaged_another_of_that_name_which_is_not_stays(blobs: DiskBlobStore, tmp_path: Path) -> None:
    """A copy that was fetched later from another peer is a file of its own."""
    add_temporary(blobs, DIGEST, DATA, "round 3")
    blobs.retain_round(JOB, 3, [DIGEST])
    blobs.path(DIGEST).unlink()
    (kept,) = [file for file in (tmp_path / "passing").rglob(DIGEST.hex()) if file.parent.name != "passing"]
    kept.write_bytes(DATA[:-1])
    again = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    add_temporary(again, DIGEST, DATA, "an audit")
    again.verify_retained()
    assert again.read_range(DIGEST) == DATA and not kept.exists()


def test_rounds_that_are_deleted_or_kept_while_others_are_verified_are_as_they_were_left(
    blobs: DiskBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [hashlib.sha256(data).digest() for data in (b"three", b"four", b"five", b"new")]
    for number, content in ((3, b"three"), (4, b"four"), (5, b"five")):
        keep(blobs, number, content)
    again = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    is_whole = DiskBlobStore._is_whole

    def meanwhile(blobs: DiskBlobStore, file: Path) -> bool:
        if file.read_bytes() == b"three":
            again.delete_rounds([(JOB[:JOB_BYTES], 3)])
            assert [again.size(digest) for digest in digests] == [None] * 4, "what is not verified yet"
            keep(again, 5, b"new")
        return is_whole(blobs, file)

    monkeypatch.setattr(DiskBlobStore, "_is_whole", meanwhile)
    again.verify_retained()
    assert [again.size(digest) for digest in digests] == [None, 4, None, 3]


# Lent blobs ---------------------------------------------------------------------------------------------------------------


def arrive(blobs: DiskBlobStore) -> None:
    writer = blobs.open_writer(DIGEST, len(DATA))
    writer.write(DATA)
    writer.finish()


def rounds(*numbers: int) -> frozenset[tuple[bytes, int]]:
    return frozenset((JOB, number) for number in numbers)


JOB = b"j" * 32


def test_what_is_lent_goes_when_it_is_taken_back_and_nobody_else_wants_it(blobs: DiskBlobStore, tmp_path: Path) -> None:
    blobs.add_round_reference(DIGEST, JOB, 1)
    arrive(blobs)
    blobs.drop_blobs([DIGEST])
    assert blobs.size(DIGEST) is not None, "while a round may accept it"
    blobs.add_round_reference(DIGEST, JOB, 2)
    blobs.release_round_references(DIGEST, rounds(1), keeps=False)
    assert blobs.size(DIGEST) is not None, "another round has named it meanwhile"
    again = DiskBlobStore(tmp_path / "kept", tmp_path / "passing")
    assert again.round_references() == {DIGEST: rounds(1, 2)}
    again.release_round_references(DIGEST, rounds(1, 2), keeps=False)
    assert files(tmp_path) == [] and again.round_references() == {}


def test_a_note_that_a_crash_has_cut_off_says_nothing(blobs: DiskBlobStore, tmp_path: Path) -> None:
    for number in (1, 12):
        blobs.add_round_reference(DIGEST, JOB, number)
    (note,) = (tmp_path / "kept").iterdir()
    whole = note.read_bytes()
    for length in range(len(whole) + 1):
        note.write_bytes(whole[:length])
        lent = DiskBlobStore(tmp_path / "kept", tmp_path / "passing").round_references()
        assert lent == ({DIGEST: rounds(1, 12)} if length == len(whole) else {})


@pytest.mark.parametrize("wants", ["keep", "add", "adopt", "accepts", "had"])
def test_what_is_lent_and_wanted_for_something_else_stays(blobs: DiskBlobStore, tmp_path: Path, wants: str) -> None:
    if wants == "had":
        blobs.add_bytes(DATA)
    blobs.add_round_reference(DIGEST, JOB, 1)
    arrive(blobs)
    if wants == "keep":
        blobs.pin_blob(DIGEST)
    elif wants == "add":
        blobs.add_bytes(DATA)
    elif wants == "adopt":
        (tmp_path / "file").write_bytes(DATA)
        blobs.adopt_file(tmp_path / "file", DIGEST)
    blobs.release_round_references(DIGEST, rounds(1), keeps=wants == "accepts")
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}"] and blobs.round_references() == {}


def test_what_an_audit_needs_of_what_was_lent_passes_with_the_audit(blobs: DiskBlobStore, tmp_path: Path) -> None:
    """A liar's accepted proposal may name the payload of another one under another purpose."""
    blobs.add_round_reference(DIGEST, JOB, 1)
    arrive(blobs)
    blobs.mark_temporary(DIGEST, "an audit")
    assert not blobs.is_audit_data(DIGEST), "it is still passed on as a payload"
    blobs.release_round_references(DIGEST, rounds(1), keeps=False)
    blobs.delete_unowned(set())
    assert blobs.read_range(DIGEST) == DATA
    release(blobs, "an audit")
    assert files(tmp_path) == []
