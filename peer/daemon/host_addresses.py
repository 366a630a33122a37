"""The addresses at which other peers can reach this peer, as far as this machine knows them."""

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

GET_ADDRESS = 0x8915  # Linux ioctl SIOCGIFADDR, which reads an interface's IPv4 address: netdevice(7)


def make_optional_services(config: Config, chain_id: bytes, network: Swarm, tell: Callable[[str], None]) -> list[OptionalService]:
    """Return the discovery services that the settings enable."""
    found = list[OptionalService]()
    if config.upnp:
        from transport.discovery.upnp import Upnp

        found.append(Upnp(lambda: network.addresses, network.set_external_address, tell))
    if config.mdns:
        from transport.discovery.mdns import Mdns

        found.append(Mdns(chain_id, lambda: network.addresses, host_addresses, network.add_local_address, tell))
    return found


def own_addresses(listening: Sequence[str], advertised: Sequence[str], outside: str | None = None) -> tuple[str, ...]:
    """Return the addresses that this peer announces, at most `ADVERTISED_MAX`.

    `outside`, the address of a forwarding router, comes first. Then come the `advertised` addresses or, if there are none, the
    listening ones. A wildcard address stands for all addresses of this machine without loopback. With only loopback, it stands
    for none.
    """
    own = advertised or expand_wildcards(listening, host_addresses())
    return tuple(dict.fromkeys([*([outside] if outside else []), *own]))[:ADVERTISED_MAX]


def host_addresses() -> tuple[str, ...]:
    """Return the IP addresses of this machine without loopback, that of the default route first.

    After a system error, there are none.
    """
    try:
        found = dict.fromkeys([*_routed(), *_of_interfaces(), *_of_interfaces_v6()])
    except OSError as error:
        log.warning("the addresses of this machine cannot be read: %s", error.strerror)
        return ()
    return tuple(host for host in found if not ipaddress.ip_address(host).is_loopback)


def _routed() -> Iterator[str]:
    """Yield the source address of the default route, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: a UDP socket sends nothing when it connects
            yield str(probe.getsockname()[0])
        except OSError:
            return


def _of_interfaces() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address, or this is not Linux: the default route still gives an address
                continue
            yield socket.inet_ntoa(answer[20:24])


def _of_interfaces_v6() -> Iterator[str]:
    """Yield the IPv6 addresses of the interfaces.

    Link-local addresses are skipped, because a peer would need the interface's name to dial them.
    """
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        address = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
        if not address.is_link_local:
            yield str(address)
