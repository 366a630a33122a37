"""The address book: the addresses to dial, with their expected peers, their sources, and the results of attempts.

The address book has no socket and reads no clock. `transport/dialer.py` dials its entries, and `transport/swarm.py` reports the
results to it.

| named by | at most | forgotten after |
|---|---|---|
| the operator | BOOK_MAX with all others | never |
| an earlier run of this peer | BOOK_MAX with all others | the first failure after its peer has left or was retired; else never |
| a member | SOURCE_BOOK_MAX for each | FAILURES_MAX failures in a row, or the first one if its peer has left |
| a peer of the local network | LOCAL_BOOK_MAX for all | FAILURES_MAX failures in a row |
| a stranger | STRANGERS_BOOK_MAX for all | the first failure |

An address is forgotten at once if this peer itself answers there, or if another peer answers than the announced one. An address
of a stranger is forgotten if this peer or the stranger refuses the link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from protocol.addresses import AddressScope, parse_address
from protocol.errors import UserError
from protocol.identity import parse_peer_id, short_id
from protocol.limits import ADVERTISED_MAX
from transport.connections.peer_link import PeerLink

BOOK_MAX: Final = 2048  # addresses in the book, each with a waiting task: 200 voters with ten addresses each
SOURCE_BOOK_MAX: Final = 2 * len(AddressScope) * ADVERTISED_MAX  # addresses per member: in its records, and in its previous ones
STRANGERS_BOOK_MAX: Final = 128
LOCAL_BOOK_MAX: Final = 64  # addresses from the local network: a low limit, because any machine there may announce any address
# Remembered addresses that were announced for our key, and at which this process answered; each new one costs a dial.
OWN_BOOK_MAX: Final = 64
# Concurrent dials per source of addresses, so that a source of dead addresses delays only its own dials.
SOURCE_DIALS_MAX: Final = 4

BACKOFF_SECONDS: Final = 0.2  # the largest pause before a dial, doubled by each failure; the pause is random
BACKOFF_SECONDS_MAX: Final = 20.0
DIRECT_SECONDS_MAX: Final = 60.0  # largest pause before a dial if the peer is linked over a relay
STABLE_SECONDS: Final = 10.0  # duration after which a connection counts as a success, and resets the pause before a dial
FAILURES_MAX: Final = 12


@dataclass(slots=True)
class AddressSource:
    """A source of addresses: one member, all strangers together, or the local network."""

    book_max: int
    address_count: int = 0  # number of this source's addresses in the book
    dials: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(SOURCE_DIALS_MAX))
    # Limits its resolver threads.
    lookups: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(SOURCE_DIALS_MAX))


@dataclass(slots=True)
class AddressEntry:
    """An address in the book, which is dialed until its peer is linked, with the results of the dials."""

    address: str
    peer: bytes | None  # peer expected at the address; None: any peer
    is_persistent: bool = False  # The operator named the address, or it is remembered from an earlier run.
    pinned: bool = False  # Only `peer` may answer at the address.
    remembered: bool = False  # `peer` answered at this address in an earlier run.
    failures: int = 0  # consecutive failed dials
    reason: str = ""  # reason of the last failed dial; empty: the last dial succeeded
    linked: bool = False  # The last dial has led to a link.
    reported_reason: str = ""  # last reason that was reported to a person
    next_at: float = 0.0  # time of the next dial
    retry_now: trio.Event = field(default_factory=trio.Event)  # set when the address should be dialed at once
    attempt_ended_event: trio.Event = field(default_factory=trio.Event)  # set when a dial has led to a link or failed
    source: AddressSource | None = None  # None: the operator or an earlier run of this peer named the address
    link_wait_scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # scope of the wait while `peer` is linked

    def end_attempt(self, reason: str) -> None:
        self.reason = reason
        self.attempt_ended_event.set()
        self.attempt_ended_event = trio.Event()

    def describe_failure(self, now: float) -> str:
        tries = "1 try" if self.failures == 1 else f"{self.failures} tries"
        expected = f"{short_id(self.peer)}, " if self.peer and short_id(self.peer) not in self.reason else ""
        pause = math.ceil(max(0.0, self.next_at - now))
        return f"cannot reach {self.address}: {self.reason} ({expected}{tries}), next try in {pause} s"


def parse_bootstrap(text: str, *, remembered: bool = False) -> AddressEntry:
    peer, separator, address = text.rpartition("@")
    parse_address(address)
    return AddressEntry(
        address, parse_peer_id(peer) if separator else None, is_persistent=True, pinned=bool(separator), remembered=remembered
    )


class AddressBook:
    def __init__(
        self,
        me: bytes,
        first: Iterable[AddressEntry],
        links: Mapping[bytes, PeerLink],
        *,
        is_stranger: Callable[[bytes], bool],
        has_gone: Callable[[bytes], bool],
        is_own: Callable[[str], bool],
        added: Callable[[AddressEntry], None],
        tell: Callable[[str], None],
        random: Random,
    ) -> None:
        """Create a book.

        `first` has the addresses of the operator, then the addresses remembered from earlier runs. `has_gone(peer)` returns
        whether the peer is a former member that no task waits for. `is_own(address)` returns whether the address is one of this
        peer's. `added` is called with each new entry, which must be dialed while `has_entry` is true. `tell` is called with lines
        for a person.
        """
        self._me, self._links, self._is_stranger, self._has_gone, self._is_own = me, links, is_stranger, has_gone, is_own
        self._added, self._tell, self._random = added, tell, random
        self._entries: dict[str, AddressEntry] = {}
        for entry in first:
            self._entries.setdefault(entry.address, entry)
        self._members: dict[bytes, AddressSource] = {}
        self._strangers, self._neighbours = AddressSource(STRANGERS_BOOK_MAX), AddressSource(LOCAL_BOOK_MAX)
        self._mine: dict[str, None] = {}  # addresses announced for our key at which this process answered

    def entries(self) -> tuple[AddressEntry, ...]:
        return tuple(self._entries.values())

    def get(self, address: str) -> AddressEntry | None:
        return self._entries.get(address)

    def has_entry(self, entry: AddressEntry) -> bool:
        return self._entries.get(entry.address) is entry

    # Sources of addresses ------------------------------------------------------------------------------------------------

    def add_configured(self, text: str) -> AddressEntry:
        """Add an address of the operator, "host:port" or "peer id@host:port". Raises `UserError` if it is invalid."""
        wanted = parse_bootstrap(text)
        entry = self._entries.get(wanted.address)
        if entry is None and len(self._entries) >= BOOK_MAX:
            raise UserError(f"cannot add {text}: the address book is full ({BOOK_MAX} addresses); try again later")
        if entry is None or not self._is_linked_at(entry, wanted):
            # The earlier peer may have left this address, so the operator's latest text replaces the entry.
            self.remove_address(wanted.address)
            entry = self._entries[wanted.address] = wanted
            self._added(entry)
        entry.is_persistent, entry.remembered, entry.failures = True, False, 0
        return entry

    def _is_linked_at(self, entry: AddressEntry, wanted: AddressEntry) -> bool:
        """Return whether the entry's peer is linked by a dial of this address, and is the peer in `wanted`, if that names one."""
        link = self._links.get(entry.peer) if entry.peer is not None else None
        return link is not None and link.dialed and link.address == entry.address and wanted.peer in (None, link.peer)

    def add_signed(self, address: str, peer: bytes) -> None:
        """Add an address from a signed record of `peer`.

        Two peers may announce one address. If the peer of the old entry is linked over another address, the new entry replaces
        it.
        """
        # An address announced for our own key leads to this process, to no process, or to a machine with a copy of the key.
        if peer == self._me and (self._is_own(address) or address in self._mine):
            return
        entry = self._entries.get(address)
        if (
            entry is not None
            and peer not in (self._me, entry.peer)
            and not entry.is_persistent
            and self._is_linked_elsewhere(entry)
        ):
            self.remove_address(address)
        self._learn(address, peer, self._source(peer))

    def _is_linked_elsewhere(self, entry: AddressEntry) -> bool:
        """Return whether the entry's peer is linked, but not by a dial of this address."""
        link = self._links.get(entry.peer) if entry.peer is not None else None
        return link is not None and not (link.dialed and link.address == entry.address)

    def add_local(self, address: str) -> None:
        """Add an address of the local network, at which any peer may answer."""
        if not self._is_own(address) and address not in self._mine and address not in self._entries:
            self._learn(address, None, self._neighbours)

    def _source(self, peer: bytes) -> AddressSource:
        if peer != self._me and self._is_stranger(peer):
            return self._strangers
        if peer not in self._members:
            self._members = {one: source for one, source in self._members.items() if source.address_count}
            self._members[peer] = AddressSource(SOURCE_BOOK_MAX)
        return self._members[peer]

    def _learn(self, address: str, peer: bytes | None, source: AddressSource) -> None:
        entry = self._entries.get(address)
        if entry is not None:
            if entry.source is self._strangers and source is not self._strangers:  # A member is more credible than a stranger.
                self._strangers.address_count, source.address_count, entry.source = (
                    self._strangers.address_count - 1,
                    source.address_count + 1,
                    source,
                )
        elif len(self._entries) < BOOK_MAX and source.address_count < source.book_max:
            source.address_count += 1
            entry = self._entries[address] = AddressEntry(address, peer, pinned=peer is not None, source=source)
            self._added(entry)

    def remove_address(self, address: str) -> None:
        """Stop dialing an address. A connection to it continues."""
        entry = self._entries.pop(address, None)
        if entry is not None:
            if entry.source is not None:
                entry.source.address_count -= 1
            entry.retry_now.set()
            entry.link_wait_scope.cancel()

    # Results of attempts -------------------------------------------------------------------------------------------------

    def confirm_peer(self, address: str, peer: bytes) -> None:
        entry = self._entries.get(address)
        if entry is not None:
            entry.peer = peer

    def record_own_address(self, address: str) -> None:
        """Record that a dial of an address reached this process itself."""
        if len(self._mine) < OWN_BOOK_MAX:
            self._mine[address] = None

    def record_success(self, address: str) -> None:
        entry = self._entries.get(address)
        if entry is not None:
            if entry.reported_reason:
                self._tell(f"reached {address}")
            entry.reported_reason, entry.linked = "", True
            entry.end_attempt("")

    def record_end(self, address: str, reason: str, was_linked: bool = True) -> None:
        """Record the end of a dialed connection. The dial has failed unless its link was in use or the peer has another link."""
        entry = self._entries.get(address)
        if entry is not None:
            has_another = entry.peer is not None and entry.peer in self._links
            entry.end_attempt("" if (entry.linked and was_linked) or has_another else reason)

    def record_refusal(self, address: str) -> None:
        """Forget a stranger's address after one end refused the link. A member is dialed again: it may have a free link later."""
        entry = self._entries.get(address)
        if entry is not None and not entry.is_persistent and entry.peer is not None and self._is_stranger(entry.peer):
            self.remove_address(address)

    def record_wrong_peer(self, address: str, reason: str) -> AddressEntry | None:
        """Record that an unexpected peer answered at an address.

        | `reason`                        | address                    | effect                                           |
        |---------------------------------|----------------------------|--------------------------------------------------|
        | "wrong-peer": another peer      | remembered                 | the book forgets which peer it expected there    |
        | "wrong-peer"                    | persistent, not remembered | none                                             |
        | "wrong-peer"                    | not persistent             | the entry is removed and returned                |
        | "self": this peer itself        | any                        | the entry is removed                             |

        Return the removed entry if another peer may claim the address, otherwise None.
        """
        entry = self._entries.get(address)
        if entry is None:
            return None
        if reason == "wrong-peer" and entry.remembered:
            entry.peer, entry.pinned = None, False  # The peer may have a new key.
        elif reason == "self" or (reason == "wrong-peer" and not entry.is_persistent):
            self.remove_address(address)
            return entry if reason == "wrong-peer" else None
        return None

    def count_attempt(self, entry: AddressEntry, held_seconds: float, *, over_relay: bool) -> None:
        """Count a dial as a success or a failure, and forget the address after too many failures.

        `held_seconds` is the duration of the dialed connection, or 0. `over_relay`: the peer is linked over a relay.
        """
        if held_seconds >= STABLE_SECONDS:
            entry.failures = 0
            return
        entry.failures += 1
        has_gone = entry.peer is not None and self._has_gone(entry.peer)
        failures_max = 0 if has_gone or entry.source is self._strangers else FAILURES_MAX
        stays = entry.is_persistent and not (entry.remembered and has_gone)
        if not over_relay and entry.failures > failures_max and not stays and self.has_entry(entry):
            self.remove_address(entry.address)

    def schedule_retry(self, entry: AddressEntry, now: float) -> float:
        """Return the seconds until the next attempt, with full jitter. Report the last failure to a person if it is news."""
        link = self._links.get(entry.peer) if entry.peer is not None else None
        longest = DIRECT_SECONDS_MAX if link is not None and link.relay is not None else BACKOFF_SECONDS_MAX
        pause = self._random.uniform(0, min(longest, BACKOFF_SECONDS * 2 ** min(entry.failures, 16)))
        entry.next_at = now + pause
        # Only failures of persistent entries are reported: the first one, each new reason, and every power of two (tries 2, 4, 8
        # …).
        if (
            entry.reason
            and entry.is_persistent
            and (entry.reason != entry.reported_reason or entry.failures & (entry.failures - 1) == 0)
        ):
            entry.reported_reason = entry.reason
            self._tell(entry.describe_failure(now))
        return pause

    def unreachable_addresses(self) -> tuple[AddressEntry, ...]:
        """Return the entries whose last attempt failed and whose peer is not linked."""
        here = {self._me, *self._links}
        return tuple(entry for entry in self.entries() if entry.reason and entry.peer not in here)
