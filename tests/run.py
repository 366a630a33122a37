"""`python -m tests.run`: the checks before a change lands, one step after the other.

    python -m tests.run                   all steps
    python -m tests.run virtual real      these steps: `make test`
    python -m tests.run --from real       continues at a step, if the one before it passed on the same files

The steps of IDLE compute without waiting. If the step `real` comes before them, they run beside the other steps, in the time that
these leave a processor idle. Their output and result follow at their place.

Tests of the rings `pure` and `virtual` have one try. A test of the ring `real` that ends because its patience ended has a second
one, alone; the test, the load and the date are then a line in `runs/flaky.jsonl`. Any other failure is final.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.waiting import load

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"
BIN = Path(sys.executable).parent
CORES = os.cpu_count() or 1
# One process may have ended early, or wait for others. Each further one costs six seconds of a processor, to collect the tests.
PROCESSES = CORES + 1
# For steps of many processes: each would compile all modules again, and the next step pytest's test files.
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
USUAL_PRIORITY, LEAST_PRIORITY = 0, 19  # of Unix
SECOND_TRIES_MAX = 5  # if more tests time out, the machine or the change is at fault


def run(*command: str | Path, **environment: str) -> int:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode


def run_python(*arguments: str) -> int:
    return run(sys.executable, *arguments)


def lint() -> int:
    steps = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]]
    failed = next((status for name, *rest in steps if (status := run(BIN / name, *rest))), 0)
    return failed or run_python("-m", "tools.prose")


def pytest(marks: str, *arguments: str, outcomes: Path | None = None) -> int:
    command = [sys.executable, "-m", "pytest", "-m", marks, *arguments, *TESTS]
    return run(*command, **KEEP_BYTECODE, **({"TEST_OUTCOMES": str(outcomes)} if outcomes else {}))


def virtual() -> int:
    return pytest("(pure or virtual) and not large and not long", "--numprocesses", str(PROCESSES), "--dist", "worksteal")


def real() -> int:
    # Daemons for all tests of a file are started once, so a file belongs to one process.
    return with_second_try("real and not large and not long", "loadfile")


def long() -> int:
    return with_second_try("long and not large", "worksteal")  # two files have most of them


def with_second_try(marks: str, distribution: str) -> int:
    """Run tests; then those again, one by one, whose patience ended, if nothing else failed."""
    with TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        status = pytest(marks, "--numprocesses", str(PROCESSES), "--dist", distribution, outcomes=outcomes)
        failed = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    impatient = tests_of_second_try(status, failed)
    if not impatient:
        return status
    print(f"\ntests whose patience ended: {len(impatient)}. Each runs once more, alone:", flush=True)
    busy = load()
    for test in impatient:
        if status := run_python("-m", "pytest", "--quiet", *TESTS[:-1], test):
            return status
        note_flaky(test, busy)
    return 0


def tests_of_second_try(status: int, failed: list[dict[str, Any]]) -> list[str]:
    """Return the failed tests, or none where pytest itself failed, a test failed for another reason, or too many did."""
    tests = sorted({failure["test"] for failure in failed})
    is_patience_alone = status == 1 and all(failure["patience"] for failure in failed)
    return tests if is_patience_alone and len(tests) <= SECOND_TRIES_MAX else []


def note_flaky(test: str, busy: float) -> None:
    RUNS.mkdir(exist_ok=True)
    with (RUNS / "flaky.jsonl").open("a") as file:
        print(json.dumps({"test": test, "load": round(busy, 2), "date": datetime.now(UTC).isoformat()}), file=file)
    passed_at_second_try.append(test)


def demo() -> int:
    with TemporaryDirectory() as folder:
        files = ["--json", f"{folder}/report.json", "--report", f"{folder}/files"]
        return run(BIN / "peer", "demo", "--rounds", "3", "--no-web", *files)


def pages() -> int:
    """Execute the code blocks of tutorials and how-to pages."""
    return run_python("-m", "tools.run_pages")


def simulator() -> int:
    return run_python(*IDLE["simulator"])


def mutants() -> int:
    return run_python(*IDLE["mutants"])


TESTS = ["tests"]
IDLE = {
    "simulator": ["-m", "tests.sim", "--seeds", "0:200", "--jobs", str(CORES)],
    "mutants": ["-m", "tests.sim.mutants", "--quick", "--jobs", str(CORES)],
}
STEPS = {step.__name__: step for step in (lint, virtual, real, long, simulator, mutants, demo, pages)}
passed_at_second_try: list[str] = []


class IdleSteps:
    """Steps that run one after the other beside the rest, with the least priority. Half of the step `real` is waiting."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped, self._awaited = False, ""
        self._thread = ThreadPoolExecutor(1)
        self._results: dict[str, Future[int]] = {name: self._thread.submit(self._run, name) for name in names}

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def _run(self, name: str) -> int:
        with (self._folder / name).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *IDLE[name]],
                cwd=ROOT,
                env=os.environ | KEEP_BYTECODE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if self._is_stopped:  # between two steps
            self._process.kill()
        set_priority(self._process.pid, USUAL_PRIORITY if name == self._awaited else LEAST_PRIORITY)
        return self._process.wait()

    def wait(self, name: str) -> int:
        """Wait for the end of this step, now with the usual priority. Print its output and return its status."""
        self._awaited = name
        if (process := self._process) is not None and process.poll() is None:
            set_priority(process.pid, USUAL_PRIORITY)
        status = self._results[name].result()
        print((self._folder / name).read_text(), end="", flush=True)
        return status

    def stop(self) -> None:
        """End the step that runs, with its processes, and start no other."""
        self._is_stopped = True
        for result in self._results.values():
            result.cancel()
        if (process := self._process) is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._thread.shutdown()


def set_priority(pid: int, priority: int) -> None:
    """Set the priority of the session that `pid` leads. Only the superuser can raise one again."""
    with suppress(ProcessLookupError, PermissionError):  # it may have ended already
        os.setpriority(os.PRIO_PGRP, pid, priority)
    # Linux shares the processors among sessions first, and a process's own priority only counts within its session.
    # The file may be missing or read-only, and Linux refuses a second change within a tenth of a second to others than root.
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(priority))


@contextmanager
def idle_steps(names: Sequence[str]) -> Iterator[IdleSteps]:
    after_real = names[names.index("real") :] if "real" in names else []
    with TemporaryDirectory() as folder:
        steps = IdleSteps([name for name in after_real if name in IDLE], Path(folder))
        try:
            yield steps
        finally:
            steps.stop()


def digest_of_files() -> str:
    """Return a digest of all files that git knows or would add."""
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout
    total = hashlib.sha256()
    for name in sorted(filter(None, listed.split(b"\0"))):
        path = ROOT / os.fsdecode(name)
        total.update(name + b"\0" + (hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""))
    return total.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="What must hold before a change lands.")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"only these, in this order: {', '.join(STEPS)}")
    parser.add_argument(
        "--from", dest="first", choices=STEPS, metavar="STEP", help="go on at this step; the one before it must have passed"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}; steps: {', '.join(STEPS)}")
    if options.steps and options.first:
        parser.error("--from goes on to the last step: it takes no further steps")
    names = options.steps or list(STEPS)
    record, files = RUNS / "steps.json", digest_of_files()
    passed = json.loads(record.read_text()) if record.exists() else {}
    if options.first:
        names = names[names.index(options.first) :]
        before = list(STEPS)[: list(STEPS).index(options.first)][-1:]
        if before and passed.get(before[0]) != files:
            parser.error(
                f"the step {before[0]} did not pass on these files; run it first: python -m tests.run --from {before[0]}"
            )
    with idle_steps(names) as beside:
        for name in names:
            began = time.monotonic()
            print(f"\n== {name}", flush=True)
            status = beside.wait(name) if name in beside else STEPS[name]()
            result = "FAILED" if status else "passed"
            print(f"== {name}: {result} after {time.monotonic() - began:.0f} s, load {load():.1f} for each core", flush=True)
            if status:
                return status
            RUNS.mkdir(exist_ok=True)
            passed[name] = files
            record.write_text(json.dumps(passed, indent=1))
    if passed_at_second_try:
        count = len(passed_at_second_try)
        print(f"{count} {'test' if count == 1 else 'tests'} passed at the second try: {', '.join(passed_at_second_try)}")
    return 0


def exit_on_signals() -> None:
    """End this process by an exception at SIGTERM, and at SIGHUP of a closed terminal, so that idle steps end, too.

    They have a session of their own, which gets no signals of the terminal.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
