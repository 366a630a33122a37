"""Programs in their own pseudo-terminal. A terminal emulator keeps the screen that a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pyte

from tests.peer.processes import environment
from tests.waiting import PATIENCE_SECONDS, PatienceEnded, patience_seconds

# Makes standard input the controlling terminal of the new session, then becomes the program. Where the tests ignore
# SIGHUP (`nohup`), the program does not.
WRAPPER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class _Emulated(pyte.HistoryScreen):
    """A screen that answers a program's queries to its terminal, such as the cursor's position."""

    answer: Callable[[str], None] = staticmethod(lambda data: None)

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Terminal:
    """`command` in a terminal of this size, the leader of its session, like a shell's foreground program."""

    def __init__(self, command: Sequence[str], columns: int, rows: int) -> None:
        self._screen = _Emulated(columns, rows, history=10_000, ratio=1.0)
        self._stream = pyte.ByteStream(self._screen)
        self._screen.answer = lambda data: self.type(data)
        self._master, slave = os.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        sizeless = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRAPPER, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=sizeless | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def lines(self) -> list[str]:
        """The lines on the screen now."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def everything(self) -> list[str]:
        """The lines that were scrolled off the screen, and the lines on it."""
        columns = range(self._screen.columns)
        above = ["".join(line[column].data for column in columns).rstrip() for line in self._screen.history.top]
        return above + self.lines

    def until(self, pattern: str, seconds: float = PATIENCE_SECONDS, *, times: int = 1) -> str:
        """Wait until `pattern` occurs `times` times, and return the whole text shown."""
        deadline = time.monotonic() + patience_seconds(seconds)
        while len(re.findall(pattern, shown := "\n".join(self.everything).rstrip())) < times:
            if time.monotonic() >= deadline:
                raise PatienceEnded(f"{pattern!r} never came:\n{shown}")
            assert self.read(0.1) or self.process.poll() is None, f"ended without {pattern!r}:\n{shown}"
        return shown

    def read(self, seconds: float) -> bool:
        """Read the program's output for this time. Return False if none came, or if the program has ended."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # the last program that had the terminal open is gone
            return False
        self._stream.feed(data)
        return bool(data)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the exit status. Read all output meanwhile, since a full terminal would block the program."""
        deadline = time.monotonic() + patience_seconds(seconds)
        while self.process.poll() is None:
            if time.monotonic() >= deadline:
                raise PatienceEnded("\n".join(self.everything))
            self.read(0.1)
        while self.read(0.0):
            pass
        return self.process.returncode

    def close(self) -> None:
        """Close the window. The kernel sends SIGHUP, and writes fail from then on."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1


@contextlib.contextmanager
def terminal(*command: str, columns: int = 80, rows: int = 24) -> Iterator[Terminal]:
    """Run `peer COMMAND …` in a terminal that is closed at the end. A process that survives this is killed."""
    made = Terminal([sys.executable, "-m", "peer.cli", *command], columns, rows)
    try:
        yield made
    finally:
        made.close()
        try:
            made.process.wait(patience_seconds())
        except subprocess.TimeoutExpired:
            made.process.kill()
            made.process.wait()
