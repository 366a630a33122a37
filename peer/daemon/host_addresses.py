"""Where others can reach this peer, as far as this machine can tell."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from peer.settings.config import Config
from protocol.addresses import expand_wildcards
from protocol.limits import ADVERTISED_MAX
from transport.discovery.optional_service import OptionalService
from transport.swarm import Swarm

log = logging.getLogger("peer")

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux, netdevice(7)


def make_optional_services(config: Config, chain_id: bytes, network: Swarm, tell: Callable[[str], None]) -> list[OptionalService]:
    """What the settings ask for to be found."""
    found = list[OptionalService]()
    if config.upnp:
        from transport.discovery.upnp import Upnp

        found.append(Upnp(lambda: network.addresses, network.set_external_address, tell))
    if config.mdns:
        from transport.discovery.mdns import Mdns

        found.append(Mdns(chain_id, lambda: network.addresses, host_addresses, network.add_local_address, tell))
    return found


def own_addresses(listening: Sequence[str], advertised: Sequence[str], outside: str | None = None) -> tuple[str, ...]:
    """`advertised` if that names any; else where this peer listens, with the hosts of this machine for wildcards.

    First of all where a router forwards to it.

    The host with the default route comes first. Loopback is among them only if it is all that this peer listens on; none at all
    where a wildcard leads to nothing else.
    """
    own = advertised or expand_wildcards(listening, host_addresses())
    return tuple(dict.fromkeys([*([outside] if outside else []), *own]))[:ADVERTISED_MAX]


def host_addresses() -> tuple[str, ...]:
    """Of this machine, for others: without loopback. None where the system cannot be asked, for lack of descriptors."""
    try:
        found = dict.fromkeys([*_routed(), *_of_interfaces(), *_of_interfaces_v6()])
    except OSError as error:
        log.warning("the addresses of this machine cannot be read: %s", error.strerror)
        return ()
    return tuple(host for host in found if not ipaddress.ip_address(host).is_loopback)


def _routed() -> Iterator[str]:
    """The host that the default route leaves from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: choosing the route sends nothing
            yield str(probe.getsockname()[0])
        except OSError:
            return


def _of_interfaces() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none, or this is another system, where the route alone tells
                continue
            yield socket.inet_ntoa(answer[20:24])


def _of_interfaces_v6() -> Iterator[str]:
    """Global ones: what is local to a link means something only together with the interface."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        address = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
        if not address.is_link_local:
            yield str(address)
