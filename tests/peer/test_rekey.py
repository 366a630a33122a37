"""A peer replaces its key by a network decision. The vote moves to the new key, and the old key becomes worthless."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from consensus.effects import OwnStatement
from ledger.core.genesis import Founder, Genesis
from peer.cli import main
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.errors import UserError
from protocol.identity import Identity, peer_id, sign_message
from protocol.messages import Prepare
from storage.ledger_store import LedgerStore
from tests.ledger.world import MODULES
from tests.peer.processes import Daemon, command, daemons, peer, poll

VOTER = ("--role", "voter", "--listen", "127.0.0.1:0")


@pytest.fixture
async def founders(tmp_path: Path) -> list[Daemon]:
    """Three voters with a quorum of two."""
    with daemons([tmp_path / name for name in ("anna", "ben", "carl")]) as made:
        yield await found(made)  # type: ignore[misc]


async def found(made: list[Daemon]) -> list[Daemon]:
    anna, *others = made
    keys = [command("identity", "--data-dir", str(daemon.directory))[1].strip() for daemon in others]
    voters = [word for key in keys for word in ("--voter", key)]
    assert command("init", "--network", "lab", "--data-dir", str(anna.directory), *voters)[0] == 0
    await anna.start("run", *VOTER).answers()
    invitation = command("console", "--data-dir", str(anna.directory), "invite")[1].strip()
    for daemon in others:
        daemon.start("join", invitation, *VOTER)
    for daemon in others:
        await daemon.answers()
    await decides(others[0])
    return made


async def decides(daemon: Daemon) -> None:
    """Assert that the network decides a transaction."""
    job = await daemon.client.run_test_round()
    await poll(lambda: _is_finished(daemon, job))


async def _is_finished(daemon: Daemon, job: str) -> bool:
    return next(view.state for view in await daemon.client.jobs() if view.job == job) == "finished"


async def _replaced(daemon: Daemon, old: str, new: str) -> bool:
    """Return True if this peer knows that the new key votes and the old one does not."""
    views = {view.peer: view for view in await daemon.client.peers()}
    return new in views and views[new].voter and views[old].departed == f"now {new[:8]}" and not views[old].voter


async def _forgot_the_old_key(daemon: Daemon) -> bool:
    return not (daemon.directory / "identity.old").exists()


def rekey(daemon: Daemon) -> tuple[str, str, str]:
    status, out, error = command("rekey", "--data-dir", str(daemon.directory))
    assert (status, error) == (0, "") and f"peer run --data-dir {daemon.directory}" in out
    old, new = re.findall(r"key +(\w{52})", out)
    return old, new, out


BACKUP = ("identity.key", "genesis", "peer.toml", "addresses")  # the files that docs/how-to/back-up-and-move.md names


@pytest.mark.real("processes")
@pytest.mark.parametrize("lost", ["its log", *(pytest.param(lost, marks=pytest.mark.long) for lost in ("", "all but a backup"))])
async def test_a_peer_goes_on_with_a_new_key_also_when_its_vote_log_is_lost(founders: list[Daemon], lost: str) -> None:
    anna, ben, carl = founders
    before = await carl.client.status()
    carl.terminate()
    if lost == "all but a backup":
        carl.directory.rename(carl.directory.with_name("broken"))
        carl.directory.mkdir(mode=0o700)
        for name in BACKUP:
            if (carl.directory.with_name("broken") / name).exists():
                shutil.copy2(carl.directory.with_name("broken") / name, carl.directory)
    elif lost:
        (carl.directory / "ledger.sqlite").unlink()
        _, _, error = peer("run", *VOTER, "--no-console", "--data-dir", str(carl.directory))
        assert "peer rekey" in error
    old, new, out = rekey(carl)
    assert old == before.peer and ("moved to" in out) == (lost == "its log")
    await carl.start("run", *VOTER).answers()
    assert (await carl.client.status()).peer == new
    for daemon in founders:
        await poll(lambda daemon=daemon: _replaced(daemon, old, new))  # type: ignore[misc]
    await poll(lambda: _forgot_the_old_key(carl))  # a moment after it knows the change
    assert [daemon.log.count(f"{new[:8]} is now the key of {old[:8]}") for daemon in (anna, ben)] == [1, 1]
    ben.terminate()  # now every quorum needs the new key
    await decides(anna)


@pytest.mark.real("processes")
async def test_a_key_whose_vote_is_needed_to_replace_it_is_not_replaced(tmp_path: Path) -> None:
    with daemons([tmp_path / "anna"]) as (anna,):
        command("init", "--network", "lab", "--data-dir", str(anna.directory))
        await anna.start("run", *VOTER).answers()
        status, _, error = command("rekey", "--data-dir", str(anna.directory))
        assert status == 2 and "a peer already runs on" in error
        anna.terminate()
        status, _, error = command("rekey", "--data-dir", str(anna.directory))
        assert status == 2 and "let another member vote first" in error and not (anna.directory / "identity.old").exists()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    made = DataDirectory.create(tmp_path / "anna")
    made.create_identity()
    yield made


def replace_identity(directory: DataDirectory) -> Identity:
    directory.load_identity_to_replace()
    directory.begin_key_replacement()
    return directory.replace_identity()


def test_the_old_key_is_kept_until_the_change_is_decided(directory: DataDirectory) -> None:
    old = directory.load_identity()
    new = replace_identity(directory)
    former = directory.load_former_identity()
    assert former is not None and former.seed == old.seed != new.seed and directory.load_identity().seed == new.seed
    with pytest.raises(UserError, match="not decided yet"):
        replace_identity(directory)
    directory.forget_former_identity()
    assert directory.load_former_identity() is None
    assert replace_identity(directory).seed not in (old.seed, new.seed)


# Remains of a crash or a full disk ----------------------------------------------------------------------------------------


@dataclass
class Past:
    """A stopped voter that has signed something."""

    directory: DataDirectory
    chain_id: bytes
    key: bytes
    vote: OwnStatement


def past(directory: DataDirectory, founders: int) -> Past:
    me = directory.load_identity()
    others = {Identity.generate().public: Founder(f"other-{number}", ()) for number in range(founders - 1)}
    genesis = Genesis("lab", 1, bytes(16), dict(sorted({**others, me.public: Founder("anna", ())}.items())), MODULES)
    directory.write_genesis(codec.encode(genesis))
    vote = OwnStatement(("prepare", 1, 0), sign_message(me, genesis.chain_id, Prepare(genesis.voters.hash, 1, 0, b"A" * 32)))
    with contextlib.closing(LedgerStore(directory.ledger, genesis.chain_id)) as store:
        store.append_records([vote])
    (directory.models / "job").mkdir()
    return Past(directory, genesis.chain_id, me.public, vote)


def whole(ledger: Path) -> None:
    pass


def damaged(ledger: Path) -> None:
    data = bytearray(ledger.read_bytes())
    data[100:116] = bytes(16)  # of the root of its tables
    ledger.write_bytes(data)


def gone(ledger: Path) -> None:
    ledger.unlink()


class Crashes:
    """Copies of a directory as a crash would leave it, before and after each rename and each sync of a folder in it."""

    def __init__(self, directory: Path, copies: Path) -> None:
        self.directory, self.copies = directory, copies
        self.done: list[str] = []  # the operations in their order
        self._copying = False

    def around(self, name: str, change: Callable[..., object]) -> Callable[..., object]:
        def changed(*arguments: Any, **options: Any) -> object:
            if self._copying:
                return change(*arguments, **options)
            self._copy()
            result = change(*arguments, **options)
            self._copy()
            self.done.append(" ".join([name, *(Path(path).name for path in arguments if not isinstance(path, int))]))
            return result

        return changed

    def _copy(self) -> None:
        self._copying = True
        shutil.copytree(self.directory, self.copies / f"{len(list(self.copies.iterdir())):03d}")
        self._copying = False


def what_run_finds(past: Past, copy: Path) -> tuple[bytes, tuple[OwnStatement, ...]] | None:
    """Return the key that `peer run` signs with and its recorded votes, or None if it refuses to start."""
    directory = DataDirectory.open(copy)
    try:
        with contextlib.closing(LedgerStore(directory.ledger, past.chain_id)) as store:
            return directory.load_identity().public, store.read_restart_state().votes
    except UserError as refusal:
        assert "peer rekey" in str(refusal), refusal
        return None


@pytest.mark.parametrize(("spoil", "founders"), [(whole, 3), (damaged, 1), (gone, 1)])
def test_wherever_a_crash_cuts_it_off_no_key_that_has_signed_signs_again_without_its_votes(
    directory: DataDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], founders: int
) -> None:
    """With one founder the log alone would name the voters. It is lost, and others are known, so the command continues."""
    voter = past(directory, founders)
    (directory.path / "addresses").write_text(f"{peer_id(Identity(bytes([77]) * 32).public)}@127.0.0.1:7000\n")
    spoil(directory.ledger)
    crashes = Crashes(directory.path, tmp_path / "copies")
    crashes.copies.mkdir()
    with monkeypatch.context() as patched:
        for name in ("link", "mkdir", "rename", "replace", "unlink", "fsync"):
            patched.setattr(os, name, crashes.around(name, getattr(os, name)))
        assert main(["rekey", "--data-dir", str(directory.path)]) == 0
    swap = crashes.done.index("replace identity.next identity.key")
    assert crashes.done[swap - 1] == crashes.done[-1] == "fsync", "a power cut may undo what was not synced, in any order"
    copies = sorted(crashes.copies.iterdir())
    assert len(copies) > 10
    for copy in copies:
        found = what_run_finds(voter, copy)
        is_replaced = found is not None and found[0] != voter.key
        assert found is None or is_replaced or found == (voter.key, (voter.vote,)), f"{copy.name} of {crashes.done}"
        begun = (copy / "identity.next").read_bytes() if (copy / "identity.next").exists() else None
        assert main(["rekey", "--data-dir", str(copy)]) == (2 if is_replaced else 0), f"{copy.name}: a change is asked for once"
        replaced, former = DataDirectory(copy).load_identity(), DataDirectory(copy).load_former_identity()
        assert former is not None and former.public == voter.key != replaced.public
        assert begun is None or bytes.fromhex(begun.decode()) == replaced.seed, "the key that was made is used"
        assert what_run_finds(voter, copy) == (replaced.public, (voter.vote,) if spoil is whole else ())
        assert (copy / "models" / "job").exists() == (spoil is whole), "what belongs to a lost log goes with it"
        assert spoil is not damaged or [file.name for file in copy.glob("lost-*/ledger.sqlite")] == ["ledger.sqlite"]


@pytest.mark.parametrize("founders", [1, 2])
@pytest.mark.parametrize("spoil", [damaged, gone])
def test_a_lost_log_in_a_network_that_needs_this_vote_is_no_reason_for_a_key_that_is_worth_nothing(
    directory: DataDirectory, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], founders: int
) -> None:
    """No other peer could decide the change, and no peer has the log. The only remedy is another network."""
    voter = past(directory, founders)
    spoil(directory.ledger)
    if founders == 1:
        (directory.path / "addresses").write_text(f"{peer_id(voter.key)}@127.0.0.1:7000\n")  # this peer itself
    before = sorted(path.name for path in directory.path.iterdir())
    assert main(["rekey", "--data-dir", str(directory.path)]) == 2
    told = capsys.readouterr().err
    who = "this peer is the only founder" if founders == 1 else "a decision needs all 2 founders"
    assert who in told and "peer init --network lab --data-dir" in told and "--bootstrap PEER@HOST:PORT" in told
    assert told.count("\n") == 1
    assert sorted(path.name for path in directory.path.iterdir() if path.name != "peer.lock") == before, "nothing is changed"
    assert main(["rekey", "--data-dir", str(directory.path), "--bootstrap", "127.0.0.1:7000"]) == 0, "others vote by now"


@pytest.mark.real("processes")
async def test_between_two_keys_a_peer_does_not_start(directory: DataDirectory) -> None:
    past(directory, founders=3)
    directory.begin_key_replacement()
    status, _, error = peer("run", *VOTER, "--no-console", "--data-dir", str(directory.path))
    assert status == 2 and "peer rekey" in error


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_database(*_: object, **__: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize(
    ("writes", "fails", "spoil"),
    [("sqlite3.connect", full_database, whole), ("os.fsync", full, whole), ("os.fsync", full, damaged)],
)
def test_a_full_disk_is_said_and_takes_neither_the_key_nor_its_votes(
    directory: DataDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    writes: str,
    fails: Callable[..., None],
    spoil: Callable[[Path], None],
) -> None:
    voter = past(directory, founders=3)
    spoil(directory.ledger)
    with monkeypatch.context() as patched:
        patched.setattr(writes, fails)
        assert main(["rekey", "--data-dir", str(directory.path)]) == 2
    said = capsys.readouterr().err
    assert "is full" in said or "No space left" in said
    assert directory.load_identity().public == voter.key and not list(directory.path.glob("lost-*"))
    assert what_run_finds(voter, directory.path) == ((voter.key, (voter.vote,)) if spoil is whole else None)
