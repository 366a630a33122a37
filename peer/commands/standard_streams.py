"""Functions for the standard streams of a process: missing streams, closed pipes and closed terminals.

A process gets SIGHUP when the user closes the terminal's window, or when the terminal's connection drops.
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


def program_name() -> str:
    """Return the word with which a shell starts this program:

    `peer` if the search path has it, otherwise the path of the script.
    """
    own, found = Path(sys.argv[0]), shutil.which("peer")
    is_script = own.name == "peer" and own.is_file()
    return shlex.quote(str(own)) if is_script and (found is None or not own.samefile(found)) else "peer"


def terminal_descriptors() -> tuple[int, ...]:
    """Return the descriptors of standard streams that are terminals. Call this early: a closed terminal is not recognized."""
    return tuple(number for number in DESCRIPTORS if os.isatty(number))


def detach_descriptors(descriptors: tuple[int, ...]) -> None:
    """Redirect these descriptors to the null device.

    Reads then find the end of the input, and writes are dropped without an error.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in descriptors:
        os.dup2(nothing, number)
    os.close(nothing)


def open_missing_streams() -> None:
    """Open closed standard streams on the null device, and let output accept all characters.

    Otherwise the next opened file would get the descriptor of the closed stream.
    """
    for number, name, mode in zip(DESCRIPTORS, ("stdin", "stdout", "stderr"), "rww", strict=True):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number, inheritable=True)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode))
    for stream in (sys.stdout, sys.stderr):
        # A UTF-8 terminal gets the bytes of a path that is not UTF-8 unchanged. Other unencodable characters are escaped.
        takes_bytes = stream.encoding.lower() in ("utf-8", "utf8") and stream.errors == "surrogateescape"
        if isinstance(stream, io.TextIOWrapper) and not takes_bytes:
            stream.reconfigure(errors="backslashreplace")


def is_output_closed() -> bool:
    """Return True if the program that reads standard output has ended, as `head` does after its lines."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def mute_output() -> None:
    """Redirect standard output to the null device, because the interpreter would otherwise fail to write its buffer at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
