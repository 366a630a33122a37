"""A peer gets a new key: the network decides it, the vote follows, and the old key is worth nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.datadir import DataDirectory
from protocol.errors import UserError
from tests.peer.processes import Daemon, daemons, peer, poll

VOTER = ("--role", "voter", "--listen", "127.0.0.1:0")


@pytest.fixture
async def founders(tmp_path: Path) -> list[Daemon]:
    """Three voters, of which two decide."""
    with daemons([tmp_path / name for name in ("anna", "ben", "carl")]) as made:
        yield await found(made)  # type: ignore[misc]


async def found(made: list[Daemon]) -> list[Daemon]:
    anna, *others = made
    keys = [peer("identity", "--data-dir", str(daemon.directory))[1].strip() for daemon in others]
    voters = [word for key in keys for word in ("--voter", key)]
    assert peer("init", "--network", "lab", "--data-dir", str(anna.directory), *voters)[0] == 0
    await anna.start("run", *VOTER).answers()
    invitation = peer("console", "--data-dir", str(anna.directory), "invite")[1].strip()
    for daemon in others:
        daemon.start("join", invitation, *VOTER)
    for daemon in others:
        await daemon.answers()
    await decides(others[0])
    return made


async def decides(daemon: Daemon) -> None:
    """Something is decided."""
    job = await daemon.client.test()
    await poll(lambda: _is_finished(daemon, job))


async def _is_finished(daemon: Daemon, job: str) -> bool:
    return next(view.state for view in await daemon.client.jobs() if view.job == job) == "finished"


async def _replaced(daemon: Daemon, old: str, new: str) -> bool:
    """Whether this peer knows that the old key votes no more and the new one does."""
    views = {view.peer: view for view in await daemon.client.peers()}
    return new in views and views[new].voter and views[old].gone == f"now {new[:8]}" and not views[old].voter


def rekey(daemon: Daemon) -> tuple[str, str, str]:
    status, out, error = peer("rekey", "--data-dir", str(daemon.directory))
    assert (status, error) == (0, "") and f"peer run --data-dir {daemon.directory}" in out
    old, new = re.findall(r"key +(\w{52})", out)
    return old, new, out


@pytest.mark.parametrize("lost", [False, True])
async def test_a_peer_goes_on_with_a_new_key_also_when_its_vote_log_is_lost(founders: list[Daemon], lost: bool) -> None:
    anna, ben, carl = founders
    before = await carl.client.status()
    carl.terminate()
    if lost:
        (carl.directory / "ledger.sqlite").unlink()
        _, _, error = peer("run", *VOTER, "--no-console", "--data-dir", str(carl.directory))
        assert "peer rekey" in error
    old, new, out = rekey(carl)
    assert old == before.peer and ("set aside" in out) == lost
    await carl.start("run", *VOTER).answers()
    assert (await carl.client.status()).peer == new
    for daemon in founders:
        await poll(lambda daemon=daemon: _replaced(daemon, old, new))  # type: ignore[misc]
    assert not (carl.directory / "identity.old").exists()
    ben.terminate()  # now the new key is needed for every quorum
    await decides(anna)


async def test_a_key_whose_vote_is_needed_to_replace_it_is_not_replaced(tmp_path: Path) -> None:
    with daemons([tmp_path / "anna"]) as (anna,):
        peer("init", "--network", "lab", "--data-dir", str(anna.directory))
        await anna.start("run", *VOTER).answers()
        status, _, error = peer("rekey", "--data-dir", str(anna.directory))
        assert status == 2 and "a peer runs on" in error
        anna.terminate()
        status, _, error = peer("rekey", "--data-dir", str(anna.directory))
        assert status == 2 and "let others vote first" in error and not (anna.directory / "identity.old").exists()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    made = DataDirectory.create(tmp_path / "anna")
    made.create_identity()
    yield made


def test_the_old_key_is_kept_until_the_change_is_decided(directory: DataDirectory) -> None:
    old = directory.load_identity()
    new = directory.replace_identity()
    former = directory.load_former_identity()
    assert former is not None and former.seed == old.seed != new.seed and directory.load_identity().seed == new.seed
    with pytest.raises(UserError, match="not decided yet"):
        directory.replace_identity()
    directory.forget_former_identity()
    assert directory.load_former_identity() is None
    assert directory.replace_identity().seed not in (old.seed, new.seed)


def test_a_replacement_that_a_crash_cut_off_goes_on_with_the_same_new_key(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = directory.load_identity()

    def crash(*_: object) -> None:
        raise OSError("power failure")

    with monkeypatch.context() as context, pytest.raises(UserError, match="power failure"):
        context.setattr("os.replace", crash)
        directory.replace_identity()
    assert directory.load_identity().seed == old.seed, "nothing was replaced"
    new = directory.replace_identity()
    former = directory.load_former_identity()
    assert new.seed != old.seed and former is not None and former.seed == old.seed
    assert not (directory.path / "identity.next").exists()
