"""Where others reach this peer: what its operator advertises, or else where it listens; and where a router forwards to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from protocol.addresses import NO_LISTEN_ADDRESS, expand_wildcards, is_ip, parse_address, parse_listen_addresses


class OwnAddresses:
    def __init__(self, listen: str, advertise: Sequence[str], hosts: Callable[[], Iterable[str]]) -> None:
        """`listen`, `advertise`, `hosts`: as `Swarm` takes them. Raises `UserError`."""
        self.listening = parse_listen_addresses(listen)  # with the real ports once they are open
        self.external_address: str | None = None  # where a router forwards to this peer
        self._advertised, self._hosts = tuple(advertise), hosts

    @property
    def first_listening(self) -> str:
        return self.listening[0] if self.listening else NO_LISTEN_ADDRESS

    def __contains__(self, address: str) -> bool:
        return address in self.listening or address in self._advertised

    def reachable_addresses(self, seen: str | None, hosts: Sequence[str]) -> tuple[str, ...]:
        """All of them. A wildcard stands for the host at which others have `seen` this peer, and for those of the machine."""
        outside = [self.external_address] if self.external_address is not None else []
        own = self._advertised or expand_wildcards(
            self.listening, [*([seen] if seen is not None else []), *self._hosts(), *hosts]
        )
        return tuple(dict.fromkeys([*outside, *own]))

    def port_at(self, host: str | None) -> int | None:
        """At which others reach this peer at that host, or at any; None: it listens at none of that IP version."""
        if self.external_address is not None and parse_address(self.external_address)[0] == host:
            return parse_address(self.external_address)[1]
        for own, port in map(parse_address, self._advertised or self.listening):
            if host is None or not is_ip(own) or (":" in own) == (":" in host):
                return port
        return None
