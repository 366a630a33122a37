"""Timers that are precise to tens of microseconds. The timers of an event loop have the kernel's resolution of 1 ms."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import trio

MONOTONIC, NONBLOCKING, CLOSED_ON_EXEC = 1, 0o4000, 0o2000000  # constants of Linux headers
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@contextmanager
def hurried(*, with_children: bool = False) -> Iterator[None]:
    """Give this thread real-time priority if it may have it (root), so that other load does not disturb measurements."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | (0 if with_children else os.SCHED_RESET_ON_FORK), os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, *before)


class Alarm:
    """A kernel timer (on Linux; elsewhere the event loop's own). One task at a time can sleep on it."""

    def __init__(self) -> None:
        self._file = -1 if _libc is None else _libc.timerfd_create(MONOTONIC, NONBLOCKING | CLOSED_ON_EXEC)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def sleep_until(self, at: float) -> None:
        """Sleep until the time `at` of Trio's clock."""
        if self._file < 0 or _libc is None:
            await trio.sleep_until(at)
            return
        nanoseconds = int(1e9 * (at - trio.current_time()))
        if nanoseconds <= 0:
            await trio.lowlevel.checkpoint()
            return
        once = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 10**9))
        _libc.timerfd_settime(self._file, 0, once, None)
        await trio.lowlevel.wait_readable(self._file)
        os.read(self._file, 8)
