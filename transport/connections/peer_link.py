"""One connection to a peer: its queues, its accounts, its pings, its part of the uplink, and why it was closed."""

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

HANDOVER_SECONDS = 10.0  # from a circuit to a direct link: for the largest message, at the bytes a second that a relay allows
STRANGERS_SHARE = 1 / 8
LEAST_RATE = UPLINK_MBIT_MIN * 1_000_000 / 8  # bytes a second; also where a member takes what it is sent more slowly than this
LOOK_SECONDS = 0.1  # while strangers wait, whether somebody else still does

CLOSING_SECONDS: Final = 1.0  # for the last message to arrive: some round trips; then the connection ends anyway

CLOSE_REASON_TEXTS: Final = {
    "banned": "this peer's key is refused there for some minutes, after what it sent",
    "gave-way": "it has as many links as it takes, and members go before strangers",
    "half-open": "too many others were connecting to it",
    "memory-full": "this peer did not take what was sent to it, and held too much memory there",
    "too-busy": "this peer sent more than a stranger may",
    "too-many-links": "it has as many links as it takes",
    "vote-queue-full": "this peer took votes too slowly",
}
_CODE = re.compile(r"[a-z0-9-]+")


class LinkClosedByPeer(RemoteProtocolError):
    """The other side has ended the link and said why: nobody is to blame here."""

    def __init__(self, reason: str) -> None:
        code = reason if _CODE.fullmatch(reason) else "for a reason that is no word"  # nothing else of a stranger's text is shown
        super().__init__("closed", f"it closed the link: {CLOSE_REASON_TEXTS.get(reason, code)}")


def raise_if_closed(message: Message) -> None:
    """Raises `LinkClosedByPeer` where the first message on a link is the last."""
    if message.channel is Channel.LINK:
        try:
            closing: LinkClosing = decode_message(message.data, (LinkClosing,))
        except RemoteProtocolError:
            return  # another message, which is read when its turn comes
        raise LinkClosedByPeer(closing.reason)


class UploadShaper:
    """What strangers may take of this peer's uplink: all that is left, and a little where members wait for something.

    | something waits for a member, a guest or a voter | then a frame goes to a stranger |
    |---|---|
    | no | at once |
    | yes | when as much time has gone by as an eighth of what the slowest of those links carries needs for the frame before |

    So members and voters have seven eighths at least, and a stranger is never left without. A link that has no measurement yet
    counts as the slowest one that a peer may have.
    """

    def __init__(self, links: Mapping[bytes, PeerLink]) -> None:
        self._links = links
        self._free_at = -math.inf

    async def wait_for_turn(self, link: PeerLink) -> None:
        """Returns when the next frame may go over this link."""
        while link.peer_class is PeerClass.STRANGER and not link.closed and (rate := self._rate()) is not None:
            now = trio.current_time()
            if now >= self._free_at:
                self._free_at = now + min(link.outbox.held, link.meter.frame_bytes) / (STRANGERS_SHARE * rate)
                return
            await trio.sleep(min(LOOK_SECONDS, self._free_at - now))

    def _rate(self) -> float | None:
        """Bytes a second of the slowest link for which something waits, but for strangers'; None: nothing does."""
        waiting = [link for link in self._links.values() if link.peer_class is not PeerClass.STRANGER and link.outbox]
        return min((max(LEAST_RATE, link.meter.bytes_per_second or 0.0) for link in waiting), default=None)


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


def choose_link_to_evict(links: Sequence[PeerLink]) -> PeerLink:
    """Which of them gives way: of the lowest standing, of the host that has most of those, the oldest."""
    lowest = min(link.peer_class for link in links)
    found = [link for link in links if link.peer_class is lowest]
    hosts = Counter(link.host for link in found)
    return min(found, key=lambda link: (-hosts[link.host], link.since))
