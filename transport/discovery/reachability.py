"""Whether others can dial this peer, and where: what its operator advertises, or else where it listens, and where a router
forwards to it; at which host others see it, and what came of asking them to dial it.

| seen by two members | a handshake has come from one of them | two of them have not reached it | then it is |
|---|---|---|---|
| no | | | unknown |
| yes | yes | | direct |
| yes | no | yes | relayed |
| yes | no | no | unknown |

A peer that accepts no connections is relayed from the start.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

from protocol.addresses import (
    AddressScope,
    expand_wildcards,
    format_address,
    is_ip,
    parse_address,
    parse_listen_addresses,
    scope_of,
)
from protocol.errors import UserError


class OwnAddresses:
    def __init__(self, listen: str, advertise: Sequence[str], hosts: Callable[[], Iterable[str]]) -> None:
        """`listen`, `advertise`, `hosts`: as `Swarm` takes them. Raises `UserError`."""
        self.listening = parse_listen_addresses(listen)  # with the real ports once they are open
        self.external_address: str | None = None  # where a router forwards to this peer
        self._advertised, self._hosts = tuple(advertise), hosts

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


OBSERVERS_MIN: Final = 2  # members that see one host, or do not reach it, until it is believed: one may lie
ASK_AGAIN_SECONDS: Final = 600.0  # the same member: a router may have been set meanwhile
DIAL_BACK_SECONDS: Final = 60.0  # between two that one link is granted
ANSWER_SECONDS: Final = 25.0  # for a dial and a handshake there, each of ten seconds at most


class ReachabilityState(enum.StrEnum):
    DIRECT = "direct"
    RELAYED = "relayed"
    UNKNOWN = "unknown"


class RelayMode(enum.StrEnum):
    """Whether a peer forwards between others.

    | reachable | AUTO takes reservations | and keeps those it has |
    |---|---|---|
    | direct | yes | yes |
    | unknown | no | yes: whoever has reached this peer may only have left |
    | relayed | no | no |
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Reachability:
    """Pure: the time is an argument. `members`: who is one now; only what they say counts."""

    def __init__(self, listens: bool, members: Callable[[bytes], bool]) -> None:
        self._listens, self._members = listens, members
        self._seen: dict[bytes, str] = {}  # linked peer -> host at which it sees this one
        self._reached: set[bytes] = set()  # those who have completed a handshake that this peer had not dialed
        self._missed: set[bytes] = set()  # those who were asked, and came to nothing
        self._asked: dict[bytes, float] = {}  # when

    def on_observed(self, peer: bytes, address: str, dialed_us: bool) -> None:
        """`dialed_us`: over the link on which it says so. Raises `UserError` for an address that is none."""
        host = parse_address(address)[0]
        if not is_ip(host):
            raise UserError(f"{host!r} is a name: whoever sees a connection sees an IP address")
        if self._seen.get(peer) != host:
            self.forget_peer(peer)
        self._seen[peer] = host
        if dialed_us:
            self._reached.add(peer)

    def on_inbound_handshake(self, peer: bytes) -> None:
        """A handshake that this peer had not dialed was completed by that one."""
        if peer in self._seen:
            self._reached.add(peer)

    def on_dial_back_failed(self, peer: bytes) -> None:
        if peer in self._asked:
            self._missed.add(peer)

    def on_address_changed(self) -> None:
        """Others find it at another port from now on. Whoever was asked is asked again as soon as it grants another dial."""
        self._missed.clear()
        earlier = ASK_AGAIN_SECONDS - DIAL_BACK_SECONDS
        self._asked = {peer: at - earlier for peer, at in self._asked.items()}

    def forget_peer(self, peer: bytes) -> None:
        self._seen.pop(peer, None)
        self._asked.pop(peer, None)
        self._reached.discard(peer)
        self._missed.discard(peer)

    def retain_peers(self, peers: Set[bytes]) -> None:
        """Whoever is not linked any more says nothing any more."""
        for peer in self._seen.keys() - peers:
            self.forget_peer(peer)

    @property
    def observed_host(self) -> str | None:
        """Where members see this peer, enough of them to be believed. Of several: what most people reach, then what most see."""
        hosts = Counter(host for peer, host in self._seen.items() if self._members(peer))
        agreed = [host for host, count in hosts.items() if count >= OBSERVERS_MIN]
        return max(
            agreed, key=lambda host: (list(AddressScope).index(scope_of(format_address(host, 1))), hosts[host]), default=None
        )

    def _seers(self, host: str | None) -> set[bytes]:
        return {peer for peer, at in self._seen.items() if at == host and self._members(peer)}

    @property
    def state(self) -> ReachabilityState:
        if not self._listens:
            return ReachabilityState.RELAYED
        seers = self._seers(self.observed_host)
        if seers & self._reached:
            return ReachabilityState.DIRECT
        return ReachabilityState.RELAYED if len(seers & self._missed) >= OBSERVERS_MIN else ReachabilityState.UNKNOWN

    def choose_dialers(self, now: float) -> list[bytes]:
        """The members to be asked to dial this peer now; they count as asked."""
        seers = self._seers(self.observed_host)
        if not self._listens or seers & self._reached:
            return []
        waiting = sum(1 for peer, at in self._asked.items() if peer not in self._missed and now < at + ANSWER_SECONDS)
        able = sorted(peer for peer in seers if now >= self._asked.get(peer, -math.inf) + ASK_AGAIN_SECONDS)
        asked = able[: max(0, OBSERVERS_MIN - waiting)]
        self._asked |= dict.fromkeys(asked, now)
        return asked
