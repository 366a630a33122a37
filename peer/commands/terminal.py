"""The terminal that a process was started in, and its end: SIGHUP comes when somebody closes the window or the link drops."""

from __future__ import annotations

import os

DESCRIPTORS = (0, 1, 2)
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def terminals() -> tuple[int, ...]:
    """Which of this process's standard streams are a terminal. To be asked before the terminal is gone: then none of them is."""
    return tuple(number for number in DESCRIPTORS if os.isatty(number))


def let_go(descriptors: tuple[int, ...]) -> None:
    """What is still read from these streams ends, and what is still written to them is lost, instead of failing."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in descriptors:
        os.dup2(nothing, number)
    os.close(nothing)
