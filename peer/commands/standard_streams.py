"""The streams that a process was started with: what they lack, and the end of a terminal.

SIGHUP comes when somebody closes its window, or the link drops.
"""

from __future__ import annotations

import io
import os
import select
import shlex
import shutil
import sys
from pathlib import Path

DESCRIPTORS = (0, 1, 2)
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def program_name() -> str:
    """The word by which a person's shell starts this program: `peer` if that is on the path, else its file."""
    own, found = Path(sys.argv[0]), shutil.which("peer")
    is_script = own.name == "peer" and own.is_file()
    return shlex.quote(str(own)) if is_script and (found is None or not own.samefile(found)) else "peer"


def terminal_descriptors() -> tuple[int, ...]:
    """Which of this process's standard streams are a terminal. To be asked before the terminal is gone: then none of them is."""
    return tuple(number for number in DESCRIPTORS if os.isatty(number))


def detach_descriptors(descriptors: tuple[int, ...]) -> None:
    """From now on a read of these streams finds their end, and a write to them is lost. Neither fails."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in descriptors:
        os.dup2(nothing, number)
    os.close(nothing)


def open_missing_streams() -> None:
    """Standard streams that take whatever is written. One that the caller closed leads nowhere: else the next file that is opened
    gets its number.
    """
    for number, name, mode in zip(DESCRIPTORS, ("stdin", "stdout", "stderr"), "rww", strict=True):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number, inheritable=True)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode))
    for stream in (sys.stdout, sys.stderr):
        # A path that is no UTF-8 is written as it is, in a terminal that shows UTF-8; all else that cannot be written is escaped.
        takes_bytes = stream.encoding.lower() in ("utf-8", "utf8") and stream.errors == "surrogateescape"
        if isinstance(stream, io.TextIOWrapper) and not takes_bytes:
            stream.reconfigure(errors="backslashreplace")


def is_output_closed() -> bool:
    """Whether the reader of standard output is gone, as `head` is after its lines."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def mute_output() -> None:
    """Drops the buffer of standard output: the interpreter would write it at its end, and complain."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
