"""Limits of accepted and half-open connections. Connections above the limit of their host are closed at once.

| connections from                     | limit                                | connections above the limit            |
|--------------------------------------|--------------------------------------|----------------------------------------|
| a host with members                  | 8 per second, bursts of 250          | are closed, at a tenth of the          |
|                                      |                                      | cost of serving them                   |
| a host without members               | 1 in 4 seconds, bursts of 250        | are closed                             |
| all hosts without members            | 4 per second, bursts of 250, and 80  | are closed                             |
|                                      | more from hosts with few connections |                                        |
| all hosts, even if closed at once    | the processor time of ACCEPT_SHARE   | wait in the kernel: up to BACKLOG;     |
|                                      |                                      | further ones get no answer             |

So a new host can connect while a dozen other hosts connect as fast as they can. A returning member waits in the kernel until
earlier connections are closed. This takes 0.8 s if closing a connection takes 60 µs. If the backlog is full, the member's kernel
retries after 1, 3 and 7 seconds.

A half-open connection is still in the handshake, so its peer is unknown. If there are too many, the host with most half-open
connections loses its oldest one. So an attacker evicts only its own connections, because an honest handshake takes only a
few round trips. Connections from hosts of members are evicted last.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator

import trio

from protocol.addresses import host_subnet
from protocol.errors import RemoteProtocolError
from transport.quotas.cpu_quota import (
    HANDSHAKES_SHARE,
    HOSTS_MAX,
    MEMBER_HOST_HANDSHAKES_SHARE,
    STRANGERS_SHARE,
    CpuBucket,
    CpuShare,
    wait_until_paid,
)

log = logging.getLogger(__name__)

HALF_OPEN_MAX = 64  # half-open connections: in the handshake, and not links yet
HALF_OPEN_PER_HOST_MAX = 16

# Processor time charged for a connection without its handshake: opening and closing of sockets and a task.
CONNECTION_SECONDS = 0.0006
CONNECTIONS_SHARE = CpuShare(0.0025, 0.15)  # CPU share of connections from all hosts at which no member is known
RESERVED_SECONDS = 0.05  # additional burst for a host whose debt is below FEW_SECONDS
FEW_SECONDS = 8 * CONNECTION_SECONDS
# CPU share of one host's connections: a dozen hosts leave some of CONNECTIONS_SHARE.
HOST_CONNECTIONS_SHARE = CpuShare(0.00015, 0.15)
MEMBER_HOST_CONNECTIONS_SHARE = CpuShare(0.005, 0.15)
ACCEPT_SHARE = CpuShare(0.01, 0.05)  # CPU share of accepting connections from the kernel, even if they are closed at once
BACKLOG = 128  # connections that may wait in the kernel until they are accepted
ACCEPT_BATCH_MAX = 32  # connections accepted between turns of other tasks: two milliseconds
PAUSE_SECONDS = 0.05  # pause after a batch in which connections were refused
FAULT_SECONDS = 0.1  # pause after a failed attempt to accept, for example without a free socket

# The sum of these shares leaves other work its time. Decisions take 1.5 times as long if a peer loses a third of its processor
# time. Four peers on two processors have half a processor each, and attackers on the same machine use as much time as they cost
# these peers.
ALL_SHARES = (
    STRANGERS_SHARE,
    HANDSHAKES_SHARE,
    MEMBER_HOST_HANDSHAKES_SHARE,
    CONNECTIONS_SHARE,
    MEMBER_HOST_CONNECTIONS_SHARE,
    ACCEPT_SHARE,
)
assert sum(share.cpu_fraction for share in ALL_SHARES) < 0.5 / 3 / 4


class AcceptLimiter:
    """Limits of connections by host. `has_members(host)` returns whether members have linked from a host."""

    def __init__(self, has_members: Callable[[str], bool], processor: Callable[[], float]) -> None:
        self._has_members, self._processor = has_members, processor
        self._all, self._taking = CpuBucket(CONNECTIONS_SHARE), CpuBucket(ACCEPT_SHARE)
        self._hosts: OrderedDict[tuple[str, bool], CpuBucket] = OrderedDict()

    def admit_connection(self, host: str) -> bool:
        """Return whether one more connection from `host` is within the limits. If so, charge the host."""
        now, has_members = trio.current_time(), self._has_members(host)
        share = MEMBER_HOST_CONNECTIONS_SHARE if has_members else HOST_CONNECTIONS_SHARE
        own = self._hosts.setdefault((host, has_members), CpuBucket(share))
        self._hosts.move_to_end((host, has_members))
        if len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)
        if own.wait_seconds(now) > 0:
            return False
        if not has_members:
            if self._all.debt_seconds(now) > CONNECTIONS_SHARE.burst_seconds + RESERVED_SECONDS * (
                own.debt_seconds(now) < FEW_SECONDS
            ):
                return False
            self._all.spend(CONNECTION_SECONDS, now)
        own.spend(CONNECTION_SECONDS, now)
        return True

    async def run(
        self,
        listener: trio.SocketListener,
        serve: Callable[[trio.SocketStream], Awaitable[None]],
        refuse: Callable[[], None],
        nursery: trio.Nursery,
    ) -> None:
        """Accept connections for ever. `serve` handles and closes each admitted connection. `refuse` counts the others."""
        with socket.socket(fileno=listener.socket.detach()) as listening:  # Trio's `accept` would cost as much as a close.
            listening.setblocking(False)
            while True:
                await trio.lowlevel.wait_readable(listening)
                await wait_until_paid(self._taking)
                started, turned_away = self._processor(), False
                try:
                    for _ in range(ACCEPT_BATCH_MAX):
                        connection, address = listening.accept()
                        if self.admit_connection(host_subnet(address[0].partition("%")[0])):
                            nursery.start_soon(serve, trio.SocketStream(trio.socket.from_stdlib_socket(connection)))
                        else:
                            connection.close()
                            refuse()
                            turned_away = True
                except BlockingIOError:
                    pass  # No further connection waits.
                except OSError as error:
                    log.error("cannot accept a connection: %s", error)
                    await trio.sleep(FAULT_SECONDS)
                self._taking.spend(self._processor() - started, trio.current_time())
                await trio.sleep(PAUSE_SECONDS * turned_away)  # Connections that are closed in batches cost half as much.


class HalfOpenSlot:
    """The slot of a half-open connection. `scope` contains all its tasks."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.scope = trio.CancelScope()
        self.evicted = False


class HalfOpenTable:
    def __init__(self, half_open_max: int = HALF_OPEN_MAX) -> None:
        self._half_open_max = half_open_max
        self._places: dict[HalfOpenSlot, None] = {}  # slots, the oldest first

    @contextlib.contextmanager
    def hold_slot(self, host: str, spared: Collection[str]) -> Iterator[HalfOpenSlot]:
        """Occupy a slot until the `with` block ends or `release_slot` is called.

        Raises `RemoteProtocolError` if a newer connection has evicted this one. Hosts in `spared` are evicted last.
        """
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
            raise RemoteProtocolError("half-open", "evicted by a newer connection")

    def release_slot(self, place: HalfOpenSlot) -> None:
        """Free the slot of a connection that is a link now, or has ended."""
        self._places.pop(place, None)

    def _end_oldest(self, hosts: set[str]) -> None:
        place = next(place for place in self._places if place.host in hosts)
        place.evicted = True
        self.release_slot(place)
        place.scope.cancel()
