"""The TCP network: dials, listens, keeps one connection to each peer, and carries messages over Noise sessions.

Who decides which connection stays, when two peers dial each other at once? The one with the smaller key. Both ends confirm
after the handshake: the larger key speaks first, the smaller one answers on the connection that it keeps and closes any other.
So both always agree, whatever arrives first, and nobody sees a link come, go and come again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import trio

from protocol.addresses import NOWHERE, WILDCARDS, Scope, completed, format_address, listened, parse_address, scope_of
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import WIRE_VERSIONS, Signer, parse_peer_id, short_id
from protocol.limits import ADDRESSES_MAX, CIRCUIT_RECORD_BYTES_MAX
from protocol.messages import Addresses, Guest, PeerAddress
from transport.blobs import BlobStore
from transport.circuit import CircuitSession
from transport.detours import CircuitStream, Detours
from transport.discovery import Discovery
from transport.effort import Payer
from transport.farewell import Farewell, check_first
from transport.framing import TAG_BYTES, Message, Priority
from transport.hub import LINKS_MAX, Allow, Hub, Link, Welcome
from transport.measures import PIECE_BYTES_START, TCP_INFO_BYTES, Kernel
from transport.network import Copied, DialInfo
from transport.noise import KeyPair
from transport.reachability import Reachable
from transport.records import RecordBook
from transport.session import Established, OtherVersion, Session
from transport.silence import Pace
from transport.slots import HALF_OPEN_MAX, HalfOpen, Place
from transport.standing import Standing, StandingOf

log = logging.getLogger(__name__)

Stream = trio.abc.HalfCloseableStream  # a connection, or one end of a circuit

HANDSHAKE_SECONDS = 10.0  # from the connection to its confirmation; a loaded two-core machine takes well under one
DIAL_SECONDS = 10.0  # for TCP to connect
SEND_SECONDS = 30.0  # for one frame to fit into the kernel's buffer: slower than 2 KiB/s is dead
PROBE_SECONDS = 5.0  # how long an old link may stay silent after its peer has dialed again
READ_BYTES = 256 << 10  # at once; a few frames
STRANGER_READ_BYTES = 16 << 10  # some hundred messages at most, before it is somebody else's turn

CIRCUIT_HANDSHAKE_SECONDS = 5.0  # a relay that forwards nothing costs so much; then another one is tried
CIRCUIT_PING_SECONDS = 2.5  # more often than on a direct link: whether the relay forwards is seen only from what comes through
CIRCUIT_IDLE_SECONDS = 3 * CIRCUIT_PING_SECONDS + 0.5
DIRECT_SECONDS_MAX = 60.0  # between dials of a peer that is linked over a relay

DIALS_MAX = 16  # at once
BACKOFF_SECONDS = 0.2  # a pause before dialing lies between 0 and this, twice as much after each failure, at most
BACKOFF_SECONDS_MAX = 20.0
STABLE_SECONDS = 10.0  # a connection that held this long was a success: the backoff starts again
FAILURES_MAX = 12  # in a row, after which an address that was only heard of is forgotten

CONNECTIONS_MAX = LINKS_MAX + HALF_OPEN_MAX  # that were accepted
LINKS_PER_HOST_MAX = 256  # many peers behind one address (a test machine, a NAT)
BOOK_MAX = 2048  # addresses known: 200 voters with ten each, each a task that waits
HEARD_MAX = 4096  # addresses listened to over one link

# These may be the work of somebody on the way, so they end the connection and are counted, but the peer's key is not banned.
UNPROVEN = frozenset({"bad-tag", "bad-frame", "truncated", "idle"})


@dataclass(slots=True)
class _Known:
    """An address to keep dialing."""

    address: str
    peer: bytes | None  # None: whoever answers
    named: bool = False  # by the operator, or remembered: never forgotten for its failures
    pinned: bool = False  # only `peer` may answer
    remembered: bool = False  # `peer` was there once
    failures: int = 0
    reason: str = ""  # why the last attempt failed; empty: it did not
    linked: bool = False  # the last attempt has led to a link
    told: str = ""  # the reason that was told last
    version: int | None = None  # an older one, to open the next attempt with: the last attempt was answered in it
    next_at: float = 0.0  # when it is dialed again
    at_once: trio.Event = field(default_factory=trio.Event)  # somebody does not want to wait until then
    tried: trio.Event = field(default_factory=trio.Event)  # an attempt has come to a link, or to its end

    def came_to_something(self, reason: str) -> None:
        self.reason = reason
        self.tried.set()
        self.tried = trio.Event()


class SessionLink(Link):
    """A link with a session of its own."""

    half_open: Place | None = None  # that it takes until it is attached

    def __init__(self, peer: bytes, address: str, dialed: bool, session: Session, incarnation: bytes) -> None:
        super().__init__(peer, address, dialed, session.outbox, session.inbox)
        self.incarnation, self.version = incarnation, session.version
        self.error: RemoteProtocolError | None = None  # what ended it, before it was in use or without a ban
        self.heard = 0  # addresses in all of its messages
        self.idle_scope = trio.CancelScope()
        self.ended = trio.Event()

    def close(self, reason: str = "") -> None:
        super().close(reason)
        self.ended.set()

    def frame_bytes(self) -> int:
        """Of the next frame."""
        return self.meter.frame_bytes

    def probe(self) -> None:
        """The peer seems to have lost this link: it must show soon that it has not."""
        self.ping()
        self.idle_scope.deadline = min(self.idle_scope.deadline, trio.current_time() + PROBE_SECONDS)


class TcpLink(SessionLink):
    def __init__(
        self,
        peer: bytes,
        address: str,
        dialed: bool,
        session: Session,
        incarnation: bytes,
        stream: trio.SocketStream,
        half_open: Place | None,
    ) -> None:
        super().__init__(peer, address, dialed, session, incarnation)
        self._stream, self._unsent_bytes, self.half_open = stream, PIECE_BYTES_START, half_open

    def kernel(self) -> Kernel:
        return _kernel(self._stream) or super().kernel()

    def frame_bytes(self) -> int:
        """Of the next frame; and the kernel is told how much it may hold."""
        if self.meter.unsent_bytes != self._unsent_bytes:
            self._unsent_bytes = self.meter.unsent_bytes
            _limit_unsent(self._stream, self._unsent_bytes)
        return super().frame_bytes()


class RelayedLink(SessionLink):
    """Over a circuit."""

    reach = Scope.PUBLIC  # nobody sees at which host the peer is

    def __init__(self, peer: bytes, stream: CircuitStream, session: CircuitSession, incarnation: bytes) -> None:
        super().__init__(peer, stream.carrier.address, False, session, incarnation)
        self.by, self.stream, self._session = stream.carrier.peer, stream, session
        stream.credited = lambda: self._output.set()

    async def output(self) -> None:
        while self._session.next_lane() is None:
            if not self.outbox:
                self.meter.idle(self.kernel(), trio.current_time())
            self._output = trio.Event()
            await self._output.wait()
        self.meter.busy(self.kernel(), trio.current_time())

    def frame_bytes(self) -> int:
        return min(super().frame_bytes(), CIRCUIT_RECORD_BYTES_MAX - TAG_BYTES)

    async def keep_alive(self) -> None:
        while True:
            self.ping()
            await trio.sleep(CIRCUIT_PING_SECONDS)


class Swarm(Hub):
    def __init__(
        self,
        identity: Signer,
        chain_id: bytes,
        listen: str,
        bootstrap: Sequence[str],
        blobs: BlobStore,
        *,
        remembered: Sequence[str] = (),
        advertise: Sequence[str] = (),
        allow: Allow = lambda peer: True,
        standing_of: StandingOf = lambda peer: Standing.MEMBER,
        welcome: Welcome = lambda peer, shown: None,
        guest: Callable[[], Guest | None] = lambda: None,
        tell: Callable[[str], None] = log.info,
        random: Random | None = None,
        versions: Sequence[int] = WIRE_VERSIONS,
        members: Callable[[bytes], bool] = lambda peer: True,
        hosts: Callable[[], Iterable[str]] = tuple,
        pace: Pace = Pace(),
        relay: bool = True,
    ) -> None:
        """`listen`: "host:port", port 0 for any free one; several with commas; or "none". `advertise`: where others reach this
        peer, if not there; `tell` hears what a person should know, each thing once. `bootstrap`: as `connect` takes it.
        `remembered`: "peer id@host:port", as `claims` said earlier; `bootstrap` goes before them. `hosts`: of this machine, that
        others may reach it at where it listens on all. `guest`: what this peer shows to others while it is no member. `welcome`:
        others have shown it. `relay`: forward between `members`.

        Raises `UserError` for an address that is none.
        """
        super().__init__(
            identity.public,
            blobs,
            allow,
            trio.to_thread.run_sync,
            pace,
            standing_of=standing_of,
            welcome=welcome,
            processor=time.thread_time,
        )
        self.addresses = listened(listen)  # with the real ports once `run` has started
        self._advertise, self._tell = tuple(advertise), tell
        self._identity, self._chain_id, self._versions = identity, chain_id, versions
        self._random = random or Random(secrets.randbits(64))
        self._static = KeyPair.of(secrets.token_bytes(32))  # one for each start, see `Established.incarnation`
        self._book: dict[str, _Known] = {}
        for known in (*map(_parse_bootstrap, bootstrap), *(replace(_parse_bootstrap(e), remembered=True) for e in remembered)):
            self._book.setdefault(known.address, known)
        self._mine: dict[str, None] = {}  # said to be addresses of our key, and found to lead to this process
        self._claims: dict[bytes, str] = {}  # peer of wire version 2 -> its address in its own words
        self.records = RecordBook(identity, chain_id, allow=allow, members=members)
        self._discovery = Discovery(
            self.records,
            self._links,
            self._hear,
            self._own_addresses,
            self._dial_back,
            self._port,
            self.refuse,
            self._random,
        )
        self._hosts = hosts
        self._dials = trio.CapacityLimiter(DIALS_MAX)
        self._guest = guest
        self._half_open = HalfOpen()
        self._member_hosts: OrderedDict[str, None] = OrderedDict()  # from which members were linked, the last one at the end
        self._open: Counter[str] = Counter()
        self._nursery: trio.Nursery | None = None
        self._detours = Detours(
            self.me,
            self._links,
            self._serve_circuit,
            serves=members,
            forwards=relay and listen != NOWHERE,
            is_hidden=lambda: self.reachable is Reachable.RELAYED,
            refuse=self.refuse,
            random=self._random,
            changed=self._discovery.set_relays,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await self._open_listeners()
        try:
            async with trio.open_nursery() as self._nursery:
                await self._nursery.start(self._exchange.run)
                self._nursery.start_soon(self._discovery.run)
                self._nursery.start_soon(self._detours.run)
                if listeners:
                    self._nursery.start_soon(trio.serve_listeners, self._accept, listeners)
                for known in self._book.values():
                    self._nursery.start_soon(self._keep_dialed, known)
                task_status.started()
        finally:
            for link in tuple(self._links.values()):
                self.detach(link)

    async def _open_listeners(self) -> list[trio.SocketListener]:
        listeners: list[trio.SocketListener] = []
        addresses = []
        for address in self.addresses:
            host, port = parse_address(address)
            try:
                opened = await trio.open_tcp_listeners(port, host=host)
            except OSError as error:
                for listener in listeners:
                    await listener.aclose()
                raise UserError(
                    f"cannot listen on {address}: {error.strerror or error}; stop the program that uses it, or name "
                    "another address (HOST:PORT, port 0 for any free one)"
                ) from None
            listeners += opened
            addresses.append(format_address(host, opened[0].socket.getsockname()[1]))
        self.addresses = tuple(addresses)
        return listeners

    @property
    def address(self) -> str:
        """The first that this peer listens on."""
        return self.addresses[0] if self.addresses else NOWHERE

    # Connections -----------------------------------------------------------------------------------------------------

    async def _accept(self, stream: trio.SocketStream) -> None:
        try:
            address = _remote(stream)
        except OSError:  # gone before it was looked at
            await trio.aclose_forcefully(stream)
            return
        host = parse_address(address)[0]
        if self._open.total() >= CONNECTIONS_MAX or self._open[host] >= LINKS_PER_HOST_MAX:
            self.refuse("too-many-links")
        else:
            with _counted(self._open, host):
                await self._converse(stream, address, None, dialed=False)
        await trio.aclose_forcefully(stream)

    async def _converse(self, stream: trio.SocketStream, address: str, expected: bytes | None, *, dialed: bool) -> None:
        """Serve one connection to its end. Whatever goes wrong on it is counted, and ends here."""
        try:
            _tune(stream)
            await self._serve(stream, address, expected, dialed)
            if dialed:
                self._note(address, "the other side ended the connection")
        except Farewell as farewell:
            log.info("%s: %s", address, farewell.detail)
            if dialed:
                self._note(address, farewell.detail, was_linked=False)
        except RemoteProtocolError as error:
            if dialed and isinstance(error, OtherVersion) and self._speak(address, error):
                return
            if error.reason != "self":
                # A dial that came to no link is told by `_pause`, at fewer and fewer of its tries.
                is_told = dialed and address in self._book and not self._book[address].linked
                self.refuse(error.reason)
                count = self._refused[error.reason]
                is_often = not dialed and count & (count - 1)  # told at 1, 2, 4, 8 … of them: strangers fill no log
                log.log(logging.DEBUG if is_told or is_often else logging.INFO, "%s: %s", address, error)
            if dialed:
                self._note(address, _in_words(error))
                self._reconsider(address, error.reason)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            if dialed:  # what else that means is seen from the links
                self._note(address, "the other side ended the connection; it may belong to another network, or refuse this peer")
        except Exception:
            log.exception("connection with %s", address)
            self.refuse("internal-error")
        finally:
            await trio.aclose_forcefully(stream)

    async def _serve(self, stream: trio.SocketStream, address: str, expected: bytes | None, dialed: bool) -> None:
        place = None if dialed else self._half_open.place(parse_address(address)[0], self._member_hosts)
        with place or contextlib.nullcontext() as half_open:
            await self._serve_at(stream, address, expected, half_open)

    def _session(self, initiator: bool, expected: bytes | None, versions: Sequence[int]) -> Session:
        ephemeral = KeyPair.of(secrets.token_bytes(32))
        return Session(
            self._identity,
            self._chain_id,
            initiator=initiator,
            static=self._static,
            ephemeral=ephemeral,
            expected=expected,
            versions=versions,
        )

    async def _serve_at(self, stream: trio.SocketStream, address: str, expected: bytes | None, half_open: Place | None) -> None:
        dialed, host = half_open is None, parse_address(address)[0]
        payer = None if dialed else self.effort.host(host, host in self._member_hosts)  # a dial is our own work
        session = self._session(dialed, expected, self._versions_for(address) if dialed else self._versions)
        deadline = trio.current_time() + HANDSHAKE_SECONDS
        established, early = await self._shake_hands(stream, session, deadline, payer)
        if established.peer == self.me:
            self._meet_own_key(address, established.incarnation, dialed)
            self.check_peer(self.me)  # raises
        if not dialed:
            self._discovery.came(established.peer)
        link = TcpLink(established.peer, address, dialed, session, established.incarnation, stream, half_open)
        link.local_host = stream.socket.getsockname()[0].partition("%")[0]
        link.remote = _remote(stream)
        try:
            with link.scope:
                await self._serve_link(link, session, stream, early, deadline)
            if link.error is not None:
                raise link.error
        finally:
            self.detach(link)

    async def _serve_circuit(self, stream: CircuitStream, peer: bytes, opens: bool) -> None:
        """Serve a link over a relay to its end. What goes wrong before the handshake is complete may be the relay's work."""
        session = CircuitSession(
            self._identity,
            self._chain_id,
            stream.name,
            initiator=opens,
            static=self._static,
            ephemeral=KeyPair.of(secrets.token_bytes(32)),
            expected=peer,
            versions=self._versions,
            credit=stream.credit,
        )
        link: RelayedLink | None = None
        try:
            self.check_peer(peer)
            deadline = trio.current_time() + CIRCUIT_HANDSHAKE_SECONDS
            established, early = await self._shake_hands(stream, session, deadline, None)
            link = RelayedLink(peer, stream, session, established.incarnation)
            with link.scope:
                await self._serve_link(link, session, stream, early, deadline)
            if link.error is not None:
                raise link.error
        except RemoteProtocolError as error:
            log.debug("%s over %s: %s", short_id(peer), short_id(stream.carrier.peer), error)
            if not isinstance(error, Farewell):
                self.refuse(error.reason)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception:
            log.exception("circuit with %s", short_id(peer))
            self.refuse("internal-error")
        finally:
            if link is not None:
                self.detach(link)

    def _meet_own_key(self, address: str, incarnation: bytes, dialed: bool) -> None:
        """This process itself, or another one, on a machine that has a copy of our key."""
        if incarnation != self._static.public:
            self.events.put(Copied(address))
        elif dialed and len(self._mine) < ADDRESSES_MAX:
            self._mine[address] = None

    async def _shake_hands(
        self, stream: Stream, session: Session, deadline: float, payer: Payer | None
    ) -> tuple[Established, list[Message]]:
        with trio.move_on_at(deadline):
            await stream.send_all(session.data_to_send())
            while True:
                if payer is not None:
                    await self.effort.turn_of_handshake(payer)
                try:
                    events = await self._receive(stream, session, payer)
                except RemoteProtocolError:
                    await stream.send_all(session.data_to_send())  # our preamble, in which a refused peer reads why
                    raise
                await stream.send_all(session.data_to_send())
                if events and isinstance(events[0], Established):
                    return events[0], [event for event in events[1:] if isinstance(event, Message)]
        raise RemoteProtocolError("handshake-timeout", f"no handshake within {HANDSHAKE_SECONDS:g} seconds")

    async def _receive(self, stream: Stream, session: Session, payer: Payer | None = None) -> list[Established | Message]:
        return self._take(session, bytes(await stream.receive_some(READ_BYTES)), payer)

    def _take(self, session: Session, data: bytes, payer: Payer | None) -> list[Established | Message]:
        if not data:
            session.receive_end()
            raise trio.BrokenResourceError("closed by the peer")
        with self.working(payer) if payer is not None else contextlib.nullcontext():
            return session.receive(data)

    async def _serve_link(
        self, link: SessionLink, session: Session, stream: Stream, early: list[Message], deadline: float
    ) -> None:
        """Read and write until the link ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, link, session, stream)
            try:
                self.check_peer(link.peer)
                messages = await self._confirm(link, session, stream, early, deadline)
                nursery.start_soon(link.keep_alive)
                if link.predecessor is not None:
                    await link.predecessor.all_read.wait()
                await self._read(link, session, stream, messages)
            except RemoteProtocolError as error:
                self._blame(link, error)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                nursery.cancel_scope.cancel()
            with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                while link.closed and await stream.receive_some(READ_BYTES):
                    """Until the peer has read why; unread bytes would make the kernel throw our last ones away."""
            nursery.cancel_scope.cancel()

    def _blame(self, link: SessionLink, error: RemoteProtocolError) -> None:
        """What cost the peer this link. It is counted by `_converse`, or the key is banned."""
        if isinstance(error, Farewell) or error.reason in UNPROVEN:
            link.error = error
        elif self._links.get(link.peer) is link:
            log.info("%s at %s: %s", short_id(link.peer), link.address, error)
            self.drop(link.peer, error)
        else:
            link.error = error
            link.close(error.reason)

    async def _confirm(
        self, link: SessionLink, session: Session, stream: Stream, early: list[Message], deadline: float
    ) -> list[Message]:
        """Attach the link, if the smaller key keeps it; what the peer has sent by then."""
        if link.dialed and link.address in self._book:
            self._book[link.address].peer = link.peer
        decides = self.me < link.peer
        if not decides:
            link.ping()
        messages = early
        with trio.move_on_at(deadline):
            while not messages:
                messages = [event for event in await self._receive(stream, session) if isinstance(event, Message)]
        if not messages:
            raise RemoteProtocolError("handshake-timeout", "the handshake was not confirmed")
        check_first(messages[0])
        if decides and self._keeps_another(link):
            raise trio.ClosedResourceError
        self.attach(link)
        if link.half_open is not None:
            self._half_open.leave(link.half_open)
        if link.standing >= Standing.MEMBER:
            self._member_hosts[link.host] = None
            self._member_hosts.move_to_end(link.host)
            if len(self._member_hosts) > BOOK_MAX:
                self._member_hosts.popitem(last=False)
        if link.dialed:
            self._succeeded(link.address)
        shown = self._guest()
        if shown is not None:
            link.post(shown, Priority.CONTROL)
        if addresses := self._addresses(link):
            link.post(Addresses(addresses), Priority.CONTROL)
        self._discovery.linked(link)
        return messages

    def _keeps_another(self, link: SessionLink) -> bool:
        old = self._links.get(link.peer)
        if not isinstance(old, SessionLink) or old.incarnation != link.incarnation:
            return False  # none, or one to a process that has ended since
        if self.takes_over(old, link):
            return False
        old.probe()
        return True

    def takes_over(self, old: Link, link: Link) -> bool:
        assert isinstance(old, SessionLink) and isinstance(link, SessionLink)
        return old.by is not None and link.by is None and old.incarnation == link.incarnation

    def attach(self, link: Link) -> None:
        super().attach(link)
        if isinstance(link, RelayedLink):
            link.stream.linked = True
        else:
            self._detours.linked(link)

    def detach(self, link: Link, reason: str = "") -> None:
        if link.by is None and self._links.get(link.peer) is link:
            self._detours.unlinked(link)
        super().detach(link, reason)

    def on_circuit_message(self, link: Link, message: Any) -> None:
        if link.by is not None:
            raise RemoteProtocolError("nested-circuit", "a circuit inside a circuit")
        self._detours.on_message(link, message)

    async def _read(self, link: SessionLink, session: Session, stream: Stream, messages: Sequence[Message]) -> None:
        idle_seconds = self.pace.idle_seconds if link.by is None else CIRCUIT_IDLE_SECONDS
        while not link.closed:
            for message in messages:
                await self.deliver(link, message)
            size = STRANGER_READ_BYTES if link.standing is Standing.STRANGER else READ_BYTES
            link.silence.listens(trio.current_time())
            with trio.CancelScope(deadline=trio.current_time() + idle_seconds) as link.idle_scope:
                data = await stream.receive_some(size)
            if link.idle_scope.cancelled_caught:
                raise RemoteProtocolError("idle", "silent for too long")
            link.silence.heard(trio.current_time())  # also where what came has to wait for its turn
            await self.turn(link, is_full=len(data) == size)
            messages = [event for event in self._take(session, bytes(data), link.payer) if isinstance(event, Message)]
            self.stand(link)
            self.hold(link)

    async def _write(self, link: SessionLink, session: Session, stream: Stream) -> None:
        """The only place that seals frames: what is sealed is sent, in order, or the connection ends."""
        with trio.CancelScope() as sending:  # one for all frames
            try:
                while True:
                    await link.output()
                    sending.deadline = trio.current_time() + SEND_SECONDS
                    # A frame that is sealed before there is room for it is one more to wait for.
                    if link.meter.is_slow and isinstance(stream, trio.SocketStream):
                        await trio.lowlevel.wait_writable(stream.socket)
                    with self.working(link.payer):
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

    async def _keep_dialed(self, known: _Known) -> None:
        while self._book.get(known.address) is known:
            link = self._links.get(known.peer) if known.peer is not None else None
            if isinstance(link, TcpLink):
                await link.ended.wait()
                known.failures = 0
            elif await self._dial(known) >= STABLE_SECONDS:
                known.failures = 0
            else:
                known.failures += 1
                if link is None and known.failures > FAILURES_MAX and not known.named and self._book.get(known.address) is known:
                    self._book.pop(known.address, None)
            await self._pause(known)

    async def _pause(self, known: _Known) -> None:
        is_relayed = known.peer in self._links and self._links[known.peer].by is not None
        longest = DIRECT_SECONDS_MAX if is_relayed else BACKOFF_SECONDS_MAX
        pause = self._random.uniform(0, min(longest, BACKOFF_SECONDS * 2 ** min(known.failures, 16)))
        known.next_at = trio.current_time() + pause
        # Told when it is new, when the reason changes, and at 2, 4, 8 … tries; nothing of what was only heard of.
        if known.reason and known.named and (known.reason != known.told or known.failures & (known.failures - 1) == 0):
            known.told = known.reason
            self._tell(str(self._info(known)))
        with trio.move_on_after(pause):
            await known.at_once.wait()
        known.at_once = trio.Event()

    async def _dial(self, known: _Known) -> float:
        """Connect and serve the connection; how long it lasted, in seconds, and 0 if there was none."""
        if known.peer is not None and (not self._allow(known.peer) or self._bans.until(known.peer) > trio.current_time()):
            known.came_to_something("this peer refuses it, because it was expelled or misbehaved")
            return 0.0
        host, port = parse_address(known.address)
        try:
            async with self._dials:
                with trio.fail_after(DIAL_SECONDS):
                    stream = await trio.open_tcp_stream(host, port)
        except (OSError, ValueError) as error:  # `ValueError`: the resolver does not take the name
            known.came_to_something(_why(error))
            return 0.0
        except trio.TooSlowError:
            known.came_to_something(f"no answer within {DIAL_SECONDS:g} s")
            return 0.0
        if not known.named and _leads_home(stream, known.address):
            await trio.aclose_forcefully(stream)
            known.came_to_something("the name leads into this peer's own network")
            return 0.0
        start, known.linked = trio.current_time(), False
        expected = known.peer if known.pinned else None
        await self._converse(stream, known.address, expected, dialed=True)
        return trio.current_time() - start

    def _versions_for(self, address: str) -> Sequence[int]:
        """Up to the newest, or to the one in which the attempt before was answered."""
        known = self._book.get(address)
        version = known.version if known is not None else None
        if known is not None:
            known.version = None
        return [one for one in self._versions if version is None or one <= version]

    def _speak(self, address: str, error: OtherVersion) -> bool:
        """Whether the address is dialed again at once, in the older version of whoever answered."""
        known = self._book.get(address)
        if known is None or error.version not in self._versions or error.version >= error.ours:
            return False
        known.version = error.version
        known.at_once.set()
        return True

    def _note(self, address: str, reason: str, was_linked: bool = True) -> None:
        """An attempt has failed; a link that was in use, or another one to the same peer, is no failure."""
        known = self._book.get(address)
        if known is not None:
            has_another = known.peer is not None and known.peer in self._links
            known.came_to_something("" if (known.linked and was_linked) or has_another else reason)

    def _succeeded(self, address: str) -> None:
        known = self._book.get(address)
        if known is not None:
            if known.told:
                self._tell(f"reached {address}")
            known.told, known.linked = "", True
            known.came_to_something("")

    def _info(self, known: _Known) -> DialInfo:
        wait = max(0.0, known.next_at - trio.current_time())
        return DialInfo(known.address, known.peer, known.reason, known.failures, wait)

    def unreached(self) -> tuple[DialInfo, ...]:
        """The addresses that could not be reached lately, and whose peer is not linked over another one."""
        here = {self.me, *self._links}
        return tuple(self._info(known) for known in self._book.values() if known.reason and known.peer not in here)

    async def connect(self, text: str) -> bytes:
        """Dials "host:port" or "peer id@host:port" at once and keeps to it; the peer that answered. Raises `UserError`."""
        wanted = _parse_bootstrap(text)
        known = self._book.get(wanted.address)
        if known is None and len(self._book) >= BOOK_MAX:
            raise UserError(f"{text}: this peer knows {BOOK_MAX} addresses already, which is the most")
        if known is None or not self._is_linked_at(known, wanted):
            # Whoever was said to be there may have moved, and another one come: what the person says now is what counts.
            assert self._nursery is not None
            if known is not None:
                known.at_once.set()  # so that its task sees that it is out of the book
            known = self._book[wanted.address] = wanted
            self._nursery.start_soon(self._keep_dialed, known)
        known.named, known.failures = True, 0
        if known.peer is None or known.peer not in self._links:
            known.at_once.set()
            with trio.move_on_after(DIAL_SECONDS + HANDSHAKE_SECONDS) as patience:
                await known.tried.wait()
            if patience.cancelled_caught:
                raise UserError(f"{text}: no answer within {DIAL_SECONDS + HANDSHAKE_SECONDS:g} s; this peer keeps trying")
        if known.peer in self._links:
            return known.peer
        if self._book.get(wanted.address) is not known:
            raise UserError(f"{text}: {known.reason}")
        raise UserError(f"cannot reach {wanted.address}: {known.reason}; this peer keeps trying")

    def _is_linked_at(self, known: _Known, wanted: _Known) -> bool:
        """Whether the peer there, which must be the wanted one where one is named, is linked over this very address."""
        link = self._links.get(known.peer) if known.peer is not None else None
        return link is not None and link.dialed and link.address == known.address and wanted.peer in (None, link.peer)

    # Addresses -------------------------------------------------------------------------------------------------------

    def _reconsider(self, address: str, reason: str) -> None:
        """Somebody else answered at an address."""
        known = self._book.get(address)
        if known is not None and known.remembered and reason == "wrong-peer":
            known.peer, known.pinned = None, False  # who was there goes on under a new key, perhaps, and remembers our old one
        elif reason == "self" or (reason == "wrong-peer" and not self._is_named(address)):
            self._book.pop(address, None)
            if known is not None and reason == "wrong-peer":  # of several who say that they are there, another one is
                self._discovery.dial_at(address, without=known.peer)

    def _is_named(self, address: str) -> bool:
        return address in self._book and self._book[address].named

    def claims(self) -> dict[bytes, str]:
        """Where peers are reached: where this peer reached them, or else where they say."""
        said = {peer: addresses[0] for peer in self.records.peers() if (addresses := self.records.addresses(peer))}
        return {**self._claims, **said, **{link.peer: link.address for link in self._links.values() if link.dialed}}

    def _addresses(self, link: Link) -> tuple[PeerAddress, ...]:
        """For peers of wire version 2 where everybody is reached; for others where those peers are, which sign no records."""
        said = dict(self._claims)
        if link.version < 3:
            for peer in self.records.peers():
                for one in self.records.addresses(peer):
                    if scope_of(one).includes(link.reach):
                        said.setdefault(peer, one)
        mine = [(self.me, address) for address in self._advertise or self.addresses] if link.version < 3 else []
        return tuple(PeerAddress(peer, address) for peer, address in [*mine, *said.items()][:ADDRESSES_MAX])

    def on_discovery(self, link: Link, message: Any) -> None:
        self._discovery.on_message(link, message)

    def _own_addresses(self, hosts: Sequence[str]) -> Sequence[str]:
        seen = [self._discovery.host] if self._discovery.host is not None else []
        return self._advertise or completed(self.addresses, [*seen, *self._hosts(), *hosts])

    def _port(self, host: str | None) -> int | None:
        """At which others reach this peer at that host; None where it listens at none of that IP version."""
        for own, port in map(parse_address, self._advertise or self.addresses):
            if host is None or not _is_ip(own) or (":" in own) == (":" in host):
                return port
        return None

    @property
    def reachable(self) -> Reachable:
        return self._discovery.reachable

    async def _dial_back(self, peer: bytes, address: str) -> bool:
        """Whether this very peer answers there; the connection ends with the handshake."""
        try:
            async with self._dials:
                with trio.fail_after(DIAL_SECONDS):
                    stream = await trio.open_tcp_stream(*parse_address(address))
            async with stream:
                session = self._session(True, peer, self._versions)
                await self._shake_hands(stream, session, trio.current_time() + HANDSHAKE_SECONDS, None)
                return True
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError):
            return False

    def _hear(self, address: str, peer: bytes) -> None:
        """A signed record says so. Several may claim one address; who only claims it gives way."""
        if peer == self.me:
            self._look_for_a_copy(address)
            return
        known = self._book.get(address)
        link = self._links.get(known.peer) if known is not None and known.peer != peer and known.peer is not None else None
        if known is not None and link is not None and not known.named and not (link.dialed and link.address == address):
            del self._book[address]  # whoever is linked from elsewhere needs no dial there
        self._learn(address, peer, first_hand=False)

    def on_addresses(self, link: Link, addresses: Addresses) -> None:
        """Hearsay is only dialed, and must prove itself there; what a peer says of itself is also passed on."""
        assert isinstance(link, SessionLink)
        link.heard += len(addresses.known)
        if link.heard > HEARD_MAX:
            return
        has_claimed = False  # of several addresses of its own the first is passed on
        for item in addresses.known:
            address = self._complete(item.address, link)
            if item.peer == self.me:
                self._look_for_a_copy(address)
                continue
            first_hand = item.peer == link.peer
            if first_hand and not has_claimed and link.version < 3 and self._claims.get(link.peer) != address:
                self._claim(link.peer, address)
            has_claimed = has_claimed or first_hand
            self._learn(address, item.peer, first_hand=first_hand)

    def _look_for_a_copy(self, address: str) -> None:
        """Our own key is said to be there. That is this process, or nobody any more, or a machine that should not have it."""
        if address not in self.addresses and address not in self._advertise and address not in self._mine:
            self._learn(address, self.me, first_hand=False)

    def _complete(self, address: str, link: Link) -> str:
        """The address with the host that the peer is seen at, if it listens on all of its interfaces."""
        try:
            host, port = parse_address(address)
        except UserError as error:
            raise RemoteProtocolError("bad-address", str(error)) from None
        return format_address(parse_address(link.address)[0] if host in WILDCARDS else host, port)

    def _claim(self, peer: bytes, address: str) -> None:
        self._claims.pop(peer, None)
        self._claims[peer] = address
        if len(self._claims) > BOOK_MAX:
            del self._claims[next(iter(self._claims))]
        for link in self._links.values():
            if link.peer != peer:
                link.post(Addresses((PeerAddress(peer, address),)), Priority.CONTROL)

    def _learn(self, address: str, peer: bytes, first_hand: bool) -> None:
        assert self._nursery is not None
        if address in self._book:
            if first_hand and not self._is_named(address):
                self._book[address].peer = peer
        elif len(self._book) < BOOK_MAX:
            known = self._book[address] = _Known(address, peer, pinned=True)
            self._nursery.start_soon(self._keep_dialed, known)


def _parse_bootstrap(text: str) -> _Known:
    peer, separator, address = text.rpartition("@")
    parse_address(address)
    return _Known(address, parse_peer_id(peer) if separator else None, named=True, pinned=bool(separator))


def _is_ip(host: str) -> bool:
    return ":" in host or host.rpartition(".")[2].isdigit()


def _remote(stream: trio.SocketStream) -> str:
    host, port = stream.socket.getpeername()[:2]
    return format_address(host.partition("%")[0], port)  # without the name of the interface


def _leads_home(stream: trio.SocketStream, address: str) -> bool:
    """Whether a name that somebody gave us leads to a nearer network than it seemed to."""
    try:
        return not scope_of(_remote(stream)).includes(scope_of(address))
    except OSError:  # gone already
        return False


def _why(error: OSError | ValueError) -> str:
    """Why a dial failed, in a few words. Trio tries all addresses of a name and hangs their errors behind its own."""
    causes = error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else [error.__cause__ or error]
    if isinstance(error, (socket.gaierror, ValueError)):
        return "no such name"
    told = {os.strerror(cause.errno).lower() for cause in causes if isinstance(cause, OSError) and cause.errno}
    return ", ".join(sorted(told)) or str(error)


def _in_words(error: RemoteProtocolError) -> str:
    words = {
        "self": "this is this peer itself",
        "wrong-peer": "another peer than expected answers there",
        "not-folkmoot": "something else than a peer answers there",
        "bad-tag": "whoever answers belongs to another network, or is no peer",
        "handshake-timeout": f"no handshake within {HANDSHAKE_SECONDS:g} s",
    }
    return words.get(error.reason, str(error))


def _tune(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    _limit_unsent(stream, PIECE_BYTES_START)


def _limit_unsent(stream: trio.SocketStream, count: int) -> None:
    """Keeps the kernel from taking megabytes of bulk that a vote then waits behind."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)


def _kernel(stream: trio.SocketStream) -> Kernel | None:
    if sys.platform != "linux":  # others have a structure of their own
        return None
    with contextlib.suppress(OSError):  # closed
        return Kernel.of(stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    return None


@contextlib.contextmanager
def _counted(counter: Counter[str], key: str) -> Iterator[None]:
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
