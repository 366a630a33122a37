"""How a program that has started peers is ended by signals and closed terminals, without leaving any of them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Awaitable, Callable

import trio

from peer.commands.standard_streams import detach_descriptors, terminal_descriptors


def is_interrupt(error: BaseException) -> bool:
    """Ctrl-C comes out of whatever was running, perhaps of several things at once."""
    group = isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None
    return group or isinstance(error, KeyboardInterrupt)


def map_signals_to_interrupt() -> None:
    """Whoever ends this process ends its peers too. Trio raises KeyboardInterrupt only where that is safe, and for SIGINT only.

    A shell lets its background jobs ignore SIGINT, and Trio would leave it at that. `nohup` lets what it starts ignore SIGHUP,
    and there it stays ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    streams = terminal_descriptors()

    def hung_up(*_: object) -> None:
        # Kernel and shell may both say it; a second one must not cut off the stopping of the peers.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        detach_descriptors(streams)
        signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hung_up)


async def run_until_hangup(run: Callable[[], Awaitable[int]]) -> int:
    """What `run` gives. `KeyboardInterrupt` when the terminal closes first.

    A KeyboardInterrupt that a signal raises comes out of whatever line runs just then, and may be lost in one that swallows it.
    Nothing but SIGHUP would end this process then, and its peers with it. So here SIGHUP raises nothing: it cancels. It stays so
    afterwards: kernel and shell may both say it, and a later one must not cut off the stopping of the peers.
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
