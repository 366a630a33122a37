"""Threads for the blocking calls of a gateway: so few that the programs it serves cannot occupy the threads of the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

# Calls at once that read and write the disk. Their database has one writer, so more threads would only wait.
DISK_CALLS_AT_ONCE: Final = 4
# Requests that are decoded at once. A decoder is Python code, and takes turns with the peer's other threads.
DECODERS_AT_ONCE: Final = 1

T = TypeVar("T")
_disk_calls = trio.lowlevel.RunVar[trio.CapacityLimiter]("disk calls of the gateway")
_decoders = trio.lowlevel.RunVar[trio.CapacityLimiter]("decoders of the gateway")


async def run_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that waits for the disk in a thread, and return its result."""
    return await trio.to_thread.run_sync(function, *arguments, limiter=_limiter(_disk_calls, DISK_CALLS_AT_ONCE))


async def decode_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that computes for long, such as a decoder of large requests, in a thread, and return its result."""
    return await trio.to_thread.run_sync(function, *arguments, limiter=_limiter(_decoders, DECODERS_AT_ONCE))


def _limiter(variable: trio.lowlevel.RunVar[trio.CapacityLimiter], most: int) -> trio.CapacityLimiter:
    try:
        return variable.get()
    except LookupError:
        variable.set(trio.CapacityLimiter(most))
        return variable.get()
