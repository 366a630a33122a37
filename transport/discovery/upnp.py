"""The router forwards a port to this peer, on request: UPnP's Internet Gateway Device, with the library miniupnpc.

| the router | then |
|---|---|
| is not there, refuses, or has no public address | one line says so; it is asked again at the next renewal |
| forwards | the public address is one more that others are told |
| has given the port to another machine | some other port is asked for |
| knows no leases | it forwards until this peer ends; after a crash, until its operator looks |
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

LEASE_SECONDS: Final = 1_800  # after which a router forgets a peer that has crashed
RENEW_SECONDS: Final = 600.0  # two renewals may fail; a router that was started anew forwards again so soon
ANSWER_SECONDS: Final = 30.0  # for a whole renewal: the library waits some seconds for each of its answers
CLOSE_SECONDS: Final = 3.0  # to take the forwarding back
DISCOVER_MS: Final = 2_000  # for routers to answer; they spread their answers over so long (UPnP Device Architecture, MX)
OTHER_PORTS: Final = range(49_152, 65_536)  # dynamic ones (RFC 6335)
OTHERS_TRIED: Final = 3  # a router whose table is full refuses any
TAKEN, NO_LEASES = "ConflictInMappingEntry", "OnlyPermanentLeasesSupported"  # errors 718 and 725, as the library names them


RunInThread = Callable[..., Awaitable[Any]]  # as trio.to_thread.run_sync


class RouterError(Exception):
    """In words of the library's, or ours."""


class Gateway:
    """The first router that answers. `interface`: at which it is looked for; `description`: where it describes itself.

    All of it blocks. Raises `RouterError`.
    """

    def __init__(self, interface: str | None = None, description: str | None = None, discover_ms: int = DISCOVER_MS) -> None:
        import miniupnpc

        self._make = partial(miniupnpc.UPnP, multicastif=interface, discoverdelay=discover_ms)
        self._description = description
        self._found: Any = None

    def discover_router(self) -> str:
        """The host at which the router sees this machine."""
        self._found = self._make()
        try:
            if self._description is None:
                self._found.discover()
            self._found.selectigd(*([] if self._description is None else [self._description]))
        except Exception:  # bare ones are all that it raises; of these, "Success" where nobody has answered
            raise RouterError("no router answers; many have UPnP switched off") from None
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
    """Blocking. One call at a time: the end of the peer waits for a renewal, so that it takes back what that has got."""

    def __init__(self, router: Gateway, random: Random) -> None:
        self._router, self._random = router, random
        self._lock = threading.Lock()
        self._closed = False
        self.port: int | None = None  # outside, while the router forwards it
        self.lease_seconds = LEASE_SECONDS

    def renew(self, listening: Sequence[str]) -> str:
        """The address outside that leads here from now on. Raises `RouterError` where there is none."""
        with self._lock:
            if self._closed:
                raise RouterError("this peer ends")
            host = self._router.discover_router()
            own_port = _port_at(host, listening)
            outside = self._router.external_address()
            if not _is_public(outside):
                self._stop()
                raise RouterError(f"the router's own address, {outside!r}, is not public: another router is in front of it")
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
        raise RouterError(f"the router says that the ports {', '.join(map(str, wanted))} are taken")

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
                log.info("the router did not take back port %d: %s", port, error)


class Upnp(OptionalService):
    """`listening`: where this peer does. `outside` is told where others reach it through the router; None: nowhere."""

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
        self._until = -math.inf  # the router forwards, as far as it has said

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
            self._failed(forwarding, f"the router has not answered for {ANSWER_SECONDS:g} s")
        except RouterError as error:
            self._failed(forwarding, str(error))
        else:
            self._until = trio.current_time() + LEASE_SECONDS
            lasts = "" if forwarding.lease_seconds else ", without a lease: look there if this peer ever crashes"
            self._outside(address)
            self.set_status(True, f"the router forwards {address} to this peer{lasts}")

    def _failed(self, forwarding: PortMapping, why: str) -> None:
        if forwarding.port is None or trio.current_time() >= self._until:
            self._outside(None)
        self.set_status(False, f"{why}; asked again every {RENEW_SECONDS / 60:g} minutes")


def _port_at(host: str, listening: Sequence[str]) -> int:
    for address in listening:
        own, port = parse_address(address)
        if own in (host, WILDCARDS[0]):
            return port
    raise RouterError(f"the router sees this machine at {host}, and this peer listens at {', '.join(listening)} alone")


def _is_public(host: str) -> bool:
    try:
        return scope_of(format_address(str(ipaddress.ip_address(host)), 1)) is AddressScope.PUBLIC
    except ValueError:
        return False
