"""The common part of networks over TCP and in memory: links, events, refusals, bans, quotas, and transfers of blobs."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import trio

from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import short_id
from protocol.messages import (
    LINK_MESSAGES,
    BlobChunk,
    BlobElsewhere,
    CircuitDeliveryReport,
    CircuitMigrated,
    GetBlob,
    GuestInvitation,
    HasBlob,
    LinkClosing,
    LivenessReport,
    NoBlob,
    Ping,
    Pong,
)
from transport.blobs.blob_exchange import BlobExchange, RunBlocking
from transport.blobs.blob_store import BlobStore
from transport.connections.inbound_queue import InboundQueue
from transport.connections.peer_link import LinkClosedByPeer, PeerLink, UploadShaper, choose_link_to_evict
from transport.network import DataReceived, PeerConnected, PeerDisconnected, Traffic
from transport.peer_policy import PeerClass, PeerPolicy
from transport.quotas.cpu_quota import STRANGER_WAIT_SECONDS_MAX, CpuAccount, CpuQuota
from transport.quotas.memory_quota import STRANGERS_MAX, MemoryAccount, MemoryQuota
from transport.wire.failure_detector import KeepaliveConfig, LinkFailureDetector
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, ByPriority, Channel, Message, Priority
from transport.wire.link_measurements import LinkHistory

BAN_SECONDS = 2.0  # duration of the first ban; each further one is twice as long
BAN_SECONDS_MAX = 600.0
BAN_MEMORY_SECONDS = 3600.0  # time of good behaviour after which the next ban counts as the first
BANS_MAX = 1024  # banned keys; the oldest is forgotten first
HISTORIES_MAX = 1024  # peers with a history of measurements, 10 kB each: all linked peers, and as many others
LINKS_MAX = 512  # links of this peer: VOTERS_MAX, and as many others

ANSWER_SECONDS_MAX = 1.0  # most seconds charged for a blob request: if it took longer, the process was stopped meanwhile
CHUNK_HEAD_BYTES = 64  # length of the start of an encoded BlobChunk that contains its tag and digest


class BanList:
    """Keys that are refused for some time after misbehaviour."""

    def __init__(self) -> None:
        # Key -> (end of its last ban, duration of that ban in seconds).
        self._bans: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def add(self, peer: bytes, now: float) -> None:
        until, length = self._bans.pop(peer, (now, 0.0))
        length = 0.0 if now > until + BAN_MEMORY_SECONDS else length
        length = min(BAN_SECONDS_MAX, 2 * length or BAN_SECONDS)
        self._bans[peer] = (now + length, length)
        if len(self._bans) > BANS_MAX:
            self._bans.popitem(last=False)

    def banned_until(self, peer: bytes) -> float:
        """Return the end of the key's last ban, or minus infinity if it was never banned."""
        return self._bans.get(peer, (float("-inf"), 0.0))[0]


class ConnectionManager:
    """A network of links, as the other parts of a peer use it.

    `Swarm` (TCP) and `MemoryNetwork` create links, `attach` them, and pass messages to `deliver_message`.
    """

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
        """`processor` returns this thread's processor time, and `clock` a monotonic time, both in seconds.

        By default both return 0, so that no processor time is charged to links.
        """
        self.me, self.keepalive = me, pace
        self.memory_quota, self.cpu_quota = MemoryQuota(), CpuQuota()
        self._processor, self._clock = processor, clock
        self.events = InboundQueue(self.cpu_quota.strangers_wait_seconds)
        self._policy = policy
        self._links: dict[bytes, PeerLink] = {}
        self._uplink = UploadShaper(self._links)
        # Peer -> its history, the most recently linked peer last.
        self._histories: OrderedDict[bytes, LinkHistory] = OrderedDict()
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
        """Queue `data` for a peer, without blocking.

        False: the peer is not connected, or its queue is full (counted as `queue-full`).
        """
        return self._push(peer, Channel.APPLICATION, data, priority)

    def broadcast(self, data: bytes, priority: Priority = Priority.CONTROL) -> int:
        """Queue `data` for each connected peer except strangers, and return the number of these peers."""
        return sum(self.send(link.peer, data, priority) for link in tuple(self._links.values()) if not self._is_stranger(link))

    def connected_peers(self) -> frozenset[bytes]:
        return frozenset(self._links)

    def live_peers(self) -> frozenset[bytes]:
        """Return the connected peers that the failure detector does not suspect."""
        now = trio.current_time()
        return frozenset(peer for peer, link in self._links.items() if not link.failure_detector.is_suspected(now))

    def send_liveness_report(self, hears: LivenessReport, to: Set[bytes]) -> None:
        """Queue a liveness report for each connected peer in `to`, unless it equals the last report to that peer."""
        for link in self._links.values():
            if link.peer in to and link.liveness_report_sent != hears and link.queue_message(hears, Priority.CONTROL):
                link.liveness_report_sent = hears

    def ban_peer(self, peer: bytes, error: RemoteProtocolError) -> None:
        """Ban a peer that misbehaved: count `error.reason`, close its link, and refuse its key for a growing time."""
        self.count_refusal(error.reason)
        self._bans.add(peer, trio.current_time())
        link = self._links.get(peer)
        if link is not None:
            self.detach(link, error.reason)

    def links(self) -> tuple[PeerLink, ...]:
        return tuple(self._links.values())

    def traffic(self) -> Traffic:
        links, exchange, server = self._links.values(), self._exchange, self._exchange.server
        return Traffic(
            _total(self._past_sent, (link.outbox.sent for link in links)),
            _total(self._past_received, (link.inbox.received for link in links)),
            server.bytes_sent,
            exchange.bytes_received,
            server.audit_bytes_sent,
            exchange.audit_bytes_received,
        )

    def audit_bytes_sent_by_peer(self) -> Mapping[bytes, int]:
        """Return the bytes in `Traffic.audit_bytes_sent` by receiving peer."""
        return self._exchange.server.audit_bytes_by_peer

    def refusal_counts(self) -> Mapping[str, int]:
        """Return the number of refused connections, handshakes, frames, messages and payloads by reason."""
        return dict(self._refused)

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] | None = None) -> None:
        """Return when the blob store holds `digest`. `sources` are asked first, then every connected peer.

        A download retries for ever, so call this in a cancel scope with a deadline. Raises `StorageError` if the local store
        fails.
        """
        await self._exchange.fetch_blob(digest, size_max, sources)

    def _is_stranger(self, link: PeerLink) -> bool:
        if link.peer_class is PeerClass.STRANGER:
            self.update_peer_class(link)
        return link.peer_class is PeerClass.STRANGER

    # For subclasses --------------------------------------------------------------------------------------------------

    def count_refusal(self, reason: str) -> None:
        self._refused[reason] += 1

    def check_peer(self, peer: bytes) -> None:
        """Raise `RemoteProtocolError` if this key is banned, or is our own."""
        if peer == self.me:
            raise RemoteProtocolError("self", "this is this peer's own key")
        if self._bans.banned_until(peer) > trio.current_time():
            raise RemoteProtocolError("banned", short_id(peer))

    def attach(self, link: PeerLink) -> None:
        """Put a link into use. An older link of the same peer ends first, or hands over to the new link.

        Raises `RemoteProtocolError` if all links are in use and none may be evicted.
        """
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
        """Return whether the older link of a peer hands over to the new one instead of ending at once."""
        return False

    def detach(self, link: PeerLink, reason: str = "") -> None:
        """End a link and tell the peer the reason; a second call does nothing.

        Messages that arrive afterwards are not delivered.
        """
        successor, link.successor = link.successor, None
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            if link.peer_class is PeerClass.STRANGER:
                self.events.discard_messages(link.peer)  # Otherwise messages of many short-lived keys would pile up.
            self._add_past_traffic(link)
            self.events.put(PeerDisconnected(link.peer), link)
            link.switch_account(MemoryAccount())
            self._exchange.peer_disconnected(link.peer)
        elif successor is not None:
            self._add_past_traffic(link)
            link.move_held_bytes(MemoryAccount())
            if self._links.get(link.peer) is successor and not link.handed_over:
                # Messages may be lost, so report a new link: both sides then repeat state that the other may lack.
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
        """Classify the peer of a link again, since a stranger may have become a member."""
        standing = self._policy.classify(link.peer)
        if standing is not link.peer_class:
            if link.peer_class is PeerClass.STRANGER:
                self.events.promote_peer(link.peer)
            link.peer_class, link.cpu_account = standing, self.cpu_quota.link_account(standing)
            self.memory_quota.account_of(link.peer, standing)

    @contextlib.contextmanager
    def measure_cpu(self, payer: CpuAccount) -> Iterator[None]:
        """Charge the processor time of the `with` block to `payer`. The block must not await anything."""
        started = self._processor()
        try:
            yield
        finally:
            payer.spend(self._processor() - started)

    def worked(self, peer: bytes, seconds: float) -> None:
        """Charge `seconds` of processor time to the link of `peer`, after a `DataReceived` of that peer was handled.

        A link in debt is read more slowly. Without this call, only `inbound_queue.STRANGER_MESSAGES_IN_PROGRESS_MAX` messages of
        strangers are delivered.
        """
        self.charge_cpu(peer, seconds)
        self.events.finish_message(peer)

    def charge_cpu(self, peer: bytes, seconds: float) -> None:
        """Charge processor time to a peer's link, except the time for handling its messages (`worked`)."""
        link = self._links.get(peer)
        if link is not None:
            link.cpu_account.spend(seconds)

    def cpu_wait_seconds(self, peer: bytes) -> float:
        """Return the seconds until a peer's link has paid back its debt; 0 or less: it has none."""
        link = self._links.get(peer)
        return 0.0 if link is None else link.cpu_account.wait_seconds()

    async def wait_for_cpu_quota(self, link: PeerLink, is_full: bool) -> None:
        """Wait until the quota of processor time lets this link be read. `is_full`: the last read filled its buffer.

        Raises `RemoteProtocolError` for a stranger that fills each read for too long.
        """
        link.read_wait_seconds *= is_full
        link.read_wait_seconds += await self.cpu_quota.wait_for_link(link.cpu_account, link.peer_class)
        if link.read_wait_seconds > STRANGER_WAIT_SECONDS_MAX and link.peer_class is PeerClass.STRANGER:
            raise RemoteProtocolError("too-busy", f"a stranger sent more than its share for {STRANGER_WAIT_SECONDS_MAX:g} s")

    def enforce_memory_quota(self, link: PeerLink) -> None:
        """Evict links until the received bytes of this link fit into its memory budget."""
        while (other := link.memory_account.account_to_evict()) is not None and not link.closed:
            self._evict_account(other)

    async def deliver_message(self, link: PeerLink, message: Message) -> None:
        """Queue a message of the application, or handle a message of the link itself.

        Raises `RemoteProtocolError` if a message of the link is invalid.
        """
        if link.closed:
            return
        link.failure_detector.record_arrival(trio.current_time())
        if message.channel is Channel.APPLICATION:
            account, size, started = link.memory_account, len(message.data), trio.current_time()
            account.add_bytes(size)  # The message counts as held memory even while this task waits.
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
        """Answer a request for a chunk.

        The peer also pays for reading from the disk, and the link is not read while it is in debt.
        """
        started = self._clock()
        self._exchange.server.on_get_blob(link.peer, asked)
        link.cpu_account.spend(min(ANSWER_SECONDS_MAX, self._clock() - started))
        if link.cpu_account.wait_seconds() > 0:
            link.read_wait_seconds += await self.cpu_quota.wait_for_link(link.cpu_account, link.peer_class)

    # Internals -------------------------------------------------------------------------------------------------------

    def _take_slot(self, link: PeerLink) -> None:
        """Choose the class and accounts of a new link, and evict another link if there are too many.

        Raises `RemoteProtocolError` if no link may be evicted.
        """
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
                raise RemoteProtocolError("too-many-links", f"all {LINKS_MAX} links are in use, and none may be evicted")
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

    def _recall(self, peer: bytes, digest: bytes) -> None:
        """Withdraw the queued chunks of a blob, except a chunk of which a part is sent already."""
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
        if priority is Priority.VOTE:  # A lost vote is worse than a lost connection, which the peers open again.
            self.count_refusal("vote-queue-full")
            self.detach(link, "vote-queue-full")
        else:
            self.count_refusal("queue-full")
        return False


def _total(past: Iterable[int], parts: Iterable[ByPriority]) -> ByPriority:
    first, second, third = (sum(column) for column in zip(past, *parts, strict=True))
    return first, second, third
