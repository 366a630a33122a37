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

HANDOVER_SECONDS = 10.0  # timeout of a handover from a circuit to a direct link: the largest message at a relay's rate
STRANGERS_SHARE = 1 / 8
LEAST_RATE = UPLINK_MBIT_MIN * 1_000_000 / 8  # bytes per second, assumed even of a slower link
LOOK_SECONDS = 0.1  # interval of checks whether a stranger still has to wait for members

CLOSING_SECONDS: Final = 1.0  # time for the last message to arrive before the connection ends: a few round trips

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
    """The other peer has ended the link with a reason. This is no misbehaviour."""

    def __init__(self, reason: str) -> None:
        code = reason if _CODE.fullmatch(reason) else "it gave no valid reason"  # Other text of a stranger is never shown.
        super().__init__("closed", f"the peer closed the link: {CLOSE_REASON_TEXTS.get(reason, code)}")


def raise_if_closed(message: Message) -> None:
    """Raise `LinkClosedByPeer` if the first message of a link closes it."""
    if message.channel is Channel.LINK:
        try:
            closing: LinkClosing = decode_message(message.data, (LinkClosing,))
        except RemoteProtocolError:
            return  # Another message is handled later.
        raise LinkClosedByPeer(closing.reason)


class UploadShaper:
    """The strangers' share of this peer's uplink: the unused rest, and at least STRANGERS_SHARE while others wait.

    | bytes wait for a member, guest or voter | a frame for a stranger |
    |---|---|
    | no | is sent at once |
    | yes | is sent after the time that the previous one takes at STRANGERS_SHARE of the slowest rate of these links |

    So other peers have at least seven eighths of the uplink, and strangers are never starved. A link without a measurement
    counts with LEAST_RATE.
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
        """Return the bytes per second of the slowest link with waiting bytes, except strangers' ones; None: there is none."""
        waiting = [link for link in self._links.values() if link.peer_class is not PeerClass.STRANGER and link.outbox]
        return min((max(LEAST_RATE, link.meter.bytes_per_second or 0.0) for link in waiting), default=None)


class PeerLink:
    """The common part of authenticated connections to a peer, over TCP, a circuit or memory."""

    relay: bytes | None = None  # the relay; None: the link is direct

    def __init__(self, peer: bytes, address: str, dialed: bool, outbox: Outbox, inbox: Inbox) -> None:
        self.peer, self.address, self.dialed = peer, address, dialed
        self.host = host_subnet(parse_address(address)[0])  # host for budgets by host
        self.outbox, self.inbox = outbox, inbox
        # The network replaces these when it attaches the link.
        self.peer_class, self.memory_account, self.cpu_account = (
            PeerClass.MEMBER,
            MemoryAccount(),
            CpuAccount(LINK_SHARES[PeerClass.MEMBER]),
        )
        self.uplink: UploadShaper | None = None
        self.read_wait_seconds = 0.0  # seconds that reading waited while this peer filled each read
        self.scope = trio.CancelScope()  # around all tasks of this link
        self.since = trio.current_time()
        self.meter = LinkMeter(LinkHistory())  # receives the peer's history when the link is attached
        self.closed = False
        self.local_host: str | None = None  # this machine's address of a direct link
        self.remote: str | None = None  # "host:port" of its other end, with an IP address
        self.records_told_at = self.dialed_back_at = -math.inf
        self.keepalive = KeepaliveConfig()  # replaced by the network's value when the link is attached, like `failure_detector`
        self.failure_detector = LinkFailureDetector(self.keepalive, self.since)
        self.liveness_report: LivenessReport | None = None  # the last one from the peer
        self.liveness_report_sent: LivenessReport | None = None  # the last one to the peer
        self._output = trio.Event()
        self._ping_number = 0
        self._ping_time: float | None = None
        self.successor: PeerLink | None = None  # the direct link that has taken over from this circuit
        self.predecessor: PeerLink | None = None  # the circuit that this link has taken over from
        self.all_read = trio.Event()  # set when no more messages come: the peer uses the new link, or this one has ended
        self._moved_lanes = 0  # lanes that the peer has moved to the new link
        self._all_read_there = False

    @property
    def address_scope(self) -> AddressScope:
        """Scope of the other end's address."""
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
        """Close the link at once, or after sending a reason to the peer."""
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

    # A direct link takes over from a circuit. Both ends send new messages over the direct link, and read it after the end of the
    # circuit, which is marked in each lane. So no message is lost or repeated, and each priority keeps its order.

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
        """Handle a delivery report. Only circuits use it."""

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
            # If a message comes before that, the regular time is early enough.
            while (at := self.failure_detector.next_ping_at(trio.current_time(), due)) > trio.current_time():  # noqa: ASYNC110
                await trio.sleep_until(at)


def choose_link_to_evict(links: Sequence[PeerLink]) -> PeerLink:
    """Choose the oldest link of the host with most links, among links of the lowest class."""
    lowest = min(link.peer_class for link in links)
    found = [link for link in links if link.peer_class is lowest]
    hosts = Counter(link.host for link in found)
    return min(found, key=lambda link: (-hosts[link.host], link.since))
