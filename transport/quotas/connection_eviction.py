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
from transport.peer_policy import PeerClass

HALF_OPEN_MAX = 64  # connections that are no link yet
HALF_OPEN_PER_HOST_MAX = 16


class HalfOpenSlot:
    """Of one half-open connection; `scope` is around everything that serves it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.scope = trio.CancelScope()
        self.evicted = False


class HalfOpenTable:
    def __init__(self, half_open_max: int = HALF_OPEN_MAX) -> None:
        self._half_open_max = half_open_max
        self._places: dict[HalfOpenSlot, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.contextmanager
    def hold_slot(self, host: str, spared: Collection[str]) -> Iterator[HalfOpenSlot]:
        """Raises `RemoteProtocolError` once this connection has had to give way; it may be left before by `release_slot`."""
        hosts = Counter(place.host for place in self._places)
        if hosts[host] >= HALF_OPEN_PER_HOST_MAX:
            self._end_oldest({host})
        elif len(self._places) >= self._half_open_max:
            others = {one: count for one, count in hosts.items() if one not in spared} or hosts
            most = max(others.values())
            self._end_oldest({one for one, count in others.items() if count == most})
        self._places[place := HalfOpenSlot(host)] = None
        try:
            with place.scope:
                yield place
        finally:
            self.release_slot(place)
        if place.evicted:
            raise RemoteProtocolError("half-open", "gave way to a newer connection")

    def release_slot(self, place: HalfOpenSlot) -> None:
        """It is a link now, or it has ended."""
        self._places.pop(place, None)

    def _end_oldest(self, hosts: set[str]) -> None:
        place = next(place for place in self._places if place.host in hosts)
        place.evicted = True
        self.release_slot(place)
        place.scope.cancel()


class EvictableLink(Protocol):
    host: str
    since: float
    peer_class: PeerClass


L = TypeVar("L", bound=EvictableLink)


def choose_link_to_evict(links: Sequence[L]) -> L:
    """Which of them gives way: of the lowest standing, of the host that has most of those, the oldest."""
    lowest = min(link.peer_class for link in links)
    found = [link for link in links if link.peer_class is lowest]
    hosts = Counter(link.host for link in found)
    return min(found, key=lambda link: (-hosts[link.host], link.since))
