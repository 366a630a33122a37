"""Each ring notices what it forbids, and a test whose patience ended has a second try."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from tests import rings, run
from tests.waiting import PatienceEnded, ended_in_patience, patience

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
    assert noticed() == ["socket.__new__", "subprocess.Popen", "time.sleep"]


def test_a_rule_that_was_broken_is_known_where_the_code_survives() -> None:
    try:
        socket.socket()
    except BaseException:
        pass
    assert noticed() == ["socket.__new__"]


def test_the_clock_of_a_pure_test_is_no_machines() -> None:
    assert [time.monotonic() for _ in range(3)] == [number * rings.STEP_SECONDS for number in (1, 2, 3)]


async def test_a_virtual_day_takes_no_time_and_a_thread_is_none() -> None:
    await trio.sleep(86_400)
    assert trio.current_time() == 86_400 <= time.monotonic()
    assert await trio.to_thread.run_sync(threading.get_ident) == threading.get_ident()


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


ENTRY = '[[test]]\nid = "tests/test_x.py::test_{}"\nsince = 2026-11-01\nreason = "luck"\n'


def test_the_quarantine_is_small_and_short(tmp_path: Path) -> None:
    file = tmp_path / "quarantine.toml"
    file.write_text("".join(map(ENTRY.format, range(5))))
    assert rings.quarantined(date(2026, 11, 15), file)["tests/test_x.py::test_4"] == "luck"
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
    if not seen.exists():
        seen.write_text("")
        raise error("late")
"""


@pytest.mark.real("processes")
@pytest.mark.parametrize(("errors", "status"), [("PatienceEnded", 0), ("AssertionError", 1)])
def test_a_test_whose_patience_ended_passes_at_its_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str, status: int
) -> None:
    monkeypatch.setattr(run, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(run, "passed_at_second_try", [])
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # what is started here is no worker
    (run.ROOT / "runs").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=run.ROOT / "runs") as folder:  # a test outside of this repository has no path that pytest takes
        test = Path(folder) / "test_sometimes.py"
        test.write_text(SOMETIMES.format(errors=errors))
        monkeypatch.setattr(run, "TESTS", ["--noconftest", "-p", "tests.conftest", str(test)])
        assert run.with_second_try("real") == status
    flaky = tmp_path / "runs/flaky.jsonl"
    assert flaky.exists() == (status == 0)
    if not status:
        (line,) = map(json.loads, flaky.read_text().splitlines())
        assert line["test"].endswith("test_fails_once[PatienceEnded]") and line["load"] >= 1


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
    monkeypatch.setattr(run, "digest_of_files", lambda: "other files")
    with pytest.raises(SystemExit):
        run.main(["--from", "long"])
