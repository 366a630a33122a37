"""The processes of a rival: their start, their cores and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.rivals.environment import Unavailable
from benchmarks.rivals.work import Work

CHECKOUT = Path(__file__).parents[2]
LOOK_SECONDS = 0.1  # interval between checks for ended processes; no timed work waits for it


def reports(
    python: str, module: str, work: Work, processes: int, seconds_max: float, cores: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Return the reports of all processes of `benchmarks.rivals.MODULE`, which run on `cores` if there are any.

    Raises `Unavailable` with the last output of a process that fails.
    """
    with running(python, module, work.save(), processes) as started:
        for process, core in zip(started, cores, strict=False):
            pin(process.pid, core)
        wait(started, Path(work.folder), seconds_max)
    return [json.loads(work.result_file(rank).read_text()) for rank in range(processes)]


@contextmanager
def running(python: str, module: str, work: Path, processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    surroundings = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    started = []
    try:
        for rank in range(processes):
            command = [python, "-m", f"benchmarks.rivals.{module}", str(work), str(rank)]
            with (work.parent / f"log-{rank}").open("wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=surroundings, start_new_session=True))
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            process.wait()


def pin(pid: int, core: int) -> None:
    """Pin a process and its children with all their threads to a core. Their later children inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core})
            for child in (thread / "children").read_text().split():
                pin(int(child), core)


def wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds_max: float) -> None:
    """Wait until all have succeeded.

    Raises `Unavailable` at the first failure, because the others would wait for that process.
    """
    deadline, waiting = time.monotonic() + seconds_max, dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            status = process.poll()
            if status == 0:
                del waiting[rank]
            elif status:
                lines = (folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()
                raise Unavailable(lines[-1] if lines else f"ended with status {status}")
        if waiting and time.monotonic() >= deadline:
            raise Unavailable(f"not done after {seconds_max:.0f} s")
        time.sleep(LOOK_SECONDS)
