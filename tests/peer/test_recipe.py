"""Four peers on one machine: the printed commands do what the demo does, and `init` prints commands that work."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo import command_line
from demo.command_line import NAMES
from peer.cli import main
from tests.peer.processes import DEMO_SECONDS_MAX, environment, wait
from tests.test_docs import ROOT
from tests.waiting import run_process

PROGRAM = Path(sys.executable).with_name("peer")
TINY = "--set model.width=16 model.layers=1 model.hidden=16 local_steps=1 batch=1"


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["demo", "--commands", *more]) == 0
    return capsys.readouterr().out


def test_the_guide_has_the_recipe_as_it_is_printed() -> None:
    options = argparse.Namespace(peers=4, rounds=None, data=None, seed=0, keep=True)
    text = "".join(f"    {line}\n" for line in command_line.make_demo_script(options).splitlines())
    assert text in (ROOT / "docs" / "guide.md").read_text()


def test_what_is_asked_for_is_in_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "--peers", "7", "--rounds", "3", "--data", "my texts/", "--seed", "5")
    assert [name for name in NAMES if f"--name {name} " in said] == list(NAMES[:7])
    assert "--rounds 3 --data 'my texts/' --set seed=5" in said and "kill" in said.splitlines()[-1]
    assert not printed(capsys, "--keep").splitlines()[-1].startswith("kill"), "the network goes on running"
    assert "#" in printed(capsys, "--keep").splitlines()[-1]


@pytest.mark.parametrize("other", ["--rlhf=toy", "--annotate", "--mixed", "--attack=lazy"])
def test_what_commands_cannot_do_is_named(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--commands", other]) == 2
    assert f"{other.partition('=')[0]}: leave it out with --commands" in capsys.readouterr().err


@pytest.mark.real("four daemons that a shell starts")
def test_the_commands_work_as_they_are_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the ports, which other tests of this machine may have, and the size of the model."""
    script = printed(capsys, "--rounds", "3").replace(" train --name demo", f" train --name demo {TINY}")
    script = re.sub(r"127\.0\.0\.1:7[78]0?\d+", "127.0.0.1:0", script)
    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    here = {"PATH": path, "PYTHONPATH": str(ROOT)}  # the program of this checkout
    done = run_process(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env=environment() | here,
        capture_output=True,
        text=True,
        errors="replace",  # what so small a model says
        start_new_session=True,
        idle=DEMO_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "audit=sampled needs a steady uplink" in " ".join(done.stdout.split()), "four that train, of whom one may lie"
    assert "finished, round 3 of 3" in done.stdout
    assert len(re.findall(r"^[123] [0-9a-f]{8} +accept", done.stdout, re.MULTILINE)) == 3, done.stdout
    for name in NAMES[:4]:
        assert "stopping on SIGTERM" in (tmp_path / "folkmoot-lab" / f"{name}.log").read_text()


@pytest.mark.real("a daemon and the commands that `init` printed")
def test_init_prints_commands_that_work(tmp_path: Path) -> None:
    """Its program is not on the path, and the data directory has a space."""
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
        assert said["they"].strip().endswith("peer join STRING")
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert wait(daemon) == 0
