"""Terminals, standard input, output and arguments of real processes: the person's view, Ctrl-C, and the exit."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
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
from tests.peer.processes import children, command, daemons, environment, import_torch_for_ever, wait, wait_for_ends
from tests.peer.screen import terminal
from tests.waiting import in_time, patience_seconds, run_process

RUN = ("run", "--role", "voter", "--listen", "127.0.0.1:0")
SHORT = ("model.width=32", "model.layers=1", "model.hidden=64", "model.context=64", "local_steps=5", "batch=2")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A data directory of a network with one peer, anna."""
    made = tmp_path / "peer"
    assert command("init", "--network", "lab", "--name", "anna", "--data-dir", str(made))[0] == 0
    return made


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience_seconds()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def descendants(pid: int, count: int) -> list[int]:
    """Wait until this process has at least `count` children and grandchildren, and return them."""

    def found() -> list[int]:
        return [further for started in children(pid) for further in (started, *children(started))]

    soon(lambda: len(found()) >= count)
    return found()


@pytest.mark.real("processes")
def test_control_c_ends_the_command_that_runs_and_not_the_peer(directory: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # a dial waits for its greeting
    silent.settimeout(patience_seconds())
    command = f"connect 127.0.0.1:{silent.getsockname()[1]}"
    with silent, terminal(*RUN, "--data-dir", str(directory)) as shown:
        shown.until("peer>$")
        shown.type(f"{command}\r")
        with silent.accept()[0]:
            shown.type("\x03")
            shown.until(f"interrupted: '{command}'")
        shown.type("sttas\r")
        shown.until("did you mean stats")
        shown.type("\x03")
        shown.until("`quit`, Ctrl-D or a second Ctrl-C stops the peer")
        assert shown.process.poll() is None
        shown.type("\x03")
        assert shown.wait() == 0


@pytest.mark.real("processes")
def test_the_prompt_says_who_it_is_and_what_happens_and_leaves_the_line_being_typed_whole(
    directory: Path, tmp_path: Path
) -> None:
    screen = terminal(*RUN, "--data-dir", str(directory), columns=100, rows=24)
    with screen as shown, daemons([tmp_path / "erin"]) as (erin,):
        shown.until("peer>$")
        assert re.match(r"anna \([a-z2-7]{8}\) of network lab listens on 127\.0\.0\.1:\d+: working$", shown.lines[0]), shown.lines
        shown.type("invite\r")
        printed = r"(folkmoot1:[\w\n-]+?)\nthe new peer dials .*\npeer>$"
        invitation = re.search(printed, shown.until(printed))
        assert invitation is not None
        shown.type("status")  # without Enter
        shown.until("peer> status$")
        erin.start("join", invitation[1].replace("\n", ""), *RUN[1:], "--name", "erin")
        told = shown.until(r"is a voter candidate: to approve it, run `peer approve erin`\n(.*\n)*peer> status$")
        assert re.search(r"\d\d:\d\d:\d\d member +erin was admitted as a member, invited by anna\n", told), told
        assert told.count("peer> status") == 1 and told.endswith("\npeer> status")
        shown.type("\x15approve erin\r")
        told = shown.until(r"erin is now one of 2 voters\n(.*\n)*peer>$")
        shown.type("log 30\r")  # more than its last lines, since blocks may continue
        assert "erin" in shown.until(r"peer> log 30\n(.*\n){3,}peer>$").split("log 30")[1]


@pytest.mark.real("processes")
def test_a_peer_ends_in_good_order_with_the_terminal_of_its_prompt(directory: Path) -> None:
    with terminal(*RUN, "--data-dir", str(directory)) as shown:
        shown.until("peer>$")
        shown.close()
        assert wait(shown.process) == 0
    assert not (directory / "control.sock").exists()
    log = (directory / "peer.log").read_text()
    assert "stopping on SIGHUP" in log and "Traceback" not in log


@pytest.mark.real("processes")
def test_a_daemon_without_a_terminal_reopens_its_log_at_sighup_and_goes_on(directory: Path, tmp_path: Path) -> None:
    log, moved = tmp_path / "rotated.log", tmp_path / "rotated.log.1"
    with daemons([directory]) as (daemon,):
        daemon.start(*RUN, "--log-file", str(log))
        soon(lambda: log.exists() and "listens on" in log.read_text())
        log.rename(moved)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        soon(lambda: log.exists() and "reopened the log, the peer keeps running" in log.read_text())
        assert daemon.terminate() == 0
        assert "stopping on SIGTERM" in log.read_text() and "stopping" not in moved.read_text() + daemon.log


KEYS = {
    "honest_roots_equal",
    "heights",
    "heldout_bits_per_byte",
    "baseline_bits_per_byte",
    "accepted",
    "rejected",
    "decision_ms_p50",
    "decision_ms_p99",
    "bytes_sent_per_peer_per_round",
    "pss_mb_per_peer",
    "seconds_total",
    "seconds_to_first_decision",
}


def demo(folder: Path, rounds: int) -> list[str]:
    settings = [word for field in SHORT for word in ("--set", field)]
    return ["demo", "--report", str(folder / "run"), "--rounds", str(rounds), *settings]


@pytest.mark.real("processes")
@pytest.mark.long
def test_closing_the_terminal_of_a_demo_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_torch_for_ever(tmp_path, monkeypatch)
    with terminal(*demo(tmp_path, 500), "--no-web") as shown:
        shown.until("4 peers are running")
        pids = [shown.process.pid, *descendants(shown.process.pid, 4 + 3)]  # four peers and three workers
        shown.close()
        wait_for_ends(pids)


@pytest.mark.real("processes")
@pytest.mark.long
def test_a_demo_shows_its_liar_with_the_reasons_in_words_its_report_is_whole_and_its_export_is_reproduced(tmp_path: Path) -> None:
    """On average two peers replay each proposal of the liar."""
    sampled = ("--audit", "sampled", "--attack", "false-update", "--set", "audit_window=6", "audit_rate=1")
    with terminal(*demo(tmp_path, 12), *sampled, "--json", str(tmp_path / "r.json"), columns=120, rows=40) as shown:
        shown.until(r"liar-2 +\d+  .*suspended.*\n(│.*│\n)*╰─+╯$")
        frame = "\n".join(shown.lines)
        assert re.search(r"╭─+ folkmoot demo ─+╮\n(│.*│\n)+╰─+╯", frame), frame
        for name in ("trainer-0", "trainer-1", "voter-3"):
            assert re.search(rf"│ {name} +\d+ ", frame), frame
        assert "…" not in frame
        status = shown.wait()
        told = "\n".join(shown.lines)
        assert status == 0, told
        assert re.search(r"│ liar-2 +suspended once: ", told), told
        assert "all honest peers have equal state roots, each dishonest peer was found, the loss fell" in told
        assert max(map(len, shown.lines)) <= 120
    report = json.loads((tmp_path / "r.json").read_text())
    assert KEYS - report.keys() == set()
    assert (report["suspensions"], report["false_challenges"], report["audit"]) == ({"liar-2": 1}, {}, "sampled")
    assert report["honest_roots_equal"] is True and report["baseline_bits_per_byte"] is None
    assert report["heldout_bits_per_byte"][-1] < report["heldout_bits_per_byte"][0]
    sent = report["bytes_sent"]["trainer-0"]
    # Some replies with blobs are cancelled before they leave as bulk data.
    assert sent["bulk"] > 0 and 0 < sent["reveals"] <= sent["blobs"]
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert "export" in names and any(name.endswith((".png", ".svg")) for name in names)
    status, out, error = command("audit", str(tmp_path / "run" / "export"))
    assert (status, error) == (0, "") and "reproduced" in out


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
    return invitation_text(
        make_invitation(
            founder, Genesis("lab", 1, bytes(16), {founder.public: Founder("anna", ())}, founding_modules()), 7, ("127.0.0.1:1",)
        )
    )


@pytest.mark.real("processes, and their standard input")
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


@pytest.mark.real("processes, and their standard input")
def test_join_without_an_invitation_says_how(tmp_path: Path) -> None:
    with in_time():
        _, told = peer("join", "--data-dir", str(tmp_path)).communicate(timeout=patience_seconds())
    assert told.startswith(b"peer: error: join: missing INVITATION") and told.count(b"\n") == 1


@pytest.mark.real("processes, and their standard input")
def test_variable_reaches_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INVITATION_VARIABLE, "text")
    assert read_invitation("") == "text" and INVITATION_VARIABLE not in os.environ


@pytest.mark.real("processes, and their standard input")
def test_files_that_hold_no_invitation(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "large").write_bytes(b"x" * 200_000)
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("empty", "is empty"), ("large", "has more than"), ("pipe", "is a pipe")):
        with pytest.raises(UserError, match=told):
            read_invitation(f"@{tmp_path / name}")


@pytest.mark.real("processes, and their standard input")
def test_silent_standard_input_has_a_deadline(standard_input: Callable[[bytes], None]) -> None:
    with pytest.raises(UserError, match=r"no input for 0\.05 s"):
        list(read_chunks(0.05))


@pytest.mark.real("processes, and their standard input")
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


@pytest.mark.real("processes, and their standard input")
def test_standard_input_is_read_once(tmp_path: Path) -> None:
    options = argparse.Namespace(command="train", data="-", examples="-")
    with pytest.raises(UserError, match="is given twice"), standard_input_as_file(options, tmp_path):
        pass


# Standard output without a reader -------------------------------------------------------------------------------------


@pytest.mark.real("processes, and their standard input")
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


@pytest.mark.real("processes, and their standard input")
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


@pytest.mark.real("processes, and their standard input")
async def test_each_listing_ends_quietly_where_its_reader_is_gone(tmp_path: Path) -> None:
    """A running peer answers, and the command's output has no reader: as text, as JSON and in pieces."""
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
