"""Starts the processes of a rival, and waits for them."""

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
LOOK_SECONDS = 0.1  # whether somebody has ended; nothing that is timed waits for it


def reports(
    python: str, module: str, work: Work, processes: int, seconds_max: float, cores: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """What each process of `benchmarks.rivals.MODULE` reports, each on its core where some are named. `Unavailable` with its last
    words if one fails.
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
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started itself
            process.wait()


def pin(pid: int, core: int) -> None:
    """This process and its children with all their threads; what they start later stays there, too."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core})
            for child in (thread / "children").read_text().split():
                pin(int(child), core)


def wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds_max: float) -> None:
    """Until all have ended well. `Unavailable` at the first that does not: the others would wait for it."""
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
