"""The address book: which addresses are dialed, whose each is said to be, who has named it, and what came of the attempts.

It has no socket and reads no clock. `transport/dialer.py` dials its entries; `transport/swarm.py` reports what came of that.

| named by | at most | forgotten after |
|---|---|---|
| the operator | BOOK_MAX with all others | never, however often it fails |
| an earlier life of this peer | BOOK_MAX with all others | the first failure once its peer has left or was retired; else never |
| a member | SOURCE_BOOK_MAX for each | FAILURES_MAX failures in a row, the first of a peer that has left |
| a peer of the local network | LOCAL_BOOK_MAX for all | FAILURES_MAX failures in a row |
| a stranger | STRANGERS_BOOK_MAX for all | the first failure |

An address where this peer itself answers is forgotten at once. So is one where another peer answers than it was heard to be.
So is a stranger's, where one end does not want the other.
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

BOOK_MAX: Final = 2048  # addresses: 200 voters with ten each, each a task that waits
SOURCE_BOOK_MAX: Final = 2 * len(AddressScope) * ADVERTISED_MAX  # of one member: its records, and those that they replaced
STRANGERS_BOOK_MAX: Final = 128
LOCAL_BOOK_MAX: Final = 64  # on the local network, where anybody may say anything
OWN_BOOK_MAX: Final = 64  # said to be of our key, and found to lead to this process: each costs a dial
SOURCE_DIALS_MAX: Final = 4  # at once, to addresses of one source: who names dead ones holds up itself

BACKOFF_SECONDS: Final = 0.2  # a pause before dialing lies between 0 and this, twice as much after each failure, at most
BACKOFF_SECONDS_MAX: Final = 20.0
DIRECT_SECONDS_MAX: Final = 60.0  # between dials of a peer that is linked over a relay
STABLE_SECONDS: Final = 10.0  # a connection that held this long was a success: the backoff starts again
FAILURES_MAX: Final = 12


@dataclass(slots=True)
class AddressSource:
    """Who has named addresses: one member, all strangers together, or the local network."""

    book_max: int
    address_count: int = 0  # that are in the book
    dials: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(SOURCE_DIALS_MAX))
    lookups: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(SOURCE_DIALS_MAX))  # threads


@dataclass(slots=True)
class AddressEntry:
    """An address to keep dialing."""

    address: str
    peer: bytes | None  # None: whoever answers
    is_persistent: bool = False  # by the operator, or remembered
    pinned: bool = False  # only `peer` may answer
    remembered: bool = False  # `peer` was there once
    failures: int = 0  # in a row
    reason: str = ""  # why the last attempt failed; empty: it did not
    linked: bool = False  # the last attempt has led to a link
    reported_reason: str = ""  # the reason that was told last
    next_at: float = 0.0  # when it is dialed again
    retry_now: trio.Event = field(default_factory=trio.Event)  # somebody does not want to wait until then
    attempt_ended_event: trio.Event = field(default_factory=trio.Event)  # an attempt has come to a link, or to its end
    source: AddressSource | None = None  # None: the operator, or an earlier life of this peer
    link_wait_scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # while its peer is linked

    def end_attempt(self, reason: str) -> None:
        self.reason = reason
        self.attempt_ended_event.set()
        self.attempt_ended_event = trio.Event()

    def describe_failure(self, now: float) -> str:
        tries = "1 try" if self.failures == 1 else f"{self.failures} tries"
        expected, pause = f"{short_id(self.peer)}, " if self.peer else "", math.ceil(max(0.0, self.next_at - now))
        return f"cannot reach {self.address}: {self.reason} ({expected}{tries}), next in {pause} s"


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
        """`first`: what the operator names, then what is remembered. `has_gone`: whether it was a member, and nobody waits for it
        now. `is_own`: whether this peer says that it is there itself.
        `added` is called with each new entry, which is to be dialed while the book `has_entry` it; `tell` with lines for a
        person.
        """
        self._me, self._links, self._is_stranger, self._has_gone, self._is_own = me, links, is_stranger, has_gone, is_own
        self._added, self._tell, self._random = added, tell, random
        self._entries: dict[str, AddressEntry] = {}
        for entry in first:
            self._entries.setdefault(entry.address, entry)
        self._members: dict[bytes, AddressSource] = {}
        self._strangers, self._neighbours = AddressSource(STRANGERS_BOOK_MAX), AddressSource(LOCAL_BOOK_MAX)
        self._mine: dict[str, None] = {}  # said to be addresses of our key, and found to lead to this process

    def entries(self) -> tuple[AddressEntry, ...]:
        return tuple(self._entries.values())

    def get(self, address: str) -> AddressEntry | None:
        return self._entries.get(address)

    def has_entry(self, entry: AddressEntry) -> bool:
        return self._entries.get(entry.address) is entry

    # What is said --------------------------------------------------------------------------------------------------------

    def add_configured(self, text: str) -> AddressEntry:
        """The operator names "host:port" or "peer id@host:port". Raises `UserError`."""
        wanted = parse_bootstrap(text)
        entry = self._entries.get(wanted.address)
        if entry is None and len(self._entries) >= BOOK_MAX:
            raise UserError(f"{text}: this peer knows {BOOK_MAX} addresses already, which is the most")
        if entry is None or not self._is_linked_at(entry, wanted):
            # Whoever was said to be there may have moved, and another one come: what the person says now is what counts.
            self.remove_address(wanted.address)
            entry = self._entries[wanted.address] = wanted
            self._added(entry)
        entry.is_persistent, entry.remembered, entry.failures = True, False, 0
        return entry

    def _is_linked_at(self, entry: AddressEntry, wanted: AddressEntry) -> bool:
        """Whether the peer there, which must be the wanted one where one is named, is linked over this very address."""
        link = self._links.get(entry.peer) if entry.peer is not None else None
        return link is not None and link.dialed and link.address == entry.address and wanted.peer in (None, link.peer)

    def add_signed(self, address: str, peer: bytes) -> None:
        """A record that `peer` has signed says so. Several may claim one address; who only claims it gives way."""
        # Our own key is said to be there: that is this process, or nobody any more, or a machine that should not have it.
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
        """Whether the peer needs no dial there."""
        link = self._links.get(entry.peer) if entry.peer is not None else None
        return link is not None and not (link.dialed and link.address == entry.address)

    def add_local(self, address: str) -> None:
        """Somebody on the local network may be there, whoever that is."""
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
            if entry.source is self._strangers and source is not self._strangers:  # a member is believed more
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
        """Nobody dials it any more; a connection that leads there goes on."""
        entry = self._entries.pop(address, None)
        if entry is not None:
            if entry.source is not None:
                entry.source.address_count -= 1
            entry.retry_now.set()
            entry.link_wait_scope.cancel()

    # What came of an attempt ---------------------------------------------------------------------------------------------

    def confirm_peer(self, address: str, peer: bytes) -> None:
        entry = self._entries.get(address)
        if entry is not None:
            entry.peer = peer

    def record_own_address(self, address: str) -> None:
        """This process answered there itself."""
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
        """An attempt has ended; the end of a link that was in use, or of one more to the same peer, is no failure."""
        entry = self._entries.get(address)
        if entry is not None:
            has_another = entry.peer is not None and entry.peer in self._links
            entry.end_attempt("" if (entry.linked and was_linked) or has_another else reason)

    def record_refusal(self, address: str) -> None:
        """One end does not want the other. A member is tried again: there may be room for it later."""
        entry = self._entries.get(address)
        if entry is not None and not entry.is_persistent and entry.peer is not None and self._is_stranger(entry.peer):
            self.remove_address(address)

    def record_wrong_peer(self, address: str, reason: str) -> AddressEntry | None:
        """Another peer answered ("wrong-peer"), or this one ("self"). The forgotten entry, where others may claim its address."""
        entry = self._entries.get(address)
        if entry is None:
            return None
        if reason == "wrong-peer" and entry.remembered:
            entry.peer, entry.pinned = None, False  # who was there goes on under a new key, perhaps, and remembers our old one
        elif reason == "self" or (reason == "wrong-peer" and not entry.is_persistent):
            self.remove_address(address)
            return entry if reason == "wrong-peer" else None
        return None

    def count_attempt(self, entry: AddressEntry, held_seconds: float, *, over_relay: bool) -> None:
        """Count the attempt. `held_seconds`: its connection, 0 if there was none; `over_relay`: the peer is linked so."""
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
        """Seconds until the next attempt, drawn with full jitter. Tells a person why the last one failed."""
        link = self._links.get(entry.peer) if entry.peer is not None else None
        longest = DIRECT_SECONDS_MAX if link is not None and link.relay is not None else BACKOFF_SECONDS_MAX
        pause = self._random.uniform(0, min(longest, BACKOFF_SECONDS * 2 ** min(entry.failures, 16)))
        entry.next_at = now + pause
        # Told when it is new, when the reason changes, and at 2, 4, 8 … tries; nothing of what was only heard of.
        if (
            entry.reason
            and entry.is_persistent
            and (entry.reason != entry.reported_reason or entry.failures & (entry.failures - 1) == 0)
        ):
            entry.reported_reason = entry.reason
            self._tell(entry.describe_failure(now))
        return pause

    def unreachable_addresses(self) -> tuple[AddressEntry, ...]:
        """The addresses that could not be reached lately, and whose peer is not linked over another one."""
        here = {self._me, *self._links}
        return tuple(entry for entry in self.entries() if entry.reason and entry.peer not in here)
