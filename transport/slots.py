"""Who gives way where there are too many: half-open connections, and links.

Nobody knows yet who a half-open connection is. So the host that has most of them loses its oldest one: whoever fills the table
pushes out itself, and an honest handshake takes a few round trips. Hosts of members are spared as long as others are there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, TypeVar

import trio

from protocol.errors import RemoteProtocolError
from transport.standing import Standing

HALF_OPEN_MAX = 64  # connections that are no link yet
HALF_OPEN_PER_HOST_MAX = 16


class Place:
    """Of one half-open connection; `scope` is around everything that serves it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.scope = trio.CancelScope()
        self.gave_way = False


class HalfOpen:
    def __init__(self, half_open_max: int = HALF_OPEN_MAX) -> None:
        self._half_open_max = half_open_max
        self._places: dict[Place, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.contextmanager
    def place(self, host: str, spared: Collection[str]) -> Iterator[Place]:
        """Raises `RemoteProtocolError` once this connection has had to give way; it may be left before by `leave`."""
        hosts = Counter(place.host for place in self._places)
        if hosts[host] >= HALF_OPEN_PER_HOST_MAX:
            self._end_oldest({host})
        elif len(self._places) >= self._half_open_max:
            others = {one: count for one, count in hosts.items() if one not in spared} or hosts
            most = max(others.values())
            self._end_oldest({one for one, count in others.items() if count == most})
        self._places[place := Place(host)] = None
        try:
            with place.scope:
                yield place
        finally:
            self.leave(place)
        if place.gave_way:
            raise RemoteProtocolError("half-open", "gave way to a newer connection")

    def leave(self, place: Place) -> None:
        """It is a link now, or it has ended."""
        self._places.pop(place, None)

    def _end_oldest(self, hosts: set[str]) -> None:
        place = next(place for place in self._places if place.host in hosts)
        place.gave_way = True
        self.leave(place)
        place.scope.cancel()


class Linked(Protocol):
    host: str
    since: float
    standing: Standing


L = TypeVar("L", bound=Linked)


def least(links: Sequence[L]) -> L:
    """Which of them gives way: of the lowest standing, of the host that has most of those, the oldest."""
    lowest = min(link.standing for link in links)
    found = [link for link in links if link.standing is lowest]
    hosts = Counter(link.host for link in found)
    return min(found, key=lambda link: (-hosts[link.host], link.since))
