"""An in-memory network with latency, bandwidth, loss and partitions from a seed.

Frames, priorities, queues, pings and payload exchange are the swarm's own code; only TCP and encryption are missing. Time is
Trio's clock, so under `trio.testing.MockClock(autojump_threshold=0)` a slow network costs no real time, and a seed always gives
the same run. `LinkConditions` describe a link. If both ends have an access (`scenarios/emulation/link_profiles.py`), the link is
TCP over both instead.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import trio

from protocol.errors import RemoteProtocolError
from protocol.identity import short_id
from protocol.messages import Ping, Pong
from scenarios.emulation.link_profiles import SEGMENT_BYTES, SHIFT_SECONDS, AccessLink, AccessProfile, NetworkPath, TcpFlow
from transport.blobs.blob_store import BlobStore
from transport.connections.connection_manager import ConnectionManager
from transport.connections.peer_link import LinkClosedByPeer, PeerLink
from transport.discovery.address_book import AddressEntry
from transport.discovery.reachability import ReachabilityState
from transport.peer_policy import EVERYBODY_IS_MEMBER, PeerPolicy
from transport.wire.failure_detector import KeepaliveConfig
from transport.wire.framing import FRAME_PLAINTEXT_MAX, Channel, Inbox, Outbox, Priority
from transport.wire.link_measurements import TcpInfo

REDIAL_SECONDS = 1.0  # after a link ended or was refused
SHAPED_FRAME_BYTES = 3 * SEGMENT_BYTES  # frame of a shaped link; the links of one peer share its uplink frame by frame
FRAMES_IN_FLIGHT_MAX = 64  # 4 MiB, about the buffers of TCP; a sender waits while the receiver does not read


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """Conditions of one link, for both directions."""

    latency_seconds: float = 0.001  # one way
    jitter_seconds: float = 0.0  # uniform, added to the latency; order is kept
    bytes_per_second: float = math.inf
    loss: float = 0.0  # probability that an application message is lost; TCP would delay it
    lost_pings: float = 0.0  # probability that a ping or its answer is lost


class Mesh:
    """An in-memory network: its peers and the conditions of their links."""

    def __init__(self, seed: int, conditions: LinkConditions = LinkConditions()) -> None:
        self.random = random.Random(seed)
        self._default = conditions
        self._conditions: dict[frozenset[bytes], LinkConditions] = {}
        self._accesses: dict[bytes, AccessLink] = {}
        self._groups: tuple[frozenset[bytes], ...] = ()
        self.running: dict[bytes, MemoryNetwork] = {}
        self.changed = trio.Event()

    def network(
        self,
        me: bytes,
        blobs: BlobStore,
        policy: PeerPolicy = EVERYBODY_IS_MEMBER,
        *,
        pace: KeepaliveConfig = KeepaliveConfig(),
    ) -> MemoryNetwork:
        """Return a member of this mesh. It is reachable while its `run` runs, and can run again later."""
        return MemoryNetwork(self, me, blobs, policy, pace)

    def set_conditions(self, one: bytes, other: bytes, conditions: LinkConditions) -> None:
        """Set the conditions of later links between two peers."""
        self._conditions[frozenset((one, other))] = conditions

    def set_profile(self, peer: bytes, profile: AccessProfile) -> None:
        """Give a peer an access for later links with others that have one.

        Each access starts at another moment of its profile.
        """
        self._accesses[peer] = AccessLink(profile.shifted(SHIFT_SECONDS * len(self._accesses)))

    def path_between(self, one: bytes, other: bytes) -> NetworkPath | None:
        speaker, hearer = self._accesses.get(one), self._accesses.get(other)
        return None if speaker is None or hearer is None else NetworkPath(speaker, hearer)

    def partition(self, *groups: Iterable[bytes]) -> None:
        """Cut every link between different groups, at once and for both sides. A peer outside all groups is alone."""
        self._groups = tuple(frozenset(group) for group in groups)
        for network in self.running.values():
            network.detach_matching(lambda peer, me=network.me: not self.reachable(me, peer))  # type: ignore[misc]

    def blackhole(self, *peers: bytes) -> None:
        """Drop the later messages of these peers on existing links, without any sign of it."""
        for peer in peers:
            self.running[peer].blackhole()

    def heal_partition(self) -> None:
        self._groups = ()
        self.notify_changed()

    def reachable(self, one: bytes, other: bytes) -> bool:
        together = not self._groups or any(one in group and other in group for group in self._groups)
        return together and one in self.running and other in self.running

    def conditions_between(self, one: bytes, other: bytes) -> LinkConditions:
        return self._conditions.get(frozenset((one, other)), self._default)

    def add_network(self, network: MemoryNetwork) -> None:
        assert network.me not in self.running, "one network at a time runs under one key"
        self.running[network.me] = network
        self.notify_changed()

    def remove_network(self, network: MemoryNetwork) -> None:
        del self.running[network.me]
        for other in self.running.values():
            other.detach_matching(lambda peer: peer == network.me)

    def notify_changed(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class MemoryLink(PeerLink):
    def __init__(
        self, peer: bytes, dialed: bool, conditions: LinkConditions, random: random.Random, frames_max: int = FRAMES_IN_FLIGHT_MAX
    ) -> None:
        super().__init__(peer, f"{short_id(peer)}.memory:1", dialed, Outbox(), Inbox())
        self.conditions, self._random = conditions, random
        self.is_mute = False  # later messages do not arrive
        self.to_peer: trio.MemorySendChannel[tuple[float, bytes]]
        self.to_peer, self._arriving = trio.open_memory_channel[tuple[float, bytes]](frames_max)
        self._arrival = 0.0
        self._carried = 0  # bytes

    def queue_message(self, message: Any, priority: Priority) -> bool:
        lost = self.conditions.lost_pings
        if lost and isinstance(message, Ping | Pong) and self._random.random() < lost:
            return True
        return super().queue_message(message, priority)

    def queue_bytes(self, channel: Channel, data: bytes, priority: Priority) -> bool:
        if self.is_mute:
            return True
        if channel is Channel.APPLICATION and self._random.random() < self.conditions.loss:
            return True
        return super().queue_bytes(channel, data, priority)

    def tcp_info(self) -> TcpInfo:
        return TcpInfo(self._carried, int(bool(self.outbox)), 0, 0)  # waiting bytes wait only for the link

    async def transmit(self) -> None:
        while True:
            await self.wait_until_sendable()
            frame = self.outbox.next_frame(self.meter.frame_bytes)
            await trio.sleep(len(frame) / self.conditions.bytes_per_second)
            self._carried += len(frame)
            delay = self.conditions.latency_seconds + self._random.uniform(0, self.conditions.jitter_seconds)
            self._arrival = max(self._arrival, trio.current_time() + delay)
            await self.to_peer.send((self._arrival, frame))

    async def receive(self) -> bytes:
        """Return the next frame. Raises `trio.EndOfChannel` if the other end has closed, `trio.TooSlowError` if it is silent."""
        with trio.fail_after(self.keepalive.idle_seconds):
            arrival, frame = await self._arriving.receive()
            await trio.sleep_until(arrival)
        return frame


class ShapedLink(MemoryLink):
    """A link that behaves like TCP from `way.speaker` to `way.hearer`."""

    def __init__(self, peer: bytes, dialed: bool, way: NetworkPath, random: random.Random) -> None:
        super().__init__(
            peer, dialed, LinkConditions(0.0), random, FRAMES_IN_FLIGHT_MAX * FRAME_PLAINTEXT_MAX // SHAPED_FRAME_BYTES
        )
        self.flow = TcpFlow(way, random)

    def tcp_info(self) -> TcpInfo:
        again = self.flow.lost * SEGMENT_BYTES
        return TcpInfo(self._carried, int(bool(self.outbox)), self._carried + again, again)

    async def transmit(self) -> None:
        flow = self.flow
        while True:
            await self.wait_until_sendable()
            while (at := flow.next_send_at(trio.current_time())) > trio.current_time():  # noqa: ASYNC110
                await trio.sleep_until(at)
            frame = self.outbox.next_frame(min(SHAPED_FRAME_BYTES, self.meter.frame_bytes))
            self._carried += len(frame)
            arrival = flow.send(trio.current_time(), len(frame), more=bool(self.outbox))
            await self.to_peer.send((arrival, frame))

    async def receive(self) -> bytes:
        frame = await super().receive()
        await trio.sleep_until(self.flow.way.speaker.down.queue_bytes(trio.current_time(), len(frame)))  # this end's downlink
        return frame


class MemoryNetwork(ConnectionManager):
    address, reachability = "", ReachabilityState.UNKNOWN  # a mesh has no addresses
    addresses: tuple[str, ...] = ()
    announced_addresses: tuple[str, ...] = ()

    def __init__(self, mesh: Mesh, me: bytes, blobs: BlobStore, policy: PeerPolicy, pace: KeepaliveConfig) -> None:
        super().__init__(me, blobs, policy, _inline, pace)
        self._mesh = mesh
        self._nursery: trio.Nursery | None = None
        self._dialing: set[bytes] = set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self._exchange.run)
            self._mesh.add_network(self)
            task_status.started()
            try:
                await self._dial_forever(self._nursery)
            finally:
                self._mesh.remove_network(self)
                self.detach_matching(lambda peer: True)
                self._dialing.clear()

    def unreached_addresses(self) -> tuple[AddressEntry, ...]:
        return ()

    def detach_matching(self, condition: Callable[[bytes], bool]) -> None:
        for link in tuple(self._links.values()):
            if condition(link.peer):
                self.detach(link)

    def blackhole(self) -> None:
        for link in self._links.values():
            assert isinstance(link, MemoryLink)
            link.is_mute = True

    async def _dial_forever(self, nursery: trio.Nursery) -> None:
        """Dial peers with larger keys, so that each pair has one link."""
        while True:
            for other in tuple(self._mesh.running.values()):
                if self.me < other.me and other.me not in self._dialing and self._mesh.reachable(self.me, other.me):
                    self._dialing.add(other.me)
                    nursery.start_soon(self._dial, other)
            await self._mesh.changed.wait()

    async def _dial(self, other: MemoryNetwork) -> None:
        conditions, way = self._mesh.conditions_between(self.me, other.me), self._mesh.path_between(self.me, other.me)
        # Three messages of the handshake, and those of TCP if there is a profile.
        await trio.sleep(3 * conditions.latency_seconds if way is None else 2.5 * way.round_trip(trio.current_time()))
        if self._mesh.reachable(self.me, other.me) and self._admits(other.me) and other._admits(self.me):
            link, other_link = self._make_end(other, conditions, dialed=True), other._make_end(self, conditions, dialed=False)
            link.to_peer, other_link.to_peer = other_link.to_peer, link.to_peer
            self.attach(link)
            other.attach(other_link)
            assert other._nursery is not None, "only a running network is reachable"
            other._nursery.start_soon(other._serve, other_link)
            await self._serve(link)
        await trio.sleep(REDIAL_SECONDS)
        self._dialing.discard(other.me)
        self._mesh.notify_changed()

    def _admits(self, peer: bytes) -> bool:
        try:
            self.check_peer(peer)
        except RemoteProtocolError as error:
            self.count_refusal(error.reason)
            return False
        return True

    def _make_end(self, other: MemoryNetwork, conditions: LinkConditions, *, dialed: bool) -> MemoryLink:
        way = self._mesh.path_between(self.me, other.me)
        if way is not None:
            return ShapedLink(other.me, dialed, way, self._mesh.random)
        return MemoryLink(other.me, dialed, conditions, self._mesh.random)

    async def _serve(self, link: MemoryLink) -> None:
        with link.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.transmit)
                nursery.start_soon(link.run_keepalive)
                await self._read(link)
                nursery.cancel_scope.cancel()
        self.detach(link)
        link.to_peer.close()

    async def _read(self, link: MemoryLink) -> None:
        try:
            while not link.closed:
                messages = link.inbox.receive_frame(await link.receive())
                self.update_peer_class(link)
                self.enforce_memory_quota(link)
                for message in messages:
                    await self.deliver_message(link, message)
        except (trio.EndOfChannel, trio.TooSlowError):
            return
        except LinkClosedByPeer:
            return
        except RemoteProtocolError as error:
            self.ban_peer(link.peer, error)
        with contextlib.suppress(trio.EndOfChannel, trio.TooSlowError):
            while True:  # until the peer has read the reason
                await link.receive()


async def _inline(function: Callable[[], None]) -> None:
    function()
