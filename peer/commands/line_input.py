"""Whoever types lines into a terminal or a pipe, without an editor."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable

import trio


class LineInput:
    """Implements `features.commands.UserInput` on standard input."""

    async def read_line(self, prompt: str) -> str | None:
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(prompt, end="", flush=True)
        # A thread waiting for a pipe that never speaks must not hold up the end of the program.
        line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        return line.rstrip("\n") if line else None

    async def run_interruptible(self, do: Callable[[], Awaitable[None]]) -> None:
        """Of a person alone: in a script Ctrl-C ends all of it."""
        if not sys.stdin.isatty():
            await do()
            return
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(_cancel_at_interrupt, nursery.cancel_scope)
            try:
                await do()
            except Exception as error:  # raised below, by itself
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed


async def _cancel_at_interrupt(scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
