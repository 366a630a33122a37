"""Content-addressed files: whole or not there, several writers at once, and what passes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from pathlib import Path

import pytest

from protocol.blob_digest import BlobHasher
from protocol.errors import MissingBlobError, RemoteProtocolError, StorageError
from storage import blobs as blobs_module
from storage.blobs import JOB_BYTES, Blobs
from tests.ledger.power import Disk, PowerCut

DATA = b"some payload" * 100
DIGEST = hashlib.sha256(DATA).digest()


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "kept", tmp_path / "passing")


def files(tmp_path: Path) -> list[str]:
    return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())


def test_what_was_added_is_read_whole_and_in_parts_also_after_a_restart(blobs: Blobs, tmp_path: Path) -> None:
    assert blobs.size(DIGEST) is None
    assert blobs.add(DATA) == DIGEST == blobs.add(DATA)
    again = Blobs(tmp_path / "kept", tmp_path / "passing")
    assert (again.size(DIGEST), again.read(DIGEST), again.read(DIGEST, 5, 7)) == (len(DATA), DATA, DATA[5:12])
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}"]


def test_a_blob_is_not_there_before_it_is_whole_and_a_crash_leaves_nothing_behind(blobs: Blobs, tmp_path: Path) -> None:
    writer = blobs.begin(DIGEST, len(DATA))
    writer.write(DATA[:10])
    assert blobs.size(DIGEST) is None and len(files(tmp_path)) == 1
    again = Blobs(tmp_path / "kept", tmp_path / "passing")
    assert files(tmp_path) == [] and again.size(DIGEST) is None
    writer.abort()


def test_an_aborted_blob_leaves_nothing(blobs: Blobs, tmp_path: Path) -> None:
    writer = blobs.begin(DIGEST, len(DATA))
    writer.write(DATA)
    writer.abort()
    assert files(tmp_path) == []


@pytest.mark.parametrize("written", [b"x" + DATA[1:], DATA[:-1], b""])
def test_other_bytes_than_the_digests_are_refused_and_leave_nothing(blobs: Blobs, tmp_path: Path, written: bytes) -> None:
    writer = blobs.begin(DIGEST, len(DATA))
    writer.write(written)
    with pytest.raises(RemoteProtocolError, match="bad-blob"):
        writer.finish()
    assert files(tmp_path) == [] and blobs.size(DIGEST) is None


def test_more_bytes_than_announced_are_refused_before_they_fill_the_disk(blobs: Blobs) -> None:
    writer = blobs.begin(DIGEST, 10)
    writer.write(DATA[:10])
    with pytest.raises(RemoteProtocolError, match="more than the 10 bytes"):
        writer.write(b"x")
    writer.abort()


def test_two_writers_of_one_blob_do_not_disturb_each_other(blobs: Blobs, tmp_path: Path) -> None:
    """A fetch that was cancelled may still finish while the next one has begun."""
    first, second = blobs.begin(DIGEST, len(DATA)), blobs.begin(DIGEST, len(DATA))
    first.write(DATA)
    second.write(DATA[:5])
    first.finish()
    second.write(DATA[5:])
    assert blobs.read(DIGEST) == DATA
    second.finish()
    assert blobs.read(DIGEST) == DATA and files(tmp_path) == [f"kept/{DIGEST.hex()}"]
    third, fourth = blobs.begin(DIGEST, len(DATA)), blobs.begin(DIGEST, len(DATA))
    third.write(DATA)
    fourth.abort()
    third.finish()
    assert blobs.read(DIGEST) == DATA


def test_a_blob_is_durable_before_it_is_visible(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, replace = blobs_module.os.fsync, blobs_module.os.replace
    monkeypatch.setattr(blobs_module.os, "fsync", lambda descriptor: (happened.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(blobs_module.os, "replace", lambda *paths: (happened.append("replace"), replace(*paths)))
    blobs.add(DATA)
    assert happened == ["fsync", "replace", "fsync"], "the file, its name, and the folder that holds the name"


def test_a_full_disk_is_a_storage_error_that_names_the_file_and_leaves_nothing(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs_module.os, "fsync", full)
    with pytest.raises(StorageError, match=rf"cannot write .*{DIGEST.hex()}.*No space left.*free some space"):
        blobs.add(DATA)
    monkeypatch.undo()
    assert files(tmp_path) == [] and blobs.size(DIGEST) is None
    assert blobs.add(DATA) == DIGEST


def test_a_disk_that_fills_while_a_blob_is_written_is_a_storage_error(blobs: Blobs) -> None:
    writer = blobs.begin(DIGEST, len(DATA))
    writer._file.close()
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the writer closes it
    writer._file = full  # type: ignore[assignment]
    with pytest.raises(StorageError, match="No space left"):
        writer.write(DATA)
    writer.abort()
    assert full.closed


def test_a_blob_that_is_not_there_is_said_to_be_missing(blobs: Blobs) -> None:
    with pytest.raises(MissingBlobError, match=rf"cannot read .*{DIGEST.hex()}: No such file"):
        blobs.read(DIGEST)


def test_a_finished_file_is_taken_over(blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "worker").write_bytes(DATA)
    blobs.adopt(tmp_path / "worker", DIGEST)
    assert blobs.read(DIGEST) == DATA and files(tmp_path) == [f"kept/{DIGEST.hex()}"]
    with pytest.raises(StorageError, match="cannot write"):
        blobs.adopt(tmp_path / "worker", DIGEST)


# Passing --------------------------------------------------------------------------------------------------------------


def test_what_passes_is_deleted_when_its_owner_has_let_go_and_nobody_keeps_it(blobs: Blobs, tmp_path: Path) -> None:
    blobs.expect_to_pass(DIGEST, "round 1")
    blobs.add(DATA)
    assert blobs.read(DIGEST) == DATA
    blobs.delete_passed(set())
    assert blobs.size(DIGEST) is not None, "its owner still needs it"
    blobs.release("round 2")
    blobs.delete_passed(set())
    assert blobs.size(DIGEST) is not None
    blobs.release("round 1")
    blobs.delete_passed({DIGEST})
    assert blobs.size(DIGEST) is not None, "it is needed for the next round"
    blobs.delete_passed(set())
    assert blobs.size(DIGEST) is None and files(tmp_path) == []


def test_what_two_owners_expect_stays_until_both_have_let_go(blobs: Blobs) -> None:
    blobs.expect_to_pass(DIGEST, "audit 1")
    blobs.add(DATA)
    blobs.expect_to_pass(DIGEST, "audit 2")
    blobs.release("audit 1")
    blobs.delete_passed(set())
    assert blobs.size(DIGEST) is not None
    blobs.release("audit 2")
    blobs.delete_passed(set())
    assert blobs.size(DIGEST) is None


def test_what_was_let_go_and_is_expected_again_before_it_is_deleted_stays(blobs: Blobs) -> None:
    blobs.expect_to_pass(DIGEST, "audit 1")
    blobs.add(DATA)
    blobs.release("audit 1")
    blobs.expect_to_pass(DIGEST, "audit 2")
    blobs.delete_passed(set())
    assert blobs.read(DIGEST) == DATA


def test_what_is_expected_while_it_is_on_its_way_already_is_found(blobs: Blobs) -> None:
    writer = blobs.begin(DIGEST, len(DATA))
    blobs.expect_to_pass(DIGEST, "audit 1")
    writer.write(DATA)
    writer.finish()
    assert blobs.size(DIGEST) == len(DATA) and blobs.read(DIGEST) == DATA


def test_only_what_serves_audits_is_a_reveal(blobs: Blobs, tmp_path: Path) -> None:
    state = hashlib.sha256(b"state").digest()
    keep(blobs, 3, b"state")
    blobs.add(DATA)
    passing = hashlib.sha256(b"buffer").digest()
    blobs.expect_to_pass(passing, "round 1")
    assert [blobs.is_reveal(digest) for digest in (state, passing, DIGEST)] == [True, True, False]


def test_single_rounds_that_were_kept_together_are_named_and_deleted(blobs: Blobs, tmp_path: Path) -> None:
    digests = [hashlib.sha256(data).digest() for data in (b"three", b"four")]
    keep(blobs, 3, b"three")
    keep(blobs, 4, b"four")
    assert sorted(blobs.kept_together()) == [(JOB[:JOB_BYTES], 3), (JOB[:JOB_BYTES], 4)]
    blobs.delete_rounds([(JOB[:JOB_BYTES], 3)])
    assert blobs.kept_together() == [(JOB[:JOB_BYTES], 4)]
    assert [blobs.size(digest) for digest in digests] == [None, 4]


def test_what_is_kept_already_does_not_pass(blobs: Blobs) -> None:
    blobs.add(DATA)
    blobs.expect_to_pass(DIGEST, "round 1")
    assert blobs.size(DIGEST) == len(DATA)
    blobs.release("round 1")
    blobs.delete_passed(set())
    assert blobs.read(DIGEST) == DATA


def test_what_is_to_be_kept_stays_although_a_liar_named_it_as_a_buffer_of_its_own(blobs: Blobs, tmp_path: Path) -> None:
    blobs.expect_to_pass(DIGEST, "round 1")
    blobs.add(DATA)
    blobs.keep(DIGEST)
    assert blobs.read(DIGEST) == DATA
    blobs.release("round 1")
    blobs.delete_passed(set())
    assert blobs.read(DIGEST) == DATA and files(tmp_path) == [f"kept/{DIGEST.hex()}"]


def test_a_blob_that_is_being_received_is_not_deleted_with_what_passed(blobs: Blobs) -> None:
    blobs.expect_to_pass(DIGEST, "round 1")
    writer = blobs.begin(DIGEST, len(DATA))
    writer.write(DATA)
    blobs.release("round 1")
    blobs.delete_passed(set())
    writer.finish()
    assert blobs.read(DIGEST) == DATA


# Kept together --------------------------------------------------------------------------------------------------------

JOB = hashlib.sha256(b"job").digest()


def keep(blobs: Blobs, number: int, *contents: bytes) -> None:
    """Keeps these for the audits of a round, and nothing else needs them."""
    digests = [hashlib.sha256(content).digest() for content in contents]
    for digest, content in zip(digests, contents, strict=True):
        blobs.expect_to_pass(digest, "made")
        blobs.add(content)
    blobs.keep_together(JOB, number, digests)
    blobs.release("made")
    blobs.delete_passed(set())


def started(tmp_path: Path) -> Blobs:
    """By another process, which has verified what is there."""
    blobs = Blobs(tmp_path / "kept", tmp_path / "passing")
    blobs.verify_together()
    return blobs


def test_what_a_round_keeps_together_stays_over_restarts_until_the_round_is_long_past(blobs: Blobs, tmp_path: Path) -> None:
    state = hashlib.sha256(b"state").digest()
    keep(blobs, 3, b"state", DATA)
    for there in (blobs, started(tmp_path)):
        there.delete_rounds([(JOB[:JOB_BYTES], 2)])
        assert (there.read(state), there.read(DIGEST)) == (b"state", DATA), "the buffer passed, but its round may be audited"
    blobs.delete_rounds([(bytes(JOB_BYTES), 3)])
    assert blobs.size(state) == 5, "of another job"
    blobs.delete_rounds([(JOB[:JOB_BYTES], 3)])
    assert blobs.size(state) is None and blobs.size(DIGEST) is None and files(tmp_path) == []


def test_what_two_rounds_keep_goes_with_the_later_one(blobs: Blobs, tmp_path: Path) -> None:
    blobs.expect_to_pass(DIGEST, "round 3")
    blobs.add(DATA)
    for number in (4, 3):
        blobs.keep_together(JOB, number, [DIGEST])
    blobs.release("round 3")
    blobs.delete_passed(set())
    blobs.delete_rounds([(JOB[:JOB_BYTES], 3)])
    assert blobs.read(DIGEST) == DATA


def test_a_round_that_is_done_again_after_a_crash_keeps_what_is_the_same_in_it(tmp_path: Path, blobs: Blobs) -> None:
    for there in (blobs, started(tmp_path)):
        there.delete_passed(set())  # as when the round opens: nobody has said yet that this stays
        there.expect_to_pass(DIGEST, "round 3")
        (tmp_path / "buffer").write_bytes(DATA)
        there.adopt(tmp_path / "buffer", DIGEST)
        there.keep_together(JOB, 3, [DIGEST])
        there.release("round 3")
        there.delete_passed(set())
        assert there.read(DIGEST) == DATA
    assert started(tmp_path).kept_together() == [(JOB[:JOB_BYTES], 3)]


def test_what_is_kept_is_shown_also_while_others_are_expected_to_send_it(tmp_path: Path, blobs: Blobs) -> None:
    keep(blobs, 3, b"state")
    state, again = hashlib.sha256(b"state").digest(), Blobs(tmp_path / "kept", tmp_path / "passing")
    again.expect_to_pass(state, "an audit of somebody who names our state as its own")
    assert again.size(state) is None
    again.verify_together()
    assert again.read(state) == b"state"


def test_what_cannot_be_read_is_damaged(tmp_path: Path, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(blobs, 3, b"state")

    def unreadable(hasher: BlobHasher, stream: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(BlobHasher, "update_from_stream", unreadable)
    assert started(tmp_path).size(hashlib.sha256(b"state").digest()) is None


def test_a_round_that_is_done_again_after_a_crash_replaces_what_it_left(blobs: Blobs, tmp_path: Path) -> None:
    keep(blobs, 3, b"first")
    keep(blobs, 3, b"second")
    blobs.keep_together(JOB, 3, [hashlib.sha256(b"second").digest(), bytes(32)])
    assert blobs.size(hashlib.sha256(b"second").digest()) == 6
    assert blobs.size(hashlib.sha256(b"first").digest()) is None


@pytest.mark.parametrize("names_stay", [True, False])
def test_a_power_cut_takes_nothing_of_what_is_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_stay: bool
) -> None:
    disk = Disk(monkeypatch)
    blobs = Blobs(tmp_path / "kept", tmp_path / "passing")
    blobs.expect_to_pass(DIGEST, "round 3")
    blobs.add(DATA)
    blobs.keep_together(JOB, 3, [DIGEST])
    (tmp_path / "passing" / DIGEST.hex()).unlink()  # it passed, and the audits of its round are left
    disk.cut(tmp_path / "passing", names_stay)
    again = started(tmp_path)
    assert again.read(DIGEST) == DATA


@pytest.mark.parametrize("names_stay", [True, False])
@pytest.mark.parametrize("syncs", range(8, 16))
def test_what_has_its_name_is_whole_whenever_the_power_is_cut(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: int, names_stay: bool
) -> None:
    contents = [b"state %d" % number for number in range(6)]
    digests = [hashlib.sha256(content).digest() for content in contents]
    disk = Disk(monkeypatch, syncs)
    with contextlib.suppress(PowerCut):
        for digest, content in zip(digests, contents, strict=True):
            blobs.expect_to_pass(digest, "round 3")
            (tmp_path / "buffer").write_bytes(content)
            blobs.adopt(tmp_path / "buffer", digest)
        blobs.keep_together(JOB, 3, digests)
    disk.cut(tmp_path / "passing", names_stay)
    held = [file for folder in (tmp_path / "passing").iterdir() if folder.is_dir() for file in folder.iterdir()]
    assert all(hashlib.sha256(file.read_bytes()).hexdigest() == file.name for file in held)
    assert len(held) == 6 or syncs < 14, "six files, each with its folder; the folder of all six and the one above"


def test_a_sync_that_fails_is_a_storage_error(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blobs_module.os, "fsync", failing)
    with pytest.raises(StorageError, match=r"cannot write .*Input/output error"):
        blobs.keep_together(JOB, 3, [])
    assert not blobs.kept_together()


@pytest.mark.parametrize("left", [b"", b"stat", b"other", None])
def test_what_the_disk_has_damaged_is_deleted_at_the_start_and_never_held(
    blobs: Blobs, tmp_path: Path, caplog: pytest.LogCaptureFixture, left: bytes | None
) -> None:
    state, whole = hashlib.sha256(b"state").digest(), hashlib.sha256(b"whole").digest()
    keep(blobs, 3, b"state", b"whole")
    file = blobs.path(state)
    file.unlink() if left is None else file.write_bytes(left)
    again = Blobs(tmp_path / "kept", tmp_path / "passing")
    assert again.size(state) is None and again.size(whole) is None, "whoever asks before they were read is asked to come again"
    again.verify_together()
    assert again.size(state) is None and again.read(whole) == b"whole" and not file.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged: this peer deletes it, and cannot show it to an audit any more"
    ] * (left is not None)


def test_a_damaged_buffer_is_not_gone_on_from_either(blobs: Blobs, tmp_path: Path) -> None:
    blobs.expect_to_pass(DIGEST, "round 3")
    blobs.add(DATA)
    blobs.keep_together(JOB, 3, [DIGEST])
    blobs.path(DIGEST).write_bytes(DATA[:-1])
    assert started(tmp_path).size(DIGEST) is None and files(tmp_path) == []


def test_where_a_kept_file_is_damaged_another_of_that_name_which_is_not_stays(blobs: Blobs, tmp_path: Path) -> None:
    """What came since then, from a peer that has it too, is its own file."""
    blobs.expect_to_pass(DIGEST, "round 3")
    blobs.add(DATA)
    blobs.keep_together(JOB, 3, [DIGEST])
    blobs.path(DIGEST).unlink()
    (kept,) = [file for file in (tmp_path / "passing").rglob(DIGEST.hex()) if file.parent.name != "passing"]
    kept.write_bytes(DATA[:-1])
    again = Blobs(tmp_path / "kept", tmp_path / "passing")
    again.expect_to_pass(DIGEST, "an audit")
    again.add(DATA)
    again.verify_together()
    assert again.read(DIGEST) == DATA and not kept.exists()


def test_rounds_that_are_deleted_or_kept_while_others_are_verified_are_as_they_were_left(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [hashlib.sha256(data).digest() for data in (b"three", b"four", b"five", b"new")]
    for number, content in ((3, b"three"), (4, b"four"), (5, b"five")):
        keep(blobs, number, content)
    again = Blobs(tmp_path / "kept", tmp_path / "passing")
    is_whole = Blobs._is_whole

    def meanwhile(blobs: Blobs, file: Path) -> bool:
        if file.read_bytes() == b"three":
            again.delete_rounds([(JOB[:JOB_BYTES], 3)])
            assert [again.size(digest) for digest in digests] == [None] * 4, "what is not verified yet"
            keep(again, 5, b"new")
        return is_whole(blobs, file)

    monkeypatch.setattr(Blobs, "_is_whole", meanwhile)
    again.verify_together()
    assert [again.size(digest) for digest in digests] == [None, 4, None, 3]


# Lent blobs ---------------------------------------------------------------------------------------------------------------


def arrive(blobs: Blobs) -> None:
    writer = blobs.begin(DIGEST, len(DATA))
    writer.write(DATA)
    writer.finish()


def rounds(*numbers: int) -> frozenset[tuple[bytes, int]]:
    return frozenset((JOB, number) for number in numbers)


JOB = b"j" * 32


def test_what_is_lent_goes_when_it_is_taken_back_and_nobody_else_wants_it(blobs: Blobs, tmp_path: Path) -> None:
    blobs.lend(DIGEST, JOB, 1)
    arrive(blobs)
    blobs.drop([DIGEST])
    assert blobs.size(DIGEST) is not None, "while a round may accept it"
    blobs.lend(DIGEST, JOB, 2)
    blobs.take_back(DIGEST, rounds(1), keeps=False)
    assert blobs.size(DIGEST) is not None, "another round has named it meanwhile"
    again = Blobs(tmp_path / "kept", tmp_path / "passing")
    assert again.lent() == {DIGEST: rounds(1, 2)}
    again.take_back(DIGEST, rounds(1, 2), keeps=False)
    assert files(tmp_path) == [] and again.lent() == {}


def test_a_note_that_a_crash_has_cut_off_says_nothing(blobs: Blobs, tmp_path: Path) -> None:
    for number in (1, 12):
        blobs.lend(DIGEST, JOB, number)
    (note,) = (tmp_path / "kept").iterdir()
    whole = note.read_bytes()
    for length in range(len(whole) + 1):
        note.write_bytes(whole[:length])
        lent = Blobs(tmp_path / "kept", tmp_path / "passing").lent()
        assert lent == ({DIGEST: rounds(1, 12)} if length == len(whole) else {})


@pytest.mark.parametrize("wants", ["keep", "add", "adopt", "accepts", "had"])
def test_what_is_lent_and_wanted_for_something_else_stays(blobs: Blobs, tmp_path: Path, wants: str) -> None:
    if wants == "had":
        blobs.add(DATA)
    blobs.lend(DIGEST, JOB, 1)
    arrive(blobs)
    if wants == "keep":
        blobs.keep(DIGEST)
    elif wants == "add":
        blobs.add(DATA)
    elif wants == "adopt":
        (tmp_path / "file").write_bytes(DATA)
        blobs.adopt(tmp_path / "file", DIGEST)
    blobs.take_back(DIGEST, rounds(1), keeps=wants == "accepts")
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}"] and blobs.lent() == {}


def test_what_an_audit_needs_of_what_was_lent_passes_with_the_audit(blobs: Blobs, tmp_path: Path) -> None:
    """A liar's accepted proposal may name another one's payload as something else."""
    blobs.lend(DIGEST, JOB, 1)
    arrive(blobs)
    blobs.expect_to_pass(DIGEST, "an audit")
    assert not blobs.is_reveal(DIGEST), "it is still passed on as a payload"
    blobs.take_back(DIGEST, rounds(1), keeps=False)
    blobs.delete_passed(set())
    assert blobs.read(DIGEST) == DATA
    blobs.release("an audit")
    blobs.delete_passed(set())
    assert files(tmp_path) == []
