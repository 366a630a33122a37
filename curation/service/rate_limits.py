"""Limits of a serving peer for each host or annotator: rates of requests, entries of tables, turns in a queue."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import trio

from web.calls import HttpProblem

K = TypeVar("K")
V = TypeVar("V")
HOSTS_MAX: Final = 10_000  # hosts that a limiter or a queue remembers: a further host replaces the least recent one
PROXY_HINT: Final = "if this peer is behind a reverse proxy, its operator has to set `web_trusted_proxies`"


class HostRateLimiter:
    """Rate limit of requests for each host: `at_once` requests at a time, then one more after each period of `seconds`."""

    def __init__(self, at_once: int, seconds: float, clock: Callable[[], float] = trio.current_time) -> None:
        self._at_once, self._seconds, self._clock = at_once, seconds, clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def acquire(self, host: str, what: str) -> None:
        """Count a request of a host. Raises `HttpProblem` if the host is above its limit. `what`: the requests in words."""
        if wait := self.try_take(host):
            raise HttpProblem("too-many", f"too many {what} from your address: try again later ({PROXY_HINT})", wait)

    def try_take(self, host: str) -> int:
        """Count a request of a host and return 0; above the limit, return the seconds until the host may send one."""
        now = self._clock()
        paid = max(now, self._paid_until.pop(host, now))
        wait = paid - now - (self._at_once - 1) * self._seconds
        self._paid_until[host] = paid + self._seconds * (wait <= 0)
        if len(self._paid_until) > HOSTS_MAX:
            self._paid_until.popitem(last=False)
        return 1 + int(wait) if wait > 0 else 0


class FairTable(Generic[K, V]):
    """Bounded table of entries with owners.

    If the table is full, a new entry replaces the oldest entry of the owner with most entries.
    """

    def __init__(self, entries_max: int, of_owner_max: int) -> None:
        self._entries_max, self._of_owner_max = entries_max, of_owner_max
        self._values: dict[K, tuple[object, V]] = {}
        self._owned: dict[object, OrderedDict[K, None]] = {}

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        return None if found is None else found[1]

    def put(self, key: K, owner: object, value: V) -> None:
        own = self._owned.get(owner, ())
        if len(own) >= self._of_owner_max:
            self.pop(next(iter(own)))
        elif len(self._values) >= self._entries_max:
            most = max(self._owned.values(), key=len)
            self.pop(next(iter(most)))
        self._values[key] = owner, value
        self._owned.setdefault(owner, OrderedDict())[key] = None

    def pop(self, key: K) -> None:
        """Remove the entry with this key, if the table has it."""
        owner, _ = self._values.pop(key, (None, None))
        if own := self._owned.get(owner):
            del own[key]
            if not own:
                del self._owned[owner]


class FairHostQueue:
    """Queue of calls, of which one runs at a time. Hosts alternate, so that a host with many calls delays only itself.

    Known hosts, from which a sign-in succeeded (`trust_host`), go first: owners of accounts use them.
    """

    def __init__(self, waiting_max: int, of_host_max: int) -> None:
        self._waiting_max, self._of_host_max = waiting_max, of_host_max
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # waiting calls by host, in the order of the hosts' turns
        self._known: OrderedDict[str, None] = OrderedDict()
        self._is_taken = False

    def trust_host(self, host: str) -> None:
        self._known[host] = None
        self._known.move_to_end(host)
        if len(self._known) > HOSTS_MAX:
            self._known.popitem(last=False)

    @asynccontextmanager
    async def hold_turn(self, host: str) -> AsyncIterator[None]:
        """Wait for the turn of a host's call, and hold the turn until the context ends.

        Raises `HttpProblem` if too many calls wait.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_taken:
            await self._wait(host)
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
            self._call_next()

    async def _wait(self, host: str) -> None:
        if len(self._waiting.get(host, ())) >= self._of_host_max:
            raise HttpProblem("too-many", f"others are signing in from your address: try again in a moment ({PROXY_HINT})", 2)
        if sum(map(len, self._waiting.values())) >= self._waiting_max:
            self._send_away(host)
        waiter = _Waiter()
        self._waiting.setdefault(host, deque()).append(waiter)
        try:
            await waiter.called.wait()
        except trio.Cancelled:
            if waiter.called.is_set() and not waiter.is_sent_away:  # The cancelled call passes its turn to another call.
                self._is_taken = False
                self._call_next()
            self._forget(host, waiter)
            raise
        if waiter.is_sent_away:
            raise _too_many()

    def _call_next(self) -> None:
        if not self._waiting:
            return
        host = next((host for host in self._waiting if host in self._known), next(iter(self._waiting)))
        waiter = self._waiting[host].popleft()
        if self._waiting[host]:
            self._waiting.move_to_end(host)
        else:
            del self._waiting[host]
        self._is_taken = True
        waiter.called.set()

    def _send_away(self, host: str) -> None:
        """Make room in the queue for a call of a host: the host with most waiting calls loses its newest call.

        A call of a known host displaces calls of unknown hosts first. Raises `HttpProblem` if no call has to give way.
        """
        most = max(self._waiting, key=lambda other: (other not in self._known, len(self._waiting[other])))
        is_before = (host in self._known) > (most in self._known)
        if not is_before and len(self._waiting[most]) <= len(self._waiting.get(host, ())) + 1:
            raise _too_many()
        waiter = self._waiting[most][-1]
        self._forget(most, waiter)
        waiter.is_sent_away = True
        waiter.called.set()

    def _forget(self, host: str, waiter: _Waiter) -> None:
        waiting = self._waiting.get(host, deque())
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._waiting[host]


class _Waiter:
    def __init__(self) -> None:
        self.called, self.is_sent_away = trio.Event(), False


def _too_many() -> HttpProblem:
    return HttpProblem("too-many", "too many people are signing in: try again in a moment", 2)
