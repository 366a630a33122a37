"""Objects of parts on disk: complete ones, partial ones, and the time for which a partial one stays."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from protocol.blob_digest import BlobHasher, BlobPartList
from protocol.errors import MissingBlobError, RemoteProtocolError, StorageError
from storage import disk_blob_store as blobs_module
from storage import multipart_objects as parts_module
from storage.disk_blob_store import DiskBlobStore
from storage.multipart_objects import LIST_SUFFIX, write_list
from tests.storage.records import add_temporary, release

PART = 1000  # bytes
DATA = random.Random(1).randbytes(3258)  # four parts
JOB = bytes(range(32))


def blobs_in(folder: Path) -> DiskBlobStore:
    return DiskBlobStore(folder / "kept", folder / "passing", part_bytes=PART)


@pytest.fixture
def blobs(tmp_path: Path) -> DiskBlobStore:
    return blobs_in(tmp_path)


@pytest.fixture
def begun(blobs: DiskBlobStore) -> DiskBlobStore:
    begin(blobs)
    return blobs


def listed(data: bytes) -> BlobPartList:
    hasher = BlobHasher(part_bytes=PART)
    hasher.update(data)
    assert hasher.part_list is not None
    return hasher.part_list


PARTS = listed(DATA)
DIGEST = PARTS.blob_digest


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def begin(blobs: DiskBlobStore, parts: BlobPartList = PARTS) -> None:
    """Store an object's list of parts, and open the object for its parts."""
    come(blobs, parts.blob_digest, parts.encode())
    blobs.complete_object(parts.blob_digest)


def come(blobs: DiskBlobStore, digest: bytes, data: bytes, of: bytes | None = None) -> None:
    writer = blobs.open_writer(digest, len(data), of)
    try:
        for start in range(0, len(data), 300):
            writer.write(data[start : start + 300])
        writer.finish()
    finally:
        writer.abort()


def part(index: int, data: bytes = DATA) -> bytes:
    return data[index * PART : (index + 1) * PART]


def lacking(blobs: DiskBlobStore, digest: bytes = DIGEST) -> dict[bytes, int]:
    wanted = blobs.missing_parts(digest)
    assert wanted is not None and wanted.total == len(DATA)
    return dict(wanted.lacking)


ALL = {PARTS.digests[index]: PARTS.part_size(index) for index in range(4)}


def test_an_object_comes_as_its_list_and_then_its_parts_and_is_held_when_all_are_there(
    blobs: DiskBlobStore, tmp_path: Path
) -> None:
    assert blobs.missing_parts(DIGEST) is None
    come(blobs, DIGEST, PARTS.encode())
    assert lacking(blobs) == {} and files(tmp_path) == [f"kept/parts/{DIGEST.hex()}"], "the list alone fills no disk"
    blobs.complete_object(DIGEST)
    assert lacking(blobs) == ALL and blobs.size(DIGEST) is None
    assert blobs.read_piece(DIGEST, 0, 9999) == PARTS.encode(), "others may have the list at once"
    for index in (3, 1, 0, 2):
        assert PARTS.digests[index] in lacking(blobs)
        assert blobs.piece_size(PARTS.digests[index]) is None
        come(blobs, PARTS.digests[index], part(index), DIGEST)
        assert not blobs.lacks_part(DIGEST, PARTS.digests[index])
        assert blobs.read_piece(PARTS.digests[index], 10, 20) == part(index)[10:30], "and each part as soon as it is here"
    assert lacking(blobs) == {} and blobs.size(DIGEST) is None
    blobs.complete_object(DIGEST)
    assert (blobs.size(DIGEST), blobs.read_range(DIGEST)) == (len(DATA), DATA)
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}", f"kept/parts/{DIGEST.hex()}"]
    again = blobs_in(tmp_path)
    assert again.read_range(DIGEST) == DATA and again.read_piece(DIGEST, 0, 9999) == PARTS.encode()
    assert again.read_piece(PARTS.digests[3], 100, 9999) == part(3)[100:], "not beyond the part"
    assert again.read_piece(PARTS.digests[1], 990, 9999) == part(1)[990:]


def test_equal_parts_come_once(blobs: DiskBlobStore) -> None:
    data = bytes(3 * PART) + b"end"
    parts = listed(data)
    begin(blobs, parts)
    come(blobs, parts.digests[0], bytes(PART), parts.blob_digest)
    assert blobs.missing_parts(parts.blob_digest).lacking == {parts.digests[3]: 3}  # type: ignore[union-attr]
    come(blobs, parts.digests[3], b"end", parts.blob_digest)
    blobs.complete_object(parts.blob_digest)
    assert blobs.read_range(parts.blob_digest) == data


def test_after_a_restart_what_was_there_does_not_lack(begun: DiskBlobStore, tmp_path: Path) -> None:
    come(begun, PARTS.digests[0], part(0), DIGEST)
    begun = begun.open_writer(PARTS.digests[3], PARTS.part_size(3), DIGEST)
    begun.write(part(3)[:5])
    begun.abort()
    again = blobs_in(tmp_path)
    assert lacking(again) == {digest: size for digest, size in ALL.items() if digest != PARTS.digests[0]}
    for index in (1, 2, 3):
        come(again, PARTS.digests[index], part(index), DIGEST)
    last = blobs_in(tmp_path)
    assert lacking(last) == {} and last.size(DIGEST) is None
    last.complete_object(DIGEST)
    assert last.read_range(DIGEST) == DATA


@pytest.mark.parametrize("sent", [b"x" + part(1)[1:], part(1)[:-1], b""])
def test_a_wrong_part_is_refused_and_touches_nothing(begun: DiskBlobStore, tmp_path: Path, sent: bytes) -> None:
    come(begun, PARTS.digests[0], part(0), DIGEST)
    before = (tmp_path / "kept/parts" / f"{DIGEST.hex()}.data").read_bytes()
    with pytest.raises(RemoteProtocolError, match="bad-blob"):
        come(begun, PARTS.digests[1], sent, DIGEST)
    assert PARTS.digests[1] in lacking(begun) and PARTS.digests[0] not in lacking(begun)
    assert (tmp_path / "kept/parts" / f"{DIGEST.hex()}.data").read_bytes() == before
    assert PARTS.digests[1] in lacking(blobs_in(tmp_path))


def test_a_part_is_no_longer_than_its_list_says(begun: DiskBlobStore) -> None:
    with pytest.raises(RemoteProtocolError, match="bad-blob"):
        come(begun, PARTS.digests[1], part(1) + b"x", DIGEST)


def test_a_part_is_durable_before_it_is_here(begun: DiskBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    fsync = os.fsync
    monkeypatch.setattr(
        parts_module.os, "fsync", lambda file: (seen.append(begun.lacks_part(DIGEST, PARTS.digests[0])), fsync(file))
    )
    come(begun, PARTS.digests[0], part(0), DIGEST)
    assert seen == [True, True], "its bytes, and that it is here"
    assert not begun.lacks_part(DIGEST, PARTS.digests[0])


def test_a_disk_that_is_full_is_a_storage_error_and_the_part_lacks(begun: DiskBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module.os, "pwrite", lambda *written: 0)
    with pytest.raises(StorageError, match="No space left"):
        come(begun, PARTS.digests[0], part(0), DIGEST)
    assert begun.lacks_part(DIGEST, PARTS.digests[0])


def test_a_writer_that_ends_late_does_not_touch_what_is_here(begun: DiskBlobStore) -> None:
    """Its fetch was cancelled, and the next fetch has completed."""
    late = begun.open_writer(PARTS.digests[0], PART, DIGEST)
    late.write(b"x" * PART)
    come(begun, PARTS.digests[0], part(0), DIGEST)
    with pytest.raises(RemoteProtocolError):
        late.finish()
    assert begun.read_piece(PARTS.digests[0], 0, PART) == part(0)


# Objects of this peer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["adopt", "add", "keep_together"])
def test_what_this_peer_made_is_held_with_its_list(blobs: DiskBlobStore, tmp_path: Path, how: str) -> None:
    made = tmp_path / "made"
    made.mkdir()
    file = made / DIGEST.hex()
    if how == "add":
        assert blobs.add_bytes(DATA) == DIGEST
    else:
        file.write_bytes(DATA)
        write_list(file, PARTS)
    if how == "keep_together":
        blobs.mark_temporary(DIGEST, "made")
    if how != "add":
        blobs.adopt_file(file, DIGEST)
    if how == "keep_together":
        blobs.retain_round(JOB, 3, [DIGEST])
        release(blobs, "made")
    assert not file.with_name(f"{file.name}{LIST_SUFFIX}").exists()
    for store in (blobs, again := blobs_in(tmp_path)):
        assert store.piece_size(DIGEST) == len(PARTS.encode())
    again.verify_retained()
    assert again.read_range(DIGEST) == DATA and again.read_piece(PARTS.digests[3], 0, 9999) == part(3)
    assert again.is_audit_data(PARTS.digests[3]) == again.is_audit_data(DIGEST) == (how == "keep_together")


def test_a_list_stays_while_its_blob_is_on_the_way(blobs: DiskBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread deletes unowned files at a moment at which the list is here and the blob is not."""
    file, replace = tmp_path / "made", os.replace
    file.write_bytes(DATA)
    write_list(file, PARTS)

    def meanwhile(*paths: Path) -> None:
        blobs.delete_unowned(set())
        replace(*paths)

    monkeypatch.setattr(blobs_module.os, "replace", meanwhile)
    blobs.adopt_file(file, DIGEST)
    assert blobs.piece_size(DIGEST) == len(PARTS.encode())


def test_an_object_of_several_parts_does_not_come_as_one_blob(blobs: DiskBlobStore) -> None:
    with pytest.raises(RemoteProtocolError):
        come(blobs, hashlib.sha256(DATA).digest(), DATA)


def test_a_damaged_buffer_of_a_round_is_deleted_with_its_list(blobs: DiskBlobStore, tmp_path: Path) -> None:
    add_temporary(blobs, DIGEST, DATA, "made")
    blobs.retain_round(JOB, 3, [DIGEST])
    blobs.path(DIGEST).write_bytes(DATA[:-1] + b"x")
    release(blobs, "made")
    again = blobs_in(tmp_path)
    again.verify_retained()
    assert again.size(DIGEST) is None
    again.sweep_partial(())
    assert files(tmp_path) == [] and again.piece_size(PARTS.digests[0]) is None


# Deletion ----------------------------------------------------------------------------------------------------------------


def test_the_list_goes_with_the_object(blobs: DiskBlobStore, tmp_path: Path) -> None:
    blobs.add_bytes(DATA)
    blobs.delete_blob(DIGEST)
    assert files(tmp_path) == [] and blobs.piece_size(DIGEST) is None and blobs.piece_size(PARTS.digests[0]) is None
    add_temporary(blobs, DIGEST, DATA, "a round")
    blobs.delete_unowned(set())
    assert blobs.read_piece(DIGEST, 0, 9999) == PARTS.encode()
    release(blobs, "a round")
    assert files(tmp_path) == [] and blobs.piece_size(DIGEST) is None
    with pytest.raises(MissingBlobError):
        blobs.read_piece(PARTS.digests[0], 0, 1)


def test_an_object_that_is_gone_can_come_again(blobs: DiskBlobStore) -> None:
    blobs.add_bytes(DATA)
    blobs.path(DIGEST).unlink()
    assert lacking(blobs) == {}, "its list is here, and nothing else is known of it"
    blobs.complete_object(DIGEST)
    assert lacking(blobs) == ALL


def test_what_this_peer_made_while_it_came_keeps_its_list(begun: DiskBlobStore, tmp_path: Path) -> None:
    """Otherwise it would be sent as if it had no parts, and the receiver would drop the link."""
    come(begun, PARTS.digests[0], part(0), DIGEST)
    begun.add_bytes(DATA)
    begun.sweep_partial(())
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}", f"kept/parts/{DIGEST.hex()}"]
    assert begun.read_piece(DIGEST, 0, 9999) == PARTS.encode() and begun.read_piece(PARTS.digests[1], 0, 9999) == part(1)


def test_what_a_round_keeps_too_keeps_its_list(blobs: DiskBlobStore) -> None:
    add_temporary(blobs, DIGEST, DATA, "a round")
    blobs.retain_round(JOB, 3, [DIGEST])
    release(blobs, "a round")
    assert blobs.read_range(DIGEST) == DATA and blobs.read_piece(DIGEST, 0, 9999) == PARTS.encode()
    blobs.delete_rounds([(JOB[:16], 3)])
    assert blobs.piece_size(DIGEST) is None


def object_of(number: int) -> bytes:
    return random.Random(number).randbytes(2 * PART)


def left(blobs: DiskBlobStore, count: int, numbers: range) -> list[bytes]:
    """Return the digests of objects of which `count` parts have come, the oldest first."""
    digests = []
    for number in numbers:
        parts = listed(object_of(number))
        begin(blobs, parts)
        for place in range(count):
            come(blobs, parts.digests[place], object_of(number)[place * PART : (place + 1) * PART], parts.blob_digest)
        here = blobs._kept / "parts" / f"{parts.blob_digest.hex()}.here"
        changed = here.stat().st_mtime - 100 + number
        os.utime(here, (changed, changed))
        digests.append(parts.blob_digest)
    return digests


def test_what_nobody_waits_for_stays_in_a_bounded_number(blobs: DiskBlobStore, tmp_path: Path) -> None:
    digests = left(blobs, 0, range(parts_module.ABANDONED_MAX + 3))
    blobs.sweep_partial({digests[0]})
    assert [blobs.missing_parts(digest) is not None for digest in digests] == [True] + [False] * 2 + [
        True
    ] * parts_module.ABANDONED_MAX
    blobs_in(tmp_path)
    assert len(files(tmp_path)) == 3 * parts_module.ABANDONED_MAX, "nor after a restart"


def test_what_nobody_waits_for_stays_in_bounded_bytes(blobs: DiskBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "ABANDONED_BYTES_MAX", 2 * PART)
    digests = left(blobs, 1, range(4))
    blobs.sweep_partial(())
    assert [blobs.missing_parts(digest) is not None for digest in digests] == [False, False, True, True]


def test_what_nobody_waits_for_stays_for_a_day(blobs: DiskBlobStore, tmp_path: Path) -> None:
    (digest,) = left(blobs, 1, range(1))
    blobs.sweep_partial(())
    assert blobs.missing_parts(digest) is not None
    here = tmp_path / "kept/parts" / f"{digest.hex()}.here"
    os.utime(here, (0, here.stat().st_mtime - parts_module.ABANDONED_SECONDS))
    blobs.sweep_partial(())
    assert files(tmp_path) == []


@pytest.mark.parametrize("lost", [".data", ".here", ""])
def test_what_a_crash_left_of_an_object_that_comes_is_nothing(begun: DiskBlobStore, tmp_path: Path, lost: str) -> None:
    (tmp_path / "kept/parts" / f"{DIGEST.hex()}{lost}").unlink()
    again = blobs_in(tmp_path)
    assert files(tmp_path) == []
    begin(again)
    assert lacking(again) == ALL


def test_a_crash_between_an_objects_name_and_the_end_of_its_coming_is_no_loss(blobs: DiskBlobStore, tmp_path: Path) -> None:
    blobs.add_bytes(DATA)
    (tmp_path / "kept/parts" / f"{DIGEST.hex()}.here").write_bytes(b"\1\1\1\0")
    assert blobs_in(tmp_path).read_range(DIGEST) == DATA
    assert files(tmp_path) == [f"kept/{DIGEST.hex()}", f"kept/parts/{DIGEST.hex()}"]


def test_a_damaged_list_takes_the_object_with_it(blobs: DiskBlobStore, tmp_path: Path) -> None:
    """Otherwise it would be sent as if it had no parts, and the receiver would drop the link."""
    blobs.add_bytes(DATA)
    (tmp_path / "kept/parts" / DIGEST.hex()).write_bytes(PARTS.encode()[:-1])
    assert blobs_in(tmp_path).size(DIGEST) is None and files(tmp_path) == []
