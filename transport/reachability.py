"""Whether others can dial this peer: at which host they see it, and what came of asking them to dial it.

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
from collections.abc import Callable, Set
from typing import Final

from protocol.addresses import AddressScope, format_address, is_ip, parse_address, scope_of
from protocol.errors import UserError

AGREE: Final = 2  # members that see one host, or do not reach it, until it is believed: one may lie
ASK_AGAIN_SECONDS: Final = 600.0  # the same member: a router may have been set meanwhile
DIAL_BACK_SECONDS: Final = 60.0  # between two that one link is granted
ANSWER_SECONDS: Final = 25.0  # for a dial and a handshake there, each of ten seconds at most


class Reachable(enum.StrEnum):
    DIRECT = "direct"
    RELAYED = "relayed"
    UNKNOWN = "unknown"


class Relaying(enum.StrEnum):
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

    def takes(self, reachable: Reachable) -> bool:
        return self is Relaying.ON or (self is Relaying.AUTO and reachable is Reachable.DIRECT)

    def keeps(self, reachable: Reachable) -> bool:
        return self is not Relaying.AUTO or reachable is not Reachable.RELAYED


class Reachability:
    """Pure: the time is an argument. `members`: who is one now; only what they say counts."""

    def __init__(self, listens: bool, members: Callable[[bytes], bool]) -> None:
        self._listens, self._members = listens, members
        self._seen: dict[bytes, str] = {}  # linked peer -> host at which it sees this one
        self._reached: set[bytes] = set()  # those who have completed a handshake that this peer had not dialed
        self._missed: set[bytes] = set()  # those who were asked, and came to nothing
        self._asked: dict[bytes, float] = {}  # when

    def observed(self, peer: bytes, address: str, dialed_us: bool) -> None:
        """`dialed_us`: over the link on which it says so. Raises `UserError` for an address that is none."""
        host = parse_address(address)[0]
        if not is_ip(host):
            raise UserError(f"{host!r} is a name: whoever sees a connection sees an IP address")
        if self._seen.get(peer) != host:
            self.unlinked(peer)
        self._seen[peer] = host
        if dialed_us:
            self._reached.add(peer)

    def came(self, peer: bytes) -> None:
        """A handshake that this peer had not dialed was completed by that one."""
        if peer in self._seen:
            self._reached.add(peer)

    def missed(self, peer: bytes) -> None:
        if peer in self._asked:
            self._missed.add(peer)

    def moved(self) -> None:
        """Others find it at another port from now on. Whoever was asked is asked again as soon as it grants another dial."""
        self._missed.clear()
        earlier = ASK_AGAIN_SECONDS - DIAL_BACK_SECONDS
        self._asked = {peer: at - earlier for peer, at in self._asked.items()}

    def unlinked(self, peer: bytes) -> None:
        self._seen.pop(peer, None)
        self._asked.pop(peer, None)
        self._reached.discard(peer)
        self._missed.discard(peer)

    def linked_are(self, peers: Set[bytes]) -> None:
        """Whoever is not linked any more says nothing any more."""
        for peer in self._seen.keys() - peers:
            self.unlinked(peer)

    @property
    def host(self) -> str | None:
        """Where members see this peer, enough of them to be believed. Of several: what most people reach, then what most see."""
        hosts = Counter(host for peer, host in self._seen.items() if self._members(peer))
        agreed = [host for host, count in hosts.items() if count >= AGREE]
        return max(
            agreed, key=lambda host: (list(AddressScope).index(scope_of(format_address(host, 1))), hosts[host]), default=None
        )

    def _seers(self, host: str | None) -> set[bytes]:
        return {peer for peer, at in self._seen.items() if at == host and self._members(peer)}

    @property
    def state(self) -> Reachable:
        if not self._listens:
            return Reachable.RELAYED
        seers = self._seers(self.host)
        if seers & self._reached:
            return Reachable.DIRECT
        return Reachable.RELAYED if len(seers & self._missed) >= AGREE else Reachable.UNKNOWN

    def ask(self, now: float) -> list[bytes]:
        """The members to be asked to dial this peer now; they count as asked."""
        seers = self._seers(self.host)
        if not self._listens or seers & self._reached:
            return []
        waiting = sum(1 for peer, at in self._asked.items() if peer not in self._missed and now < at + ANSWER_SECONDS)
        able = sorted(peer for peer in seers if now >= self._asked.get(peer, -math.inf) + ASK_AGAIN_SECONDS)
        asked = able[: max(0, AGREE - waiting)]
        self._asked |= dict.fromkeys(asked, now)
        return asked
