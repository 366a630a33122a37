from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from peer.settings.data_directory import DataDirectory, storage_errors
from protocol.errors import StorageError, UserError


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    return DataDirectory.create(tmp_path / "peer")


def test_a_new_directory_is_for_its_owner_only(directory: DataDirectory) -> None:
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.blobs.is_dir()
    assert directory.models.is_dir()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777, 0o2770])
def test_access_of_others_is_taken_away_and_told(directory: DataDirectory, mode: int, capsys: pytest.CaptureFixture[str]) -> None:
    directory.create_identity()
    directory.path.chmod(mode)
    DataDirectory.open(directory.path)
    assert stat.S_IMODE(directory.path.stat().st_mode) & 0o777 == 0o700
    assert capsys.readouterr().err.startswith(f"peer: data directory {directory.path} had mode {mode:04o}")
    DataDirectory.open(directory.path)
    assert capsys.readouterr().err == ""


def test_directory_of_another_user_is_refused(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.create_identity()
    mode = directory.path.stat().st_mode
    directory.path.chmod(0o755)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    for call in (DataDirectory.open, DataDirectory.create):
        with pytest.raises(UserError, match=f"belongs to user {me}, but this process runs as user {me + 1}"):
            call(directory.path)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o755 != mode


def test_the_key_is_private_and_comes_back(directory: DataDirectory) -> None:
    made = directory.create_identity()
    assert stat.S_IMODE(directory.identity_key.stat().st_mode) == 0o600
    assert directory.load_identity().public == made.public


def test_a_key_is_never_replaced(directory: DataDirectory) -> None:
    made = directory.create_identity()
    with pytest.raises(UserError, match="already has an identity"):
        directory.create_identity()
    assert directory.load_identity().public == made.public
    assert sorted(path.name for path in directory.path.iterdir()) == ["blobs", "identity.key", "models", "texts"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused_with_the_command_that_mends_it(directory: DataDirectory, mode: int) -> None:
    directory.create_identity()
    directory.identity_key.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:04o}.*chmod 600 {directory.identity_key}"):
        directory.load_identity()


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "a" * 62, "a" * 66])
def test_a_damaged_key_is_refused(directory: DataDirectory, text: str) -> None:
    directory.identity_key.write_text(text)
    directory.identity_key.chmod(0o600)
    with pytest.raises(UserError, match="is damaged"):
        directory.load_identity()


def test_without_a_key_the_way_to_make_one_is_named(directory: DataDirectory) -> None:
    with pytest.raises(UserError, match="peer init"):
        directory.load_identity()


def test_a_missing_directory_is_named_with_the_way_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no data directory at {tmp_path / 'no'}.*peer init"):
        DataDirectory.open(tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_directory_without_a_key_is_not_a_peer_and_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no identity\.key"):
        DataDirectory.open(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_peer_belongs_to_one_network(directory: DataDirectory) -> None:
    with pytest.raises(UserError, match="does not belong to a network yet"):
        directory.read_genesis()
    directory.write_genesis(b"first")
    with pytest.raises(UserError, match="already belongs to a network"):
        directory.write_genesis(b"second")
    assert directory.read_genesis() == b"first"


HOLD = """
import sys
from pathlib import Path
from peer.settings.data_directory import DataDirectory
with DataDirectory(Path(sys.argv[1])).lock():
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.real("processes")
def test_a_second_daemon_is_told_which_process_holds_the_directory(directory: DataDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, directory.path], stdin=-1, stdout=-1, cwd=Path.cwd()) as holder:
        assert holder.stdout and holder.stdout.readline()
        with pytest.raises(UserError, match=f"runs on {directory.path} .process {holder.pid}."), directory.lock():
            pass
        holder.kill()  # the operating system drops the lock on every kind of exit
    with directory.lock():
        assert directory.lock_file.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked_the_folder_is_named_and_no_peer_is_said_to_run(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match=f"cannot lock {directory.path} .* local disk"), directory.lock():
        pass


def test_the_lock_can_be_taken_again(directory: DataDirectory) -> None:
    for _ in range(2):
        with directory.lock():
            pass


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output"),
    ],
)
def test_what_the_disk_says_becomes_one_line(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}.*{words}"), storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def test_a_full_disk_leaves_no_half_written_key(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        directory.create_identity()
    assert sorted(path.name for path in directory.path.iterdir()) == ["blobs", "models", "texts"]


def test_a_file_where_the_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "peer"):
        with pytest.raises(StorageError, match=r"file.*directory; choose another --data-dir"):
            DataDirectory.create(path)
