"""Links through relays: this peer's reservations, its circuits to other peers, and its service as a relay for others.

A peer that cannot be dialed makes reservations at two members that it has dialed. Each relay announces its reservations to its
links. A peer that is not linked to a peer with a reservation opens a circuit to it. Both ends use the circuit as a link until a
direct link exists.

Delivery is reported by the receiver, which may be faulty. So a failed circuit does not prove that its relay is faulty. The relay
only moves to the end of the order:

| circuits over a relay                                            | the relay is chosen last                          |
|------------------------------------------------------------------|---------------------------------------------------|
| to one member have failed                                        | for circuits to this member                       |
| fail to BLAMES_MIN members or more, and work to fewer members    | for all circuits and for reservations             |
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import trio

from protocol.identity import short_id
from protocol.messages import (
    CircuitCredit,
    CircuitData,
    CloseCircuit,
    IncomingCircuit,
    OpenCircuit,
    RelayReservations,
    ReserveRelay,
)
from transport.connections.peer_link import PeerLink
from transport.discovery.reachability import ReachabilityState, RelayMode
from transport.quotas.memory_quota import MemoryAccount
from transport.relay.circuit_relay import CREDIT_SHARE, RECORDS_MAX, WINDOW_BYTES, CircuitRelay, TokenBucket
from transport.relay.circuit_session import SILENT_SECONDS
from transport.wire.framing import MESSAGE_OVERHEAD_BYTES, Priority

log = logging.getLogger(__name__)

RESERVATIONS = 2  # reservations that a peer makes: two, since one relay may disappear
CHECK_SECONDS = 0.25  # interval of checks of reservations, circuits and announcements
RESERVE_SECONDS = 2.0  # timeout of a relay's answer to a request for a reservation; then another relay is asked
REFUSED_SECONDS = 5.0  # pause before a relay that refused is asked again: it may not know yet that this peer is a member
PING_SECONDS = 1.0  # silence after which a relay in use is pinged; other links are pinged later
# Announcements of reservations per second, after ANNOUNCEMENTS_BURST: many peers may reserve and cancel.
ANNOUNCEMENTS_PER_SECOND = 1.0
ANNOUNCEMENTS_BURST = 8  # announcements without a pause: all peers that have lost a relay ask another one
GRACE_SECONDS = 0.5  # wait for a direct link before a circuit is opened; three times as long at the end with the larger key
RETRY_SECONDS = 0.25  # the largest pause before a retry, doubled by each failure; the pause is random
RETRY_SECONDS_MAX = 10.0
STABLE_SECONDS = 30.0  # seconds after which a circuit counts as a success, and clears the failures of its relay with this peer
BLAMES_MIN = 2  # members with failed circuits that discredit a relay for others; one false report of delivery must not suffice
OPENING_MAX = 16  # circuits in a handshake: opened by this peer, and likewise opened by others over each relay
ENDS_MAX = 256  # circuits that end at this peer

ServeCircuit = Callable[["CircuitStream", bytes], Awaitable[None]]  # (stream, peer); returns at the end of the circuit


class CircuitStream:
    """This peer's end of a circuit, as a byte stream. It reads and writes records of `transport.relay.circuit_session`."""

    def __init__(self, name: bytes, carrier: PeerLink, opens: bool) -> None:
        self.circuit_id, self.carrier, self.is_opener = name, carrier, opens
        self.link: PeerLink | None = None  # set when the handshake is complete and each end uses the link
        self.failed = False  # The relay withheld bytes or was silent, so a circuit over another relay is needed.
        # Account for records: first that of the relay's link, later that of `link`.
        self.account, self._held = carrier.memory_account, 0
        self.ended = False
        self.credited: Callable[[], None] = lambda: None
        self.credit = list(WINDOW_BYTES)
        self._arrived: tuple[deque[bytes], ...] = (deque(), deque(), deque())
        self._unread = [0, 0, 0]  # received bytes by lane for which the relay has not received credit
        self._read = [0, 0, 0]  # bytes of `_unread` that the session has read, by lane
        self._last = (Priority.VOTE, 0)  # lane and size of the record that the session handles now
        self._news = trio.Event()

    def on_credit(self, message: CircuitCredit) -> None:
        self.credit[message.priority] = min(WINDOW_BYTES[message.priority], self.credit[message.priority] + message.bytes)
        self.credited()

    def on_data(self, message: CircuitData) -> bool:
        """Queue a record. False: it exceeds the window."""
        if self.ended:
            return True
        is_full = self._unread[message.priority] + len(message.data) > WINDOW_BYTES[message.priority]
        if is_full or len(self._arrived[message.priority]) >= RECORDS_MAX[message.priority]:
            return False
        self._unread[message.priority] += len(message.data)
        self._arrived[message.priority].append(message.data)
        self._hold(len(message.data) + MESSAGE_OVERHEAD_BYTES)
        self._news.set()
        return True

    def _hold(self, size: int) -> None:
        self._held += size
        self.account.add_bytes(size)

    def switch_account(self, account: MemoryAccount) -> None:
        """Charge the queued records to another account from now on."""
        self.account.add_bytes(-self._held)
        self.account = account
        account.add_bytes(self._held)

    def end_stream(self) -> None:
        self.ended = True
        for arrived in self._arrived:
            arrived.clear()
        self._hold(-self._held)
        self._news.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return the next record, from the first lane that has one. Return empty bytes at the end of the circuit."""
        await trio.lowlevel.checkpoint()
        self._give_credit()
        while not self.ended:
            for lane in Priority:
                if self._arrived[lane]:
                    record = self._arrived[lane].popleft()
                    self._hold(-len(record) - MESSAGE_OVERHEAD_BYTES)
                    self._last = (lane, len(record))
                    return bytes([lane]) + record
            self._news = trio.Event()
            await self._news.wait()
        return b""

    def _give_credit(self) -> None:
        """Give the relay credit for the previous record, which is handled when the next record is read."""
        lane, size = self._last
        self._last = (lane, 0)
        self._read[lane] += size
        if self._read[lane] * CREDIT_SHARE >= WINDOW_BYTES[lane]:
            self.carrier.queue_message(CircuitCredit(self.circuit_id, lane, self._read[lane]), Priority.VOTE)
            self._unread[lane] -= self._read[lane]
            self._read[lane] = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if not data:
            return
        lane, record = Priority(data[0]), bytes(data[1:])
        self.credit[lane] -= len(record)
        if self.ended or not self.carrier.queue_message(CircuitData(self.circuit_id, lane, record), lane):
            raise trio.BrokenResourceError("the link to the relay has ended, or its queue is full")

    async def send_eof(self) -> None:
        """Do nothing, since the last message (`LinkClosing`) marks the end."""
        await trio.lowlevel.checkpoint()


@dataclass(slots=True)
class _CircuitDemand:
    """The need for a circuit to a peer without a link, or whose link leads over a failing relay, and the attempts so far."""

    since: float
    tries: int = 0
    next_at: float = 0.0
    opened: bool = False  # True while a circuit that this peer has opened for the demand exists.


class RelayClient:
    """The relays that this peer uses, the circuits that end at it, and its own service as a relay.

    `serves(peer)` returns whether a peer is a member: this peer relays only for members, and uses only members as relays.
    `relaying` is this peer's own mode as a relay. `reachable()` returns this peer's reachability: only a RELAYED peer needs
    relays. `changed(relays)` is called at each check with the relays in use.
    """

    def __init__(
        self,
        me: bytes,
        links: Mapping[bytes, PeerLink],
        serve: ServeCircuit,
        *,
        serves: Callable[[bytes], bool],
        relaying: RelayMode,
        reachable: Callable[[], ReachabilityState],
        refuse: Callable[[str], None],
        random: Random,
        changed: Callable[[tuple[bytes, ...]], None],
    ) -> None:
        self._me, self._links, self._serve = me, links, serve
        self._serves, self._relaying, self._reachable = serves, relaying, reachable
        self._refuse, self._random, self._changed = refuse, random, changed
        self.relay = CircuitRelay(self._post, serves, self._accepts_reservations, refuse, lambda peer: links[peer].memory_account)
        self._offers: dict[bytes, frozenset[bytes]] = {}  # relay -> peers that have a reservation at that relay
        self._asked: dict[bytes, float] = {}  # relay -> time of this peer's request for a reservation
        self._refused: dict[bytes, float] = {}  # relay that refused -> earliest time of the next request to it
        self._failures: defaultdict[bytes, Counter[bytes]] = defaultdict(Counter)  # relay -> failed circuits by peer
        self._missing: dict[tuple[bytes, bytes | None], _CircuitDemand] = {}  # (peer, its failing relay or None) -> demand
        self._silent: set[bytes] = set()  # relays in use by this peer that are silent
        self._ends: dict[bytes, CircuitStream] = {}
        self._told: RelayReservations | None = None
        self._tellings = TokenBucket(ANNOUNCEMENTS_PER_SECOND, ANNOUNCEMENTS_BURST)
        self._woken = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._forward)
            while True:
                self.relay.close_unserved()
                self._find_silent_relays(trio.current_time())
                self._update_reservations(trio.current_time())
                self._open_circuits(self._nursery, trio.current_time())
                self._announce_reservations(trio.current_time())
                self._changed(self._active_relays())
                await trio.sleep(CHECK_SECONDS)

    def on_linked(self, link: PeerLink) -> None:
        if self._told is not None:
            link.queue_message(self.relay.reservations, Priority.CONTROL)

    def on_unlinked(self, link: PeerLink) -> None:
        """Handle the end of a direct link. All circuits over that link end too."""
        self.relay.on_unlinked(link.peer)
        self._offers.pop(link.peer, None)
        self._asked.pop(link.peer, None)
        for stream in list(self._ends.values()):
            if stream.carrier is link:
                stream.end_stream()

    def on_message(self, link: PeerLink, message: Any) -> None:
        """Handle a message of `protocol.messages.CIRCUIT_MESSAGES` from a direct link."""
        match message:
            case ReserveRelay():
                self.relay.set_reservation(link.peer, message.wanted, trio.current_time())
            case RelayReservations():
                self._offers[link.peer] = frozenset(message.peers)
            case OpenCircuit():
                self.relay.open_circuit(link.peer, message, trio.current_time())
            case IncomingCircuit():
                self._on_incoming_circuit(link, message)
            case CircuitData() | CircuitCredit() | CloseCircuit():
                stream = self._ends.get(message.circuit)
                if stream is not None and stream.carrier is link:
                    self._on_end(stream, message)
                else:
                    self._on_relay(link.peer, message)

    # This peer as an end ---------------------------------------------------------------------------------------------

    def _on_end(self, stream: CircuitStream, message: CircuitData | CircuitCredit | CloseCircuit) -> None:
        if isinstance(message, CircuitCredit):
            stream.on_credit(message)
        elif isinstance(message, CloseCircuit):
            log.debug("circuit over relay %s closed: %s", short_id(stream.carrier.peer), message.reason)
            stream.end_stream()
        elif not stream.on_data(message):
            self._refuse("circuit-overrun")
            stream.end_stream()

    def _find_silent_relays(self, now: float) -> None:
        """Update the set of silent relays, and ping quiet ones. A relay that loses power does not close its connections."""
        self._silent.clear()
        for relay in {*self._asked, *(stream.carrier.peer for stream in self._ends.values())} & self._links.keys():
            seconds = self._links[relay].failure_detector.silent_seconds(now)
            if seconds >= PING_SECONDS:
                self._links[relay].ping()
            if seconds >= SILENT_SECONDS:
                self._silent.add(relay)

    def _update_reservations(self, now: float) -> None:
        if not (self._reachable() is ReachabilityState.RELAYED and self._serves(self._me)):
            for relay in self._asked:
                self._post(relay, ReserveRelay(False), Priority.CONTROL)
            self._asked.clear()
            return
        for relay, asked_at in list(self._asked.items()):
            if self._me not in self._offers.get(relay, ()) and asked_at + RESERVE_SECONDS <= now:
                del self._asked[relay]
                self._refused[relay] = now + REFUSED_SECONDS
        usable = [
            relay
            for relay in self._offers.keys() - self._asked.keys()
            if self._refused.get(relay, 0.0) <= now and self._serves(relay) and self._links[relay].dialed
        ]
        heard = sorted(self._asked.keys() - self._silent, key=self._rank)
        for relay in sorted(usable, key=self._rank)[: max(0, RESERVATIONS - len(heard))]:
            if self._post(relay, ReserveRelay(True), Priority.CONTROL):
                self._asked[relay] = now
        for relay in heard[RESERVATIONS:]:  # A silent relay has answered again, so one reservation is too many.
            self._post(relay, ReserveRelay(False), Priority.CONTROL)
            del self._asked[relay]

    def _active_relays(self) -> tuple[bytes, ...]:
        """Return the relays at which this peer has a reservation.

        A silent relay is among them only if fewer than RESERVATIONS others exist.
        """
        forwarding = [relay for relay in self._asked if self._me in self._offers.get(relay, ())]
        return tuple(sorted(sorted(forwarding, key=self._rank)[:RESERVATIONS]))

    def _rank(self, relay: bytes, peer: bytes = b"") -> tuple[bool, int, bool, bytes]:
        """Return a sort key of a relay for circuits to `peer`, or without `peer` for reservations.

        A hash spreads peers over the relays.
        """
        spread = hashlib.sha256(self._me + relay).digest()
        return relay in self._silent, self._failures[relay][peer], self._is_blamed(relay), spread

    def _is_blamed(self, relay: bytes) -> bool:
        links = [stream.link for stream in self._ends.values() if stream.carrier.peer == relay and not stream.failed]
        working = {link.peer for link in links if link is not None}
        failing = self._failures[relay].keys() - working
        return len(failing) >= BLAMES_MIN and len(failing) > len(working)

    def _open_circuits(self, nursery: trio.Nursery, now: float) -> None:
        failing = self._failing_circuits(now)
        heard, ways = self._links.keys() - failing.keys(), dict[tuple[bytes, bytes | None], list[bytes]]()
        for relay, peers in self._offers.items():
            for peer in peers.difference(heard) if self._serves(relay) else ():
                if peer != self._me and relay != failing.get(peer) and self._serves(peer):
                    ways.setdefault((peer, failing.get(peer)), []).append(relay)
        for key in [key for key, missing in self._missing.items() if key not in ways and not missing.opened]:
            del self._missing[key]
        for (peer, by), relays in ways.items():
            missing = self._missing.setdefault((peer, by), _CircuitDemand(now))
            due = max(missing.next_at, missing.since + GRACE_SECONDS * (1 if self._me < peer else 3))
            if due <= now and not missing.opened and self._half_open() < OPENING_MAX and len(self._ends) < ENDS_MAX:
                missing.opened = True
                nursery.start_soon(self._dial, peer, min(relays, key=partial(self._rank, peer=peer)), missing)

    def _failing_circuits(self, now: float) -> dict[bytes, bytes]:
        """Return the peers that are linked over a failing relay, with that relay.

        A failing relay withholds bytes or is silent.
        """
        failing = dict[bytes, bytes]()
        for stream in self._ends.values():
            link = stream.link
            if link is not None and self._links.get(link.peer) is link and link.needs_other_relay(now):
                failing[link.peer] = stream.carrier.peer
                if not stream.failed:
                    self._failures[stream.carrier.peer][link.peer] += 1
                stream.failed = True
        return failing

    async def _dial(self, peer: bytes, relay: bytes, missing: _CircuitDemand) -> None:
        carrier = self._links.get(relay)
        if carrier is None or carrier.relay is not None:  # The link was lost since the decision.
            missing.opened = False
            return
        start = trio.current_time()
        stream = CircuitStream(self._random.randbytes(16), carrier, opens=True)
        self._ends[stream.circuit_id] = stream
        stream.carrier.queue_message(OpenCircuit(stream.circuit_id, peer), Priority.VOTE)
        await self._serve_end(stream, peer)
        now = trio.current_time()
        missing.tries = 0 if stream.link else missing.tries + 1
        if not stream.failed:  # A failed circuit was counted by `_failing_circuits`.
            failed = self._failures[relay].pop(peer, 0) + 1
            if stream.link is None or now - start < STABLE_SECONDS:
                self._failures[relay][peer] = failed
        pause = min(RETRY_SECONDS_MAX, RETRY_SECONDS * 2 ** min(missing.tries, 16))
        missing.next_at, missing.opened = now + self._random.uniform(0, pause), False

    def _on_incoming_circuit(self, link: PeerLink, message: IncomingCircuit) -> None:
        assert self._nursery is not None
        if (problem := self._refusal_reason(link, message)) is not None:
            self._refuse(problem)
            link.queue_message(CloseCircuit(message.circuit, "refused"), Priority.VOTE)
            return
        stream = self._ends[message.circuit] = CircuitStream(message.circuit, link, opens=False)
        self._nursery.start_soon(self._serve_end, stream, message.peer)

    def _refusal_reason(self, relay: PeerLink, message: IncomingCircuit) -> str | None:
        if relay.peer not in self._asked or message.circuit in self._ends:
            return "circuit-unasked"
        if not self._serves(message.peer):  # The relay may name any key.
            return "relay-not-member"
        crowded = self._half_open(relay) >= OPENING_MAX or len(self._ends) >= ENDS_MAX
        return "too-many-links" if crowded else None

    def _half_open(self, carrier: PeerLink | None = None) -> int:
        """Count circuits in a handshake that others opened over `carrier`, or if it is None, that this peer opened."""
        return sum(
            stream.link is None and carrier is (None if stream.is_opener else stream.carrier) for stream in self._ends.values()
        )

    async def _serve_end(self, stream: CircuitStream, peer: bytes) -> None:
        """Serve one end of a circuit until it ends."""
        try:
            await self._serve(stream, peer)
        finally:
            del self._ends[stream.circuit_id]
            if not stream.ended:
                stream.carrier.queue_message(CloseCircuit(stream.circuit_id, "ended"), Priority.VOTE)
                stream.end_stream()

    # This peer as a relay --------------------------------------------------------------------------------------------

    def _on_relay(self, peer: bytes, message: CircuitData | CircuitCredit | CloseCircuit) -> None:
        self.relay.on_message(peer, message)
        self._woken.set()

    async def _forward(self) -> None:
        while True:
            self._woken = trio.Event()
            with trio.move_on_at(self.relay.forward_records(trio.current_time())):
                await self._woken.wait()

    def _accepts_reservations(self) -> bool:
        is_direct = self._reachable() is ReachabilityState.DIRECT
        return self._relaying is RelayMode.ON or (self._relaying is RelayMode.AUTO and is_direct)

    def _announce_reservations(self, now: float) -> None:
        """Announce changed reservations to all direct links. Nothing is announced before this peer first accepts reservations."""
        if self._relaying is RelayMode.AUTO and self._reachable() is ReachabilityState.RELAYED:
            self.relay.cancel_reservations()
        if self._told is None and not self._accepts_reservations():
            return
        reservations = self.relay.reservations
        if reservations == self._told or self._tellings.wait_seconds(now) > 0:
            return
        self._tellings.spend(1)
        self._told = reservations
        for link in self._links.values():
            if link.relay is None:
                link.queue_message(reservations, Priority.CONTROL)

    def _post(self, peer: bytes, message: Any, priority: Priority) -> bool:
        """Queue a message on a direct link, and return whether it was queued. A circuit never passes through two relays."""
        link = self._links.get(peer)
        return link is not None and link.relay is None and link.queue_message(message, priority)
