"""Who comes in: connections are taken from the kernel at a bounded cost, and hosts that make too many are turned away at once.

| who                                    | may make so many connections          | and then                               |
|----------------------------------------|---------------------------------------|----------------------------------------|
| a host with members                    | 8 a second, 250 at once               | they are closed at once: a tenth of    |
|                                        |                                       | what it costs to serve them            |
| a host without members                 | 1 in 4 seconds, 250 at once           | the same                               |
| all hosts without members              | 4 a second, 250 at once, and 80 more  | the same                               |
|                                        | of hosts that have made few lately    |                                        |
| everybody, also whoever is turned away | what TAKING carries                   | they wait in the kernel, BACKLOG of    |
|                                        |                                       | them; others are not answered          |

So a newcomer comes in though a dozen hosts connect as fast as they can. A member that comes back waits for those before it in the
kernel, some .8 s where a connection is closed in 60 µs; where the kernel has no room, its own tries again after 1, 3
and 7 seconds.

Nobody knows yet who a half-open connection is. So the host that has most of them loses its oldest one: whoever fills the table
pushes out itself, and an honest handshake takes a few round trips. Hosts of members are spared as long as others are there.
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

HALF_OPEN_MAX = 64  # connections that are no link yet
HALF_OPEN_PER_HOST_MAX = 16

CONNECTION_SECONDS = 0.0006  # of a processor, beside the handshake: sockets, a task, and the end of both
CONNECTIONS_SHARE = CpuShare(0.0025, 0.15)  # of all hosts without members
RESERVED_SECONDS = 0.05  # beyond that, for hosts that have made few lately:
FEW_SECONDS = 8 * CONNECTION_SECONDS
HOST_CONNECTIONS_SHARE = CpuShare(0.00015, 0.15)  # a dozen hosts at their bound leave something of CONNECTIONS
MEMBER_HOST_CONNECTIONS_SHARE = CpuShare(0.005, 0.15)
ACCEPT_SHARE = CpuShare(0.01, 0.05)  # connections from the kernel, whatever becomes of them
BACKLOG = 128  # connections that wait in the kernel
ACCEPT_BATCH_MAX = 32  # before others have their turn: two milliseconds
PAUSE_SECONDS = 0.05  # where somebody was turned away
FAULT_SECONDS = 0.1  # until the kernel is asked again that had no room for another socket

# A third of a peer's time makes decisions 1.5 times as long. Four peers on a machine with two processors have half of one each,
# and attackers on the same machine take as much again as all that the peers lose.
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
    """`has_members`: whether members are known to come from this host."""

    def __init__(self, has_members: Callable[[str], bool], processor: Callable[[], float]) -> None:
        self._has_members, self._processor = has_members, processor
        self._all, self._taking = CpuBucket(CONNECTIONS_SHARE), CpuBucket(ACCEPT_SHARE)
        self._hosts: OrderedDict[tuple[str, bool], CpuBucket] = OrderedDict()

    def admit_connection(self, host: str) -> bool:
        """Whether one more connection of this host is served; then it has paid for it."""
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
        """`serve` gets each connection that is admitted, and closes it."""
        with socket.socket(fileno=listener.socket.detach()) as listening:  # Trio's own way costs as much as closing one at once
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
                    pass  # nobody else waits
                except OSError as error:
                    log.error("cannot take a connection: %s", error)
                    await trio.sleep(FAULT_SECONDS)
                self._taking.spend(self._processor() - started, trio.current_time())
                await trio.sleep(PAUSE_SECONDS * turned_away)  # several at a time cost half as much


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
