"""What comes in and is not taken yet: in order for each peer, in turn among peers, and strangers' after everybody else's."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from protocol.limits import MESSAGE_BYTES_MAX
from transport.framing import MESSAGE_OVERHEAD_BYTES
from transport.network import Event, Received
from transport.shares import Account
from transport.standing import Standing

# Of one peer, delivered and not taken yet; then its link is not read. A stranger has nothing to say that is large.
UNREAD_BYTES_MAX = dict.fromkeys(Standing, 2 * MESSAGE_BYTES_MAX) | {Standing.STRANGER: 256 << 10}
# Of strangers: taken, and not dealt with yet. So few are in a turn of the node with a vote, and in the line before it.
AT_WORK_MAX = 16
PAUSE_SECONDS_MIN = 0.001


class Source(Protocol):
    """The link that an event is about."""

    account: Account
    standing: Standing
    closed: bool


@dataclass(slots=True)
class _Line:
    """The events of one peer."""

    account: Account
    events: deque[Event] = field(default_factory=deque)
    unread: int = 0  # bytes
    senders: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)


class EventQueue:
    """`strangers_wait`: seconds until strangers may be heard again. Whoever takes a stranger's message says `worked` after it."""

    def __init__(self, strangers_wait: Callable[[], float]) -> None:
        self._strangers_wait = strangers_wait
        self._at_work = Counter[bytes]()  # messages of strangers
        # By peer, whose turn it is first. A peer with waiting events stays in its lane, so that they keep their order.
        self._members: OrderedDict[bytes, _Line] = OrderedDict()
        self._strangers: OrderedDict[bytes, _Line] = OrderedDict()
        self._receivers = trio.lowlevel.ParkingLot()

    def put(self, event: Event, source: Source | None = None) -> None:
        account = source.account if source is not None else Account()
        line = self._line(account.owner)
        if line is None:
            lane = self._strangers if source is not None and source.standing is Standing.STRANGER else self._members
            line = lane[account.owner] = _Line(account)
        line.account = account  # an account that holds nothing ends with its link
        if isinstance(event, Received):
            line.unread += _size(event)
            account.add(_size(event))
        line.events.append(event)
        self._receivers.unpark()

    async def put_received(self, event: Received, source: Source) -> None:
        """Waits while too much of this peer is not taken yet."""
        while (line := self._line(event.peer)) is not None and line.unread >= UNREAD_BYTES_MAX[source.standing]:
            await line.senders.park()
        if not source.closed:
            self.put(event, source)

    async def receive(self) -> Event:
        await trio.lowlevel.checkpoint()
        while not self._members and (pause := self._pause()):
            with trio.move_on_after(pause + PAUSE_SECONDS_MIN):
                await self._receivers.park()
        lane = self._members or self._strangers
        peer, line = next(iter(lane.items()))
        event = line.events.popleft()
        lane.move_to_end(peer)
        if isinstance(event, Received):
            self._took(line, event)
            if lane is self._strangers:
                self._at_work[peer] += 1
        if not line.events:
            del lane[peer]
        return event

    def worked(self, peer: bytes) -> None:
        """A message of this peer was dealt with."""
        if peer in self._at_work:
            self._at_work[peer] -= 1
            if not self._at_work[peer]:
                del self._at_work[peer]
            self._receivers.unpark()

    def _pause(self) -> float:
        """Seconds until a stranger may be heard, if nothing happens before."""
        if not self._strangers or self._at_work.total() >= AT_WORK_MAX:
            return math.inf
        return max(0.0, self._strangers_wait())

    def discard(self, peer: bytes) -> None:
        """What this peer said and nobody has taken is lost."""
        line = self._line(peer)
        if line is not None:
            said = [event for event in line.events if isinstance(event, Received)]
            line.events = deque(event for event in line.events if not isinstance(event, Received))
            for event in said:
                self._took(line, event)
            if not line.events:
                self._members.pop(peer, None)
                self._strangers.pop(peer, None)

    def _took(self, line: _Line, event: Received) -> None:
        line.unread -= _size(event)
        line.account.add(-_size(event))
        line.senders.unpark_all()

    def _line(self, peer: bytes) -> _Line | None:
        return self._members.get(peer) or self._strangers.get(peer)

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> Event:
        return await self.receive()


def _size(event: Received) -> int:
    return len(event.data) + MESSAGE_OVERHEAD_BYTES
