"""Reachability of this peer: its addresses, the host at which other peers see it, and their attempts to dial it.

| two members see the same host of this peer | a member has dialed that host | two members failed to dial it | state |
|---|---|---|---|
| no | | | unknown |
| yes | yes | | direct |
| yes | no | yes | relayed |
| yes | no | no | unknown |

The state of a peer that accepts no connections is "relayed" from the start.
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
        """`listen`, `advertise` and `hosts` are the arguments of `Swarm`. Raises `UserError` for an invalid address."""
        self.listening = parse_listen_addresses(listen)  # addresses, with real ports once their sockets listen
        self.external_address: str | None = None  # address that a router forwards to this peer
        self._advertised, self._hosts = tuple(advertise), hosts

    def __contains__(self, address: str) -> bool:
        return address in self.listening or address in self._advertised

    def reachable_addresses(self, seen: str | None, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses for other peers: the one at the router, then the advertised ones, or else the listening ones.

        A listening wildcard stands for the host `seen` by others, the hosts of this machine, and `hosts`.
        """
        outside = [self.external_address] if self.external_address is not None else []
        own = self._advertised or expand_wildcards(
            self.listening, [*([seen] if seen is not None else []), *self._hosts(), *hosts]
        )
        return tuple(dict.fromkeys([*outside, *own]))

    def port_at(self, host: str | None) -> int | None:
        """Return the port of this peer at `host`; None means any host.

        Return None if it does not listen with the host's IP version.
        """
        if self.external_address is not None and parse_address(self.external_address)[0] == host:
            return parse_address(self.external_address)[1]
        for own, port in map(parse_address, self._advertised or self.listening):
            if host is None or not is_ip(own) or (":" in own) == (":" in host):
                return port
        return None


OBSERVERS_MIN: Final = 2  # members that must report the same host or failure, since one member may be faulty
ASK_AGAIN_SECONDS: Final = 600.0  # interval of dial-back requests to one member, since the router's settings may change
DIAL_BACK_SECONDS: Final = 60.0  # least interval between dial-backs for one link
ANSWER_SECONDS: Final = 25.0  # timeout of a dial-back: a dial and a handshake of ten seconds each


class ReachabilityState(enum.StrEnum):
    DIRECT = "direct"
    RELAYED = "relayed"
    UNKNOWN = "unknown"


class RelayMode(enum.StrEnum):
    """The setting by which a peer acts as a relay: always (ON), never (OFF), or by its own reachability (AUTO).

    | reachability | AUTO accepts reservations | AUTO keeps its reservations |
    |---|---|---|
    | direct | yes | yes |
    | unknown | no | yes, since the peer that had reached it may just have left |
    | relayed | no | no |
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Reachability:
    """The reachability of this peer, from reports of linked peers for which `members(peer)` is true.

    Sans-IO; time is an argument.
    """

    def __init__(self, listens: bool, members: Callable[[bytes], bool]) -> None:
        self._listens, self._members = listens, members
        self._seen: dict[bytes, str] = {}  # linked peer -> host at which that peer sees this one
        self._reached: set[bytes] = set()  # peers that have dialed this peer
        self._missed: set[bytes] = set()  # peers that failed to dial this peer back
        self._asked: dict[bytes, float] = {}  # peer -> time of the last dial-back request to it

    def on_observed(self, peer: bytes, address: str, dialed_us: bool) -> None:
        """Record the address at which `peer` sees this peer.

        `dialed_us`: `peer` dialed the link. Raises `UserError` for an invalid address.
        """
        host = parse_address(address)[0]
        if not is_ip(host):
            raise UserError(f"the observed host {host!r} is a name, expected an IP address")
        if self._seen.get(peer) != host:
            self.forget_peer(peer)
        self._seen[peer] = host
        if dialed_us:
            self._reached.add(peer)

    def on_inbound_handshake(self, peer: bytes) -> None:
        """Record a handshake on a connection that `peer` has dialed."""
        if peer in self._seen:
            self._reached.add(peer)

    def on_dial_back_failed(self, peer: bytes) -> None:
        if peer in self._asked:
            self._missed.add(peer)

    def on_address_changed(self) -> None:
        """Forget failed dial-backs after a change of the port, and let the members be asked again after DIAL_BACK_SECONDS."""
        self._missed.clear()
        earlier = ASK_AGAIN_SECONDS - DIAL_BACK_SECONDS
        self._asked = {peer: at - earlier for peer, at in self._asked.items()}

    def forget_peer(self, peer: bytes) -> None:
        self._seen.pop(peer, None)
        self._asked.pop(peer, None)
        self._reached.discard(peer)
        self._missed.discard(peer)

    def retain_peers(self, peers: Set[bytes]) -> None:
        """Forget the reports of peers that are not linked any more."""
        for peer in self._seen.keys() - peers:
            self.forget_peer(peer)

    @property
    def observed_host(self) -> str | None:
        """The host at which at least OBSERVERS_MIN members see this peer, or None.

        The widest scope wins, then the most members.
        """
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
        """Return the members to ask for a dial-back now, and record the request."""
        seers = self._seers(self.observed_host)
        if not self._listens or seers & self._reached:
            return []
        waiting = sum(1 for peer, at in self._asked.items() if peer not in self._missed and now < at + ANSWER_SECONDS)
        able = sorted(peer for peer in seers if now >= self._asked.get(peer, -math.inf) + ASK_AGAIN_SECONDS)
        asked = able[: max(0, OBSERVERS_MIN - waiting)]
        self._asked |= dict.fromkeys(asked, now)
        return asked
