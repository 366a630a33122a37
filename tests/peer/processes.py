"""Daemons in processes: real peers on loopback, each ended by its process id in every case."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio

from peer.api import control_socket
from peer.cli import main
from protocol.api import StatusView
from protocol.errors import UserError
from tests.waiting import PatienceEnded, in_time, patience, patience_seconds, run_process

LOG_SHOWN = 4_000  # characters at the log's end, shown where a test fails after a daemon has ended
DEMO_SECONDS_MAX = 300.0
LATE = {"absent", "unjudged"}  # verdicts on proposals of honest trainers on a busy machine


def environment() -> dict[str, str]:
    """Return this process's environment without settings of peers on this machine. Another peer may use the default ports."""
    ports = {"PEER_LISTEN": "127.0.0.1:0", "PEER_WEB_LISTEN": "127.0.0.1:0"}
    return {name: value for name, value in os.environ.items() if not name.startswith("PEER_")} | ports


class Daemon:
    """A long-running `peer COMMAND …`. Its log is beside its data directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log_file = directory.with_suffix(".log")
        self.client = control_socket.make_client(directory)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, module: str = "peer.cli", descriptors_max: int | None = None) -> Daemon:
        command = [sys.executable, "-m", module, *arguments, "--data-dir", str(self.directory), "--no-console"]
        if descriptors_max is not None:  # both limits, so that the daemon cannot raise its soft one
            command = ["sh", "-c", f'ulimit -n {descriptors_max} && exec "$0" "$@"', *command]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    async def answers(self) -> StatusView:
        """Wait until the daemon answers, and return its status."""
        assert self.process is not None
        with patience():
            while True:
                assert self.process.poll() is None, self.log
                with contextlib.suppress(UserError):
                    return await self.client.status()
                await trio.sleep(0.02)

    async def until(self, **expected: object) -> StatusView:
        """Wait until these fields of its status have these values, and return the status."""
        status = await self.client.status()
        with trio.move_on_after(patience_seconds()):
            while any(getattr(status, name) != value for name, value in expected.items()):
                await trio.sleep(0.02)
                status = await self.client.status()
            return status
        raise PatienceEnded(f"{expected} never came: {status}\n{self.log}")

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return wait(self.process)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait(process: subprocess.Popen[Any]) -> int:
    """Wait for the end of the process and return its exit status."""
    with in_time():
        return process.wait(patience_seconds())


async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds, since other processes cannot wake this one."""
    with patience():
        while not await condition():  # noqa: ASYNC110
            await trio.sleep(0.05)


@contextlib.contextmanager
def daemons(directories: Sequence[Path]) -> Iterator[list[Daemon]]:
    made = [Daemon(directory) for directory in directories]
    try:
        yield made
    finally:
        for daemon in made:
            # Pytest shows these where the test failed.
            if "Traceback" in (log := daemon.log if daemon.log_file.exists() else ""):
                print(f"{daemon.directory.name} logged a fault:\n{log[log.index('Traceback') :][:LOG_SHOWN]}")
            if daemon.process is not None and daemon.process.poll() is not None:
                print(f"{daemon.directory.name} ended with {daemon.process.returncode}:\n{daemon.log[-LOG_SHOWN:]}")
            daemon.kill()


def peer(*arguments: str) -> tuple[int, str, str]:
    """Run one `peer` command and return its exit status, output and error output."""
    done = run_process(
        [sys.executable, "-m", "peer.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def demo(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run `peer demo` and return its exit status, report and whole output. Its files are in `folder / "run"`."""
    command = [sys.executable, "-m", "peer.cli", "demo", "--no-web", *arguments]
    command += ["--report", str(folder / "run"), "--json", str(folder / "r.json")]
    done = run_process(command, DEMO_SECONDS_MAX, capture_output=True, text=True, env=environment(), stdin=subprocess.DEVNULL)
    report = json.loads((folder / "r.json").read_text()) if (folder / "r.json").exists() else {}
    return done.returncode, report, done.stdout + done.stderr


def command(*arguments: str) -> tuple[int, str, str]:
    """Run one `peer` command in this process, which saves the start of an interpreter. The command must end by itself."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), ThreadPoolExecutor(1) as thread:
        status = thread.submit(main, arguments).result(patience_seconds())  # in another thread than the test, where Trio may run
    for stream in streams:
        stream.seek(0)
    return status, streams[0].read(), streams[1].read()


def wait_for_ends(pids: Sequence[int]) -> None:
    """Wait until these processes are gone. Kill those that stay, and raise `PatienceEnded`."""
    deadline = time.monotonic() + patience_seconds()
    while left := [pid for pid in pids if _is_running(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise PatienceEnded(f"processes that did not end: {left}")
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the Python child processes of all threads of `pid`. `ldconfig`, which an import of trio starts, is not counted."""
    own = _command_line(pid)  # a child has its parent's command line until its exec
    started: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # the process is gone
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread is gone
                started += [int(word) for word in (thread / "children").read_text().split()]
    return [child for child in started if b"python" in (line := _command_line(child)).split(b"\0")[0] and line != own]


def _command_line(pid: int) -> bytes:
    """Return an empty command line if the process is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


UNTIL_THE_DAEMON_IS_GONE = "import select\n\npoll = select.poll()\npoll.register(0, 0)\npoll.poll()\n"


def import_torch_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let later workers hang at their import of torch, for tests of the worker processes alone."""
    (folder / "torch.py").write_text(UNTIL_THE_DAEMON_IS_GONE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))


def has_torch(pid: int) -> bool:
    return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()


def has_aiohttp(pid: int) -> bool:
    return b"/aiohttp/" in Path(f"/proc/{pid}/maps").read_bytes()
