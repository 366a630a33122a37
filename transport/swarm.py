"""The TCP network: it dials, listens, keeps one connection to each peer, and carries messages over Noise sessions.

If two peers dial each other at once, the peer with the smaller key decides which connection stays. Each end confirms a connection
after the handshake. The peer with the larger key confirms first. The peer with the smaller key answers on the connection that it
keeps, and closes all others. So both peers always use the same connection, and no link is reported, lost and reported again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

import trio

from protocol.addresses import (
    NO_LISTEN_ADDRESS,
    format_address,
    format_listen_error,
    host_subnet,
    parse_address,
)
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Signer, short_id
from protocol.messages import CIRCUIT_MESSAGES, DialBack, DialBackFailed, GetPeerRecords, ObservedAddress, PeerRecords
from transport.blobs.blob_store import BlobStore
from transport.connections.connection_manager import LINKS_MAX, ConnectionManager
from transport.connections.inbound_queue import UNREAD_BYTES_MAX
from transport.connections.peer_link import LinkClosedByPeer, PeerLink, raise_if_closed
from transport.dialer import HANDSHAKE_SECONDS, Dialer, ThreadedResolver, describe_handshake_error
from transport.discovery.address_book import AddressBook, AddressEntry, parse_bootstrap
from transport.discovery.peer_discovery import PeerDiscovery
from transport.discovery.peer_records import PeerRecordBook
from transport.discovery.reachability import OwnAddresses, ReachabilityState, RelayMode
from transport.network import DuplicateIdentity
from transport.peer_policy import EVERYBODY_IS_MEMBER, PeerClass, PeerPolicy
from transport.quotas.accept_limiter import BACKLOG, HALF_OPEN_MAX, AcceptLimiter, HalfOpenSlot, HalfOpenTable
from transport.quotas.cpu_quota import CpuAccount
from transport.quotas.memory_quota import MemoryAccount
from transport.relay.circuit_session import SILENT_SECONDS, CircuitSession
from transport.relay.relay_client import CircuitStream, RelayClient
from transport.session_links import RelayedLink, SessionLink, TcpLink, remote_address, set_socket_options
from transport.wire.failure_detector import KeepaliveConfig
from transport.wire.framing import Message, Priority
from transport.wire.noise_session import KeyPair, NoiseSession, PeerAuthenticated

log = logging.getLogger(__name__)

Stream = trio.SocketStream | CircuitStream

SEND_SECONDS = 30.0  # timeout until the kernel's buffer accepts a frame; a link slower than 2 KiB/s counts as broken
READ_BYTES = 256 << 10  # largest number of bytes per read: a few frames
# Largest number of bytes per read from a stranger's link: at most a few hundred messages before another peer's turn.
STRANGER_READ_BYTES = 16 << 10

CIRCUIT_HANDSHAKE_SECONDS = 5.0  # timeout of a handshake over a relay: the time lost if the relay forwards nothing
CIRCUIT_IDLE_SECONDS = 8.0  # silence after which a circuit ends, if no circuit over another relay replaces it

CONNECTIONS_MAX = LINKS_MAX + HALF_OPEN_MAX  # accepted connections at the same time
LINKS_PER_HOST_MAX = 256  # accepted connections of one host: many peers may share an address, on a test machine or behind a NAT
MEMBER_HOSTS_MAX = 2048  # remembered hosts from which members have had links

REFUSAL_REASONS = frozenset({"banned", "too-many-links"})  # reasons for which this peer refuses a peer that it has dialed

# Reasons of errors that a third party on the network path may cause. Such an error ends the connection and is counted, but does
# not ban the peer's key.
UNATTRIBUTED_REASONS = frozenset({"bad-tag", "bad-frame", "truncated", "idle"})


class Swarm(ConnectionManager):
    def __init__(
        self,
        identity: Signer,
        chain_id: bytes,
        listen: str,
        bootstrap: Sequence[str],
        blobs: BlobStore,
        policy: PeerPolicy = EVERYBODY_IS_MEMBER,
        *,
        remembered: Sequence[str] = (),
        advertise: Sequence[str] = (),
        tell: Callable[[str], None] = log.info,
        random: Random | None = None,
        hosts: Callable[[], Iterable[str]] = tuple,
        pace: KeepaliveConfig = KeepaliveConfig(),
        relay: RelayMode = RelayMode.ON,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Create a network, which `run` starts. Raises `UserError` for an invalid address.

        | argument | meaning |
        |---|---|
        | `listen` | one or more "host:port" separated by commas, or "none"; port 0 is any free port |
        | `bootstrap` | addresses to dial, as for `connect` |
        | `remembered` | "peer id@host:port" of earlier links; `bootstrap` has precedence |
        | `advertise` | addresses to announce to other peers, if they differ from `listen` |
        | `tell` | called once with each item of news for a person |
        | `hosts` | hosts of this machine, which a wildcard in `listen` stands for |
        | `relay` | the mode of this peer as a relay between members |
        | `connections_max` | largest number of accepted connections, limited by the file descriptors of the process |
        """
        super().__init__(
            identity.public,
            blobs,
            policy,
            trio.to_thread.run_sync,
            pace,
            processor=time.thread_time,
            clock=time.perf_counter,
        )
        self._own = OwnAddresses(listen, advertise, hosts)
        self._identity, self._chain_id = identity, chain_id
        self._random = random or Random(secrets.randbits(64))
        self._static = KeyPair.from_private(secrets.token_bytes(32))  # new at each start, see `PeerAuthenticated.incarnation`
        self.records = PeerRecordBook(identity, chain_id, policy.is_member)
        self._book = AddressBook(
            self.me,
            [*map(parse_bootstrap, bootstrap), *(parse_bootstrap(known, remembered=True) for known in remembered)],
            self._links,
            is_stranger=self._is_outsider,
            has_gone=policy.has_gone,
            is_own=self._own.__contains__,
            added=lambda entry: self._dialer.keep_dialing(entry),
            tell=tell,
            random=self._random,
        )
        self._dialer = Dialer(self._book, self._links, self._may_dial, partial(self._serve_connection, dialed=True))
        self._discovery = PeerDiscovery(
            self.records,
            self._links,
            self._book.add_signed,
            self._own,
            self._dial_back,
            self.count_refusal,
            self._is_outsider,
            self._random,
        )
        self._connections_max = connections_max
        self._half_open = HalfOpenTable(min(HALF_OPEN_MAX, max(1, connections_max // 4)))
        # Hosts from which members have had links, the most recent one last.
        self._member_hosts: OrderedDict[str, None] = OrderedDict()
        self._doors = AcceptLimiter(self._member_hosts.__contains__, self._processor)
        self._open: Counter[str] = Counter()
        self._detours = RelayClient(
            self.me,
            self._links,
            self._serve_circuit,
            serves=policy.is_member,
            relaying=relay if listen != NO_LISTEN_ADDRESS else RelayMode.OFF,
            reachable=lambda: self.reachability,
            refuse=self.count_refusal,
            random=self._random,
            changed=self._discovery.set_relays,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        trio.socket.set_custom_hostname_resolver(ThreadedResolver())
        listeners = await self._open_listeners()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._exchange.run)
                nursery.start_soon(self._discovery.run)
                nursery.start_soon(self._detours.run)
                await nursery.start(self._dialer.run)
                for listener in listeners:
                    nursery.start_soon(self._doors.run, listener, self._accept, partial(self.count_refusal, "half-open"), nursery)
                task_status.started()
        finally:
            for link in tuple(self._links.values()):
                self.detach(link)

    async def _open_listeners(self) -> list[trio.SocketListener]:
        listeners: list[trio.SocketListener] = []
        addresses = []
        for address in self._own.listening:
            host, port = parse_address(address)
            try:
                opened = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
            except OSError as error:
                for listener in listeners:
                    await listener.aclose()
                raise UserError(f"cannot listen on {address}: {format_listen_error(error)}") from None
            listeners += opened
            addresses.append(format_address(host, opened[0].socket.getsockname()[1]))
        self._own.listening = tuple(addresses)
        return listeners

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that this peer listens on, with real ports once `run` has started."""
        return self._own.listening

    @property
    def address(self) -> str:
        return self._own.listening[0] if self._own.listening else NO_LISTEN_ADDRESS

    # Connections -----------------------------------------------------------------------------------------------------

    async def _accept(self, stream: trio.SocketStream) -> None:
        try:
            address = remote_address(stream)
        except OSError:  # disconnected already
            await trio.aclose_forcefully(stream)
            return
        host = host_subnet(parse_address(address)[0])
        if self._open.total() >= self._connections_max or self._open[host] >= LINKS_PER_HOST_MAX:
            self.count_refusal("too-many-links")
        else:
            self._open[host] += 1
            try:
                await self._serve_connection(stream, address, None, dialed=False)
            finally:
                self._open -= Counter([host])  # The subtraction also drops hosts without connections.
        await trio.aclose_forcefully(stream)

    async def _serve_connection(self, stream: trio.SocketStream, address: str, expected: bytes | None, *, dialed: bool) -> None:
        """Serve one connection to its end. Errors of the connection are counted, and not raised."""
        try:
            set_socket_options(stream)
            host = host_subnet(parse_address(address)[0])
            place = None if dialed else self._half_open.hold_slot(host, self._member_hosts)
            with place or contextlib.nullcontext() as half_open:
                await self._serve(stream, address, host, expected, half_open)
            if dialed:
                self._book.record_end(address, "the peer ended the connection")
        except LinkClosedByPeer as farewell:
            log.info("%s: %s", address, farewell.detail)
            if dialed:
                self._book.record_end(address, farewell.detail, was_linked=False)
                self._book.record_refusal(address)
        except RemoteProtocolError as error:
            if error.reason != "self":
                # A dial without a link is logged only at DEBUG, since `AddressBook.schedule_retry` reports it, ever more rarely.
                entry = self._book.get(address) if dialed else None
                is_told = entry is not None and not entry.linked
                self.count_refusal(error.reason)
                count = self._refused[error.reason]
                is_often = not dialed and count & (count - 1)  # Only refusals 1, 2, 4, 8 … are logged, against floods.
                log.log(logging.DEBUG if is_told or is_often else logging.INFO, "%s: %s", address, error)
            if dialed:
                self._book.record_end(address, describe_handshake_error(error))
                if error.reason in REFUSAL_REASONS:
                    self._book.record_refusal(address)
                forgotten = self._book.record_wrong_peer(address, error.reason)
                if forgotten is not None:  # Another peer may answer at this address.
                    self._discovery.dial_other_claimant(address, without=forgotten.peer)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            if dialed:  # `record_end` ignores the reason if the peer was or is linked.
                self._book.record_end(
                    address, "the peer ended the connection: it may belong to another network, or refuse this peer"
                )
        except Exception:
            log.exception("unexpected error on the connection with %s", address)
            self.count_refusal("internal-error")
        finally:
            await trio.aclose_forcefully(stream)

    def _session(self, initiator: bool, expected: bytes | None) -> NoiseSession:
        ephemeral = KeyPair.from_private(secrets.token_bytes(32))
        return NoiseSession(
            self._identity,
            self._chain_id,
            initiator=initiator,
            static=self._static,
            ephemeral=ephemeral,
            expected=expected,
        )

    async def _serve(
        self, stream: trio.SocketStream, address: str, host: str, expected: bytes | None, half_open: HalfOpenSlot | None
    ) -> None:
        dialed = half_open is None
        # This peer itself pays for connections that it has dialed.
        payer = None if dialed else self.cpu_quota.host_account(host, host in self._member_hosts)
        deadline = trio.current_time() + HANDSHAKE_SECONDS
        if payer is not None:
            with trio.move_on_at(deadline):
                await self._wait_for_handshake_turn(stream, payer, deadline)  # The turn comes before any computation.
        session = self._session(dialed, expected)
        established, early = await self._shake_hands(stream, session, deadline, payer)
        if established.peer == self.me:
            if established.incarnation != self._static.public:  # Another process has our key.
                self.events.put(DuplicateIdentity(address))
            elif dialed:
                self._book.record_own_address(address)
            self.check_peer(self.me)  # always raises `RemoteProtocolError`
        if not dialed:
            self._discovery.on_inbound_handshake(established.peer)
        link = TcpLink(established.peer, address, dialed, session, established.incarnation, stream, half_open)
        link.local_host = stream.socket.getsockname()[0].partition("%")[0]
        link.remote = remote_address(stream)
        link.cpu_account = payer or link.cpu_account  # The host pays until the link is attached.
        try:
            with link.scope:
                await self._serve_link(link, session, stream, early, deadline)
            if link.error is not None:
                raise link.error
        finally:
            self.detach(link)

    async def _serve_circuit(self, stream: CircuitStream, peer: bytes) -> None:
        """Serve a link over a relay to its end.

        Errors are counted, and not raised. An error in the handshake may be the relay's fault.
        """
        session = CircuitSession(
            self._identity,
            self._chain_id,
            stream.circuit_id,
            initiator=stream.is_opener,
            static=self._static,
            ephemeral=KeyPair.from_private(secrets.token_bytes(32)),
            expected=peer,
            credit=stream.credit.__getitem__,
        )
        link: RelayedLink | None = None
        try:
            self.check_peer(peer)
            deadline = trio.current_time() + CIRCUIT_HANDSHAKE_SECONDS
            # A relay could start any number of handshakes here, so the account of its link pays for them.
            established, early = await self._shake_hands(
                stream, session, deadline, None if stream.is_opener else stream.carrier.cpu_account
            )
            link = RelayedLink(peer, stream, session, established.incarnation)
            with link.scope:
                await self._serve_link(link, session, stream, early, deadline)
            if link.error is not None:
                raise link.error
        except RemoteProtocolError as error:
            log.debug("%s over %s: %s", short_id(peer), short_id(stream.carrier.peer), error)
            if not isinstance(error, LinkClosedByPeer):
                self.count_refusal(error.reason)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception:
            log.exception("unexpected error on the circuit with %s", short_id(peer))
            self.count_refusal("internal-error")
        finally:
            if link is not None:
                self.detach(link)

    async def _shake_hands(
        self, stream: Stream, session: NoiseSession, deadline: float, payer: CpuAccount | None
    ) -> tuple[PeerAuthenticated, list[Message]]:
        with trio.move_on_at(deadline):
            await stream.send_all(session.data_to_send())
            while True:
                try:
                    events = await self._receive(stream, session, payer)
                except RemoteProtocolError:
                    await stream.send_all(session.data_to_send())  # The preamble shows a refused peer the reason.
                    raise
                await stream.send_all(session.data_to_send())
                if events and isinstance(events[0], PeerAuthenticated):
                    return events[0], [event for event in events[1:] if isinstance(event, Message)]
                if payer is not None:
                    await self._wait_for_handshake_turn(stream, payer, deadline)
        raise RemoteProtocolError("handshake-timeout", f"no handshake within {HANDSHAKE_SECONDS:g} seconds")

    async def _wait_for_handshake_turn(self, stream: Stream, payer: CpuAccount, deadline: float) -> None:
        """Wait for bytes of the peer, and then for a turn that `payer` pays. So a silent peer takes no turn from others."""
        if isinstance(stream, trio.SocketStream):  # A circuit has no socket, and its opener sends first.
            await trio.lowlevel.wait_readable(stream.socket)
        await self.cpu_quota.wait_for_handshake(payer, deadline)

    async def _receive(
        self, stream: Stream, session: NoiseSession, payer: CpuAccount | None = None
    ) -> list[PeerAuthenticated | Message]:
        return self._decrypt(session, bytes(await stream.receive_some(READ_BYTES)), payer)

    def _decrypt(self, session: NoiseSession, data: bytes, payer: CpuAccount | None) -> list[PeerAuthenticated | Message]:
        if not data:
            session.receive_eof()
            raise trio.BrokenResourceError("closed by the peer")
        with self.measure_cpu(payer) if payer is not None else contextlib.nullcontext():
            return session.receive(data)

    async def _serve_link(
        self, link: SessionLink, session: NoiseSession, stream: Stream, early: list[Message], deadline: float
    ) -> None:
        """Confirm a link, then read and write until it ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, link, session, stream)
            try:
                self.check_peer(link.peer)
                messages = await self._confirm(link, session, stream, early, deadline)
                nursery.start_soon(link.run_keepalive)
                if link.predecessor is not None:
                    await link.predecessor.all_read.wait()
                await self._read(link, session, stream, messages)
            except RemoteProtocolError as error:
                self._record_link_error(link, error)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                nursery.cancel_scope.cancel()
            with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                while link.closed and await stream.receive_some(READ_BYTES):
                    """Wait until the peer has read the reason. Unread bytes would make the kernel discard our last ones."""
            nursery.cancel_scope.cancel()

    def _record_link_error(self, link: SessionLink, error: RemoteProtocolError) -> None:
        """Ban the peer's key for an error on its link, or set `link.error`, which the caller of `_serve_link` raises."""
        if isinstance(error, LinkClosedByPeer) or error.reason in UNATTRIBUTED_REASONS:
            link.error = error
        elif self._links.get(link.peer) is link:
            level = logging.DEBUG if link.peer_class is PeerClass.STRANGER else logging.INFO
            log.log(level, "%s at %s: %s", short_id(link.peer), link.address, error)
            self.ban_peer(link.peer, error)
        else:
            link.error = error
            link.close(error.reason)

    async def _confirm(
        self, link: SessionLink, session: NoiseSession, stream: Stream, early: list[Message], deadline: float
    ) -> list[Message]:
        """Attach the link if the peer with the smaller key keeps it. Return the messages that the other end has sent so far."""
        if link.dialed:
            self._book.confirm_peer(link.address, link.peer)
        decides = self.me < link.peer
        if not decides:
            link.ping()
            self._show_invitation(link)  # The invitation is first, since later messages wait behind those of all strangers.
        messages = early
        with trio.move_on_at(deadline):
            while not messages:
                events = await self._receive(stream, session, link.cpu_account)
                messages = [event for event in events if isinstance(event, Message)]
                # The bytes are counted in the peer's memory account only after the link is attached.
                if link.inbox.held > UNREAD_BYTES_MAX[self._policy.classify(link.peer)]:
                    raise RemoteProtocolError("oversized", "the first message of a link is too large")
        if not messages:
            raise RemoteProtocolError("handshake-timeout", "the peer did not confirm the handshake")
        raise_if_closed(messages[0])
        if decides and self._keeps_another(link):
            raise trio.ClosedResourceError
        with self.measure_cpu(link.cpu_account):
            self._activate_link(link)
        return messages

    def _activate_link(self, link: SessionLink) -> None:
        self.attach(link)
        if link.half_open is not None:
            self._half_open.release_slot(link.half_open)
        if link.peer_class >= PeerClass.MEMBER:
            self._member_hosts[link.host] = None
            self._member_hosts.move_to_end(link.host)
            if len(self._member_hosts) > MEMBER_HOSTS_MAX:
                self._member_hosts.popitem(last=False)
        if link.dialed:
            self._book.record_success(link.address)
        if self.me < link.peer:
            self._show_invitation(link)
        self._discovery.on_linked(link)

    def _show_invitation(self, link: SessionLink) -> None:
        shown = self._policy.own_invitation()
        if shown is not None:
            link.queue_message(shown, Priority.CONTROL)

    def _keeps_another(self, link: SessionLink) -> bool:
        old = self._links.get(link.peer)
        if not isinstance(old, SessionLink) or old.incarnation != link.incarnation:
            return False  # The peer has no link, or one to its earlier process.
        if self.can_take_over(old, link):
            return False
        # A peer that opens another circuit has noticed that the old circuit fails. Noticing takes SILENT_SECONDS.
        is_asked = isinstance(link, RelayedLink) and not link.stream.is_opener and link.since - old.since >= SILENT_SECONDS
        if old.relay not in (None, link.relay) and (is_asked or old.needs_other_relay(trio.current_time())):
            return False
        old.probe()
        return True

    def can_take_over(self, old: PeerLink, link: PeerLink) -> bool:
        assert isinstance(old, SessionLink) and isinstance(link, SessionLink)
        return old.relay is not None and link.relay is None and old.incarnation == link.incarnation

    def attach(self, link: PeerLink) -> None:
        super().attach(link)
        if isinstance(link, RelayedLink):
            link.stream.link = link
            link.stream.switch_account(link.memory_account)
        else:
            self._detours.on_linked(link)

    def detach(self, link: PeerLink, reason: str = "") -> None:
        if link.relay is None and self._links.get(link.peer) is link:
            self._detours.on_unlinked(link)
        super().detach(link, reason)
        if isinstance(link, RelayedLink):
            link.stream.switch_account(MemoryAccount())  # The account has no limit, since there is no link to evict.

    def _on_link_message(self, link: PeerLink, message: Any) -> None:
        match message:
            case PeerRecords() | GetPeerRecords() | ObservedAddress() | DialBack() | DialBackFailed():
                self._discovery.on_message(link, message)
            case _ if isinstance(message, CIRCUIT_MESSAGES):
                if link.relay is not None:
                    raise RemoteProtocolError("nested-circuit", "a circuit inside a circuit is not allowed")
                self._detours.on_message(link, message)
                self.enforce_memory_quota(link)
            case _:
                super()._on_link_message(link, message)

    async def _read(self, link: SessionLink, session: NoiseSession, stream: Stream, messages: Sequence[Message]) -> None:
        idle_seconds = self.keepalive.idle_seconds if link.relay is None else CIRCUIT_IDLE_SECONDS
        while not link.closed:
            for message in messages:
                await self.deliver_message(link, message)
            size = STRANGER_READ_BYTES if link.peer_class is PeerClass.STRANGER else READ_BYTES
            link.failure_detector.resume_listening(trio.current_time())
            with trio.CancelScope(deadline=trio.current_time() + idle_seconds) as link.idle_scope:
                data = await stream.receive_some(size)
            if link.idle_scope.cancelled_caught:
                raise RemoteProtocolError("idle", f"no data for {idle_seconds:g} s")
            link.failure_detector.record_arrival(trio.current_time())  # The data may then wait for its quota.
            await self.wait_for_cpu_quota(link, is_full=len(data) == size)
            messages = [event for event in self._decrypt(session, bytes(data), link.cpu_account) if isinstance(event, Message)]
            self.update_peer_class(link)
            self.enforce_memory_quota(link)

    async def _write(self, link: SessionLink, session: NoiseSession, stream: Stream) -> None:
        """Encrypt and send frames until the link ends.

        Only this task encrypts, so frames are sent in order or the connection ends.
        """
        with trio.CancelScope() as sending:  # One scope is reused for all frames.
            try:
                while True:
                    await link.wait_until_sendable()
                    sending.deadline = trio.current_time() + SEND_SECONDS
                    # The frame is filled when the socket has room for it. Otherwise a vote would have to wait for a frame that is
                    # already filled.
                    if link.meter.is_slow and isinstance(stream, trio.SocketStream):
                        await trio.lowlevel.wait_writable(stream.socket)
                    with self.measure_cpu(link.cpu_account):
                        data = session.data_to_send(link.frame_bytes())
                    await stream.send_all(data)
                    sending.deadline = math.inf
                    if link.closed:
                        await stream.send_eof()
                        return
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                link.close()
        if sending.cancelled_caught:
            link.close()

    # Dialing ---------------------------------------------------------------------------------------------------------

    def _may_dial(self, peer: bytes) -> bool:
        return self._bans.banned_until(peer) <= trio.current_time()

    async def connect(self, text: str) -> bytes:
        return await self._dialer.connect(text)

    def unreached_addresses(self) -> tuple[AddressEntry, ...]:
        return self._book.unreachable_addresses()

    def add_local_address(self, address: str) -> None:
        """Dial an address of the local network, at which any peer may answer. It is forgotten after a dozen failures in a row."""
        self._book.add_local(address)

    # Addresses -------------------------------------------------------------------------------------------------------

    def peer_addresses(self) -> dict[bytes, str]:
        """Return one address of each known peer: the address that this peer dialed, or else one from the other peer's records."""
        said = {peer: addresses[0] for peer in self.records.peers() if (addresses := self.records.addresses(peer))}
        return said | {link.peer: link.address for link in self._links.values() if link.dialed}

    @property
    def external_address(self) -> str | None:
        """The address that a router forwards to this peer, if any."""
        return self._own.external_address

    def set_external_address(self, address: str | None) -> None:
        if address != self._own.external_address:
            self._own.external_address = address
            self._discovery.on_address_changed()

    @property
    def announced_addresses(self) -> tuple[str, ...]:
        """The addresses of this peer that it announces to other peers."""
        return self._discovery.own_addresses()

    @property
    def reachability(self) -> ReachabilityState:
        return self._discovery.reachability

    async def _dial_back(self, peer: bytes, address: str) -> bool:
        """Dial a peer at an address, and return whether it answers. The connection ends with the handshake."""
        try:
            async with await self._dialer.open_stream(address) as stream:
                session = self._session(True, peer)
                await self._shake_hands(stream, session, trio.current_time() + HANDSHAKE_SECONDS, None)
                return True
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError):
            return False

    def _is_outsider(self, peer: bytes) -> bool:
        return self._policy.classify(peer) is PeerClass.STRANGER
