"""The queue of received messages. Peers take turns, and strangers get a turn only when no other peer has messages.

Messages of one peer keep their order within each priority, as on the wire. A vote overtakes messages of bulk data that were read
before the vote.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import trio

from protocol.limits import MESSAGE_BYTES_MAX
from transport.connections.peer_link import PeerLink
from transport.network import DataReceived, NetworkEvent
from transport.peer_policy import PeerClass
from transport.quotas.memory_quota import MemoryAccount
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, Priority

# Queued bytes of one peer above which its link is not read, by class. Strangers send no large messages.
UNREAD_BYTES_MAX = dict.fromkeys(PeerClass, 2 * MESSAGE_BYTES_MAX) | {PeerClass.STRANGER: 256 << 10}
# Strangers' messages that are delivered, but not finished. A vote may have to wait for all of them in the node.
STRANGER_MESSAGES_IN_PROGRESS_MAX = 4
PAUSE_SECONDS_MIN = 0.001


# A run is a sequence of messages of one peer without another event between them, in one queue for each priority. It is never
# empty.
MessageRun = tuple[deque[DataReceived], ...]


@dataclass(slots=True)
class _PeerQueue:
    """The queued events of one peer."""

    account: MemoryAccount
    events: deque[NetworkEvent | MessageRun] = field(default_factory=deque)
    unread: int = 0  # bytes of queued messages
    senders: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    def put(self, event: NetworkEvent, priority: Priority) -> None:
        if not isinstance(event, DataReceived):
            self.events.append(event)
            return
        said = self.events[-1] if self.events else None
        if not isinstance(said, tuple):
            said = tuple(deque[DataReceived]() for _ in Priority)
            self.events.append(said)
        said[priority].append(event)

    def pop(self) -> NetworkEvent:
        first = self.events[0]
        event = next(queue for queue in first if queue).popleft() if isinstance(first, tuple) else first
        if not isinstance(first, tuple) or not any(first):
            self.events.popleft()
        return event


class InboundQueue:
    """The queue of a network's events.

    The events of each link are `PeerConnected`, any number of `DataReceived`, then `PeerDisconnected`. `strangers_wait` returns
    the seconds until messages of strangers may be delivered again. The receiver calls `finish_message` after each message of a
    stranger.
    """

    def __init__(self, strangers_wait: Callable[[], float]) -> None:
        self._strangers_wait = strangers_wait
        self._at_work = Counter[bytes]()  # stranger -> number of its messages that are delivered but not finished
        # Queues by peer; the first one has the next turn. All events of a peer are in one of the two tables, and so stay in
        # order.
        self._members: OrderedDict[bytes, _PeerQueue] = OrderedDict()
        self._strangers: OrderedDict[bytes, _PeerQueue] = OrderedDict()
        self._receivers = trio.lowlevel.ParkingLot()

    def put(self, event: NetworkEvent, source: PeerLink | None = None, priority: Priority = Priority.CONTROL) -> None:
        account = source.memory_account if source is not None else MemoryAccount()
        line = self._line(account.owner)
        if line is None:
            lane = self._strangers if source is not None and source.peer_class is PeerClass.STRANGER else self._members
            line = lane[account.owner] = _PeerQueue(account)
        line.account = account  # The account of an earlier link may have ended with that link.
        if isinstance(event, DataReceived):
            line.unread += _size(event)
            account.add_bytes(_size(event))
        line.put(event, priority)
        self._receivers.unpark()

    async def put_received(self, event: DataReceived, source: PeerLink, priority: Priority) -> None:
        """Queue a message, after waiting while the queue of its peer is full."""
        while (line := self._line(event.peer)) is not None and line.unread >= UNREAD_BYTES_MAX[source.peer_class]:
            await line.senders.park()
        if not source.closed:
            self.put(event, source, priority)

    async def receive(self) -> NetworkEvent:
        await trio.lowlevel.checkpoint()
        while not self._members and (pause := self._pause()):
            with trio.move_on_after(pause + PAUSE_SECONDS_MIN):
                await self._receivers.park()
        lane = self._members or self._strangers
        peer, line = next(iter(lane.items()))
        event = line.pop()
        lane.move_to_end(peer)
        if isinstance(event, DataReceived):
            self._release_bytes(line, event)
            if lane is self._strangers:
                self._at_work[peer] += 1
        if not line.events:
            del lane[peer]
        return event

    def finish_message(self, peer: bytes) -> None:
        """Record that a message was handled, if its sender is a stranger. For other peers this does nothing."""
        if peer in self._at_work:
            self._at_work[peer] -= 1
            if not self._at_work[peer]:
                del self._at_work[peer]
            self._receivers.unpark()

    def _pause(self) -> float:
        """Return the seconds until a stranger's message may be delivered, if no other event comes before."""
        if not self._strangers or self._at_work.total() >= STRANGER_MESSAGES_IN_PROGRESS_MAX:
            return math.inf
        return max(0.0, self._strangers_wait())

    def promote_peer(self, peer: bytes) -> None:
        """Move the events of a former stranger, in their order, to those of members."""
        if peer in self._strangers:
            self._members[peer] = self._strangers.pop(peer)
            self._receivers.unpark()

    def discard_messages(self, peer: bytes) -> None:
        """Discard the queued messages of a peer, but not its other events."""
        line = self._line(peer)
        if line is not None:
            said = [event for batch in line.events if isinstance(batch, tuple) for event in chain(*batch)]
            line.events = deque(event for event in line.events if not isinstance(event, tuple))
            for event in said:
                self._release_bytes(line, event)
            if not line.events:
                self._members.pop(peer, None)
                self._strangers.pop(peer, None)

    def _release_bytes(self, line: _PeerQueue, event: DataReceived) -> None:
        line.unread -= _size(event)
        line.account.add_bytes(-_size(event))
        line.senders.unpark_all()

    def _line(self, peer: bytes) -> _PeerQueue | None:
        return self._members.get(peer) or self._strangers.get(peer)

    def __aiter__(self) -> InboundQueue:
        return self

    async def __anext__(self) -> NetworkEvent:
        return await self.receive()


def _size(event: DataReceived) -> int:
    return len(event.data) + MESSAGE_OVERHEAD_BYTES
