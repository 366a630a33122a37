"""Execution of work that is split into parts: one after another, or in the threads of a caller's pool.

Results come in the order of the parts and are combined in that order, so the number of threads changes no bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

CHOSEN_MAX: Final = 4  # largest default number of threads: more threads would wait for the interpreter and for memory

Part = TypeVar("Part")
Result = TypeVar("Result")


class ParallelMap(Protocol):
    def __call__(self, work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]: ...


def serial_map(work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]:
    return map(work, parts)


def default_thread_count() -> int:
    """Return the default number of threads: the usable processors, at most `CHOSEN_MAX`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(CHOSEN_MAX, usable)


@contextmanager
def thread_map(count: int, parts: int) -> Iterator[ParallelMap]:
    """Provide a map function for at most `parts` parts that uses `count` threads.

    With a single thread, the caller does the work.
    """
    count = min(count, parts)
    if count <= 1:
        yield serial_map
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count, "blocks") as pool:
        yield pool.map
