"""Bounds of one host, or one person, at a serving peer: rates, entries of tables, turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import trio

from web.calls import HttpProblem

K = TypeVar("K")
V = TypeVar("V")
HOSTS_MAX: Final = 10_000  # remembered; the one that was here longest ago is forgotten
PROXY_HINT: Final = "behind a reverse proxy its operator sets `web_trusted_proxies`"


class HostRateLimiter:
    """Each host takes a number at once, and then one more after each period."""

    def __init__(self, at_once: int, seconds: float, clock: Callable[[], float] = trio.current_time) -> None:
        self._at_once, self._seconds, self._clock = at_once, seconds, clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def acquire(self, host: str, what: str) -> None:
        """Raises `HttpProblem` where the host has taken too many."""
        if wait := self.try_take(host):
            raise HttpProblem("too-many", f"too many {what} from one address: wait, or try elsewhere ({PROXY_HINT})", wait)

    def try_take(self, host: str) -> int:
        """Take one and return 0, or return the seconds until the host may take one."""
        now = self._clock()
        paid = max(now, self._paid_until.pop(host, now))
        wait = paid - now - (self._at_once - 1) * self._seconds
        self._paid_until[host] = paid + self._seconds * (wait <= 0)
        if len(self._paid_until) > HOSTS_MAX:
            self._paid_until.popitem(last=False)
        return 1 + int(wait) if wait > 0 else 0


class FairTable(Generic[K, V]):
    """A bounded table of entries with owners. The owner with most entries loses its oldest one where there is no room."""

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
        """Removes an entry, if there is one."""
        owner, _ = self._values.pop(key, (None, None))
        if own := self._owned.get(owner):
            del own[key]
            if not own:
                del self._owned[owner]


class FairHostQueue:
    """One at a time; hosts take turns, so that a host with many waits behind itself.

    Hosts where a turn came to a good end go first: they are where owners of accounts are.
    """

    def __init__(self, waiting_max: int, of_host_max: int) -> None:
        self._waiting_max, self._of_host_max = waiting_max, of_host_max
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # the host whose turn is next first
        self._known: OrderedDict[str, None] = OrderedDict()
        self._is_taken = False

    def trust_host(self, host: str) -> None:
        self._known[host] = None
        self._known.move_to_end(host)
        if len(self._known) > HOSTS_MAX:
            self._known.popitem(last=False)

    @asynccontextmanager
    async def hold_turn(self, host: str) -> AsyncIterator[None]:
        """Raises `HttpProblem` where too many wait."""
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
            raise HttpProblem("too-many", f"others sign in from this address at the moment ({PROXY_HINT})", 2)
        if sum(map(len, self._waiting.values())) >= self._waiting_max:
            self._send_away(host)
        waiter = _Waiter()
        self._waiting.setdefault(host, deque()).append(waiter)
        try:
            await waiter.called.wait()
        except trio.Cancelled:
            if waiter.called.is_set() and not waiter.is_sent_away:  # its turn has come, and another one takes it
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
        """Makes room at the cost of the host with most, or of one that is not known where this one is. Else `HttpProblem`."""
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
    return HttpProblem("too-many", "many people sign in at the moment", 2)
