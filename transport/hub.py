"""What the TCP swarm and its in-memory twin share: links, events, refusals, bans, pings, and the payload exchange."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import trio

from protocol.addresses import Scope, scope_of
from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import WIRE_VERSION, short_id
from protocol.messages import LINKS_OF, Addresses, BlobChunk, GetBlob, GetRecords, Hears, NoBlob, Ping, Pong, Records
from transport.blobs import BlobStore
from transport.exchange import Exchange, RunBlocking
from transport.framing import MESSAGE_OVERHEAD_BYTES, ByPriority, Channel, Inbox, Message, Outbox, Priority
from transport.measures import History, Kernel, Meter
from transport.network import (
    RECEIVED_BYTES_MAX,
    Connected,
    Disconnected,
    Event,
    LinkInfo,
    Received,
    Traffic,
)
from transport.silence import PROBE_SECONDS, Pace, Silence

BAN_SECONDS = 2.0  # the first; each further one is twice as long
BAN_SECONDS_MAX = 600.0
BAN_MEMORY_SECONDS = 3600.0  # a key that behaved for this long starts at the first ban again
BANS_MAX = 1024  # the oldest is forgotten first
HISTORIES_MAX = 1024  # of peers, 10 kB each: all that are linked, and as many that come and go

Allow = Callable[[bytes], bool]


class EventQueue:
    """The events of a network, in order; `Received` is bounded by bytes for each peer, by waiting in that peer's reader."""

    def __init__(self) -> None:
        self._queue: deque[Event] = deque()
        self._unread: Counter[bytes] = Counter()
        self._receivers = trio.lowlevel.ParkingLot()
        self._senders: dict[bytes, trio.lowlevel.ParkingLot] = {}

    def put(self, event: Event) -> None:
        self._queue.append(event)
        self._receivers.unpark()

    async def put_received(self, event: Received) -> None:
        while self._unread[event.peer] >= RECEIVED_BYTES_MAX:
            await self._senders.setdefault(event.peer, trio.lowlevel.ParkingLot()).park()
        self._unread[event.peer] += len(event.data) + MESSAGE_OVERHEAD_BYTES
        self.put(event)

    async def receive(self) -> Event:
        await trio.lowlevel.checkpoint()
        while not self._queue:
            await self._receivers.park()
        event = self._queue.popleft()
        if isinstance(event, Received):
            self._taken(event)
        return event

    def _taken(self, event: Received) -> None:
        self._unread[event.peer] -= len(event.data) + MESSAGE_OVERHEAD_BYTES
        if not self._unread[event.peer]:
            del self._unread[event.peer]
        if event.peer in self._senders and self._unread[event.peer] < RECEIVED_BYTES_MAX:
            self._senders.pop(event.peer).unpark_all()

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> Event:
        return await self.receive()


class Bans:
    """Keys refused for a while after misbehaviour."""

    def __init__(self) -> None:
        self._bans: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # key -> (refused until, length of that ban)

    def add(self, peer: bytes, now: float) -> None:
        until, length = self._bans.pop(peer, (now, 0.0))
        length = 0.0 if now > until + BAN_MEMORY_SECONDS else length
        length = min(BAN_SECONDS_MAX, 2 * length or BAN_SECONDS)
        self._bans[peer] = (now + length, length)
        if len(self._bans) > BANS_MAX:
            self._bans.popitem(last=False)

    def until(self, peer: bytes) -> float:
        """When the key may come back; minus infinity if it was never banned."""
        return self._bans.get(peer, (float("-inf"), 0.0))[0]


class Link:
    """One authenticated connection to a peer, as far as TCP and memory have it in common."""

    def __init__(self, peer: bytes, address: str, dialed: bool, outbox: Outbox, inbox: Inbox) -> None:
        self.peer, self.address, self.dialed = peer, address, dialed
        self.outbox, self.inbox = outbox, inbox
        self.version = WIRE_VERSION  # what both ends speak
        self.scope = trio.CancelScope()  # around everything that serves this link
        self.since = trio.current_time()
        self.meter = Meter(History())  # until it is attached; from then on with the peer's history
        self.closed = False
        self.local_host: str | None = None  # of this machine, from which the link leads
        self.records_told_at = -math.inf
        self.pace = Pace()  # of the hub, once it is attached, and `silence` is since then
        self.silence = Silence(self.pace, self.since)
        self.hears: Hears | None = None  # what the peer said last
        self.told: Hears | None = None  # what it was told last
        self._output = trio.Event()
        self._ping_number = 0
        self._ping_time: float | None = None

    @property
    def reach(self) -> Scope:
        """Who can reach the host at the other end."""
        return scope_of(self.address)

    def push(self, channel: Channel, data: bytes, priority: Priority) -> bool:
        if not self.outbox.push(channel, data, priority):
            return False
        self._output.set()
        return True

    def post(self, message: Any, priority: Priority) -> bool:
        """False: it is not queued, or the peer's wire version does not know it."""
        if not isinstance(message, LINKS_OF[self.version]):
            return False
        return self.push(Channel.LINK, encode(message), priority)

    async def output(self) -> None:
        """Return when something waits to be sent: at the end of the turn in which it was pushed, all of it together."""
        if not self.outbox:
            self.meter.idle(self.kernel(), trio.current_time())
            self._output = trio.Event()
            await self._output.wait()
        self.meter.busy(self.kernel(), trio.current_time())

    def kernel(self) -> Kernel:
        return Kernel(sum(self.outbox.sent), 0, 0, 0)  # as if it had all been sent: the rate never falls

    def close(self) -> None:
        self.closed = True
        self.scope.cancel()

    def ping(self) -> None:
        self._ping_number += 1
        self._ping_time = trio.current_time()
        self.post(Ping(self._ping_number), Priority.VOTE)

    def on_pong(self, pong: Pong) -> None:
        if self._ping_time is not None and pong.number == self._ping_number:
            now = trio.current_time()
            self.meter.trip(now - self._ping_time, now)
            self.meter.count(self.kernel(), now)
            self._ping_time = None

    async def keep_alive(self) -> None:
        while True:
            self.ping()
            due = trio.current_time() + self.pace.ping_seconds
            await trio.sleep(min(PROBE_SECONDS, self.pace.ping_seconds))
            # Something may come meanwhile; then the regular time is soon enough.
            while (at := self.silence.next_ping(trio.current_time(), due)) > trio.current_time():  # noqa: ASYNC110
                await trio.sleep_until(at)

    def info(self) -> LinkInfo:
        now = trio.current_time()
        return LinkInfo(
            self.peer,
            self.address,
            self.dialed,
            self.outbox.sent,
            self.inbox.received,
            self.meter.round_trip_seconds,
            self.since,
            self.meter.history,
            silent_seconds=self.silence.seconds(now),
            suspected=self.silence.is_suspicious(now),
            hears=self.hears,
        )


class Hub:
    """The common half of a `Network`. Subclasses make links, `attach` them, and feed what arrives to `deliver`."""

    def __init__(self, me: bytes, blobs: BlobStore, allow: Allow, run_blocking: RunBlocking, pace: Pace = Pace()) -> None:
        self.me, self.pace = me, pace
        self.events = EventQueue()
        self._allow = allow
        self._links: dict[bytes, Link] = {}
        self._histories: OrderedDict[bytes, History] = OrderedDict()  # by peer, who was linked last at the end
        self._refused: Counter[str] = Counter()
        self._bans = Bans()
        self._past_sent = [0, 0, 0]
        self._past_received = [0, 0, 0]
        self._exchange = Exchange(me, blobs, send=self._post, drop=self.drop, connected=self.connected, run_blocking=run_blocking)

    # Network ---------------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, data: bytes, priority: Priority = Priority.CONTROL) -> bool:
        return self._push(peer, Channel.APPLICATION, data, priority)

    def broadcast(self, data: bytes, priority: Priority = Priority.CONTROL) -> int:
        return sum(self.send(peer, data, priority) for peer in tuple(self._links))

    def connected(self) -> frozenset[bytes]:
        return frozenset(self._links)

    def heard(self) -> frozenset[bytes]:
        now = trio.current_time()
        return frozenset(peer for peer, link in self._links.items() if not link.silence.is_suspicious(now))

    def tell(self, hears: Hears, to: Set[bytes]) -> None:
        for link in self._links.values():
            if link.peer in to and link.told != hears and link.post(hears, Priority.CONTROL):
                link.told = hears

    def drop(self, peer: bytes, error: RemoteProtocolError) -> None:
        self.refuse(error.reason)
        self._bans.add(peer, trio.current_time())
        link = self._links.get(peer)
        if link is not None:
            self.detach(link)

    def links(self) -> tuple[LinkInfo, ...]:
        return tuple(link.info() for link in self._links.values())

    def traffic(self) -> Traffic:
        links = self._links.values()
        sent = _total(self._past_sent, (link.outbox.sent for link in links))
        received = _total(self._past_received, (link.inbox.received for link in links))
        exchange = self._exchange
        blobs, reveals = (exchange.bytes_sent, exchange.bytes_received), (exchange.reveals_sent, exchange.reveals_received)
        return Traffic(sent, received, *blobs, *reveals)

    def reveals_sent(self) -> Mapping[bytes, int]:
        return self._exchange.reveals_to

    def refused(self) -> Mapping[str, int]:
        return dict(self._refused)

    async def fetch(self, digest: bytes, size_max: int, sources: Iterable[bytes] | None = None) -> None:
        await self._exchange.fetch(digest, size_max, sources)

    # For the subclass ------------------------------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        self._refused[reason] += 1

    def check_peer(self, peer: bytes) -> None:
        """Raises `RemoteProtocolError` if no connection with this key is wanted now."""
        if peer == self.me:
            raise RemoteProtocolError("self", "this is my own address")
        if self._bans.until(peer) > trio.current_time():
            raise RemoteProtocolError("banned", short_id(peer))
        if not self._allow(peer):
            raise RemoteProtocolError("not-allowed", short_id(peer))

    def attach(self, link: Link) -> None:
        """The link is in use from here on; an older one of the same peer ends first."""
        old = self._links.get(link.peer)
        if old is not None:
            self.detach(old)
        link.pace, link.silence = self.pace, Silence(self.pace, trio.current_time())
        self._links[link.peer] = link
        link.meter.history = self._history(link.peer)
        self.events.put(Connected(link.peer))
        self._exchange.peer_connected(link.peer)

    def _history(self, peer: bytes) -> History:
        history = self._histories[peer] = self._histories.pop(peer, History())
        if len(self._histories) > HISTORIES_MAX:
            del self._histories[next(one for one in self._histories if one not in self._links)]
        return history

    def detach(self, link: Link) -> None:
        """End the link, once; nothing of it is delivered afterwards."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._past_sent = list(_total(self._past_sent, [link.outbox.sent]))
            self._past_received = list(_total(self._past_received, [link.inbox.received]))
            self.events.put(Disconnected(link.peer))
            self._exchange.peer_disconnected(link.peer)
        link.close()

    async def deliver(self, link: Link, message: Message) -> None:
        """Raises `RemoteProtocolError` if it is a message of transport's own and bad."""
        if link.closed:
            return
        link.silence.heard(trio.current_time())
        if message.channel is Channel.APPLICATION:
            await self.events.put_received(Received(link.peer, message.data))
        else:
            self._on_link_message(link, decode_message(message.data, LINKS_OF[link.version]))
        link.silence.listens(trio.current_time())

    def on_addresses(self, link: Link, addresses: Addresses) -> None:
        """Only a network that dials cares."""

    def on_discovery(self, link: Link, message: Any) -> None:
        """As `on_addresses`."""

    # Own -------------------------------------------------------------------------------------------------------------

    def _on_link_message(self, link: Link, message: Any) -> None:
        match message:
            case GetBlob():
                self._exchange.on_get_blob(link.peer, message)
            case BlobChunk():
                self._exchange.on_blob_chunk(link.peer, message)
            case NoBlob():
                self._exchange.on_no_blob(link.peer, message)
            case Addresses():
                self.on_addresses(link, message)
            case Records() | GetRecords():
                self.on_discovery(link, message)
            case Ping():
                link.post(Pong(message.number), Priority.VOTE)
            case Pong():
                link.on_pong(message)
            case Hears():
                link.hears = message

    def _post(self, peer: bytes, message: Any, priority: Priority) -> bool:
        link = self._links.get(peer)
        if link is not None and not isinstance(message, LINKS_OF[link.version]):
            return False
        return self._push(peer, Channel.LINK, encode(message), priority)

    def _push(self, peer: bytes, channel: Channel, data: bytes, priority: Priority) -> bool:
        link = self._links.get(peer)
        if link is None:
            return False
        if link.push(channel, data, priority):
            return True
        if priority is Priority.VOTE:  # a vote that silently gets lost is worse than a connection that has to be made again
            self.refuse("vote-queue-full")
            self.detach(link)
        else:
            self.refuse("queue-full")
        return False


def _total(past: Iterable[int], parts: Iterable[ByPriority]) -> ByPriority:
    first, second, third = (sum(column) for column in zip(past, *parts, strict=True))
    return first, second, third
