"""Port forwarding by the router, with UPnP's Internet Gateway Device and the library miniupnpc.

| the router | then |
|---|---|
| is missing, refuses, or has no public address | the status says so; the next renewal tries again |
| forwards the port | the public address is announced to other peers |
| forwards the port to another machine | another port is requested |
| has no leases | it forwards until this peer ends; after a crash, until a person removes the mapping |
"""

from __future__ import annotations

import ipaddress
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import trio

from protocol.addresses import WILDCARDS, AddressScope, format_address, parse_address, scope_of
from transport.discovery.optional_service import OptionalService

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 1_800  # time after which the router drops the mapping of a crashed peer
# Interval of renewals: two may fail before the lease ends, and a restarted router forwards again after the next one.
RENEW_SECONDS: Final = 600.0
ANSWER_SECONDS: Final = 30.0  # timeout of one renewal; for each answer of the router, the library waits seconds
CLOSE_SECONDS: Final = 3.0  # timeout when the mapping is deleted
DISCOVER_MS: Final = 2_000  # milliseconds over which routers spread their answers (MX of the UPnP Device Architecture)
OTHER_PORTS: Final = range(49_152, 65_536)  # ports to request if a port is in use: the dynamic ports (RFC 6335)
OTHERS_TRIED: Final = 3  # ports requested after the first one fails; a router with a full table refuses any port
TAKEN, NO_LEASES = "ConflictInMappingEntry", "OnlyPermanentLeasesSupported"  # the library's names of UPnP errors 718 and 725


RunInThread = Callable[..., Awaitable[Any]]  # signature of `trio.to_thread.run_sync`


class RouterError(Exception):
    """A failure of the router, with a message of the library or of this module."""


class Gateway:
    """The router: the first one that answers on `interface`, or the one whose description has the URL `description`.

    All methods block, and raise `RouterError`.
    """

    def __init__(self, interface: str | None = None, description: str | None = None, discover_ms: int = DISCOVER_MS) -> None:
        import miniupnpc

        self._make = partial(miniupnpc.UPnP, multicastif=interface, discoverdelay=discover_ms)
        self._description = description
        self._found: Any = None

    def discover_router(self) -> str:
        """Find the router, and return this machine's host in the router's network."""
        self._found = self._make()
        try:
            if self._description is None:
                self._found.discover()
            self._found.selectigd(*([] if self._description is None else [self._description]))
        except Exception:  # The library raises bare exceptions, even with the text "Success".
            raise RouterError("no router answers: enable UPnP on the router") from None
        return str(self._found.lanaddr)

    def external_address(self) -> str:
        return str(self._ask("externalipaddress"))

    def add_mapping(self, port: int, host: str, own_port: int, lease_seconds: int) -> None:
        self._ask("addportmapping", port, "TCP", host, own_port, "peer", "", lease_seconds)

    def delete_mapping(self, port: int) -> None:
        self._ask("deleteportmapping", port, "TCP")

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            return getattr(self._found, what)(*arguments)
        except Exception as error:
            raise RouterError(str(error)) from None


class PortMapping:
    """The router's mapping of one port to this peer.

    Its methods block and exclude each other, so `close` also deletes the mapping of a late renewal.
    """

    def __init__(self, router: Gateway, random: Random) -> None:
        self._router, self._random = router, random
        self._lock = threading.Lock()
        self._closed = False
        self.port: int | None = None  # port on the router; None: the router does not forward a port
        self.lease_seconds = LEASE_SECONDS

    def renew(self, listening: Sequence[str]) -> str:
        """Request or renew the mapping, and return its address on the router.

        Raises `RouterError` if the router forwards no port.
        """
        with self._lock:
            if self._closed:
                raise RouterError("this peer is stopping")
            host = self._router.discover_router()
            own_port = _port_at(host, listening)
            outside = self._router.external_address()
            if not _is_public(outside):
                self._stop()
                raise RouterError(f"the router's address {outside!r} is not public: another router is in front of it")
            self._forward(host, own_port)
            assert self.port is not None
            return format_address(outside, self.port)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop()

    def _forward(self, host: str, own_port: int) -> None:
        others = self._random.sample(OTHER_PORTS, OTHERS_TRIED)
        wanted = self.port or own_port, *others
        for port in wanted:
            try:
                self._ask(port, host, own_port)
            except RouterError as error:
                if str(error) != TAKEN:
                    raise RouterError(f"the router refuses to forward port {port}: {error}") from None
                self.port = None
            else:
                self.port = port
                return
        raise RouterError(f"the router reports that the ports {', '.join(map(str, wanted))} are in use")

    def _ask(self, port: int, host: str, own_port: int) -> None:
        try:
            self._router.add_mapping(port, host, own_port, self.lease_seconds)
        except RouterError as error:
            if str(error) != NO_LEASES or not self.lease_seconds:
                raise
            self.lease_seconds = 0
            self._router.add_mapping(port, host, own_port, 0)

    def _stop(self) -> None:
        port, self.port = self.port, None
        if port is not None:
            try:
                self._router.delete_mapping(port)
            except RouterError as error:
                log.info("the router did not remove the forwarding of port %d: %s", port, error)


class Upnp(OptionalService):
    """The UPnP service of a peer.

    `listening()` returns the addresses on which the peer listens. `outside` is called with its address on the router, or None.
    """

    def __init__(
        self,
        listening: Callable[[], Sequence[str]],
        outside: Callable[[str | None], None],
        tell: Callable[[str], None],
        make_router: Callable[[], Gateway] = Gateway,
        run_blocking: RunInThread = trio.to_thread.run_sync,
    ) -> None:
        super().__init__("upnp", tell)
        self._listening, self._outside, self._make_router = listening, outside, make_router
        self._run_blocking = run_blocking
        self._until = -math.inf  # end of the last lease

    async def run(self) -> None:
        if not self._listening():
            self.set_status(False, "this peer accepts no connections, so the router has nothing to forward")
            return
        try:
            forwarding = PortMapping(self._make_router(), Random())
        except ModuleNotFoundError as error:
            self.report_missing_package(error)
            return
        try:
            while True:
                await self._renew(forwarding)
                await trio.sleep(RENEW_SECONDS)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_SECONDS, shield=True):
                await self._run_blocking(forwarding.close, abandon_on_cancel=True)

    async def _renew(self, forwarding: PortMapping) -> None:
        try:
            with trio.fail_after(ANSWER_SECONDS):
                address = await self._run_blocking(forwarding.renew, self._listening(), abandon_on_cancel=True)
        except trio.TooSlowError:
            self._failed(forwarding, f"no answer from the router within {ANSWER_SECONDS:g} s")
        except RouterError as error:
            self._failed(forwarding, str(error))
        else:
            self._until = trio.current_time() + LEASE_SECONDS
            lasts = (
                "" if forwarding.lease_seconds else ", without expiry: delete the forwarding on the router if this peer crashes"
            )
            self._outside(address)
            self.set_status(True, f"the router forwards {address} to this peer{lasts}")

    def _failed(self, forwarding: PortMapping, why: str) -> None:
        if forwarding.port is None or trio.current_time() >= self._until:
            self._outside(None)
        self.set_status(False, f"{why}; this peer tries again every {RENEW_SECONDS / 60:g} minutes")


def _port_at(host: str, listening: Sequence[str]) -> int:
    for address in listening:
        own, port = parse_address(address)
        if own in (host, WILDCARDS[0]):
            return port
    raise RouterError(f"the router can forward only to {host}, but this peer listens at {', '.join(listening)}")


def _is_public(host: str) -> bool:
    try:
        return scope_of(format_address(str(ipaddress.ip_address(host)), 1)) is AddressScope.PUBLIC
    except ValueError:
        return False
