"""How work that is cut into parts is done: part after part here, in several threads where a peer hands in a pool.

The results come in the order of the parts, and nothing is combined in another order: the number of threads changes no bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

CHOSEN_MAX: Final = 4  # where nobody has said how many: more of them wait for the interpreter and for memory

Part = TypeVar("Part")
Result = TypeVar("Result")


class ParallelMap(Protocol):
    def __call__(self, work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]: ...


def serial_map(work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]:
    return map(work, parts)


def default_thread_count() -> int:
    """How many threads, where nobody has said it: as many as this process may use processors."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(CHOSEN_MAX, usable)


@contextmanager
def thread_map(count: int, parts: int) -> Iterator[ParallelMap]:
    """`count` threads for at most so many `parts`; a single one is the caller's own."""
    count = min(count, parts)
    if count <= 1:
        yield serial_map
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count, "blocks") as pool:
        yield pool.map
