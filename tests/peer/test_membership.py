"""People join a network with the commands of the how-to pages: real processes, real sockets, real admission and approval."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from demo import command_line
from demo.command_line import NAMES
from ledger.core.genesis import Founder, Genesis
from peer.cli import main
from peer.settings.data_directory import DataDirectory
from peer.settings.invitation import invitation_text, make_invitation, parse_invitation
from protocol.errors import UserError
from protocol.identity import Identity
from storage.crash_points import CRASH_POINT_VARIABLE
from tests.ledger.world import MODULES
from tests.peer.processes import DEMO_SECONDS_MAX, Daemon, children, command, daemons, environment, has_torch, peer, poll, wait
from tests.test_docs import ROOT
from tests.waiting import run_process

LOOPBACK = ("--listen", "127.0.0.1:0")
TINY = [
    word
    for setting in ("local_steps=1", "batch=2", "micro_batch=2", "model.layers=1", "model.width=32", "model.hidden=64")
    for word in ("--set", setting)
]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Daemon]]:
    with daemons([tmp_path / name for name in ("anna", "ben", "carl")]) as made:
        yield made


def init(daemon: Daemon, *voters: str) -> str:
    """Return the output of `peer init`."""
    further = [word for key in voters for word in ("--voter", key)]
    status, out, error = command(
        "init", "--network", "lab", "--name", daemon.directory.name, "--data-dir", str(daemon.directory), *further
    )
    assert (status, error) == (0, "")
    return out


def ask(daemon: Daemon, *line: str) -> str:
    status, out, error = command("console", "--data-dir", str(daemon.directory), *line)
    said = "the new peer dials 127.0.0.1:" if line[0] == "invite" else ""
    assert (status, error[: len(said) or None]) == (0, said), (out, error, daemon.log)
    return out


async def says(daemon: Daemon, text: str) -> bool:
    return text in daemon.log


async def stands(daemon: Daemon, candidate: str) -> bool:
    return candidate in {view.peer for view in await daemon.client.peers() if "candidate" in view.membership}


async def is_called(daemon: Daemon, key: str, name: str) -> bool:
    return name in {view.name for view in await daemon.client.peers() if view.peer == key}


async def is_trained(*daemons: Daemon) -> bool:
    return all([(await daemon.client.jobs())[-1].state == "finished" for daemon in daemons])


@pytest.mark.real("processes")
async def test_from_an_invitation_to_a_vote_a_trained_model_an_audit_and_back_from_disk(three: list[Daemon]) -> None:
    anna, ben, _ = three
    assert "voters      1 (tolerates 0 faulty, quorum 1)" in init(anna)
    await anna.start("run", *LOOPBACK, "--threads", "1").answers()

    ben.start("join", ask(anna, "invite").strip(), *LOOPBACK, "--name", "ben", "--threads", "1")
    key = (await ben.answers()).peer
    await poll(lambda: stands(anna, key))
    assert not (await ben.client.status()).voter
    assert (await ben.client.status()).name == "ben"

    status, out, _ = command("approve", "ben", "--data-dir", str(anna.directory))
    assert (status, "has all needed approvals" in out) == (0, True)
    assert (await ben.until(voter=True)).voters == 2

    shown = ask(ben, "test")
    kinds = re.findall(r"^\d\d:\d\d:\d\d ([\w-]+)", shown, re.MULTILINE)
    seen = [kind for kind in kinds if kind not in ("cut-off", "vouch")]
    assert seen == ["proposal", "ballot", "ballot", "decided", "round", "applied"] and kinds.count("vouch") == 1
    assert re.search(r"decided with 2 signatures: (anna ben|ben anna)\n", shown)

    assert "is decided" in ask(anna, "train", "--rounds", "2", *TINY)
    await poll(lambda: is_trained(anna, ben))
    (_, job) = await ben.client.jobs()
    first, second = sorted(job.accepted.values())
    assert first >= 1 and second == 2, "whose machine stands still for two seconds misses the second round"
    assert f"model root {job.model_root[:16]} unchanged" in ask(anna, "test")

    status, out, _ = peer("sample", "The ", "--tokens", "8", "--data-dir", str(ben.directory))
    assert status == 0
    export = ben.directory.parent / "export"
    assert "verify it anywhere" in ask(ben, "export", str(export))
    status, out, error = command("audit", str(export))
    assert (status, error) == (0, "")
    assert f"model root {job.model_root} reproduced" in out

    root = (await anna.client.status()).state_root
    await ben.until(state_root=root)
    for daemon in (anna, ben):
        assert not has_torch(daemon.pid)
        assert [has_torch(worker) for worker in children(daemon.pid)] == [True]
        assert daemon.terminate() == 0
    assert (await anna.start("run", "--role", "voter", "--listen", joined_address(ben)).answers()).state_root == root
    assert (await ben.start("run").answers()).state_root == root  # it dials and trains as it did when it joined
    await ben.until(links=1, voter=True)


def joined_address(daemon: Daemon) -> str:
    """Return the address that the joined peer will dial, which `join` has written to its settings."""
    found = re.search(r'bootstrap = \["([^"]+)"\]', (daemon.directory / "peer.toml").read_text())
    assert found is not None
    return found[1]


@pytest.mark.real("processes")
async def test_policy_approves_whom_a_voter_invited_and_only_so_many(three: list[Daemon]) -> None:
    anna, ben, carl = three
    init(anna)
    voter = ("--role", "voter", *LOOPBACK)
    await anna.start("run", *voter, "--approve-invited", "1").answers()
    await ben.start("join", ask(anna, "invite").strip(), *voter).answers()
    await ben.until(voter=True)
    await carl.start("join", ask(anna, "invite").strip(), *voter).answers()
    key = (await carl.client.status()).peer
    await poll(lambda: says(anna, f"{key[:8]} is a voter candidate: to approve it, run `peer approve {key[:8]}`"))
    await poll(lambda: stands(ben, key))
    ask(ben, "approve", key[:8])
    height = (await ben.client.status()).height

    async def has_heard() -> bool:
        return (await anna.client.status()).height >= height

    await poll(has_heard)
    views = {view.peer: view for view in await anna.client.peers()}
    assert len(views[key].approvals) == 1  # two are needed, and the policy's one approval is used up
    ask(anna, "approve", key[:8])
    await carl.until(voter=True, voters=3)
    assert not has_torch(carl.pid)


@pytest.mark.real("processes")
async def test_a_founding_voter_on_another_machine_comes_with_an_invitation_and_needs_no_admission(three: list[Daemon]) -> None:
    anna, ben, _ = three
    _, key, _ = command("identity", "--data-dir", str(ben.directory))
    assert "voters      2" in init(anna, key.strip())
    await anna.start("run", "--role", "voter", *LOOPBACK).answers()
    ben.start("join", ask(anna, "invite").strip(), "--role", "voter", *LOOPBACK, "--name", "ben")
    assert (await ben.answers()).peer == key.strip()
    assert (await ben.client.status()).voter
    assert "accepted" in ask(ben, "test")
    assert "admitted" not in ben.log
    await poll(lambda: is_called(anna, key.strip(), "ben"))  # `peer init` knew only its id


@pytest.mark.real("processes")
async def test_an_admission_that_waits_for_a_quorum_says_so_also_after_a_restart(three: list[Daemon]) -> None:
    anna, ben, carl = three
    _, key, _ = command("identity", "--data-dir", str(ben.directory))
    init(anna, key.strip())
    voter, waits = ("--role", "voter", "--no-stand", *LOOPBACK), "not a member: its admission is not decided yet"
    await anna.start("run", *voter).answers()
    for_ben, for_carl = (ask(anna, "invite").strip() for _ in range(2))
    await carl.start("join", for_carl, *voter).answers()
    await carl.until(halted=waits)
    carl.terminate()
    await carl.start("run", *voter).answers()
    await poll(lambda: says(carl, "connected to"))
    await carl.until(halted=waits)
    await ben.start("join", for_ben, *voter).answers()
    await carl.until(halted="")


@pytest.mark.real("processes")
async def test_who_leaves_the_vote_stays_out_of_it(three: list[Daemon]) -> None:
    anna, ben, _ = three
    init(anna)
    voter = ("--role", "voter", *LOOPBACK)
    await anna.start("run", *voter, "--approve-invited", "9").answers()
    await ben.start("join", ask(anna, "invite").strip(), *voter).answers()
    await ben.until(voter=True)
    assert "restart it only with --no-stand" in ask(ben, "resign")
    await ben.until(voter=False, voters=1)
    ask(ben, "test")
    status = await ben.client.status()
    assert (status.voter, status.voters) == (False, 1)


@pytest.mark.real("processes")
async def test_an_invitation_is_good_for_one_newcomer(three: list[Daemon]) -> None:
    anna, ben, carl = three
    init(anna)
    voter = ("--role", "voter", "--no-stand", *LOOPBACK)
    await anna.start("run", *voter).answers()
    invitation = ask(anna, "invite").strip()
    await ben.start("join", invitation, *voter).answers()
    await poll(lambda: says(ben, "was admitted as a member"))
    await carl.start("join", invitation, *voter).answers()
    await poll(lambda: says(carl, "the invitation was used: ask for a new one"))
    assert (await carl.client.status()).halted.startswith("not a member: the invitation was used: ask")
    carl.terminate()
    await carl.start("join", ask(anna, "invite").strip(), *voter).answers()
    await poll(lambda: says(carl, "was admitted as a member"))
    await carl.until(halted="")
    ben.terminate()
    assert (await ben.start("join", invitation, *voter).answers()).height > 0  # the repeated command just continues


@pytest.mark.real("processes")
def test_a_broken_invitation_is_one_line(tmp_path: Path) -> None:
    status, out, error = peer("join", "folkmoot1:abc", "--data-dir", str(tmp_path / "x"))
    assert (status, out) == (2, "")
    assert error.startswith("peer: error: 'folkmoot1:abc' is not a complete invitation")
    assert error.count("\n") == 1


def invitation_of(genesis: Genesis) -> str:
    return invitation_text(make_invitation(Identity(bytes(32)), genesis, 7, ("127.0.0.1:1",)))


GENESIS = Genesis("lab", 1, bytes(16), {Identity(bytes(32)).public: Founder("anna", ())}, MODULES)


@pytest.mark.real("processes")
@pytest.mark.parametrize("write", ["file-invitation", "file-toml"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_join_that_is_killed_leaves_each_file_whole_or_as_it_was(tmp_path: Path, side: str, write: str) -> None:
    file = tmp_path / ("invitation" if write == "file-invitation" else "peer.toml")
    command = [sys.executable, "-m", "peer.cli", "join", invitation_of(GENESIS), "--name", "ben", "--data-dir", str(tmp_path)]
    done = run_process(command, env={**environment(), CRASH_POINT_VARIABLE: f"{side}-{write}"}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert file.exists() == (side == "after")
    if file.name == "invitation" and side == "after":
        assert parse_invitation(file.read_text()).genesis == GENESIS and stat.S_IMODE(file.stat().st_mode) == 0o600
    elif side == "after":
        assert tomllib.loads(file.read_text()) == {"name": "ben", "bootstrap": ["127.0.0.1:1"]}


@pytest.mark.parametrize("more", ["A", "AB", "AAAA", "==AAAA", "!", "."])
def test_an_invitation_with_more_behind_it_is_refused(more: str) -> None:
    invitation = invitation_of(GENESIS)
    assert parse_invitation(f" {invitation[:40]}\n{invitation[40:]}\n").genesis == GENESIS
    with pytest.raises(UserError, match="is not a complete invitation"):
        parse_invitation(invitation + more)


@pytest.mark.real("processes")
def test_a_join_beside_the_running_peer_says_and_writes_nothing(tmp_path: Path) -> None:
    with DataDirectory(tmp_path).lock():
        status, out, error = peer("join", invitation_of(GENESIS), "--name", "ben", "--data-dir", str(tmp_path))
    assert (status, out) == (2, "") and "a peer already runs on" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "models", "peer.lock", "texts"]


@pytest.mark.real("processes")
def test_what_the_last_join_says_is_kept_and_so_is_what_a_person_wrote(tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text('threads = 3\nbootstrap = ["127.0.0.1:2"]\n')
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        for taken, name in ((first, "bne"), (second, "ben")):
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            command = ("join", invitation_of(GENESIS), "--name", name, "--listen", address, "--data-dir", str(tmp_path))
            status, _, error = peer(*command, "--sign-up", "open")
            assert status == 2 and address in error
            bootstrap = ["127.0.0.1:2", "127.0.0.1:1"]
            kept = {"threads": 3, "bootstrap": bootstrap, "name": name, "listen": address, "sign_up": "open"}
            assert tomllib.loads((tmp_path / "peer.toml").read_text()) == kept


@pytest.mark.real("processes")
def test_an_invitation_whose_genesis_no_peer_would_start_with_is_refused(tmp_path: Path) -> None:
    """Otherwise `peer join` would write a genesis that `peer run` then reports as damaged."""
    founders = {Identity(bytes(32)).public: Founder("anna", ("trainer", "trainer"))}
    status, _, error = peer("join", invitation_of(replace(GENESIS, founders=founders)), "--data-dir", str(tmp_path / "x"))
    assert status == 2 and "is not a complete invitation" in error and not (tmp_path / "x").exists()


PROGRAM = Path(sys.executable).with_name("peer")
SMALLEST = "--set model.width=16 model.layers=1 model.hidden=16 local_steps=1 batch=1"


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["demo", "--commands", *more]) == 0
    return capsys.readouterr().out


def test_a_page_has_the_recipe_as_it_is_printed() -> None:
    options = argparse.Namespace(peers=4, rounds=None, data=None, seed=0, keep=True)
    page = (ROOT / "docs" / "how-to" / "found-a-network.md").read_text()
    assert f"```sh\n{command_line.make_demo_script(options).rstrip()}\n```" in page


def test_what_is_asked_for_is_in_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "--peers", "7", "--rounds", "3", "--data", "my texts/", "--seed", "5")
    assert [name for name in NAMES if f"--name {name} " in said] == list(NAMES[:7])
    assert "--rounds 3 --data 'my texts/' --set seed=5" in said and "kill" in said.splitlines()[-1]
    assert not printed(capsys, "--keep").splitlines()[-1].startswith("kill"), "the network goes on running"
    assert "#" in printed(capsys, "--keep").splitlines()[-1]


@pytest.mark.parametrize("other", ["--rlhf=toy", "--annotate", "--mixed", "--attack=lazy"])
def test_what_commands_cannot_do_is_named(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--commands", other]) == 2
    assert f"{other.partition('=')[0]} cannot be combined with --commands" in capsys.readouterr().err


@pytest.mark.real("four daemons that a shell starts")
def test_the_commands_work_as_they_are_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the ports differ, which other tests may use, and the size of the model."""
    script = printed(capsys, "--rounds", "3").replace(" train --name demo", f" train --name demo {SMALLEST}")
    script = re.sub(r"127\.0\.0\.1:7[78]0?\d+", "127.0.0.1:0", script)
    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    here = {"PATH": path, "PYTHONPATH": str(ROOT)}  # the program of this checkout
    done = run_process(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env=environment() | here,
        capture_output=True,
        text=True,
        errors="replace",  # so small a model may emit invalid text
        start_new_session=True,
        idle=DEMO_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each trainer needs a steady uplink" in " ".join(done.stdout.split()), "four that train, of whom one may lie"
    assert "finished, round 3 of 3" in done.stdout
    assert len(re.findall(r"^[123] [0-9a-f]{8} +accept", done.stdout, re.MULTILINE)) == 3, done.stdout
    for name in NAMES[:4]:
        assert "stopping on SIGTERM" in (tmp_path / "folkmoot-lab" / f"{name}.log").read_text()


@pytest.mark.real("a daemon and the commands that `init` printed")
def test_init_prints_commands_that_work(tmp_path: Path) -> None:
    """The program is not on the path, and the data directory has a space."""
    place = tmp_path / "a b"
    bare = environment() | {"PATH": os.defpath, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PROGRAM, "init", "--network", "lab", "--data-dir", place], capture_output=True, text=True, env=bare, check=True
    )
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    run, invite = said["next"].strip(), said["then"].strip()
    with (tmp_path / "log").open("w") as log:
        extra = "--listen 127.0.0.1:0 --role voter --no-console"
        started = ["bash", "-c", f"exec {run.partition('#')[0]} {extra}"]
        daemon = subprocess.Popen(started, env=bare, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        tried = f"until {invite.partition('#')[0]} 2> /dev/null; do sleep 0.2; done"
        made = run_process(["bash", "-c", tried], env=bare, capture_output=True, text=True, idle=DEMO_SECONDS_MAX)
        assert made.stdout.startswith("folkmoot1:")
        assert said["others"].strip().endswith("peer join INVITATION")
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert wait(daemon) == 0
