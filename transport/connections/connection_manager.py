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
from protocol.identity import short_id
from protocol.messages import (
    CIRCUIT_MESSAGES,
    LINK_MESSAGES,
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
    PeerRecords,
    Ping,
    Pong,
)
from transport.blobs.blob_exchange import BlobExchange, RunBlocking
from transport.blobs.blob_store import BlobStore
from transport.connections.close_reason import CLOSING_SECONDS, LinkClosedByPeer
from transport.connections.inbound_queue import InboundQueue
from transport.connections.upload_shaper import UploadShaper
from transport.network import DataReceived, LinkInfo, PeerConnected, PeerDisconnected, Traffic
from transport.peer_policy import PeerClass, PeerPolicy
from transport.quotas.connection_eviction import choose_link_to_evict
from transport.quotas.cpu_quota import LINK_SHARES, STRANGER_WAIT_SECONDS_MAX, CpuAccount, CpuQuota
from transport.quotas.memory_quota import STRANGERS_MAX, MemoryAccount, MemoryQuota
from transport.wire.failure_detector import PROBE_SECONDS, KeepaliveConfig, LinkFailureDetector
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, ByPriority, Channel, Inbox, Message, Outbox, Priority
from transport.wire.link_measurements import LinkHistory, LinkMeter, TcpInfo

HANDOVER_SECONDS = 10.0  # from a circuit to a direct link: for the largest message, at the bytes a second that a relay allows
BAN_SECONDS = 2.0  # the first; each further one is twice as long
BAN_SECONDS_MAX = 600.0
BAN_MEMORY_SECONDS = 3600.0  # a key that behaved for this long starts at the first ban again
BANS_MAX = 1024  # the oldest is forgotten first
HISTORIES_MAX = 1024  # of peers, 10 kB each: all that are linked, and as many that come and go
LINKS_MAX = 512  # VOTERS_MAX and as many others

ANSWER_SECONDS_MAX = 1.0  # that a question for a blob costs: if it took longer, this process was stopped meanwhile
CHUNK_HEAD_BYTES = 64  # of an encoded BlobChunk: its tag and digest stand first


class BanList:
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

    def banned_until(self, peer: bytes) -> float:
        """When the key may come back; minus infinity if it was never banned."""
        return self._bans.get(peer, (float("-inf"), 0.0))[0]


class PeerLink:
    """One authenticated connection to a peer, as far as TCP and memory have it in common."""

    relay: bytes | None = None  # the relay; None: the link is direct

    def __init__(self, peer: bytes, address: str, dialed: bool, outbox: Outbox, inbox: Inbox) -> None:
        self.peer, self.address, self.dialed = peer, address, dialed
        self.host = host_subnet(parse_address(address)[0])  # for budgets of hosts
        self.outbox, self.inbox = outbox, inbox
        # Of the network, once it is attached.
        self.peer_class, self.memory_account, self.cpu_account = (
            PeerClass.MEMBER,
            MemoryAccount(),
            CpuAccount(LINK_SHARES[PeerClass.MEMBER]),
        )
        self.uplink: UploadShaper | None = None
        self.read_wait_seconds = 0.0  # seconds that this peer, which sends as much as it can, was not read
        self.scope = trio.CancelScope()  # around everything that serves this link
        self.since = trio.current_time()
        self.meter = LinkMeter(LinkHistory())  # until it is attached; from then on with the peer's history
        self.closed = False
        self.local_host: str | None = None  # of this machine, from which a direct link leads
        self.remote: str | None = None  # "host:port" to which it leads, the host an IP address
        self.records_told_at = self.dialed_back_at = -math.inf
        self.keepalive = KeepaliveConfig()  # of the hub, once it is attached, and `failure_detector` is since then
        self.failure_detector = LinkFailureDetector(self.keepalive, self.since)
        self.liveness_report: LivenessReport | None = None  # what the peer said last
        self.liveness_report_sent: LivenessReport | None = None  # what it was told last
        self._output = trio.Event()
        self._ping_number = 0
        self._ping_time: float | None = None
        self.successor: PeerLink | None = None  # a direct link, which has taken over
        self.predecessor: PeerLink | None = None  # the circuit that this one has taken over from
        self.all_read = trio.Event()  # nothing more comes here: the peer has moved, or the link has ended
        self._moved_lanes = 0  # of the peer
        self._all_read_there = False

    @property
    def address_scope(self) -> AddressScope:
        """Who can reach the host at the other end."""
        return scope_of(self.remote or self.address)

    def queue_bytes(self, channel: Channel, data: bytes, priority: Priority) -> bool:
        if not self.outbox.push(channel, data, priority):
            return False
        self._output.set()
        return True

    def queue_message(self, message: Any, priority: Priority) -> bool:
        """Queue a message of the link's own; False: that queue is full."""
        return self.queue_bytes(Channel.LINK, encode(message), priority)

    async def wait_until_sendable(self) -> None:
        """Return when something waits to be sent, and may be: at the end of the turn in which it was pushed, all together."""
        if not self.outbox:
            self.meter.on_idle(self.tcp_info(), trio.current_time())
            self._output = trio.Event()
            await self._output.wait()
        if self.uplink is not None:
            await self.uplink.wait_for_turn(self)
        self.meter.on_busy(self.tcp_info(), trio.current_time())

    def tcp_info(self) -> TcpInfo:
        return TcpInfo(sum(self.outbox.sent), 0, 0, 0)  # as if it had all been sent: the rate never falls

    def switch_account(self, account: MemoryAccount) -> None:
        """What this link holds is this account's from now on."""
        before, self.memory_account = self.memory_account, account
        before.is_linked, account.is_linked = False, True
        self.move_held_bytes(account)

    def move_held_bytes(self, account: MemoryAccount) -> None:
        for box in (self.outbox, self.inbox):
            box.account.add_bytes(-box.held)
            box.account = account
            account.add_bytes(box.held)

    def close(self, reason: str = "") -> None:
        """At once; or, for a reason, as soon as the peer has it."""
        if self.closed:
            return
        self.closed = True
        self.all_read.set()
        if reason:
            self.outbox.finish_with(Channel.LINK, encode(LinkClosing(reason)))
            self._output.set()
            self.scope.deadline = trio.current_time() + CLOSING_SECONDS
        else:
            self.scope.cancel()

    # A direct link takes over from a circuit: both ends send over it what is new, and read it once they have read the circuit to
    # its end, which each lane marks. So nothing is lost or comes twice, and the order within each priority stays.

    def hand_over_to(self, link: PeerLink) -> None:
        self.successor, link.predecessor = link, self
        link.liveness_report, link.liveness_report_sent = self.liveness_report, self.liveness_report_sent
        self.scope.deadline = trio.current_time() + HANDOVER_SECONDS
        for lane in Priority:
            self.outbox.move_waiting(link.outbox, lane)
            self.queue_message(CircuitMigrated(read=False), lane)
        link._output.set()

    def on_moved(self, moved: CircuitMigrated) -> None:
        if moved.read:
            self._all_read_there = True
            return
        self._moved_lanes += 1
        if self._moved_lanes == len(Priority):
            self.all_read.set()
            self.queue_message(CircuitMigrated(read=True), Priority.VOTE)

    @property
    def handed_over(self) -> bool:
        """Whether all that was sent over this link, either way, has been read."""
        return self._all_read_there and self._moved_lanes >= len(Priority)

    def ping(self) -> None:
        self._ping_number += 1
        self._ping_time = trio.current_time()
        self.queue_message(Ping(self._ping_number), Priority.VOTE)

    def on_ping(self, ping: Ping) -> None:
        self.queue_message(Pong(ping.number), Priority.VOTE)

    def on_arrived(self, arrived: CircuitDeliveryReport) -> None:
        """Only a circuit cares."""

    def needs_other_relay(self, now: float) -> bool:
        """Whether it should go over another relay."""
        return False

    def on_pong(self, pong: Pong) -> None:
        if self._ping_time is not None and pong.number == self._ping_number:
            now = trio.current_time()
            self.meter.add_round_trip(now - self._ping_time, now)
            self.meter.count_retransmissions(self.tcp_info(), now)
            self._ping_time = None

    async def run_keepalive(self) -> None:
        while True:
            self.ping()
            due = trio.current_time() + self.keepalive.ping_seconds
            await trio.sleep(min(PROBE_SECONDS, self.keepalive.ping_seconds))
            # Something may come meanwhile; then the regular time is soon enough.
            while (at := self.failure_detector.next_ping_at(trio.current_time(), due)) > trio.current_time():  # noqa: ASYNC110
                await trio.sleep_until(at)

    def link_info(self) -> LinkInfo:
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
            kind="relayed" if self.relay else "direct",
            relay=self.relay,
            silent_seconds=self.failure_detector.silent_seconds(now),
            suspected=self.failure_detector.is_suspected(now),
            liveness_report=self.liveness_report,
        )


class ConnectionManager:
    """The common half of a `Network`. Subclasses make links, `attach` them, and feed what arrives to `deliver_message`."""

    def __init__(
        self,
        me: bytes,
        blobs: BlobStore,
        policy: PeerPolicy,
        run_blocking: RunBlocking,
        pace: KeepaliveConfig = KeepaliveConfig(),
        *,
        processor: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`processor`: seconds of processor time that this thread has spent; `clock`: seconds that have gone by, also while it
        waited for a disk. Without them nobody spends any.
        """
        self.me, self.keepalive = me, pace
        self.memory_quota, self.cpu_quota = MemoryQuota(), CpuQuota()
        self._processor, self._clock = processor, clock
        self.events = InboundQueue(self.cpu_quota.strangers_wait_seconds)
        self._policy = policy
        self._links: dict[bytes, PeerLink] = {}
        self._uplink = UploadShaper(self._links)
        self._histories: OrderedDict[bytes, LinkHistory] = OrderedDict()  # by peer, who was linked last at the end
        self._refused: Counter[str] = Counter()
        self._bans = BanList()
        self._past_sent = [0, 0, 0]
        self._past_received = [0, 0, 0]
        self._exchange = BlobExchange(
            me,
            blobs,
            send=self._post,
            drop=self.ban_peer,
            connected=self.connected_peers,
            recall=self._recall,
            is_stranger=lambda peer: policy.classify(peer) is PeerClass.STRANGER,
            run_blocking=run_blocking,
        )

    # Network ---------------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, data: bytes, priority: Priority = Priority.CONTROL) -> bool:
        return self._push(peer, Channel.APPLICATION, data, priority)

    def broadcast(self, data: bytes, priority: Priority = Priority.CONTROL) -> int:
        return sum(self.send(link.peer, data, priority) for link in tuple(self._links.values()) if not self._is_stranger(link))

    def connected_peers(self) -> frozenset[bytes]:
        return frozenset(self._links)

    def live_peers(self) -> frozenset[bytes]:
        now = trio.current_time()
        return frozenset(peer for peer, link in self._links.items() if not link.failure_detector.is_suspected(now))

    def send_liveness_report(self, hears: LivenessReport, to: Set[bytes]) -> None:
        for link in self._links.values():
            if link.peer in to and link.liveness_report_sent != hears and link.queue_message(hears, Priority.CONTROL):
                link.liveness_report_sent = hears

    def ban_peer(self, peer: bytes, error: RemoteProtocolError) -> None:
        self.count_refusal(error.reason)
        self._bans.add(peer, trio.current_time())
        link = self._links.get(peer)
        if link is not None:
            self.detach(link, error.reason)

    def links(self) -> tuple[LinkInfo, ...]:
        return tuple(link.link_info() for link in self._links.values())

    def traffic(self) -> Traffic:
        links = self._links.values()
        sent = _total(self._past_sent, (link.outbox.sent for link in links))
        received = _total(self._past_received, (link.inbox.received for link in links))
        exchange, holder = self._exchange, self._exchange.server
        blobs, reveals = (holder.bytes_sent, exchange.bytes_received), (holder.audit_bytes_sent, exchange.audit_bytes_received)
        return Traffic(sent, received, *blobs, *reveals)

    def audit_bytes_sent_by_peer(self) -> Mapping[bytes, int]:
        return self._exchange.server.audit_bytes_by_peer

    def refusal_counts(self) -> Mapping[str, int]:
        return dict(self._refused)

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] | None = None) -> None:
        await self._exchange.fetch_blob(digest, size_max, sources)

    def _is_stranger(self, link: PeerLink) -> bool:
        if link.peer_class is PeerClass.STRANGER:
            self.update_peer_class(link)
        return link.peer_class is PeerClass.STRANGER

    # For the subclass ------------------------------------------------------------------------------------------------

    def count_refusal(self, reason: str) -> None:
        self._refused[reason] += 1

    def check_peer(self, peer: bytes) -> None:
        """Raises `RemoteProtocolError` if no connection with this key is wanted now."""
        if peer == self.me:
            raise RemoteProtocolError("self", "this is my own address")
        if self._bans.banned_until(peer) > trio.current_time():
            raise RemoteProtocolError("banned", short_id(peer))

    def attach(self, link: PeerLink) -> None:
        """The link is in use from here on; an older one of the same peer ends first, or hands over to it."""
        old = self._links.get(link.peer)
        takes_over = old is not None and self.can_take_over(old, link)
        if old is not None and not takes_over:
            self.detach(old)
        self._take_slot(link)
        link.keepalive, link.failure_detector = self.keepalive, LinkFailureDetector(self.keepalive, trio.current_time())
        self._links[link.peer] = link
        link.meter.history = self._history(link.peer)
        if old is not None and takes_over:
            old.hand_over_to(link)
            return
        self.events.put(PeerConnected(link.peer), link)
        self._exchange.peer_connected(link.peer)

    def _history(self, peer: bytes) -> LinkHistory:
        history = self._histories[peer] = self._histories.pop(peer, LinkHistory())
        if len(self._histories) > HISTORIES_MAX:
            del self._histories[next(one for one in self._histories if one not in self._links)]
        return history

    def can_take_over(self, old: PeerLink, link: PeerLink) -> bool:
        """Whether a peer's new link goes on where the old one stops."""
        return False

    def detach(self, link: PeerLink, reason: str = "") -> None:
        """End the link, once; nothing of it is delivered afterwards. The peer reads the reason."""
        successor, link.successor = link.successor, None
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            if link.peer_class is PeerClass.STRANGER:
                self.events.discard_messages(link.peer)  # or one key after the other would leave what nobody has taken yet
            self._add_past_traffic(link)
            self.events.put(PeerDisconnected(link.peer), link)
            link.switch_account(MemoryAccount())
            self._exchange.peer_disconnected(link.peer)
        elif successor is not None:
            self._add_past_traffic(link)
            link.move_held_bytes(MemoryAccount())
            if self._links.get(link.peer) is successor and not link.handed_over:
                # The peer is as good as linked anew: both sides say again what the other may have missed.
                self.events.put(PeerDisconnected(link.peer), successor)
                self._exchange.peer_disconnected(link.peer)
                self.events.put(PeerConnected(link.peer), successor)
                self._exchange.peer_connected(link.peer)
        link.close(reason)
        if link.predecessor is not None:
            self.detach(link.predecessor)

    def _add_past_traffic(self, link: PeerLink) -> None:
        self._past_sent = list(_total(self._past_sent, [link.outbox.sent]))
        self._past_received = list(_total(self._past_received, [link.inbox.received]))

    def update_peer_class(self, link: PeerLink) -> None:
        """Sees who the peer is now: a stranger may have become a member."""
        standing = self._policy.classify(link.peer)
        if standing is not link.peer_class:
            if link.peer_class is PeerClass.STRANGER:
                self.events.promote_peer(link.peer)
            link.peer_class, link.cpu_account = standing, self.cpu_quota.link_account(standing)
            self.memory_quota.account_of(link.peer, standing)

    @contextlib.contextmanager
    def measure_cpu(self, payer: CpuAccount) -> Iterator[None]:
        """What is done inside, without waiting, is done for whoever pays."""
        started = self._processor()
        try:
            yield
        finally:
            payer.spend(self._processor() - started)

    def worked(self, peer: bytes, seconds: float) -> None:
        self.charge_cpu(peer, seconds)
        self.events.finish_message(peer)

    def charge_cpu(self, peer: bytes, seconds: float) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.cpu_account.spend(seconds)

    def cpu_wait_seconds(self, peer: bytes) -> float:
        link = self._links.get(peer)
        return 0.0 if link is None else link.cpu_account.wait_seconds()

    async def wait_for_cpu_quota(self, link: PeerLink, is_full: bool) -> None:
        """Returns when more of this link may be read. `is_full`: the last read was as much as fits.

        Raises `RemoteProtocolError` for a stranger that goes on sending all that it can.
        """
        link.read_wait_seconds *= is_full
        link.read_wait_seconds += await self.cpu_quota.wait_for_link(link.cpu_account, link.peer_class)
        if link.read_wait_seconds > STRANGER_WAIT_SECONDS_MAX and link.peer_class is PeerClass.STRANGER:
            raise RemoteProtocolError("too-busy", f"more than a stranger may send, for {STRANGER_WAIT_SECONDS_MAX:g} s")

    def enforce_memory_quota(self, link: PeerLink) -> None:
        """Makes room for what has come in over this link."""
        while (other := link.memory_account.account_to_evict()) is not None and not link.closed:
            self._evict_account(other)

    async def deliver_message(self, link: PeerLink, message: Message) -> None:
        """Raises `RemoteProtocolError` if it is a message of transport's own and bad."""
        if link.closed:
            return
        link.failure_detector.record_arrival(trio.current_time())
        if message.channel is Channel.APPLICATION:
            account, size, started = link.memory_account, len(message.data), trio.current_time()
            account.add_bytes(size)  # also while it waits here
            try:
                self.enforce_memory_quota(link)
                await self.events.put_received(DataReceived(link.peer, message.data), link, message.priority)
            finally:
                account.add_bytes(-size)
                link.read_wait_seconds += trio.current_time() - started
        else:
            with self.measure_cpu(link.cpu_account):
                said: Any = decode_message(message.data, LINK_MESSAGES)
                if not isinstance(said, GetBlob):
                    self._on_link_message(link, said)
            if isinstance(said, GetBlob):
                await self._answer(link, said)
        link.failure_detector.resume_listening(trio.current_time())

    async def _answer(self, link: PeerLink, asked: GetBlob) -> None:
        """The asker pays for the disk, too, and its next question waits until it has."""
        started = self._clock()
        self._exchange.server.on_get_blob(link.peer, asked)
        link.cpu_account.spend(min(ANSWER_SECONDS_MAX, self._clock() - started))
        if link.cpu_account.wait_seconds() > 0:
            link.read_wait_seconds += await self.cpu_quota.wait_for_link(link.cpu_account, link.peer_class)

    def on_discovery(self, link: PeerLink, message: Any) -> None:
        """Only a network that dials cares."""

    def on_circuit_message(self, link: PeerLink, message: Any) -> None:
        """One of `CIRCUIT_MESSAGES`. Only a network that relays cares."""

    # Own -------------------------------------------------------------------------------------------------------------

    def _take_slot(self, link: PeerLink) -> None:
        """Another link gives way where there are too many. Raises `RemoteProtocolError` where none does."""
        link.peer_class = self._policy.classify(link.peer)
        links = self._links.values()
        strangers = [other for other in links if other.peer_class is PeerClass.STRANGER]
        below = (
            strangers
            if link.peer_class is PeerClass.STRANGER
            else [other for other in links if other.peer_class < link.peer_class]
        )
        if len(links) >= LINKS_MAX or (link.peer_class is PeerClass.STRANGER and len(strangers) >= STRANGERS_MAX):
            if not below:
                raise RemoteProtocolError("too-many-links", f"{LINKS_MAX} links, and none of them gives way")
            self.count_refusal("gave-way")
            self.detach(choose_link_to_evict(below), "gave-way")
        if link.peer_class is not PeerClass.STRANGER:
            self.events.promote_peer(link.peer)
        link.cpu_account, link.uplink = self.cpu_quota.link_account(link.peer_class), self._uplink
        link.switch_account(self.memory_quota.account_of(link.peer, link.peer_class))

    def _evict_account(self, account: MemoryAccount) -> None:
        self.count_refusal("memory-full")
        self.events.discard_messages(account.owner)
        link = self._links.get(account.owner)
        if link is not None:
            self.detach(link, "memory-full")

    def _on_link_message(self, link: PeerLink, message: Any) -> None:
        match message:
            case BlobChunk():
                self._exchange.on_blob_chunk(link.peer, message)
            case NoBlob():
                self._exchange.on_no_blob(link.peer, message)
            case BlobElsewhere():
                self._exchange.on_blob_elsewhere(link.peer, message)
            case HasBlob():
                self._exchange.on_has_blob(link.peer, message)
            case PeerRecords() | GetPeerRecords() | ObservedAddress() | DialBack() | DialBackFailed():
                self.on_discovery(link, message)
            case Ping():
                link.on_ping(message)
            case Pong():
                link.on_pong(message)
            case LivenessReport():
                link.liveness_report = message
            case CircuitMigrated():
                link.on_moved(message)
            case CircuitDeliveryReport():
                link.on_arrived(message)
            case GuestInvitation():
                self._policy.admit_guest(link.peer, message)
                self.update_peer_class(link)
            case LinkClosing():
                raise LinkClosedByPeer(message.reason)
            case _ if isinstance(message, CIRCUIT_MESSAGES):
                self.on_circuit_message(link, message)

    def _recall(self, peer: bytes, digest: bytes) -> None:
        """Chunks of this blob that have not begun to leave are not sent."""
        if peer in self._links:
            self._links[peer].outbox.withdraw_waiting(Priority.BULK, lambda data: digest in data[:CHUNK_HEAD_BYTES])

    def _post(self, peer: bytes, message: Any, priority: Priority) -> bool:
        return self._push(peer, Channel.LINK, encode(message), priority)

    def _push(self, peer: bytes, channel: Channel, data: bytes, priority: Priority) -> bool:
        link = self._links.get(peer)
        if link is None:
            return False
        while (other := link.memory_account.account_to_evict(len(data) + MESSAGE_OVERHEAD_BYTES)) not in (
            None,
            link.memory_account,
        ):
            self._evict_account(other)
        if other is None and link.queue_bytes(channel, data, priority):
            return True
        if priority is Priority.VOTE:  # a vote that silently gets lost is worse than a connection that has to be made again
            self.count_refusal("vote-queue-full")
            self.detach(link, "vote-queue-full")
        else:
            self.count_refusal("queue-full")
        return False


def _total(past: Iterable[int], parts: Iterable[ByPriority]) -> ByPriority:
    first, second, third = (sum(column) for column in zip(past, *parts, strict=True))
    return first, second, third
