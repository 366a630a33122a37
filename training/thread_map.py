"""Threads that share the work on a large model. numpy and hashlib let go of the interpreter while they compute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from training.replicated.parallel_map import ParallelMap, serial_map

CHOSEN_MAX: Final = 4  # where nobody has said how many: more of them wait for the interpreter and for memory


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
