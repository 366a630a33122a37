"""Names of hosts are looked up in threads of their own: whoever names hosts may answer for them, or never.

A thread that looks a name up ends when the system's resolver gives up, however long ago the dial did. In Trio's common threads,
of which there are 40, some dozen such names would hold up what is written to the disk, and so every vote.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import trio

THREADS_MAX = 16  # for names that the operator has given

_threads: ContextVar[trio.CapacityLimiter | None] = ContextVar("_threads", default=None)


@contextmanager
def lookup_threads(threads: trio.CapacityLimiter | None) -> Iterator[None]:
    """What this task looks up inside takes these threads."""
    token = _threads.set(threads)
    try:
        yield
    finally:
        _threads.reset(token)


class ThreadedResolver(trio.abc.HostnameResolver):
    def __init__(self) -> None:
        self._own = trio.CapacityLimiter(THREADS_MAX)

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        look = partial(socket.getaddrinfo, host, port, family, type, proto, flags)
        return await trio.to_thread.run_sync(look, limiter=_threads.get() or self._own, abandon_on_cancel=True)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        raise NotImplementedError("nobody asks for the name of a host")
