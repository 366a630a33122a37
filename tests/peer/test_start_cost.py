"""Modules that a process imports before it does its work. Imports take most of its start."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from peer.source_commit import describe_version
from tests.peer.processes import Daemon, command, daemons, environment
from tests.waiting import run_process

# Runs `peer` with the arguments behind it, and prints its modules at exit.
PEER = "import atexit, sys; from peer.__main__ import main; atexit.register(lambda: print(*sys.modules)); sys.exit(main())"
# An interpreter alone has 68 modules; trio, PyNaCl and their dependencies have 170.
VOTER_MODULES_MAX = 525
VERSION_MODULES_MAX = 120
# A voter without a job and without a person at its prompt needs none of them.
UNUSED = {
    *("numpy", "rich", "prompt_toolkit", "email", "asyncio", "aiohttp", "jinja2", "zeroconf", "multiprocessing", "concurrent"),
    *("tinygrad", "jax"),
    *("torch", "tokenizers", "safetensors", "tomllib", "xml", "csv", "importlib.metadata", "peer.commands.definitions"),
    *("demo", "peer.doctor", "peer.export", "peer.worker", "curation.service", "training.replicated.replicated_model"),
}


def by_package(modules: Sequence[str]) -> str:
    counted = Counter(name.partition(".")[0] for name in modules)
    return ", ".join(f"{name} {count}" for name, count in counted.most_common())


def start_voter(daemon: Daemon) -> subprocess.Popen[bytes]:
    words = ("run", "--role", "voter", "--data-dir", str(daemon.directory), "--no-console")
    with daemon.log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", PEER, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
        )


@pytest.mark.real("processes")
async def test_an_idle_voter_imports_what_it_needs_alone(tmp_path: Path) -> None:
    with daemons([tmp_path / "voter"]) as (daemon,):
        assert command("init", "--network", "lab", "--data-dir", str(daemon.directory))[0] == 0
        daemon.process = start_voter(daemon)
        await daemon.answers()
        assert daemon.terminate() == 0
        modules = daemon.log.splitlines()[-1].split()
    assert {"peer.daemon.daemon", "peer.api.handlers.local_peer_handler"} <= set(modules)
    assert sorted(UNUSED & set(modules)) == []
    assert len(modules) <= VOTER_MODULES_MAX, by_package(modules)


@pytest.mark.real("processes")
def test_the_version_is_told_without_the_command_line() -> None:
    done = run_process([sys.executable, "-c", PEER, "--version"], capture_output=True, text=True, check=True)
    version, modules = done.stdout.splitlines()
    assert version == describe_version()
    assert len(modules.split()) <= VERSION_MODULES_MAX, by_package(modules.split())
