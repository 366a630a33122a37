"""Peer discovery: announces this peer's records, and accepts and forwards the records of other peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

import trio

from protocol.addresses import AddressScope, format_address, parse_address, scope_of
from protocol.codec import decode_message
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import PEER_RECORDS_MAX
from protocol.messages import AgedPeerRecord, DialBack, DialBackFailed, GetPeerRecords, ObservedAddress, PeerRecord, PeerRecords
from transport.connections.peer_link import PeerLink
from transport.discovery.peer_records import CHANGE_SECONDS, PeerRecordBook, RecordOutcome, addresses_in_scope
from transport.discovery.reachability import DIAL_BACK_SECONDS, OwnAddresses, Reachability, ReachabilityState
from transport.peer_policy import PeerClass
from transport.wire.framing import Priority

FANOUT: Final = 8  # links to which a new record is forwarded: after three steps, hundreds of peers have the record
TICK_SECONDS: Final = 60.0  # interval of requests for all records that a peer has, which find missed records
ANSWER_SECONDS: Final = 10.0  # least interval between answers with all records on one link: an answer has up to 200 kB
DIAL_AGAIN_TICKS: Final = 10  # number of TICK_SECONDS until forgotten addresses of unlinked peers are dialed again
DIAL_BACKS_MAX: Final = 4  # dial-backs in DIAL_BACK_SECONDS, for all links together
# Changes of this peer's record without a pause; then one in CHANGE_SECONDS, and other peers accept twice as many.
OWN_CHANGES_BURST: Final = 4


class PeerDiscovery:
    def __init__(
        self,
        book: PeerRecordBook,
        links: Mapping[bytes, PeerLink],
        learn: Callable[[str, bytes], None],
        own: OwnAddresses,
        dial_back: Callable[[bytes, str], Awaitable[bool]],
        refuse: Callable[[str], None],
        is_stranger: Callable[[bytes], bool],
        random: Random,
    ) -> None:
        """`learn(address, peer)` is called with addresses that peers announce.

        `dial_back(peer, address)` returns whether the peer answers there.
        """
        self.book, self._links, self._learn, self._own = book, links, learn, own
        self._dial_back, self._refuse, self._is_stranger, self._random = dial_back, refuse, is_stranger, random
        self._reachability = Reachability(own.port_at(None) is not None, book.is_member)
        self._dialed_back: deque[float] = deque(maxlen=DIAL_BACKS_MAX)
        self._relays: tuple[bytes, ...] = ()
        self._hosts: set[str] = set()
        self._above = 0  # highest sequence in an earlier record of this peer that others have sent back
        self._changed = trio.Event()
        self._paid_until = 0.0
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._announce_changes)
            self._nursery.start_soon(self._tick)

    def set_relays(self, relays: tuple[bytes, ...]) -> None:
        if relays != self._relays:
            self._relays = relays
            self._changed.set()

    def on_address_changed(self) -> None:
        self._reachability.on_address_changed()
        self._announce(trio.current_time())
        self._request_dial_back()

    # Links ------------------------------------------------------------------------------------------------------------

    def on_linked(self, link: PeerLink) -> None:
        if link.local_host is not None and link.local_host not in self._hosts:
            self._hosts.add(link.local_host)
            self._announce(trio.current_time())
        if link.remote is not None:
            link.queue_message(ObservedAddress(link.remote), Priority.CONTROL)
        self._send(link, self.book.records_for_scope(link.address_scope, trio.current_time(), [self.book.me]))
        if not self.book.has_records_of(link.peer):  # A peer that is new to this one may know other new peers.
            link.queue_message(GetPeerRecords(), Priority.CONTROL)

    def on_message(self, link: PeerLink, message: Any) -> None:
        now = trio.current_time()
        match message:
            case PeerRecords():
                self._on_records(link, message, now)
            case GetPeerRecords():
                if now < link.records_told_at + ANSWER_SECONDS:
                    self._refuse("too-often")
                    return
                link.records_told_at = now
                self._send(link, self.book.records_for_scope(link.address_scope, now))
            case ObservedAddress():
                self._on_observed(link, message)
            case DialBack():
                self._on_dial_back(link, message, now)
            case DialBackFailed():
                self._reachability.on_dial_back_failed(link.peer)
                self._request_dial_back()

    def _on_records(self, link: PeerLink, records: PeerRecords, now: float) -> None:
        new: dict[bytes, None] = {}
        is_stale = False
        for aged in records.known:
            signer = aged.record.signer
            told = self.book.accept_record(aged, link.address_scope, now)
            if told is RecordOutcome.NEW:
                if not self._is_stranger(signer):  # A stranger's records are sent only on request: new keys cost nothing.
                    new[signer] = None
                self.dial_peer(signer)
            elif told is RecordOutcome.OWN:
                record = decode_message(aged.record.body, (PeerRecord,))
                self._above = max(self._above, record.sequence)
                self._changed.set()
                for address in addresses_in_scope(record):  # Another machine may have a copy of our key.
                    self._learn(address, signer)
            elif told is RecordOutcome.STALE and signer == link.peer:
                is_stale = True
        if is_stale:
            self._send(link, self.book.records_for_scope(link.address_scope, now, [link.peer]))
        # Strangers get records on request only.
        others = [other for other in self._links.values() if other is not link and other.peer_class is not PeerClass.STRANGER]
        for other in self._random.sample(others, min(FANOUT, len(others))) if new else ():
            self._send(other, self.book.records_for_scope(other.address_scope, now, new.keys() - {other.peer}))

    def dial_peer(self, peer: bytes) -> None:
        """Let the address book dial a peer's addresses, but only one address of a stranger.

        Otherwise cheap keys could direct many dials to a victim.
        """
        addresses = self.book.addresses(peer)
        for address in addresses if self.book.is_member(peer) else addresses[:1]:
            self._learn(address, peer)

    def dial_other_claimant(self, address: str, without: bytes | None) -> None:
        """Let the address book dial another peer that announces `address`, so that a false announcement cannot hide that peer."""
        others = [peer for peer in self.book.peers() if peer != without and address in self.book.addresses(peer)]
        if others:
            self._learn(address, self._random.choice(others))

    # Reachability -----------------------------------------------------------------------------------------------------

    @property
    def reachability(self) -> ReachabilityState:
        self._reachability.retain_peers(self._links.keys())
        return self._reachability.state

    @property
    def observed_host(self) -> str | None:
        """The host at which members see this peer, if this peer can be dialed there. Otherwise None."""
        return self._reachability.observed_host if self.reachability is ReachabilityState.DIRECT else None

    def on_inbound_handshake(self, peer: bytes) -> None:
        """Record a handshake on a connection that `peer` has dialed."""
        before = self.observed_host
        self._reachability.on_inbound_handshake(peer)
        if self.observed_host != before:
            self._announce(trio.current_time())

    def _on_observed(self, link: PeerLink, observed: ObservedAddress) -> None:
        if link.remote is None:  # Over a relay, a peer does not see the other peer's host.
            return
        before = self.observed_host
        try:
            self._reachability.on_observed(link.peer, observed.address, not link.dialed)
        except UserError as error:
            raise RemoteProtocolError("bad-address", str(error)) from None
        if self.observed_host != before:
            self._announce(trio.current_time())
        self._request_dial_back()

    def _request_dial_back(self) -> None:
        self._reachability.retain_peers(self._links.keys())
        port = self._own.port_at(self._reachability.observed_host)
        if port is not None:
            for peer in self._reachability.choose_dialers(trio.current_time()):
                self._links[peer].queue_message(DialBack(port), Priority.CONTROL)

    def _on_dial_back(self, link: PeerLink, asked: DialBack, now: float) -> None:
        """Dial a member back.

        The member names only the port, and the host is the one seen on its link, so it cannot direct dials to others.
        """
        is_full = len(self._dialed_back) == DIAL_BACKS_MAX and now < self._dialed_back[0] + DIAL_BACK_SECONDS
        if link.remote is None or not self.book.is_member(link.peer) or is_full:
            return
        if now < link.dialed_back_at + DIAL_BACK_SECONDS:
            self._refuse("too-often")
            return
        link.dialed_back_at = now
        self._dialed_back.append(now)
        assert self._nursery is not None
        self._nursery.start_soon(self._answer_dial_back, link, asked.port, link.remote)

    async def _answer_dial_back(self, link: PeerLink, port: int, seen_at: str) -> None:
        if not await self._dial_back(link.peer, format_address(parse_address(seen_at)[0], port)):
            link.queue_message(DialBackFailed(port), Priority.CONTROL)

    # Records of this peer --------------------------------------------------------------------------------------------

    def own_addresses(self, hosts: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the addresses of this peer to announce. `hosts` are hosts of this machine at the ends of links."""
        return self._own.reachable_addresses(self.observed_host, hosts)

    def _announce(self, now: float) -> None:
        if self._paid_until > now + (OWN_CHANGES_BURST - 1) * CHANGE_SECONDS:
            self._changed.set()
            return
        by_scope: dict[AddressScope, tuple[str, ...]] = {}
        for address in self.own_addresses(tuple(self._hosts)):
            scope = scope_of(address)
            by_scope[scope] = (*by_scope.get(scope, ()), address)
        changed = self.book.sign_own_records(by_scope, self._relays, now, self._above)
        self._above = 0
        if changed:
            self._paid_until = max(now, self._paid_until) + CHANGE_SECONDS
            for link in self._links.values():
                own = self.book.records_for_scope(link.address_scope, now, [self.book.me])
                self._send(link, [aged for aged in own if aged.record in changed])

    async def _announce_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await trio.sleep_until(self._paid_until - (OWN_CHANGES_BURST - 1) * CHANGE_SECONDS)
            self._announce(trio.current_time())

    async def _tick(self) -> None:
        ticks = 0
        while True:
            self._announce(trio.current_time())
            await trio.sleep(TICK_SECONDS)
            ticks += 1
            self.book.drop_expired(trio.current_time())
            self._request_dial_back()
            self._hosts = {link.local_host for link in self._links.values() if link.local_host is not None}
            before = trio.current_time() - ANSWER_SECONDS
            able = [link for link in self._links.values() if link.since < before]
            if able:
                self._random.choice(able).queue_message(GetPeerRecords(), Priority.CONTROL)
            if ticks % DIAL_AGAIN_TICKS == 0:
                for peer in self.book.peers():
                    if peer not in self._links:
                        self.dial_peer(peer)

    def _send(self, link: PeerLink, known: list[AgedPeerRecord]) -> None:
        for start in range(0, len(known), PEER_RECORDS_MAX):
            link.queue_message(PeerRecords(tuple(known[start : start + PEER_RECORDS_MAX])), Priority.CONTROL)
