"""One connection to a peer: its queues, accounts, pings, share of the uplink, and reasons of its end."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trio

from protocol.addresses import AddressScope, host_subnet, parse_address, scope_of
from protocol.codec import decode_message, encode
from protocol.errors import RemoteProtocolError
from protocol.limits import UPLINK_MBIT_MIN
from protocol.messages import (
    CircuitDeliveryReport,
    CircuitMigrated,
    LinkClosing,
    LivenessReport,
    Ping,
    Pong,
)
from transport.peer_policy import PeerClass
from transport.quotas.cpu_quota import LINK_SHARES, CpuAccount
from transport.quotas.memory_quota import MemoryAccount
from transport.wire.failure_detector import PROBE_SECONDS, KeepaliveConfig, LinkFailureDetector
from transport.wire.framing import Channel, Inbox, Message, Outbox, Priority
from transport.wire.link_measurements import LinkHistory, LinkMeter, TcpInfo

# Seconds after which a circuit ends that hands over to a direct link: the largest message at a relay's rate.
HANDOVER_SECONDS = 10.0
STRANGERS_SHARE = 1 / 8
LEAST_RATE = UPLINK_MBIT_MIN * 1_000_000 / 8  # least assumed rate of a link in bytes per second
LOOK_SECONDS = 0.1  # interval in seconds of checks whether a stranger's frame still has to wait for members' bytes

CLOSING_SECONDS: Final = 1.0  # time from the last message, which has the reason, to the end of the connection: a few round trips

CLOSE_REASON_TEXTS: Final = {
    "banned": "it refuses this peer's key for some time, because this peer violated the protocol",
    "gave-way": "it needed the link for another peer, and members take precedence over strangers",
    "half-open": "too many other peers were connecting to it",
    "memory-full": "messages to and from this peer filled too much of its memory",
    "too-busy": "this peer sent more than a stranger may send",
    "too-many-links": "all its links are in use",
    "vote-queue-full": "this peer read votes too slowly",
}
_CODE = re.compile(r"[a-z0-9-]+")


class LinkClosedByPeer(RemoteProtocolError):
    """The error of a link that the other peer has ended with a reason. The peer is not banned for it."""

    def __init__(self, reason: str) -> None:
        code = reason if _CODE.fullmatch(reason) else "it gave no valid reason"  # Other text of a stranger is never shown.
        super().__init__("closed", f"the peer closed the link: {CLOSE_REASON_TEXTS.get(reason, code)}")


def raise_if_closed(message: Message) -> None:
    """Raise `LinkClosedByPeer` if `message`, the first one of a link, closes the link."""
    if message.channel is Channel.LINK:
        try:
            closing: LinkClosing = decode_message(message.data, (LinkClosing,))
        except RemoteProtocolError:
            return  # Another message is handled later.
        raise LinkClosedByPeer(closing.reason)


class UploadShaper:
    """The limit of strangers' traffic: the part of the uplink that others do not use, and at least STRANGERS_SHARE of the uplink.

    | bytes wait for a member, guest or voter | a frame for a stranger |
    |---|---|
    | no | is sent at once |
    | yes | is sent after the time that the previous one takes at STRANGERS_SHARE of the slowest rate of these links |

    So other peers have at least seven eighths of the uplink, and strangers are never starved. LEAST_RATE is assumed for a link
    without a measurement.
    """

    def __init__(self, links: Mapping[bytes, PeerLink]) -> None:
        self._links = links
        self._free_at = -math.inf

    async def wait_for_turn(self, link: PeerLink) -> None:
        """Wait until the next frame may be sent over this link."""
        while link.peer_class is PeerClass.STRANGER and not link.closed and (rate := self._rate()) is not None:
            now = trio.current_time()
            if now >= self._free_at:
                self._free_at = now + min(link.outbox.held, link.meter.frame_bytes) / (STRANGERS_SHARE * rate)
                return
            await trio.sleep(min(LOOK_SECONDS, self._free_at - now))

    def _rate(self) -> float | None:
        """Return the bytes per second of the slowest link that has bytes to send and is no stranger's.

        None: no such link exists.
        """
        waiting = [link for link in self._links.values() if link.peer_class is not PeerClass.STRANGER and link.outbox]
        return min((max(LEAST_RATE, link.meter.bytes_per_second or 0.0) for link in waiting), default=None)


class PeerLink:
    """An authenticated connection to a peer: the part that links over TCP, over circuits and in memory share."""

    relay: bytes | None = None  # relay that forwards this link; None: the link is direct

    def __init__(self, peer: bytes, address: str, dialed: bool, outbox: Outbox, inbox: Inbox) -> None:
        self.peer, self.address, self.dialed = peer, address, dialed
        self.host = host_subnet(parse_address(address)[0])  # key of the peer's host, for quotas by host
        self.outbox, self.inbox = outbox, inbox
        # The network replaces these three values when it attaches the link.
        self.peer_class, self.memory_account, self.cpu_account = (
            PeerClass.MEMBER,
            MemoryAccount(),
            CpuAccount(LINK_SHARES[PeerClass.MEMBER]),
        )
        self.uplink: UploadShaper | None = None
        self.read_wait_seconds = 0.0  # seconds of waiting before reads, in an unbroken run of reads that filled their buffer
        self.scope = trio.CancelScope()  # cancel scope around all tasks of this link
        self.since = trio.current_time()
        self.meter = LinkMeter(LinkHistory())  # The meter gets the peer's history when the link is attached.
        self.closed = False
        self.local_host: str | None = None  # this machine's address on a direct link
        self.remote: str | None = None  # "host:port" of the peer's end of a direct link, with an IP address
        self.records_told_at = self.dialed_back_at = -math.inf
        # Attaching the link replaces this value and `failure_detector` by those of the network.
        self.keepalive = KeepaliveConfig()
        self.failure_detector = LinkFailureDetector(self.keepalive, self.since)
        self.liveness_report: LivenessReport | None = None  # last liveness report from the peer
        self.liveness_report_sent: LivenessReport | None = None  # last liveness report sent to the peer
        self._output = trio.Event()
        self._ping_number = 0
        self._ping_time: float | None = None
        self.successor: PeerLink | None = None  # direct link that takes over from this circuit
        self.predecessor: PeerLink | None = None  # circuit that this direct link takes over from
        # Set when this circuit delivers no more messages: the peer uses the direct link, or the circuit has ended.
        self.all_read = trio.Event()
        self._moved_lanes = 0  # number of priorities in which the peer has moved to the direct link
        self._all_read_there = False

    @property
    def address_scope(self) -> AddressScope:
        """Scope of the address of the peer's end of this link."""
        return scope_of(self.remote or self.address)

    def queue_bytes(self, channel: Channel, data: bytes, priority: Priority) -> bool:
        if not self.outbox.push(channel, data, priority):
            return False
        self._output.set()
        return True

    def queue_message(self, message: Any, priority: Priority) -> bool:
        """Queue a message of the link itself. False: the queue is full."""
        return self.queue_bytes(Channel.LINK, encode(message), priority)

    async def wait_until_sendable(self) -> None:
        """Wait until bytes are queued and may be sent. Messages queued in one turn of the event loop are sent together."""
        if not self.outbox:
            self.meter.on_idle(self.tcp_info(), trio.current_time())
            self._output = trio.Event()
            await self._output.wait()
        if self.uplink is not None:
            await self.uplink.wait_for_turn(self)
        self.meter.on_busy(self.tcp_info(), trio.current_time())

    def tcp_info(self) -> TcpInfo:
        return TcpInfo(sum(self.outbox.sent), 0, 0, 0)  # All bytes count as sent, so that the rate never falls.

    def switch_account(self, account: MemoryAccount) -> None:
        """Charge the memory of this link to another account from now on."""
        before, self.memory_account = self.memory_account, account
        before.is_linked, account.is_linked = False, True
        self.move_held_bytes(account)

    def move_held_bytes(self, account: MemoryAccount) -> None:
        for box in (self.outbox, self.inbox):
            box.account.add_bytes(-box.held)
            box.account = account
            account.add_bytes(box.held)

    def close(self, reason: str = "") -> None:
        """Close the link: at once, or if there is a reason, after sending that reason to the peer."""
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

    # A circuit hands over to a direct link. Each end sends new messages over the direct link. It reads them only after a mark in
    # each priority has ended the circuit. So no message is lost or repeated, and each priority keeps its order.

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
        """True if both peers have read all messages of this link."""
        return self._all_read_there and self._moved_lanes >= len(Priority)

    def ping(self) -> None:
        self._ping_number += 1
        self._ping_time = trio.current_time()
        self.queue_message(Ping(self._ping_number), Priority.VOTE)

    def on_ping(self, ping: Ping) -> None:
        self.queue_message(Pong(ping.number), Priority.VOTE)

    def on_arrived(self, arrived: CircuitDeliveryReport) -> None:
        """Handle a delivery report. Only circuits receive delivery reports, so this does nothing."""

    def needs_other_relay(self, now: float) -> bool:
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
            # If a message arrives before `at`, the regular time of the next ping is early enough.
            while (at := self.failure_detector.next_ping_at(trio.current_time(), due)) > trio.current_time():  # noqa: ASYNC110
                await trio.sleep_until(at)


def choose_link_to_evict(links: Sequence[PeerLink]) -> PeerLink:
    """Return the link to evict: among links of the lowest class, the oldest link of the host with most links."""
    lowest = min(link.peer_class for link in links)
    found = [link for link in links if link.peer_class is lowest]
    hosts = Counter(link.host for link in found)
    return min(found, key=lambda link: (-hosts[link.host], link.since))
