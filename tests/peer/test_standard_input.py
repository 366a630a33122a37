"""Standard input, standard output and arguments of commands, as processes of a shell have them."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from ledger.core.genesis import Founder, Genesis
from peer.api.control_socket import serve_control_socket
from peer.commands.standard_input import INVITATION_VARIABLE, read_chunks, read_invitation, standard_input_as_file
from peer.features import founding_modules
from peer.settings.invitation import invitation_text, make_invitation
from protocol.api import EventView
from protocol.errors import UserError
from protocol.identity import Identity
from tests.peer.fake_api import FakeApi
from tests.peer.processes import environment
from tests.waiting import in_time, patience_seconds, run_process

pytestmark = pytest.mark.real("processes, and their standard input")


def peer(*arguments: str, **more: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "peer.cli", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **({"env": environment()} | pipes | more))  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    reader, writer = os.pipe()

    def write(data: bytes) -> None:
        os.write(writer, data)
        os.close(writer)

    with os.fdopen(reader) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield write


def invitation() -> str:
    founder = Identity(bytes(32))
    genesis = Genesis("lab", 1, bytes(16), {founder.public: Founder("anna", ())}, founding_modules())
    return invitation_text(make_invitation(founder, genesis, 7, ("127.0.0.1:1",)))


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="only Linux shows processes as files")
@pytest.mark.parametrize("way", ["argument", "standard input", "file", "variable"])
def test_invitation_is_in_no_list_of_processes(way: str, tmp_path: Path) -> None:
    text = invitation()
    (tmp_path / "invitation").write_text(text + "\n")
    said = {"argument": text, "standard input": "-", "file": f"@{tmp_path / 'invitation'}", "variable": ""}[way]
    variable = {INVITATION_VARIABLE: text} if way == "variable" else {}
    place = ["--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--role", "voter"]
    process = peer("join", *filter(None, [said]), *place, env=environment() | variable)
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(text.encode() + b"\n")
        process.stdin.close()
        assert any(b"joining " in line for line in process.stdout)
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert text.encode() not in shown and b"--data-dir" in shown
        assert (tmp_path / "data" / "invitation").read_text().strip() == text
        process.send_signal(signal.SIGTERM)


def test_join_without_an_invitation_says_how(tmp_path: Path) -> None:
    with in_time():
        _, told = peer("join", "--data-dir", str(tmp_path)).communicate(timeout=patience_seconds())
    assert told.startswith(b"peer: error: join: give the string") and told.count(b"\n") == 1


def test_variable_reaches_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INVITATION_VARIABLE, "text")
    assert read_invitation("") == "text" and INVITATION_VARIABLE not in os.environ


def test_files_that_hold_no_invitation(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "large").write_bytes(b"x" * 200_000)
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("empty", "is empty"), ("large", "has more than"), ("pipe", "is a pipe")):
        with pytest.raises(UserError, match=told):
            read_invitation(f"@{tmp_path / name}")


def test_silent_standard_input_has_a_deadline(standard_input: Callable[[bytes], None]) -> None:
    with pytest.raises(UserError, match=r"gave nothing for 0\.05 s"):
        list(read_chunks(0.05))


@pytest.mark.parametrize(
    ("command", "name", "data", "ending"),
    [
        ("train", "data", b"a text", ".txt"),
        ("train", "examples", b' {"prompt": "a"}', ".jsonl"),
        ("tasks", "what", b"text\na\n", ".csv"),
        ("tasks", "what", b'[{"text": "a"}]', ".json"),
        ("rlhf", "blocklist", b"a\n", ".txt"),
    ],
)
def test_command_copies_standard_input(
    command: str, name: str, data: bytes, ending: str, tmp_path: Path, standard_input: Callable[[bytes], None]
) -> None:
    standard_input(data)
    options = argparse.Namespace(command=command, **{name: "-"})
    with standard_input_as_file(options, tmp_path):
        path = Path(getattr(options, name))
        assert path.read_bytes() == data and path.suffix == ending
        assert path.parent.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_standard_input_is_read_once(tmp_path: Path) -> None:
    options = argparse.Namespace(command="train", data="-", examples="-")
    with pytest.raises(UserError, match="stands twice"), standard_input_as_file(options, tmp_path):
        pass


# Standard output that nobody reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["completion", "bash"], ["config", "show"], ["identity"], ["doctor"]])
def test_closed_pipe_gives_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    place = ["--data-dir", str(tmp_path / "data")] if arguments[0] in ("config", "identity", "doctor") else []
    process = peer(*arguments, *place, stdout=writer)
    os.close(writer)
    with in_time():
        _, told = process.communicate(timeout=patience_seconds())
    assert b"Traceback" not in told and b"Exception" not in told


@pytest.mark.parametrize("is_closed", [True, False])
def test_group_of_broken_pipes_is_quiet_where_output_is_closed(is_closed: bool) -> None:
    code = (
        "from peer import cli; raised = ExceptionGroup('tasks', [ExceptionGroup('task', [BrokenPipeError(32, 'Broken pipe')])])\n"
        "def fail(options): raise raised\n"
        "cli._config = fail; raise SystemExit(cli.main(['config', 'show']))"
    )
    reader, writer = os.pipe()
    if is_closed:
        os.close(reader)
    done = run_process([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 1 and (b"Traceback" in done.stderr) is not is_closed
    if not is_closed:
        os.close(reader)


async def test_each_listing_ends_quietly_where_its_reader_is_gone(tmp_path: Path) -> None:
    """A running peer answers, and nobody reads the command's output: as text, as JSON and in pieces."""
    async with trio.open_nursery() as nursery:
        api = FakeApi()
        api.log.append(EventView(1, 0, "round", "a round", {}))
        await nursery.start(serve_control_socket, api, tmp_path)
        for line in ("log", "log --json", "peers", "status", "stats --json", "rounds", "sample once --stream"):
            words = line.split()
            reader, writer = os.pipe()
            os.close(reader)
            command = [sys.executable, "-m", "peer.cli", *words, "--data-dir", str(tmp_path)]
            done = await trio.run_process(command, stdout=writer, capture_stderr=True, check=False, env=environment())
            os.close(writer)
            assert (done.returncode, done.stderr) == (1, b""), line
        nursery.cancel_scope.cancel()
