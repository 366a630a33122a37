"""The whole demo as a person runs it, in its shortest form. Its output fits the terminal."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from rich.console import Console

from demo import demo_report, shutdown_signals
from demo.demo_peers import Demo
from demo.demo_report import prepare_output_paths
from demo.live_display import DemoDisplay
from demo.network_demo import BASELINE_RATES, assign_roles, baseline_rates, last_line
from peer.cli import build_parser, main
from protocol.api import JobView, RoundView
from protocol.errors import StorageError, UserError
from protocol.identity import peer_id
from tests.peer.processes import children, command, demo, environment, import_torch_for_ever, wait_for_ends
from tests.waiting import PatienceEnded, in_time, patience_seconds
from training.job_spec import InnerOptimizerKind, JobSpec, complete_fields
from training.transformer import ModelSpec


@pytest.mark.real("processes")
@pytest.mark.large  # tests/browser/test_live.py has this liar, too; tests/sim expels it in many ways
def test_who_signs_two_proposals_is_expelled_by_the_proof_in_the_chain(tmp_path: Path) -> None:
    short = ("model.width=32", "model.layers=1", "model.hidden=64", "model.context=64", "local_steps=5", "batch=2")
    status, report, said = demo(tmp_path, "--rounds", "2", "--attack", "equivocate", "--set", *short)
    assert status == 0, said
    # The first of its two proposals is honest. It is accepted if a quorum had only that one when it voted.
    rejected, accepted = report["rejected"], report["accepted"].get("liar-2", 0)
    assert rejected == ({} if accepted else {"liar-2": {"equivocation": 1}}), "from the second round on nobody waits for it"
    assert accepted <= 1
    assert isinstance(report["expelled"], dict)
    assert report["expelled"].keys() == {"liar-2"}
    assert "expelled at height" in said and "quorum 3 of 4, 2 of 3 at the end" in said
    assert command("audit", str(tmp_path / "run" / "export"))[0] == 0


def roles(folder: Path, *arguments: str) -> str:
    peers = assign_roles(build_parser().parse_args(["demo", *arguments]), folder)
    return "".join("l" if peer.lies else "t" if peer.trains else "v" for peer in peers)


def test_as_many_train_as_are_asked_for_and_the_last_of_them_lie(tmp_path: Path) -> None:
    assert (roles(tmp_path), roles(tmp_path, "--trainers", "4")) == ("ttlv", "tttl")
    assert roles(tmp_path, "--peers", "7", "--malicious", "2", "--trainers", "6") == "ttttllv"


def refused(folder: Path, *words: str) -> str:
    """Return the error output of a demo that never started."""
    status, _, said = command("demo", "--no-web", *words, "--report", str(folder / "run"), "--json", str(folder / "r.json"))
    assert status == 2 and list(folder.iterdir()) == []
    return said


@pytest.mark.parametrize("trainers", ["2", "5"])
def test_trainers_that_are_too_few_to_audit_or_more_than_there_are_are_refused(tmp_path: Path, trainers: str) -> None:
    assert f"--trainers {trainers}: 4 peers need 3 to 4 trainers" in refused(tmp_path, "--trainers", trainers)


def test_the_rival_s_rates_stand_around_the_job_s_own_unless_they_were_found_for_it() -> None:
    default = replace(JobSpec(name="demo"), **complete_fields({}))
    assert baseline_rates(default) == baseline_rates(replace(default, rounds=9)) == BASELINE_RATES
    assert baseline_rates(replace(default, inner_rate=6e-3)) == pytest.approx((3e-3, 6e-3, 1.2e-2))
    assert baseline_rates(replace(default, inner=InnerOptimizerKind.ADAMW)) == pytest.approx((1.5e-2, 3e-2, 6e-2))
    assert baseline_rates(replace(default, model=ModelSpec(width=128))) == pytest.approx((1.5e-2, 3e-2, 6e-2))


def test_of_a_peer_that_did_not_start_the_last_words_are_told(tmp_path: Path) -> None:
    file = tmp_path / "peer.log"
    file.write_text("  | OSError: in use\n    +----------------\n")
    assert last_line(file) == "OSError: in use"
    file.write_text("")
    assert last_line(file) == "its log is empty"


def test_more_liars_than_the_vote_tolerates_are_refused_unless_asked_for(tmp_path: Path) -> None:
    said = refused(tmp_path, "--malicious", "2")
    assert "4 voters tolerate 1 faulty: set --peers 7" in said
    assert "--beyond-bound" in said


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--set", "foo=1"), "unknown job field 'foo'; known: "),
        (("--set", "decay_rounds=9", "--rounds", "4"), "do not fit into 4 rounds"),
        (("--set", "rounds=5", "--rounds", "4"), "--rounds 4 and --set rounds=5 contradict each other: leave one out"),
        (
            ("--audit", "sampled", "--set", "audit=full"),
            "--audit sampled and --set audit=full contradict each other: leave one out",
        ),
    ],
)
def test_a_field_that_no_job_can_have_is_told_before_anything_starts(tmp_path: Path, wrong: tuple[str, ...], words: str) -> None:
    assert words in refused(tmp_path, *wrong)


PLACES = [
    ("--json", "nowhere/r.json", "No such file or directory; choose a file in an existing folder"),
    ("--json", "text/r.json", "Not a directory"),
    ("--json", "folder", "is a folder: give a file"),
    ("--json", "n" * 300, "File name too long"),
    ("--report", "text", "is a file: choose a new folder"),
    ("--report", "text/run", "Not a directory; choose a new folder"),
    ("--report", "folder", "is not empty"),
    ("--report", "loop/run", "Too many levels of symbolic links"),
    ("--report", "n" * 300, "File name too long"),
    ("--data", "text/x", "no such file or folder"),
    ("--data", "n" * 300, "File name too long; give a readable text file"),
    ("--data", "loop", "loop"),
]


@pytest.mark.parametrize(("flag", "place", "words"), PLACES, ids=[f"{flag} {place[:20]}" for flag, place, _ in PLACES])
def test_a_place_that_cannot_be_used_is_told_in_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str, place: str, words: str
) -> None:
    (tmp_path / "text").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "something").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr("trio.run", lambda *_: pytest.fail("it started"))
    places = {"--report": str(tmp_path / "run")} | {flag: str(tmp_path / place)}
    status = main(["demo", *(word for pair in places.items() for word in pair)])
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and place in error and words in error
    left = {"text", "folder", "loop"}
    assert {path.name for path in tmp_path.iterdir()} == left, "nothing is left of a demo that never started"


def test_a_place_that_may_not_be_written_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"--report .*run: Read-only file system; choose a new folder that you can write"):
        prepare_output_paths(tmp_path / "run", "")


def test_of_a_refused_demo_no_folder_is_left_that_it_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--json"):
        prepare_output_paths(tmp_path / "runs" / "demo", str(tmp_path / "nowhere" / "r.json"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="--json"):
        prepare_output_paths(tmp_path / "runs" / "demo", str(tmp_path / "nowhere" / "r.json"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"], "what was there stays"


def test_a_report_may_lie_inside_its_own_folder_and_what_was_there_is_kept(tmp_path: Path) -> None:
    prepare_output_paths(tmp_path / "run", str(tmp_path / "run" / "r.json"))
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "r.json").write_text("old")
    prepare_output_paths(tmp_path / "run", str(tmp_path / "r.json"))
    assert (tmp_path / "r.json").read_text() == "old"


@pytest.mark.real("processes")
@pytest.mark.long
def test_its_page_answers_as_soon_as_it_is_named_and_control_c_stops_every_process_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_torch_for_ever(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "peer.cli", "demo", "--report", str(tmp_path / "run"), "--rounds", "50"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), stdin=subprocess.DEVNULL
    )
    try:
        pids = _peers_of(process.pid)
        assert process.stdout is not None
        (named,) = itertools.islice((line for line in process.stdout if b"watch it at" in line), 1)
        with urllib.request.urlopen(named.split()[-1].decode()) as page:
            assert page.status == 200 and b"<h1>Watch</h1>" in page.read()
        process.send_signal(signal.SIGINT)
        with in_time():
            out = process.communicate(timeout=patience_seconds())[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert re.search(rb"interrupted; all 4 peers are stopped", out) and out.count(b"interrupted") == 1
    wait_for_ends(pids)


def _peers_of(pid: int) -> list[int]:
    """Wait for the four daemons and three workers, and return them. A worker may be hit during its imports."""
    deadline = time.monotonic() + patience_seconds()
    while len(daemons := children(pid)) < 4 or len(workers := [of for daemon in daemons for of in children(daemon)]) < 3:
        if time.monotonic() > deadline:
            raise PatienceEnded(f"of the demo there are {len(daemons)} daemons")
        time.sleep(0.05)
    return [*daemons, *workers]


async def forever() -> int:
    await trio.sleep_forever()
    return 1


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set signals as the demo does, and restore them afterwards. The tests' terminal stays attached."""
    monkeypatch.setattr(shutdown_signals, "detach_descriptors", lambda streams: None)
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    shutdown_signals.map_signals_to_interrupt()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.real("processes")
@pytest.mark.usefixtures("signals")
def test_a_demo_whose_terminal_closes_ends_whatever_swallows_an_interrupt() -> None:
    async def swallowing() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
            await trio.sleep_forever()
        return await forever()

    with pytest.raises(KeyboardInterrupt):
        trio.run(shutdown_signals.run_until_hangup, swallowing)


@pytest.mark.real("processes")
@pytest.mark.usefixtures("signals")
def test_what_follows_the_end_of_a_terminal_does_not_cut_off_the_stopping_of_the_peers() -> None:
    """Kernel and shell may both signal the end: at once or later, while the demo unwinds, and while it stops its peers."""
    unwound = False

    async def hung_up_again_and_again() -> int:
        nonlocal unwound
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            return await forever()
        finally:
            with trio.CancelScope(shield=True):
                for _ in range(3):
                    await trio.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGHUP)
                unwound = True

    with pytest.raises(KeyboardInterrupt):
        trio.run(shutdown_signals.run_until_hangup, hung_up_again_and_again)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
    assert unwound


@pytest.mark.real("processes")
@pytest.mark.usefixtures("signals")
def test_the_end_of_a_terminal_does_not_cut_off_the_stopping_of_peers_that_have_done_their_work() -> None:
    async def done() -> int:
        await trio.lowlevel.checkpoint()
        return 7

    assert trio.run(shutdown_signals.run_until_hangup, done) == 7
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.real("processes")
@pytest.mark.usefixtures("signals")
def test_a_demo_under_nohup_goes_on_when_the_terminal_closes() -> None:
    async def hung_up() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        await trio.sleep(0.01)
        return 7

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert trio.run(shutdown_signals.run_until_hangup, hung_up) == 7


ROUNDS = 60
REASONS = {"replay": 48, "norm": 7, "unjudged": 4, "absent": 1}


def demo_of(folder: Path, *arguments: str) -> Demo:
    options = build_parser().parse_args(["demo", *arguments])
    return Demo(options, folder, assign_roles(options, folder))


def test_engines_are_those_of_the_honest_trainers_and_the_last_one_is_the_others(tmp_path: Path) -> None:
    demo = demo_of(tmp_path, "--engines", "torch,pytorch,tinygrad")
    assert [(peer.trains, peer.lies, peer.engine) for peer in demo.peers] == [
        (True, False, "pytorch"),
        (True, False, "pytorch"),
        (True, False, "tinygrad"),
        (True, True, "tinygrad"),
    ]
    assert demo.overrides["inner"] == "adamw", "other engines than torch have no Muon"
    assert demo_of(tmp_path, "--engines", "torch,tinygrad", "--set", "inner=muon").overrides["inner"] == "muon"
    plain = demo_of(tmp_path)
    assert {peer.engine for peer in plain.peers} == {"pytorch"} and "inner" not in plain.overrides


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--engines", "torch,slate"), "'slate' is not an engine: choose from pytorch, tinygrad"),
        (("--engines", "torch,torch,torch,torch"), "--engines names 4 honest trainers, but only 3 of 4 peers are honest"),
        (("--engines", "torch", "--rlhf", "toy"), "--engines cannot be combined with --rlhf toy: leave one out"),
    ],
)
def test_engines_that_no_demo_can_have_are_refused(words: tuple[str, ...], told: str) -> None:
    status, _, error = command("demo", *words)
    assert status == 2 and told in error and error.count("\n") == 1


def picture(folder: Path, peers: int, liars: int, width: int, height: int) -> list[str]:
    demo = demo_of(folder, "--peers", str(peers), "--malicious", str(liars))
    keys = {peer_id(peer.identity.public): peer for peer in demo.peers}
    accepted = {key: ROUNDS for key, peer in keys.items() if peer.trains and not peer.lies}
    rejected = {key: REASONS for key, peer in keys.items() if peer.lies}
    verdicts = dict.fromkeys(accepted, "accept") | dict.fromkeys(rejected, "unjudged")
    job: Any = ("e" * 64, "demo", "language", "running", ROUNDS, ROUNDS, "f" * 64, "full", "0" * 64, accepted, rejected, 1)
    rounds = tuple(
        RoundView("e" * 64, number, number, verdicts, tuple(keys), True, True, "f" * 64, 2.5, None, 1.25, 1040.0)
        for number in range(ROUNDS)
    )
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(
        DemoDisplay(demo)._picture(JobView(*job, rounds_in_model=ROUNDS), rounds, width, height)
    )
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
@pytest.mark.parametrize(("peers", "liars"), [(4, 1), (7, 2), (10, 3)])
def test_the_live_table_fits_and_the_liars_rows_have_all_their_reasons(
    tmp_path: Path, peers: int, liars: int, width: int, height: int
) -> None:
    lines = picture(tmp_path, peers, liars, width, height)
    assert len(lines) < height and max(map(len, lines)) <= width
    told = " ".join("\n".join(lines).replace("│", " ").split())
    assert all(f"{reason} {count}" in told for reason, count in REASONS.items()), told
    for number in range(peers):
        assert any(f"-{number} " in line for line in lines), f"no row of peer {number}"
    assert any(line.split()[1] == str(ROUNDS - 1) for line in lines if len(line.split()) > 1), "the newest round is shown"
    assert "…" not in told


def test_a_terminal_too_low_for_the_rounds_shows_the_peers(tmp_path: Path) -> None:
    assert sum("replay 48" in line for line in picture(tmp_path, 10, 3, 80, 16)) == 3


@pytest.mark.parametrize("name", ["a short one", "one with blanks " + "that no line has room for " * 4])
def test_a_path_is_written_as_a_shell_wants_it_and_stays_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    folder = tmp_path / name
    DemoDisplay(demo_of(folder)).print_line("4 peers are running, with data in", folder)
    printed = capsys.readouterr().out
    assert shlex.quote(str(folder)) in printed and "data in" in printed


def test_the_demo_tells_the_engine_of_each_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with DemoDisplay(demo_of(tmp_path, "--engines", "torch,torch,jax")):
        assert "engines: trainer-0 pytorch, trainer-1 pytorch, trainer-2 jax, liar-3 jax\n" in capsys.readouterr().out
    with DemoDisplay(demo_of(tmp_path)):
        assert "engines" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["report.json", "sample.txt", "json"])
def test_full_disk_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    """Linux has a device that is always full."""
    (tmp_path / name).symlink_to("/dev/full")
    demo: Any = SimpleNamespace(folder=tmp_path, options=SimpleNamespace(json=str(tmp_path / "json")))
    with pytest.raises(StorageError, match=f"{name}: the disk is full; free some space"):
        demo_report.write_report(demo, "{}")
        demo_report.write_text(tmp_path / "sample.txt", "text")
