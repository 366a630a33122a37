"""What takes no times may use all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")
JOBS = os.cpu_count() or 1


def side_by_side(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Results in the order of `tasks`, each computed with one thread in one of `jobs` processes; of one job, in this one."""
    if min(jobs, len(tasks)) <= 1:
        yield from map(work, tasks)
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when a process loads numpy
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(work, tasks)
