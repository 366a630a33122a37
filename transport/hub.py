"""What the TCP swarm and its in-memory twin share: links, events, refusals, bans, pings, and the payload exchange."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import trio

from protocol.addresses import AddressScope, host_subnet, parse_address, scope_of
from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import WIRE_VERSION, short_id
from protocol.messages import (
    CIRCUIT_MESSAGES,
    LINK_MESSAGES_BY_VERSION,
    BlobChunk,
    BlobElsewhere,
    CircuitDeliveryReport,
    CircuitMigrated,
    DialBack,
    DialBackFailed,
    GetBlob,
    GetPeerRecords,
    GuestInvitation,
    HasBlob,
    LinkClosing,
    LivenessReport,
    NoBlob,
    ObservedAddress,
    PeerAddresses,
    PeerRecords,
    Ping,
    Pong,
)
from transport.blobs import BlobStore
from transport.effort import LINK, PATIENCE_SECONDS, Effort, Payer
from transport.events import EventQueue
from transport.exchange import Exchange, RunBlocking
from transport.farewell import CLOSING_SECONDS, Farewell
from transport.framing import MESSAGE_OVERHEAD_BYTES, ByPriority, Channel, Inbox, Message, Outbox, Priority
from transport.measures import History, Kernel, Meter
from transport.network import Connected, Disconnected, LinkInfo, Received, Traffic
from transport.shares import STRANGERS_MAX, Account, Memory
from transport.silence import PROBE_SECONDS, Pace, Silence
from transport.slots import least
from transport.standing import Standing, StandingOf
from transport.uplink import Uplink

HANDOVER_SECONDS = 10.0  # from a circuit to a direct link: for the largest message, at the bytes a second that a relay allows
BAN_SECONDS = 2.0  # the first; each further one is twice as long
BAN_SECONDS_MAX = 600.0
BAN_MEMORY_SECONDS = 3600.0  # a key that behaved for this long starts at the first ban again
BANS_MAX = 1024  # the oldest is forgotten first
HISTORIES_MAX = 1024  # of peers, 10 kB each: all that are linked, and as many that come and go
LINKS_MAX = 512  # VOTERS_MAX and as many others

ANSWER_SECONDS_MAX = 1.0  # that a question for a blob costs: if it took longer, this process was stopped meanwhile
CHUNK_HEAD_BYTES = 64  # of an encoded BlobChunk: its tag and digest stand first

Allow = Callable[[bytes], bool]
Welcome = Callable[[bytes, GuestInvitation], None]  # raises `RemoteProtocolError` for what is no invitation


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

    by: bytes | None = None  # the relay; None: the link is direct

    def __init__(self, peer: bytes, address: str, dialed: bool, outbox: Outbox, inbox: Inbox) -> None:
        self.peer, self.address, self.dialed = peer, address, dialed
        self.host = host_subnet(parse_address(address)[0])  # for budgets of hosts
        self.outbox, self.inbox = outbox, inbox
        self.version = WIRE_VERSION  # what both ends speak
        # Of the network, once it is attached.
        self.standing, self.account, self.payer = Standing.MEMBER, Account(), Payer(LINK[Standing.MEMBER])
        self.uplink: Uplink | None = None
        self.waited = 0.0  # seconds that this peer, which sends as much as it can, was not read
        self.scope = trio.CancelScope()  # around everything that serves this link
        self.since = trio.current_time()
        self.meter = Meter(History())  # until it is attached; from then on with the peer's history
        self.closed = False
        self.local_host: str | None = None  # of this machine, from which a direct link leads
        self.remote: str | None = None  # "host:port" to which it leads, the host an IP address
        self.records_told_at = self.dialed_back_at = -math.inf
        self.pace = Pace()  # of the hub, once it is attached, and `silence` is since then
        self.silence = Silence(self.pace, self.since)
        self.hears: LivenessReport | None = None  # what the peer said last
        self.told: LivenessReport | None = None  # what it was told last
        self._output = trio.Event()
        self._ping_number = 0
        self._ping_time: float | None = None
        self.successor: Link | None = None  # a direct link, which has taken over
        self.predecessor: Link | None = None  # the circuit that this one has taken over from
        self.all_read = trio.Event()  # nothing more comes here: the peer has moved, or the link has ended
        self._moved_lanes = 0  # of the peer
        self._all_read_there = False

    @property
    def reach(self) -> AddressScope:
        """Who can reach the host at the other end."""
        return scope_of(self.remote or self.address)

    def push(self, channel: Channel, data: bytes, priority: Priority) -> bool:
        if not self.outbox.push(channel, data, priority):
            return False
        self._output.set()
        return True

    def post(self, message: Any, priority: Priority) -> bool:
        """False: it is not queued, or the peer's wire version does not know it."""
        if not isinstance(message, LINK_MESSAGES_BY_VERSION[self.version]):
            return False
        return self.push(Channel.LINK, encode(message), priority)

    async def output(self) -> None:
        """Return when something waits to be sent, and may be: at the end of the turn in which it was pushed, all together."""
        if not self.outbox:
            self.meter.idle(self.kernel(), trio.current_time())
            self._output = trio.Event()
            await self._output.wait()
        if self.uplink is not None:
            await self.uplink.turn(self)
        self.meter.busy(self.kernel(), trio.current_time())

    def kernel(self) -> Kernel:
        return Kernel(sum(self.outbox.sent), 0, 0, 0)  # as if it had all been sent: the rate never falls

    def pay_with(self, account: Account) -> None:
        """What this link holds is this account's from now on."""
        before, self.account = self.account, account
        before.is_linked, account.is_linked = False, True
        self.charge(account)

    def charge(self, account: Account) -> None:
        for box in (self.outbox, self.inbox):
            box.account.add(-box.held)
            box.account = account
            account.add(box.held)

    def close(self, reason: str = "") -> None:
        """At once; or, for a reason, as soon as the peer has it."""
        if self.closed:
            return
        self.closed = True
        self.all_read.set()
        if reason and LinkClosing in LINK_MESSAGES_BY_VERSION[self.version]:
            self.outbox.end(Channel.LINK, encode(LinkClosing(reason)))
            self._output.set()
            self.scope.deadline = trio.current_time() + CLOSING_SECONDS
        else:
            self.scope.cancel()

    # A direct link takes over from a circuit: both ends send over it what is new, and read it once they have read the circuit to
    # its end, which each lane marks. So nothing is lost or comes twice, and the order within each priority stays.

    def hand_over_to(self, link: Link) -> None:
        self.successor, link.predecessor = link, self
        link.hears, link.told = self.hears, self.told
        self.scope.deadline = trio.current_time() + HANDOVER_SECONDS
        for lane in Priority:
            self.outbox.move_waiting(link.outbox, lane)
            self.post(CircuitMigrated(read=False), lane)
        link._output.set()

    def on_moved(self, moved: CircuitMigrated) -> None:
        if moved.read:
            self._all_read_there = True
            return
        self._moved_lanes += 1
        if self._moved_lanes == len(Priority):
            self.all_read.set()
            self.post(CircuitMigrated(read=True), Priority.VOTE)

    @property
    def handed_over(self) -> bool:
        """Whether all that was sent over this link, either way, has been read."""
        return self._all_read_there and self._moved_lanes >= len(Priority)

    def ping(self) -> None:
        self._ping_number += 1
        self._ping_time = trio.current_time()
        self.post(Ping(self._ping_number), Priority.VOTE)

    def on_ping(self, ping: Ping) -> None:
        self.post(Pong(ping.number), Priority.VOTE)

    def on_arrived(self, arrived: CircuitDeliveryReport) -> None:
        """Only a circuit cares."""

    def fails(self, now: float) -> bool:
        """Whether it should go over another relay."""
        return False

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
            kind="relayed" if self.by else "direct",
            by=self.by,
            silent_seconds=self.silence.seconds(now),
            suspected=self.silence.is_suspicious(now),
            hears=self.hears,
        )


class Hub:
    """The common half of a `Network`. Subclasses make links, `attach` them, and feed what arrives to `deliver`."""

    def __init__(
        self,
        me: bytes,
        blobs: BlobStore,
        allow: Allow,
        run_blocking: RunBlocking,
        pace: Pace = Pace(),
        *,
        standing_of: StandingOf,
        welcome: Welcome = lambda peer, shown: None,
        processor: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`processor`: seconds of processor time that this thread has spent; `clock`: seconds that have gone by, also while it
        waited for a disk. Without them nobody spends any.
        """
        self.me, self.pace = me, pace
        self.memory, self.effort = Memory(), Effort()
        self._standing_of, self._welcome = standing_of, welcome
        self._processor, self._clock = processor, clock
        self.events = EventQueue(self.effort.until_strangers_are_heard)
        self._allow = allow
        self._links: dict[bytes, Link] = {}
        self._uplink = Uplink(self._links)
        self._histories: OrderedDict[bytes, History] = OrderedDict()  # by peer, who was linked last at the end
        self._refused: Counter[str] = Counter()
        self._bans = Bans()
        self._past_sent = [0, 0, 0]
        self._past_received = [0, 0, 0]
        self._exchange = Exchange(
            me,
            blobs,
            send=self._post,
            drop=self.drop,
            connected=self.connected,
            takes_turns=self._takes_turns,
            recall=self._recall,
            is_stranger=lambda peer: standing_of(peer) is Standing.STRANGER,
            run_blocking=run_blocking,
        )

    # Network ---------------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, data: bytes, priority: Priority = Priority.CONTROL) -> bool:
        return self._push(peer, Channel.APPLICATION, data, priority)

    def broadcast(self, data: bytes, priority: Priority = Priority.CONTROL) -> int:
        return sum(self.send(link.peer, data, priority) for link in tuple(self._links.values()) if not self._is_stranger(link))

    def connected(self) -> frozenset[bytes]:
        return frozenset(self._links)

    def heard(self) -> frozenset[bytes]:
        now = trio.current_time()
        return frozenset(peer for peer, link in self._links.items() if not link.silence.is_suspicious(now))

    def tell(self, hears: LivenessReport, to: Set[bytes]) -> None:
        for link in self._links.values():
            if link.peer in to and link.told != hears and link.post(hears, Priority.CONTROL):
                link.told = hears

    def drop(self, peer: bytes, error: RemoteProtocolError) -> None:
        self.refuse(error.reason)
        self._bans.add(peer, trio.current_time())
        link = self._links.get(peer)
        if link is not None:
            self.detach(link, error.reason)

    def links(self) -> tuple[LinkInfo, ...]:
        return tuple(link.info() for link in self._links.values())

    def traffic(self) -> Traffic:
        links = self._links.values()
        sent = _total(self._past_sent, (link.outbox.sent for link in links))
        received = _total(self._past_received, (link.inbox.received for link in links))
        exchange, holder = self._exchange, self._exchange.holder
        blobs, reveals = (holder.bytes_sent, exchange.bytes_received), (holder.reveals_sent, exchange.reveals_received)
        return Traffic(sent, received, *blobs, *reveals)

    def reveals_sent(self) -> Mapping[bytes, int]:
        return self._exchange.holder.reveals_to

    def refused(self) -> Mapping[str, int]:
        return dict(self._refused)

    async def fetch(self, digest: bytes, size_max: int, sources: Iterable[bytes] | None = None) -> None:
        await self._exchange.fetch(digest, size_max, sources)

    def _is_stranger(self, link: Link) -> bool:
        if link.standing is Standing.STRANGER:
            self.stand(link)
        return link.standing is Standing.STRANGER

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
        """The link is in use from here on; an older one of the same peer ends first, or hands over to it."""
        old = self._links.get(link.peer)
        takes_over = old is not None and self.takes_over(old, link)
        if old is not None and not takes_over:
            self.detach(old)
        self._take_slot(link)
        link.pace, link.silence = self.pace, Silence(self.pace, trio.current_time())
        self._links[link.peer] = link
        link.meter.history = self._history(link.peer)
        if old is not None and takes_over:
            old.hand_over_to(link)
            return
        self.events.put(Connected(link.peer), link)
        self._exchange.peer_connected(link.peer)

    def _history(self, peer: bytes) -> History:
        history = self._histories[peer] = self._histories.pop(peer, History())
        if len(self._histories) > HISTORIES_MAX:
            del self._histories[next(one for one in self._histories if one not in self._links)]
        return history

    def takes_over(self, old: Link, link: Link) -> bool:
        """Whether a peer's new link goes on where the old one stops."""
        return False

    def detach(self, link: Link, reason: str = "") -> None:
        """End the link, once; nothing of it is delivered afterwards. The peer reads the reason."""
        successor, link.successor = link.successor, None
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            if link.standing is Standing.STRANGER:
                self.events.discard(link.peer)  # or one key after the other would leave what nobody has taken yet
            self._count(link)
            self.events.put(Disconnected(link.peer), link)
            link.pay_with(Account())
            self._exchange.peer_disconnected(link.peer)
        elif successor is not None:
            self._count(link)
            link.charge(Account())
            if self._links.get(link.peer) is successor and not link.handed_over:
                # The peer is as good as linked anew: both sides say again what the other may have missed.
                self.events.put(Disconnected(link.peer), successor)
                self._exchange.peer_disconnected(link.peer)
                self.events.put(Connected(link.peer), successor)
                self._exchange.peer_connected(link.peer)
        link.close(reason)
        if link.predecessor is not None:
            self.detach(link.predecessor)

    def _count(self, link: Link) -> None:
        self._past_sent = list(_total(self._past_sent, [link.outbox.sent]))
        self._past_received = list(_total(self._past_received, [link.inbox.received]))

    def stand(self, link: Link) -> None:
        """Sees who the peer is now: a stranger may have become a member."""
        standing = self._standing_of(link.peer)
        if standing is not link.standing:
            if link.standing is Standing.STRANGER:
                self.events.admit(link.peer)
            link.standing, link.payer = standing, self.effort.link(standing)
            self.memory.account(link.peer, standing)

    @contextlib.contextmanager
    def working(self, payer: Payer) -> Iterator[None]:
        """What is done inside, without waiting, is done for whoever pays."""
        started = self._processor()
        try:
            yield
        finally:
            payer.spend(self._processor() - started)

    def worked(self, peer: bytes, seconds: float) -> None:
        self.spent(peer, seconds)
        self.events.worked(peer)

    def spent(self, peer: bytes, seconds: float) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.payer.spend(seconds)

    def waits(self, peer: bytes) -> float:
        link = self._links.get(peer)
        return 0.0 if link is None else link.payer.wait()

    async def turn(self, link: Link, is_full: bool) -> None:
        """Returns when more of this link may be read. `is_full`: the last read was as much as fits.

        Raises `RemoteProtocolError` for a stranger that goes on sending all that it can.
        """
        link.waited *= is_full
        link.waited += await self.effort.turn(link.payer, link.standing)
        if link.waited > PATIENCE_SECONDS and link.standing is Standing.STRANGER:
            raise RemoteProtocolError("too-busy", f"more than a stranger may send, for {PATIENCE_SECONDS:g} s")

    def hold(self, link: Link) -> None:
        """Makes room for what has come in over this link."""
        while (other := link.account.gives_way()) is not None and not link.closed:
            self._give_way(other)

    async def deliver(self, link: Link, message: Message) -> None:
        """Raises `RemoteProtocolError` if it is a message of transport's own and bad."""
        if link.closed:
            return
        link.silence.heard(trio.current_time())
        if message.channel is Channel.APPLICATION:
            account, size, started = link.account, len(message.data), trio.current_time()
            account.add(size)  # also while it waits here
            try:
                self.hold(link)
                await self.events.put_received(Received(link.peer, message.data), link, message.priority)
            finally:
                account.add(-size)
                link.waited += trio.current_time() - started
        else:
            with self.working(link.payer):
                said: Any = decode_message(message.data, LINK_MESSAGES_BY_VERSION[link.version])
                if not isinstance(said, GetBlob):
                    self._on_link_message(link, said)
            if isinstance(said, GetBlob):
                await self._answer(link, said)
        link.silence.listens(trio.current_time())

    async def _answer(self, link: Link, asked: GetBlob) -> None:
        """The asker pays for the disk, too, and its next question waits until it has."""
        started = self._clock()
        self._exchange.holder.on_get_blob(link.peer, asked)
        link.payer.spend(min(ANSWER_SECONDS_MAX, self._clock() - started))
        if link.payer.wait() > 0:
            link.waited += await self.effort.turn(link.payer, link.standing)

    def on_addresses(self, link: Link, addresses: PeerAddresses) -> None:
        """Only a network that dials cares."""

    def on_discovery(self, link: Link, message: Any) -> None:
        """As `on_addresses`."""

    def on_circuit_message(self, link: Link, message: Any) -> None:
        """One of `CIRCUIT_MESSAGES`. Only a network that relays cares."""

    # Own -------------------------------------------------------------------------------------------------------------

    def _take_slot(self, link: Link) -> None:
        """Another link gives way where there are too many. Raises `RemoteProtocolError` where none does."""
        link.standing = self._standing_of(link.peer)
        links = self._links.values()
        strangers = [other for other in links if other.standing is Standing.STRANGER]
        below = strangers if link.standing is Standing.STRANGER else [other for other in links if other.standing < link.standing]
        if len(links) >= LINKS_MAX or (link.standing is Standing.STRANGER and len(strangers) >= STRANGERS_MAX):
            if not below:
                raise RemoteProtocolError("too-many-links", f"{LINKS_MAX} links, and none of them gives way")
            self.refuse("gave-way")
            self.detach(least(below), "gave-way")
        if link.standing is not Standing.STRANGER:
            self.events.admit(link.peer)
        link.payer, link.uplink = self.effort.link(link.standing), self._uplink
        link.pay_with(self.memory.account(link.peer, link.standing))

    def _give_way(self, account: Account) -> None:
        self.refuse("memory-full")
        self.events.discard(account.owner)
        link = self._links.get(account.owner)
        if link is not None:
            self.detach(link, "memory-full")

    def _on_link_message(self, link: Link, message: Any) -> None:
        match message:
            case BlobChunk():
                self._exchange.on_blob_chunk(link.peer, message)
            case NoBlob():
                self._exchange.on_no_blob(link.peer, message)
            case BlobElsewhere():
                self._exchange.on_blob_elsewhere(link.peer, message)
            case HasBlob():
                self._exchange.on_has_blob(link.peer, message)
            case PeerAddresses():
                self.on_addresses(link, message)
            case PeerRecords() | GetPeerRecords() | ObservedAddress() | DialBack() | DialBackFailed():
                self.on_discovery(link, message)
            case Ping():
                link.on_ping(message)
            case Pong():
                link.on_pong(message)
            case LivenessReport():
                link.hears = message
            case CircuitMigrated():
                link.on_moved(message)
            case CircuitDeliveryReport():
                link.on_arrived(message)
            case GuestInvitation():
                self._welcome(link.peer, message)
                self.stand(link)
            case LinkClosing():
                raise Farewell(message.reason)
            case _ if isinstance(message, CIRCUIT_MESSAGES):
                self.on_circuit_message(link, message)

    def _takes_turns(self, peer: bytes) -> bool:
        link = self._links.get(peer)
        return link is not None and BlobElsewhere in LINK_MESSAGES_BY_VERSION[link.version]

    def _recall(self, peer: bytes, digest: bytes) -> None:
        """Chunks of this blob that have not begun to leave are not sent."""
        if peer in self._links:
            self._links[peer].outbox.recall(Priority.BULK, lambda data: digest in data[:CHUNK_HEAD_BYTES])

    def _post(self, peer: bytes, message: Any, priority: Priority) -> bool:
        link = self._links.get(peer)
        if link is not None and not isinstance(message, LINK_MESSAGES_BY_VERSION[link.version]):
            return False
        return self._push(peer, Channel.LINK, encode(message), priority)

    def _push(self, peer: bytes, channel: Channel, data: bytes, priority: Priority) -> bool:
        link = self._links.get(peer)
        if link is None:
            return False
        while (other := link.account.gives_way(len(data) + MESSAGE_OVERHEAD_BYTES)) not in (None, link.account):
            self._give_way(other)
        if other is None and link.push(channel, data, priority):
            return True
        if priority is Priority.VOTE:  # a vote that silently gets lost is worse than a connection that has to be made again
            self.refuse("vote-queue-full")
            self.detach(link, "vote-queue-full")
        else:
            self.refuse("queue-full")
        return False


def _total(past: Iterable[int], parts: Iterable[ByPriority]) -> ByPriority:
    first, second, third = (sum(column) for column in zip(past, *parts, strict=True))
    return first, second, third
