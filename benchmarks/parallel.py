"""Computation in parallel processes, for benchmarks that do not measure time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")
JOBS = os.cpu_count() or 1


def side_by_side(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[tuple[int, Result]]:
    """Yield (index in `tasks`, result) in order of completion, from `jobs` processes with one thread each.

    A single job runs in this process. A failed task does not stop the others. After the last result a `RuntimeError` with the
    traces of all failures is raised.
    """
    failures, attempts = list[str](), partial(_attempt, work)
    with ExitStack() as stack:
        if min(jobs, len(tasks)) <= 1:
            found: Iterator[tuple[int, list[Result], str]] = map(attempts, enumerate(tasks))
        else:
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy reads it when it is loaded
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(min(jobs, len(tasks)), torch.set_num_threads, (1,)))
            found = pool.imap_unordered(attempts, list(enumerate(tasks)))
        for number, results, failure in found:
            failures += [failure] if failure else []
            yield from ((number, result) for result in results)
    if failures:
        raise RuntimeError("\n".join(failures))


def _attempt(work: Callable[[Task], Result], numbered: tuple[int, Task]) -> tuple[int, list[Result], str]:
    number, task = numbered
    try:
        return number, [work(task)], ""
    except Exception:
        return number, [], f"{task}:\n{traceback.format_exc()}"
