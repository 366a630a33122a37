"""Where a peer is dialed: HOST:PORT, the host an IP address or a name, which whoever dials it looks up."""

from __future__ import annotations

import enum
import errno
import ipaddress
import re
from collections.abc import Sequence

from protocol.errors import UserError
from protocol.limits import ADDRESS_CHARACTERS_MAX, ADVERTISED_MAX

WILDCARDS = ("0.0.0.0", "::")  # listened on, they mean every interface; nobody can dial them
NO_LISTEN_ADDRESS = "none"  # as an address to listen on: this peer accepts no connections
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# A last label of digits alone is an IP address that is none, not a name (WHATWG URL, "ends in a number").
_NAME = re.compile(rf"(?:{_LABEL}\.)*(?![0-9]+\.?$){_LABEL}\.?", re.IGNORECASE | re.ASCII)


def parse_address(text: str, what: str = "") -> tuple[str, int]:
    """Host and port of "host:port" or "[v6 address]:port". Raises `UserError` naming the text, and `what` it is for."""
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
    """Whose host it is, as far as budgets ask: of IPv6, everybody has a network of 2^64 hosts."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if ip.version == 4 or ip.ipv4_mapped:
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((ip, 64), strict=False).network_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches itself there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def parse_listen_addresses(text: str, what: str = "") -> tuple[str, ...]:
    """The addresses that a peer listens on, as a text separates them by commas; none for `none`. Raises `UserError`."""
    addresses = tuple(address.strip() for address in text.split(",")) if text != NO_LISTEN_ADDRESS else ()
    for address in addresses:
        if address == NO_LISTEN_ADDRESS:
            raise UserError(
                f"{what}{NO_LISTEN_ADDRESS!r} stands alone: a peer accepts connections at every other address, or dials only"
            )
        if parse_address(address, what)[1] and addresses.count(address) > 1:
            raise UserError(f"{what}{address!r} is there twice")
    if len(addresses) > ADVERTISED_MAX:
        raise UserError(f"{what}{len(addresses)} addresses are too many: {ADVERTISED_MAX} are the most")
    return addresses


def format_listen_addresses(listening: Sequence[str], told: Sequence[str]) -> str:
    """Of a peer that runs: where it listens, with the ports that the system chose, and what others are told, if that differs."""
    if not listening:
        return "dials only and accepts no connections"
    differs = told and list(told) != list(listening)
    return f"listens on {', '.join(listening)}" + (f" (others are told {', '.join(told)})" if differs else "")


def format_listen_error(error: OSError) -> str:
    """What happened, and behind `; ` what to do."""
    way = "stop the program that uses it, or name" if error.errno == errno.EADDRINUSE else "name"
    return f"{(error.strerror or str(error)).lower()}; {way} another address (HOST:PORT, port 0 for any free one)"


class AddressScope(enum.StrEnum):
    """Who can reach an address."""

    LOOPBACK = "loopback"  # the machine itself
    PRIVATE = "private"  # its local network: the same host elsewhere is another machine
    PUBLIC = "public"  # everybody; names of the DNS are taken to be so

    def includes(self, other: AddressScope) -> bool:
        """Whether everybody of `other` is in this scope, too."""
        order = list(AddressScope)
        return order.index(self) >= order.index(other)


def scope_of(address: str) -> AddressScope:
    """Of "host:port". Raises `UserError` for an address that is none."""
    host = parse_address(address)[0]
    if is_loopback(host):
        return AddressScope.LOOPBACK
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return AddressScope.PUBLIC
    mapped = getattr(ip, "ipv4_mapped", None) or ip  # ::ffff:10.0.0.1 is 10.0.0.1
    return AddressScope.LOOPBACK if mapped.is_loopback else AddressScope.PUBLIC if mapped.is_global else AddressScope.PRIVATE


def expand_wildcards(listening: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    """Where a peer that listens there is reached; a wildcard stands for those of the hosts that have its IP version."""
    found: dict[str, None] = {}
    for address in listening:
        host, port = parse_address(address)
        for one in hosts if host in WILDCARDS else [host]:
            if host not in WILDCARDS or (":" in one) == (":" in host):
                found[format_address(one, port)] = None
    return tuple(found)


def check_dialable_address(text: str, what: str) -> str:
    """An address that others can be told to dial. Raises `UserError`, which begins with `what`."""
    host, port = parse_address(text, f"{what}: ")
    if port == 0:
        raise UserError(f"{what}: {text!r} names port 0, at which nobody can be dialed; name the port that others reach")
    if host in WILDCARDS:
        raise UserError(f"{what}: {text!r} means every interface, and nobody can dial that; name the address that others reach")
    return text


def _is_host(host: str, version: int) -> bool:
    """Whether it is an address of this IP version, or a name, which stands where one of version 4 may.

    Behind a `%` is the name of an interface, which means something on one machine alone, and may be any text.
    """
    try:
        return "%" not in host and ipaddress.ip_address(host).version == version
    except ValueError:
        return version == 4 and _NAME.fullmatch(host) is not None
