"""Tasks beside agreement: a fault of the operating system ends none of them for good, and never the peer's vote."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol.errors import LostVotesError, StorageError
from storage.durable_files import is_descriptor_shortage

RETRY_SECONDS: Final = 5.0  # until a task that failed runs again: a full table of descriptors is often a matter of seconds
SYSTEM_FAULTS: Final = (OSError, StorageError, sqlite3.Error)

log = logging.getLogger("peer")


async def restart_on_fault(
    what: str, run: Callable[[], Awaitable[None]], tell: Callable[[str], None], faults: Callable[[Exception], bool] | None = None
) -> None:
    """Runs this task, and runs it again after a fault of the system. `tell` gets a line for the operator at the first of several.

    Any other exception is a fault of ours and passes on. `faults` names the faults; without it these are all of `SYSTEM_FAULTS`.
    """
    is_endured = faults or _is_of_the_system
    told = ""
    while True:
        try:
            return await run()
        except Exception as error:
            if not is_endured(error):
                raise
            reason = _reason(error)
        if reason != told:
            tell(f"{what} failed ({reason}) and is tried again every {RETRY_SECONDS:g} s; the peer goes on")
            told = reason
        await trio.sleep(RETRY_SECONDS)


def lacks_descriptors(error: Exception) -> bool:
    """True for a shortage of descriptors, or a group of nothing else. A full disk ends a task that agreement needs."""
    if isinstance(error, ExceptionGroup):
        return all(map(lacks_descriptors, error.exceptions))
    return is_descriptor_shortage(error)


def _is_of_the_system(error: Exception) -> bool:
    """True for a fault of the system, or a group of nothing else. Lost votes are more than that."""
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_the_system, error.exceptions))
    return isinstance(error, SYSTEM_FAULTS) and not isinstance(error, LostVotesError)


def _reason(error: Exception) -> str:
    if isinstance(error, ExceptionGroup):
        return _reason(error.exceptions[0])
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
