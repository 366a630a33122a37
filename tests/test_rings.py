"""Each ring notices forbidden calls, and a test that timed out has a second try."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from _pytest.mark.expression import Expression
from hypothesis import given
from hypothesis import strategies as st

from tests import rings, run
from tests.peer.processes import wait_for_ends
from tests.waiting import PatienceEnded, ended_in_patience, in_time, patience, patience_seconds, run_process

Forbidden = pytest.fail.Exception


def noticed() -> list[str]:
    """Return the broken rules, and forget them, so that this test may pass."""
    found = rings.broken()[:]
    rings.broken().clear()
    return found


def test_a_pure_test_has_no_socket_no_process_and_does_not_sleep() -> None:
    with pytest.raises(Forbidden):
        socket.socket()
    with pytest.raises(Forbidden):
        subprocess.run([sys.executable, "--version"], check=True)
    with pytest.raises(Forbidden):
        time.sleep(0.001)
    time.sleep(0)
    assert noticed() == ["socket.__new__", "subprocess.Popen", "time.sleep"]


@pytest.mark.parametrize("event", ["socket.getaddrinfo", "os.fork", "os.forkpty", "os.posix_spawn"])
def test_a_pure_test_looks_up_no_name_and_forks_no_process(event: str) -> None:
    with pytest.raises(Forbidden):
        sys.audit(event)
    assert noticed() == [event]


def item_of(request: pytest.FixtureRequest, function: Callable[..., object], *markers: pytest.MarkDecorator) -> pytest.Item:
    item: pytest.Item = pytest.Function.from_parent(request.node.parent, name="test_of_this_test", callobj=function)
    for marker in markers:
        item.add_marker(marker)
    return item


def test_the_ring_of_a_test_follows_from_its_marker_and_its_kind(request: pytest.FixtureRequest) -> None:
    async def later() -> None:
        pass

    @given(st.integers())
    async def drawn(number: int) -> None:
        pass

    assert rings.ring_of(item_of(request, lambda: None)) == "pure"
    assert rings.ring_of(item_of(request, later)) == rings.ring_of(item_of(request, drawn)) == "virtual"
    assert rings.ring_of(item_of(request, later, pytest.mark.real("sockets"))) == "real"
    for without_reason in (pytest.mark.real, pytest.mark.real("sockets", "threads"), pytest.mark.real(None)):
        with pytest.raises(pytest.UsageError, match="`real` needs its reason"):
            rings.ring_of(item_of(request, later, without_reason))


def test_a_test_in_quarantine_may_fail_or_pass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    item = item_of(request, lambda: None)
    monkeypatch.setattr(rings, "quarantined", lambda: {item.nodeid: "luck"})
    rings.mark([item])
    marker = item.get_closest_marker("xfail")
    assert marker is not None and marker.kwargs == {"reason": "luck", "strict": False}


def test_what_one_test_broke_is_not_held_against_the_next_and_nothing_is_forbidden_between(
    request: pytest.FixtureRequest,
) -> None:
    with pytest.raises(Forbidden):
        socket.socket()
    with rings.enforced(item_of(request, lambda: None)):
        assert rings.broken() == []
        with pytest.raises(Forbidden):
            socket.socket()
        noticed()
    socket.socket().close()


def test_a_rule_that_was_broken_is_known_where_the_code_survives() -> None:
    try:
        socket.socket()
    except BaseException:
        pass
    assert noticed() == ["socket.__new__"]


def test_the_clock_of_a_pure_test_is_no_machines(tmp_path: Path) -> None:
    assert [time.monotonic() for _ in range(3)] == [number * rings.STEP_SECONDS for number in (1, 2, 3)]
    before, after = time.time() * 1e9, time.time_ns()
    assert round((after - before) / 1e9, 6) == rings.STEP_SECONDS
    (tmp_path / "file").touch()
    assert abs((tmp_path / "file").stat().st_mtime - time.time()) < 3_600, "dates of files are of the same day"


async def test_a_virtual_day_takes_no_time_and_a_thread_is_none() -> None:
    await trio.sleep(86_400)
    assert trio.current_time() == 86_400 <= time.monotonic()
    assert await trio.to_thread.run_sync(threading.get_ident) == threading.get_ident()
    variable: ContextVar[int] = ContextVar("variable", default=1)
    await trio.to_thread.run_sync(variable.set, 2)
    assert variable.get() == 1, "as a thread has a context of its own"


async def test_a_virtual_test_does_not_connect_or_listen() -> None:
    with socket.socket() as ours:
        with pytest.raises(Forbidden):
            ours.bind(("127.0.0.1", 0))
        with pytest.raises(Forbidden):
            ours.connect(("127.0.0.1", 9))
    assert noticed() == ["socket.bind", "socket.connect"]


@pytest.mark.virtual(threads=True)
async def test_the_virtual_clock_stands_still_while_a_thread_works_and_goes_on_while_it_asks_trio() -> None:
    def work() -> tuple[float, float, float]:
        began = trio.from_thread.run_sync(trio.current_time)
        hashlib.sha256(bytes(50_000_000)).digest()
        worked = trio.from_thread.run_sync(trio.current_time)
        trio.from_thread.run(trio.sleep, 5)
        return began, worked, trio.from_thread.run_sync(trio.current_time)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 100)
        assert await trio.to_thread.run_sync(work) == (0, 0, 5)
    assert trio.current_time() == 100


async def test_patience_is_what_ends_a_wait() -> None:
    with pytest.raises(PatienceEnded), patience():
        await trio.sleep_forever()
    assert trio.current_time() >= 60


def test_patience_grows_with_the_load_and_is_never_less_than_on_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for average, seconds in ((0.0, 10.0), (2.0, 10.0), (3.0, 15.0), (8.0, 40.0)):
        monkeypatch.setattr(os, "getloadavg", lambda average=average: (average, 0.0, 0.0))
        assert patience_seconds(10.0) == seconds


def test_a_process_or_a_reply_that_takes_too_long_ends_patience() -> None:
    for late in (subprocess.TimeoutExpired("peer", 9), TimeoutError("timed out")):
        with pytest.raises(PatienceEnded), in_time():
            raise late
    with pytest.raises(ConnectionResetError), in_time():
        raise ConnectionResetError("gone")


async def test_an_error_of_what_was_cancelled_is_the_end_of_patience() -> None:
    with pytest.raises(PatienceEnded), patience():
        try:
            await trio.sleep_forever()
        finally:
            raise AssertionError("status 503: stopping")
    with pytest.raises(AssertionError), patience():
        raise AssertionError("status 404")


def test_a_second_try_is_for_patience_alone() -> None:
    late, wrong = PatienceEnded("late"), AssertionError("wrong")
    assert ended_in_patience(ExceptionGroup("", [late, ExceptionGroup("", [late])]))
    assert not ended_in_patience(ExceptionGroup("", [late, wrong])) and not ended_in_patience(wrong)
    assert not ended_in_patience(trio.TooSlowError("a deadline of the test's own"))


def test_a_second_try_is_for_few_tests_and_only_if_nothing_else_failed() -> None:
    late = [{"test": f"test_{number}", "patience": True} for number in range(run.SECOND_TRIES_MAX)]
    wrong, more = {"test": "test_wrong", "patience": False}, {"test": "test_more", "patience": True}
    assert run.tests_of_second_try(1, [*late[:2], late[0]]) == ["test_0", "test_1"], "once, though set-up and end failed"
    assert len(run.tests_of_second_try(1, late)) == run.SECOND_TRIES_MAX
    for status, failed in ((1, []), (1, [*late, more]), (1, [late[0], wrong]), (2, late), (3, late), (0, [])):
        assert run.tests_of_second_try(status, failed) == []


ENTRY = '[[test]]\nid = "tests/test_x.py::test_{}"\nsince = 2026-11-01\nreason = "luck"\n'


def test_the_quarantine_is_small_and_short(tmp_path: Path) -> None:
    file = tmp_path / "quarantine.toml"
    file.write_text("".join(map(ENTRY.format, range(5))))
    assert rings.quarantined(date(2026, 11, 15), file)["tests/test_x.py::test_4"] == "luck"
    with pytest.raises(pytest.UsageError, match="test_0 is there since 2026-11-01"):
        rings.quarantined(date(2026, 10, 31), file)
    with pytest.raises(pytest.UsageError, match=r"test_0 is there since 2026-11-01; 14 days are allowed"):
        rings.quarantined(date(2026, 11, 16), file)
    file.write_text("".join(map(ENTRY.format, range(6))))
    with pytest.raises(pytest.UsageError, match="holds 6 tests; at most 5"):
        rings.quarantined(date(2026, 11, 2), file)


SOMETIMES = """
import pathlib
import pytest
from tests.waiting import PatienceEnded

@pytest.mark.real("a test of tests")
@pytest.mark.parametrize("error", [{errors}])
def test_fails_once(error):
    seen = pathlib.Path(__file__).with_name("seen")
    if not seen.exists() or {always}:
        seen.write_text("")
        raise error("late")
"""


@pytest.mark.real("processes")
@pytest.mark.parametrize(
    ("errors", "always", "status"), [("PatienceEnded", False, 0), ("PatienceEnded", True, 1), ("AssertionError", False, 1)]
)
def test_a_test_whose_patience_ended_passes_at_its_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str, always: bool, status: int
) -> None:
    monkeypatch.setattr(run, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(run, "passed_at_second_try", [])
    for name in ("PYTEST_XDIST_WORKER", "TEST_OUTCOMES"):  # the started process is neither a worker nor a test of this run
        monkeypatch.delenv(name, raising=False)
    (run.ROOT / "runs").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=run.ROOT / "runs") as folder:  # pytest accepts no path of a test outside of this repository
        test = Path(folder) / "test_sometimes.py"
        test.write_text(SOMETIMES.format(errors=errors, always=always))
        monkeypatch.setattr(run, "TESTS", ["--noconftest", "-p", "tests.conftest", str(test)])
        assert run.with_second_try("real", "load") == status
    flaky = tmp_path / "runs/flaky.jsonl"
    assert flaky.exists() == (status == 0)
    if not status:
        (line,) = map(json.loads, flaky.read_text().splitlines())
        assert line["test"].endswith("test_fails_once[PatienceEnded]") and line["load"] >= 1


SURVIVED = """
import socket

def test_survives():
    try:
        socket.socket()
    except BaseException:
        pass
"""


@pytest.mark.real("processes")
def test_a_test_fails_where_the_code_under_test_survives_a_broken_rule(tmp_path: Path) -> None:
    (run.ROOT / "runs").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=run.ROOT / "runs") as folder:
        test = Path(folder) / "test_survives.py"
        test.write_text(SURVIVED)
        command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "tests.conftest", str(test)]
        with in_time():
            outcomes = {"TEST_OUTCOMES": str(tmp_path / "outcomes"), "PYTEST_XDIST_WORKER": "gw0"}
        done = run_process(command, cwd=run.ROOT, env=os.environ | outcomes, capture_output=True, text=True)
    assert not (tmp_path / "outcomes").exists(), "the process that has all reports writes them"
    assert done.returncode == 1 and "the code under test survived socket.__new__, which its ring forbids" in done.stdout


def test_a_run_goes_on_only_where_the_step_before_passed_on_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = list[str]()
    monkeypatch.setattr(run, "RUNS", tmp_path)
    monkeypatch.setattr(run, "digest_of_files", lambda: "these files")
    monkeypatch.setattr(
        run, "STEPS", {name: lambda name=name: done.append(name) or name == "long" for name in ("lint", "real", "long", "demo")}
    )
    assert run.main([]) == 1 and done == ["lint", "real", "long"], "what fails ends it"
    with pytest.raises(SystemExit):
        run.main(["--from", "demo"])
    assert "the step long did not pass on these files" in capsys.readouterr().err
    done.clear()
    assert run.main(["--from", "long"]) == 1 and done == ["long"]
    for wrong, why in (
        (["real", "nothing"], "there is no step 'nothing'"),
        (["real", "--from", "long"], "takes no further steps"),
    ):
        with pytest.raises(SystemExit):
            run.main(wrong)
        assert why in capsys.readouterr().err
    assert done == ["long"]
    monkeypatch.setattr(run, "digest_of_files", lambda: "other files")
    with pytest.raises(SystemExit):
        run.main(["--from", "long"])


def test_lint_ends_at_the_first_tool_that_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    monkeypatch.setattr(run, "run", lambda tool, *arguments: called.append(tool.name) or 7 * (tool.name == "mypy"))
    assert run.lint() == 7 and called == ["ruff", "ruff", "mypy"]


def test_each_test_that_is_not_large_is_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[str]()
    monkeypatch.setattr(run, "pytest", lambda marks, *arguments, **more: chosen.append(marks) or 0)
    assert [step() for step in (run.virtual, run.real, run.long)] == [0, 0, 0]
    for ring in rings.RINGS:
        for marks, count in (({ring}, 1), ({ring, "long"}, 1), ({ring, "large"}, 0), ({ring, "large", "long"}, 0)):
            steps = [one for one in chosen if Expression.compile(one).evaluate(lambda name, marks=marks, **more: name in marks)]
            assert len(steps) == count, marks


@pytest.mark.real("git")
def test_the_digest_of_files_is_of_names_and_contents_of_all_that_git_would_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "a").write_text("one")
    first = run.digest_of_files()
    (tmp_path / "ignored").write_text("x")
    assert run.digest_of_files() == first
    (tmp_path / "a").write_text("two")
    second = run.digest_of_files()
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, run.digest_of_files()}) == 3


@pytest.mark.real("processes")
def test_idle_steps_run_beside_those_before_them_and_are_reported_at_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    commands = {"simulator": ["-c", f"open({str(begun)!r}, 'w'); print('seeds')"], "mutants": ["-c", "print('bugs'); exit(3)"]}
    monkeypatch.setattr(run, "RUNS", tmp_path)
    monkeypatch.setattr(run, "digest_of_files", lambda: "these files")
    monkeypatch.setattr(run, "IDLE", commands)
    monkeypatch.setattr(run, "STEPS", {"real": lambda: wait_for(begun.exists), "simulator": None, "mutants": None, "demo": None})
    assert run.main([]) == 3
    printed = [word for word in capsys.readouterr().out.split() if word in {"real", "seeds", "bugs", *commands}]
    assert printed == ["real", "simulator", "seeds", "mutants", "bugs"]
    assert json.loads((tmp_path / "steps.json").read_text()) == {"real": "these files", "simulator": "these files"}


@pytest.mark.real("processes")
def test_an_idle_step_has_the_least_priority_and_ends_with_its_processes_where_another_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, new = tmp_path / "child", tmp_path / "new"
    monkeypatch.setattr(run, "IDLE", {"simulator": ["-c", PARENT, str(new), str(child)], "mutants": []})
    steps = run.IdleSteps(["simulator", "mutants"], tmp_path)
    try:
        wait_for(child.exists)
        pid = int(child.read_text())
        wait_for(lambda: priorities(pid) <= {run.LEAST_PRIORITY})
        if not os.geteuid():
            with ThreadPoolExecutor(1) as thread:
                thread.submit(steps.wait, "simulator")
                try:
                    wait_for(lambda: priorities(pid) <= {run.USUAL_PRIORITY})
                finally:
                    steps.stop()  # the thread waits for the step
    finally:
        steps.stop()
    wait_for_ends([pid])
    assert not (tmp_path / "mutants").exists()


@pytest.mark.real("processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_idle_steps_end_with_the_run_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    child = tmp_path / "child"
    idle = {"simulator": ["-c", PARENT, str(tmp_path / "new"), str(child)]}
    with subprocess.Popen([sys.executable, "-c", RUN, json.dumps(idle), str(tmp_path)], cwd=run.ROOT) as process:
        try:
            wait_for(child.exists)
            process.send_signal(number)
            with in_time():
                assert process.wait(patience_seconds()) != 0
        finally:
            process.kill()
    wait_for_ends([int(child.read_text())])


RUN = """
import json, pathlib, sys, time
from tests import run

run.IDLE, run.RUNS = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
run.digest_of_files = lambda: "these files"
run.STEPS = {"real": lambda: time.sleep(600), "simulator": None}
run.exit_on_signals()
run.main([])
"""


@pytest.mark.parametrize("error", [BlockingIOError, PermissionError, FileNotFoundError])
def test_a_session_whose_priority_cannot_be_changed_keeps_it(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    def refuse(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(os, "setpriority", lambda *arguments: None)
    monkeypatch.setattr(Path, "write_text", refuse)
    run.set_priority(os.getpid(), run.LEAST_PRIORITY)


PARENT = """
import os, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
new, file = sys.argv[1:]
with open(new, "w") as written:
    written.write(str(child.pid))
os.rename(new, file)
child.wait()
"""


def priorities(pid: int) -> set[int]:
    """Return the priorities of the process's parent, and of its session on Linux."""
    session = Path(f"/proc/{pid}/autogroup")
    found = {int(session.read_text().split()[-1])} if session.exists() else set[int]()
    return found | {os.getpriority(os.PRIO_PROCESS, os.getpgid(pid))}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience_seconds()
    while not condition():
        if time.monotonic() > deadline:
            raise PatienceEnded("the condition never held")
        time.sleep(0.01)
