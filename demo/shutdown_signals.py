"""Handling of signals and closed terminals in a program that has started peers, so that no peer keeps running."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Awaitable, Callable

import trio

from peer.commands.standard_streams import detach_descriptors, terminal_descriptors


def is_interrupt(error: BaseException) -> bool:
    """Return True for a KeyboardInterrupt, alone or in a group of exceptions of several tasks."""
    group = isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None
    return group or isinstance(error, KeyboardInterrupt)


def map_signals_to_interrupt() -> None:
    """Turn SIGTERM and SIGHUP into SIGINT, so that each of these signals stops the peers as Ctrl-C does.

    Trio raises KeyboardInterrupt for SIGINT only, at safe places. A shell starts background jobs with SIGINT ignored, and Trio
    would not change that. `nohup` starts programs with SIGHUP ignored, and this function leaves it ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    streams = terminal_descriptors()

    def hung_up(*_: object) -> None:
        # Kernel and shell may each send a SIGHUP, and the second one must not interrupt the shutdown of the peers.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        detach_descriptors(streams)
        signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hung_up)


async def run_until_hangup(run: Callable[[], Awaitable[int]]) -> int:
    """Return the result of `run`. Raises `KeyboardInterrupt` if the terminal closes first.

    A KeyboardInterrupt from a signal handler is raised in an arbitrary line, where other code may catch it. The process and its
    peers would then survive the terminal. So SIGHUP cancels `run` instead. The handler stays installed, because kernel and shell
    may both send SIGHUP, and the second one must not interrupt the shutdown of the peers.
    """
    streams, token = terminal_descriptors(), trio.lowlevel.current_trio_token()
    with trio.CancelScope() as scope:

        def hung_up(*_: object) -> None:
            detach_descriptors(streams)
            with contextlib.suppress(trio.RunFinishedError):  # the peers are being stopped already
                token.run_sync_soon(scope.cancel)

        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, hung_up)
        return await run()
    raise KeyboardInterrupt
