"""Links with their own Noise session, over a TCP connection or a circuit, and options of TCP sockets."""

from __future__ import annotations

import contextlib
import socket
import sys
from functools import cached_property

import trio

from protocol.addresses import AddressScope, format_address, scope_of
from protocol.errors import RemoteProtocolError
from protocol.limits import CIRCUIT_RECORD_BYTES_MAX
from protocol.messages import CircuitDeliveryReport, Ping
from transport.connections.peer_link import PeerLink
from transport.quotas.accept_limiter import HalfOpenSlot
from transport.relay.circuit_session import SILENT_SECONDS, CircuitSession, RelayWatchdog
from transport.relay.relay_client import CircuitStream
from transport.wire.framing import TAG_BYTES, Priority
from transport.wire.link_measurements import PIECE_BYTES_START, TCP_INFO_BYTES, TcpInfo
from transport.wire.noise_session import NoiseSession

PROBE_SECONDS = 5.0  # longest silence of an old link after its peer has dialed again
CIRCUIT_PING_SECONDS = 1.0  # interval of pings: shorter than on a direct link, since only answers show that the relay forwards


class SessionLink(PeerLink):
    half_open: HalfOpenSlot | None = None  # slot that is occupied until the link is attached

    def __init__(self, peer: bytes, address: str, dialed: bool, session: NoiseSession, incarnation: bytes) -> None:
        super().__init__(peer, address, dialed, session.outbox, session.inbox)
        self.incarnation = incarnation
        self.error: RemoteProtocolError | None = None  # error that ended the link, if the error did not ban the peer
        self.idle_scope = trio.CancelScope()
        self.ended = trio.Event()

    def close(self, reason: str = "") -> None:
        super().close(reason)
        self.ended.set()

    def frame_bytes(self) -> int:
        return self.meter.frame_bytes

    def probe(self) -> None:
        """Ping the peer, which seems to have lost this link, and close the link if it stays silent for PROBE_SECONDS."""
        self.ping()
        self.idle_scope.deadline = min(self.idle_scope.deadline, trio.current_time() + PROBE_SECONDS)


class TcpLink(SessionLink):
    def __init__(
        self,
        peer: bytes,
        address: str,
        dialed: bool,
        session: NoiseSession,
        incarnation: bytes,
        stream: trio.SocketStream,
        half_open: HalfOpenSlot | None,
    ) -> None:
        super().__init__(peer, address, dialed, session, incarnation)
        self._stream, self._unsent_bytes, self.half_open = stream, PIECE_BYTES_START, half_open

    def tcp_info(self) -> TcpInfo:
        if sys.platform == "linux":  # Other systems have other structures of TCP_INFO.
            with contextlib.suppress(OSError):  # The socket may be closed already.
                told = self._stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                return TcpInfo.parse(told) or super().tcp_info()
        return super().tcp_info()

    def frame_bytes(self) -> int:
        """Return the largest size of the next frame, and update the limit of unsent bytes in the kernel."""
        if self.meter.unsent_bytes != self._unsent_bytes:
            self._unsent_bytes = self.meter.unsent_bytes
            limit_unsent(self._stream, self._unsent_bytes)
        return super().frame_bytes()


class RelayedLink(SessionLink):
    address_scope = AddressScope.PUBLIC  # The peer's host is unknown.

    def __init__(self, peer: bytes, stream: CircuitStream, session: CircuitSession, incarnation: bytes) -> None:
        super().__init__(peer, stream.carrier.address, False, session, incarnation)
        self.relay, self.stream, self._session = stream.carrier.peer, stream, session
        stream.credited = lambda: self._output.set()

    async def wait_until_sendable(self) -> None:
        while self._session.next_priority() is None:
            if not self.outbox:
                self.meter.on_idle(self.tcp_info(), trio.current_time())
            self._output = trio.Event()
            await self._output.wait()
        self.meter.on_busy(self.tcp_info(), trio.current_time())

    def frame_bytes(self) -> int:
        return min(super().frame_bytes(), CIRCUIT_RECORD_BYTES_MAX - TAG_BYTES)

    @cached_property
    def _lanes(self) -> RelayWatchdog:
        """The watchdog of this link's relay, which starts at its first use."""
        return RelayWatchdog(trio.current_time())

    def on_ping(self, ping: Ping) -> None:
        super().on_ping(ping)
        self._send_delivery_report()

    def _send_delivery_report(self) -> None:
        self.queue_message(CircuitDeliveryReport(*self.inbox.received), Priority.VOTE)

    def on_arrived(self, arrived: CircuitDeliveryReport) -> None:
        self._lanes.on_arrived((arrived.votes, arrived.control, arrived.bulk), trio.current_time())

    def needs_other_relay(self, now: float) -> bool:
        held_back = self._lanes.is_withholding(self.outbox.sent, now, listens=self.failure_detector.is_listening)
        return held_back or self.failure_detector.silent_seconds(now) >= SILENT_SECONDS

    async def run_keepalive(self) -> None:
        while True:
            self.ping()
            self._send_delivery_report()  # The report is sent even if a ping waits behind votes.
            await trio.sleep(CIRCUIT_PING_SECONDS)


def remote_address(stream: trio.SocketStream) -> str:
    host, port = stream.socket.getpeername()[:2]
    return format_address(host.partition("%")[0], port)  # The interface name of a link-local address is removed.


def resolves_to_nearer_network(stream: trio.SocketStream, address: str) -> bool:
    """Return whether a connection leads to a nearer network than its address, such as a public name of a private address."""
    try:
        return not scope_of(remote_address(stream)).includes(scope_of(address))
    except OSError:  # The socket is disconnected already.
        return False


def set_socket_options(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    limit_unsent(stream, PIECE_BYTES_START)


def limit_unsent(stream: trio.SocketStream, count: int) -> None:
    """Limit the unsent bytes in the kernel's buffer, since a vote waits behind them."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)
