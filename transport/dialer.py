"""Dialing of the addresses in the address book. Each entry has a task, which waits while the entry's peer is linked.

Host names are resolved in separate threads, because a peer that spreads a name may control its name server, which may never
answer. A resolving thread ends only when the system's resolver gives up, even if the dial timed out long before. A few dozen
names without an answer would occupy all 40 common threads of Trio. Then writes to the disk would wait, and so all votes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import trio

from protocol.addresses import parse_address
from protocol.errors import RemoteProtocolError, UserError
from transport.connections.peer_link import PeerLink
from transport.discovery.address_book import AddressBook, AddressEntry, AddressSource
from transport.session_links import TcpLink, resolves_to_nearer_network

DIALS_MAX: Final = 32  # concurrent dials
DIAL_SECONDS: Final = 10.0  # timeout in seconds until the TCP connection exists
HANDSHAKE_SECONDS: Final = 10.0  # timeout from the connection to its confirmation; a loaded two-core machine takes well under 1 s
THREADS_MAX: Final = 16  # concurrent threads that resolve host names given by the operator

# Limit of the threads that resolve host names for the current task. None: THREADS_MAX.
_threads: ContextVar[trio.CapacityLimiter | None] = ContextVar("_threads", default=None)


class ThreadedResolver(trio.abc.HostnameResolver):
    def __init__(self) -> None:
        self._own = trio.CapacityLimiter(THREADS_MAX)

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        look = partial(socket.getaddrinfo, host, port, family, type, proto, flags)
        return await trio.to_thread.run_sync(look, limiter=_threads.get() or self._own, abandon_on_cancel=True)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        raise NotImplementedError("reverse lookups are not supported")


class Dialer:
    def __init__(
        self,
        book: AddressBook,
        links: Mapping[bytes, PeerLink],
        may_link: Callable[[bytes], bool],
        converse: Callable[[trio.SocketStream, str, bytes | None], Awaitable[None]],
    ) -> None:
        """`converse(stream, address, expected)` serves a connection to its end.

        Only the peer `expected` may answer, unless it is None.
        """
        self._book, self._links, self._may_link, self._converse = book, links, may_link, converse
        self._dials = trio.CapacityLimiter(DIALS_MAX)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            for entry in self._book.entries():
                self.keep_dialing(entry)
            task_status.started()
            await trio.sleep_forever()

    def keep_dialing(self, entry: AddressEntry) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._keep_dialed, entry)

    async def connect(self, text: str) -> bytes:
        """Dial "host:port" or "peer id@host:port" at once, and return the peer that answered.

        The address stays in the address book. Raises `UserError` if no peer answers or the address is invalid.
        """
        entry = self._book.add_configured(text)
        if entry.peer is None or entry.peer not in self._links:
            entry.retry_now.set()
            with trio.move_on_after(DIAL_SECONDS + HANDSHAKE_SECONDS) as patience:
                await entry.attempt_ended_event.wait()
            if patience.cancelled_caught:
                raise UserError(
                    f"cannot reach {text}: no answer within {DIAL_SECONDS + HANDSHAKE_SECONDS:g} s; this peer keeps trying"
                )
        if entry.peer is not None and entry.peer in self._links:
            return entry.peer
        if not self._book.has_entry(entry):
            raise UserError(f"cannot reach {text}: {entry.reason}")
        raise UserError(f"cannot reach {entry.address}: {entry.reason}; this peer keeps trying")

    async def open_stream(self, address: str, source: AddressSource | None = None) -> trio.SocketStream:
        """Connect to an address. Raises `OSError`, `trio.TooSlowError`, or `ValueError` for a name that the resolver rejects."""
        host, port = parse_address(address)
        async with source.dials if source else contextlib.nullcontext(), self._dials:
            token = _threads.set(source.lookups if source else None)
            try:
                with trio.fail_after(DIAL_SECONDS):
                    return await trio.open_tcp_stream(host, port)
            finally:
                _threads.reset(token)

    async def _keep_dialed(self, entry: AddressEntry) -> None:
        while self._book.has_entry(entry):
            link = self._links.get(entry.peer) if entry.peer is not None else None
            if isinstance(link, TcpLink):
                with trio.CancelScope() as entry.link_wait_scope:
                    await link.ended.wait()
                entry.failures = 0
            else:
                self._book.count_attempt(entry, await self._dial(entry), over_relay=link is not None)
            with trio.move_on_after(self._book.schedule_retry(entry, trio.current_time())):
                await entry.retry_now.wait()
            entry.retry_now = trio.Event()

    async def _dial(self, entry: AddressEntry) -> float:
        """Dial an entry, serve the connection to its end, and return its duration in seconds, or 0 if the dial failed."""
        if entry.peer is not None and not self._may_link(entry.peer):
            entry.end_attempt("this peer refuses its key, which was expelled or violated the protocol")
            return 0.0
        try:
            stream = await self.open_stream(entry.address, entry.source)
        except (OSError, ValueError) as error:
            entry.end_attempt(describe_dial_error(error))
            return 0.0
        except trio.TooSlowError:
            entry.end_attempt(f"no answer within {DIAL_SECONDS:g} s")
            return 0.0
        if not entry.is_persistent and resolves_to_nearer_network(stream, entry.address):
            await trio.aclose_forcefully(stream)
            entry.end_attempt("the name resolves to an address of a local network")
            return 0.0
        start, entry.linked = trio.current_time(), False
        await self._converse(stream, entry.address, entry.peer if entry.pinned else None)
        return trio.current_time() - start


def describe_dial_error(error: OSError | ValueError) -> str:
    """Describe briefly why a dial failed. Trio tries all addresses of a name and chains their errors to its own."""
    causes = error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else [error.__cause__ or error]
    if isinstance(error, (socket.gaierror, ValueError)):
        return "unknown host name"
    told = {os.strerror(cause.errno).lower() for cause in causes if isinstance(cause, OSError) and cause.errno}
    return ", ".join(sorted(told)) or str(error)


def describe_handshake_error(error: RemoteProtocolError) -> str:
    words = {
        "self": "this peer itself answers there",
        "wrong-peer": error.detail,
        "wrong-version": error.detail,
        "not-folkmoot": "the program that answers there is not a Folkmoot peer",
        "bad-tag": "a peer of another network or another program answers there",
        "handshake-timeout": f"no handshake within {HANDSHAKE_SECONDS:g} s",
    }
    return words.get(error.reason, str(error))
