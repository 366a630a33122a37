"""How long tests wait for other processes, and the one failure that this may end in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

PATIENCE_SECONDS = 60.0  # for anything that takes a second or two when it works, while the machine does nothing else


class PatienceEnded(trio.TooSlowError):
    """Nothing is wrong but the time. `tests/run.py` runs such a test once more, alone."""


def load() -> float:
    """Return how many processes want each processor, at least one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience_seconds(idle: float = PATIENCE_SECONDS) -> float:
    """Return the time for what takes at most `idle` seconds on an idle machine."""
    return idle * load()


@contextmanager
def patience(idle: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Raise `PatienceEnded` where the block takes longer than that."""
    with trio.move_on_after(patience_seconds(idle)) as scope:
        yield
    if scope.cancelled_caught:
        raise PatienceEnded(f"nothing came in {patience_seconds(idle):.0f} s")


def ended_in_patience(error: BaseException) -> bool:
    """Return whether impatience alone is behind this exception, or behind all of this group."""
    if isinstance(error, BaseExceptionGroup):
        return all(ended_in_patience(each) for each in error.exceptions)
    return isinstance(error, PatienceEnded)
