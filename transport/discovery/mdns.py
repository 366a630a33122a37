"""Discovery of peers in the local network by multicast DNS (RFC 6762, RFC 6763), with the library zeroconf.

A peer registers a service under a random name, with its addresses and the tag of its chain. The addresses of services with the
same tag are dialed. The handshake then proves the identity of the peer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import trio

from protocol.addresses import expand_wildcards, format_address, is_ip, parse_address
from transport.discovery.optional_service import OptionalService
from transport.wire.noise_session import chain_tag

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

log = logging.getLogger(__name__)

SERVICE: Final = "_folkmoot._tcp.local."
PROPERTY: Final = b"chain"
NAMES_MAX: Final = 64  # remembered services; further ones are ignored until one of these disappears
ADDRESSES_MAX: Final = 4  # addresses used per service: two interfaces, with both versions of IP
LOOK_SECONDS: Final = 60.0  # interval of queries of all services, and of checks whether this machine's addresses have changed
PAUSE_SECONDS: Final = 0.25  # least pause between two queries, each of which takes milliseconds of the thread that votes
ASKED_MAX: Final = 4  # services in one query, among those whose addresses are not in the cache
ANSWER_SECONDS: Final = 0.5  # timeout of the query of one service; a local network answers in milliseconds
CLOSE_SECONDS: Final = 3.0  # timeout when the registration of this peer's service is removed

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class Mdns(OptionalService):
    """The multicast DNS service of a peer.

    `listening()` returns the addresses on which this peer listens. `hosts()` returns the hosts of this machine. `found` is called
    with each address of another peer.
    """

    def __init__(
        self,
        chain_id: bytes,
        listening: Callable[[], Sequence[str]],
        hosts: Callable[[], Sequence[str]],
        found: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__("mdns", tell)
        self._tag, self._found = chain_tag(chain_id).hex().encode(), found
        self._listening, self._hosts = listening, hosts
        # Name of this peer's service, new at each start, so that the name identifies no peer.
        self._instance = secrets.token_hex(8)
        self._names: dict[str, None] = {}  # names of other services; zeroconf's thread writes the table in atomic operations
        self._news = trio.Event()

    async def run(self) -> None:
        try:
            import zeroconf  # noqa: F401
        except ModuleNotFoundError as error:
            self.report_missing_package(error)
            return
        while True:
            try:
                await self._serve(*self._place())
            except Exception as error:  # The library raises errors of any class, also because of packets of other machines.
                log.debug("mDNS", exc_info=True)
                self.set_status(False, f"multicast DNS failed: {error}; next try in {LOOK_SECONDS:g} s")
                await trio.sleep(LOOK_SECONDS)

    def _place(self) -> tuple[tuple[str, ...], int | None]:
        """Return the hosts and the port to register. Port None: this peer only looks for other peers."""
        listening = self._listening()
        if not listening:
            return tuple(sorted(self._hosts())), None
        own = [parse_address(address) for address in expand_wildcards(listening, self._hosts())]
        port = own[0][1] if own else None  # A service has one port.
        return tuple(sorted(host for host, at in own if at == port and is_ip(host))), port

    async def _serve(self, hosts: tuple[str, ...], port: int | None) -> None:
        """Register this peer's service if it listens, and query other services, until the hosts or the port change."""
        if not hosts:
            self.set_status(False, "this machine has no address in a local network")
            await trio.sleep(LOOK_SECONDS)
            return
        networks, token = await trio.to_thread.run_sync(_networks, hosts), trio.lowlevel.current_trio_token()
        opened = await trio.to_thread.run_sync(self._open, hosts, port, token)
        try:
            where = ", ".join(hosts) if port is None else ", ".join(format_address(host, port) for host in hosts)
            self.set_status(True, f"looks for peers from {where}" if port is None else f"announces {where} on the local network")
            while self._place() == (hosts, port):
                self._news = trio.Event()
                await self._look(opened, networks)
                await trio.sleep(PAUSE_SECONDS)
                with trio.move_on_after(LOOK_SECONDS):
                    await self._news.wait()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_SECONDS, shield=True):
                await trio.to_thread.run_sync(opened.close, abandon_on_cancel=True)
            self._names.clear()

    def _open(self, hosts: Sequence[str], port: int | None, token: trio.lowlevel.TrioToken) -> Zeroconf:
        from zeroconf import ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

        own = f"{self._instance}.{SERVICE}"

        def changed(name: str, state_change: ServiceStateChange, **others: Any) -> None:
            if state_change is ServiceStateChange.Removed:
                self._names.pop(name, None)
            elif name != own and len(self._names) < NAMES_MAX:
                self._names[name] = None
            with contextlib.suppress(trio.RunFinishedError):  # The thread of zeroconf may outlive the peer.
                token.run_sync_soon(self._wake, idempotent=True)

        opened = Zeroconf(interfaces=[host for host in hosts if ":" not in host] or list(hosts))
        try:
            ServiceBrowser(opened, SERVICE, handlers=[changed])
            if port is not None:
                properties: dict[str | bytes, Any] = {PROPERTY: self._tag}
                server = f"{self._instance}.local."
                opened.register_service(
                    ServiceInfo(SERVICE, own, port, properties=properties, server=server, parsed_addresses=list(hosts))
                )
        except BaseException:
            opened.close()
            raise
        return opened

    def _wake(self) -> None:
        self._news.set()

    async def _look(self, opened: Zeroconf, networks: Sequence[IpNetwork]) -> None:
        from zeroconf import ServiceInfo

        silent = []
        for name in tuple(self._names):
            service = ServiceInfo(SERVICE, name)
            if service.load_from_cache(opened):
                self._report_addresses(service, networks)
            else:
                silent.append(name)
        for name in random.sample(silent, min(ASKED_MAX, len(silent))):
            milliseconds = math.ceil(1_000 * ANSWER_SECONDS)
            answer = await trio.to_thread.run_sync(opened.get_service_info, SERVICE, name, milliseconds)
            if answer is not None:
                self._report_addresses(answer, networks)

    def _report_addresses(self, service: ServiceInfo, networks: Iterable[IpNetwork]) -> None:
        """Report a service's addresses in local networks.

        Other addresses are ignored, since machines nearby must not direct dials elsewhere.
        """
        if service.properties.get(PROPERTY) != self._tag or not service.port:
            return
        for host in service.parsed_addresses()[:ADDRESSES_MAX]:
            if any(ipaddress.ip_address(host) in network for network in networks):
                self._found(format_address(host, service.port))


def _networks(hosts: Sequence[str]) -> list[IpNetwork]:
    """Return the networks of this machine's interfaces that contain `hosts`."""
    import ifaddr

    found = []
    for ip in (ip for adapter in ifaddr.get_adapters() for ip in adapter.ips):
        host = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
        if host in hosts:
            found.append(ipaddress.ip_network(f"{host}/{ip.network_prefix}", strict=False))
    return found
