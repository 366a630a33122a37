"""Addresses of peers: HOST:PORT. The host is an IP address, or a name that the dialing peer looks up."""

from __future__ import annotations

import enum
import errno
import ipaddress
import re
from collections.abc import Sequence

from protocol.errors import UserError
from protocol.limits import ADDRESS_CHARACTERS_MAX, ADVERTISED_MAX

WILDCARDS = ("0.0.0.0", "::")  # hosts that as listening addresses mean all interfaces, and that no peer can dial
NO_LISTEN_ADDRESS = "none"  # value of the setting of a peer that accepts no connections
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# A host whose last label has only digits is a malformed IP address, not a name (WHATWG URL, "ends in a number").
_NAME = re.compile(rf"(?:{_LABEL}\.)*(?![0-9]+\.?$){_LABEL}\.?", re.IGNORECASE | re.ASCII)


def parse_address(text: str, what: str = "") -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6 address]:port".

    Raises `UserError` if `text` has neither form. The error's message begins with `what` and quotes the text.
    """
    host, separator, port = text.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_v6 else host
    is_port = bool(separator) and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not is_port or len(text) > ADDRESS_CHARACTERS_MAX or not _is_host(host, 6 if is_v6 else 4):
        shown = text if len(text) <= 64 else f"{text[:63]}…"
        raise UserError(
            f"{what}{shown!r} is not an address: write HOST:PORT, such as 192.0.2.7:7700, [2001:db8::7]:7700 or example.org:7700"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip(host: str) -> bool:
    return ":" in host or host.rpartition(".")[2].isdigit()


def host_subnet(host: str) -> str:
    """Return the key of a host in quotas: its IPv4 address, its name, or its IPv6 /64 network, which usually has one owner."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if ip.version == 4 or ip.ipv4_mapped:
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((ip, 64), strict=False).network_address)


def is_loopback(host: str) -> bool:
    """Return whether a host is the loopback interface, which only programs on the same machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def parse_listen_addresses(text: str, what: str = "") -> tuple[str, ...]:
    """Parse a comma-separated list of listening addresses. `none` gives no address.

    Raises `UserError` for an invalid address, a duplicate, or more than ADVERTISED_MAX.
    """
    addresses = tuple(address.strip() for address in text.split(",")) if text != NO_LISTEN_ADDRESS else ()
    for address in addresses:
        if address == NO_LISTEN_ADDRESS:
            raise UserError(
                f"{what}{NO_LISTEN_ADDRESS!r} cannot be combined with addresses: it means that the peer accepts no connections"
            )
        if parse_address(address, what)[1] and addresses.count(address) > 1:
            raise UserError(f"{what}{address!r} is listed twice: remove one of them")
    if len(addresses) > ADVERTISED_MAX:
        raise UserError(f"{what}{len(addresses)} addresses, at most {ADVERTISED_MAX} are allowed")
    return addresses


def format_listen_addresses(listening: Sequence[str], told: Sequence[str]) -> str:
    """Describe the addresses on which a running peer listens, and the addresses that it announces (`told`), if they differ."""
    if not listening:
        return "accepts no connections, only dials other peers"
    differs = told and list(told) != list(listening)
    return f"listens on {', '.join(listening)}" + (f" (announced as {', '.join(told)})" if differs else "")


def format_listen_error(error: OSError) -> str:
    """Describe a failure to listen on an address and, after `; `, its remedy."""
    way = "stop the program that uses it, or choose" if error.errno == errno.EADDRINUSE else "choose"
    return f"{(error.strerror or str(error)).lower()}; {way} another address (HOST:PORT, port 0 for any free one)"


class AddressScope(enum.StrEnum):
    """The set of peers that can reach an address."""

    LOOPBACK = "loopback"  # peers on the same machine
    PRIVATE = "private"  # peers in the same local network; in another network the address belongs to another machine
    PUBLIC = "public"  # all peers; DNS names are assumed to be public

    def includes(self, other: AddressScope) -> bool:
        """Return whether this scope contains the scope `other`."""
        order = list(AddressScope)
        return order.index(self) >= order.index(other)


def scope_of(address: str) -> AddressScope:
    """Return the scope of the address "host:port". Raises `UserError` for any other text."""
    host = parse_address(address)[0]
    if is_loopback(host):
        return AddressScope.LOOPBACK
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return AddressScope.PUBLIC
    mapped = getattr(ip, "ipv4_mapped", None) or ip  # an IPv4 address in IPv6 form: ::ffff:10.0.0.1 is 10.0.0.1
    return AddressScope.LOOPBACK if mapped.is_loopback else AddressScope.PUBLIC if mapped.is_global else AddressScope.PRIVATE


def expand_wildcards(listening: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a listening peer. The `hosts` of its IP version replace a wildcard."""
    found: dict[str, None] = {}
    for address in listening:
        host, port = parse_address(address)
        for one in hosts if host in WILDCARDS else [host]:
            if host not in WILDCARDS or (":" in one) == (":" in host):
                found[format_address(one, port)] = None
    return tuple(found)


def check_dialable_address(text: str, what: str) -> str:
    """Return `text` if other peers can dial it. Otherwise raises `UserError` with a message that begins with `what`."""
    host, port = parse_address(text, f"{what}: ")
    if port == 0:
        raise UserError(f"{what}: {text!r} has port 0, which other peers cannot dial; give the port that they can reach")
    if host in WILDCARDS:
        raise UserError(
            f"{what}: {text!r} means every interface, and other peers cannot dial it; give an address that they can reach"
        )
    return text


def _is_host(host: str, version: int) -> bool:
    """Return whether `host` is an address of this IP version. For version 4, names are hosts, too.

    An address with `%` is refused: it contains the name of a local interface, which may be any text.
    """
    try:
        return "%" not in host and ipaddress.ip_address(host).version == version
    except ValueError:
        return version == 4 and _NAME.fullmatch(host) is not None
