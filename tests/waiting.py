"""Waiting for other processes in tests, and the failure after too long a wait."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

PATIENCE_SECONDS = 60.0  # for operations that take a second or two on an idle machine


class PatienceEnded(trio.TooSlowError):
    """A wait that took too long. `tests/run.py` runs such a test once more, alone."""


def load() -> float:
    """Return how many processes want each processor, at least one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience_seconds(idle: float = PATIENCE_SECONDS) -> float:
    """Return the time for what takes at most `idle` seconds on an idle machine."""
    return idle * load()


@contextmanager
def patience(idle: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Raise `PatienceEnded` where the block takes longer than that, also where it fails since it was cancelled."""
    seconds = patience_seconds(idle)
    cause: Exception | None = None
    with trio.move_on_after(seconds) as scope:
        try:
            yield
        except Exception as error:
            if not scope.cancel_called:
                raise
            cause = error  # a request that a stopping daemon refuses, for example
    if scope.cancelled_caught or cause is not None:
        raise PatienceEnded(f"nothing came in {seconds:.0f} s") from cause


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `PatienceEnded` where a process, or a reply to a blocking call, takes longer than its `timeout`."""
    try:
        yield
    except (subprocess.TimeoutExpired, TimeoutError) as error:
        raise PatienceEnded(str(error)) from error


def run_process(
    command: Sequence[str | Path], idle: float = PATIENCE_SECONDS, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a process as `subprocess.run` does. Raise `PatienceEnded` where it takes too long."""
    with in_time():
        return subprocess.run(command, timeout=patience_seconds(idle), **options)


def ended_in_patience(error: BaseException) -> bool:
    """Return whether impatience alone is behind this exception, or behind all of this group."""
    if isinstance(error, BaseExceptionGroup):
        return all(ended_in_patience(each) for each in error.exceptions)
    return isinstance(error, PatienceEnded)
