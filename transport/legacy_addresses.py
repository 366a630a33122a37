"""Addresses that peers name without a signature (`PeerAddresses`): those of wire version 2 know no others.

What a peer says of others is only dialed, and must prove itself there; what one of wire version 2 says of itself is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from protocol.addresses import WILDCARDS, format_address, parse_address, scope_of
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import ADDRESSES_MAX
from protocol.messages import PeerAddress, PeerAddresses
from transport.connections.connection_manager import PeerLink
from transport.discovery.address_book import BOOK_MAX, AddressBook
from transport.discovery.peer_records import PeerRecordBook
from transport.session_links import SessionLink
from transport.wire.framing import Priority

HEARD_MAX: Final = 4096  # addresses listened to over one link
CLAIMS_MAX: Final = 8  # of its own addresses, one after another, that a member has passed on over one link; of a stranger one


class LegacyAddressGossip:
    def __init__(
        self,
        me: bytes,
        book: AddressBook,
        records: PeerRecordBook,
        links: Mapping[bytes, PeerLink],
        own: Callable[[], Sequence[str]],
        is_stranger: Callable[[bytes], bool],
    ) -> None:
        self._me, self._book, self._records, self._links = me, book, records, links
        self._own, self._is_stranger = own, is_stranger
        self._claims: dict[bytes, str] = {}  # peer of wire version 2 -> its address in its own words

    def peer_addresses(self) -> dict[bytes, str]:
        """Where peers are reached: where this peer reached them, or else where they say."""
        said = {peer: addresses[0] for peer in self._records.peers() if (addresses := self._records.addresses(peer))}
        return {**self._claims, **said, **{link.peer: link.address for link in self._links.values() if link.dialed}}

    def on_linked(self, link: PeerLink) -> None:
        """Tells a peer of wire version 2 where everybody is reached; others where those peers are, which sign no records."""
        said = dict(self._claims)
        if link.version < 3:
            for peer in self._records.peers():
                for one in self._records.addresses(peer):
                    if scope_of(one).includes(link.address_scope):
                        said.setdefault(peer, one)
        mine = [(self._me, address) for address in self._own()] if link.version < 3 else []
        members_first = sorted(said.items(), key=lambda one: self._is_stranger(one[0]))  # of so many that not all are told
        told = tuple(PeerAddress(peer, address) for peer, address in [*mine, *members_first][:ADDRESSES_MAX])
        if told:
            link.queue_message(PeerAddresses(told), Priority.CONTROL)

    def on_addresses(self, link: SessionLink, addresses: PeerAddresses) -> None:
        link.addresses_heard += len(addresses.known)
        if link.addresses_heard > HEARD_MAX:
            return
        has_claimed = False  # of several addresses of its own the first is passed on
        for item in addresses.known:
            address = _complete(item.address, link)
            first_hand = item.peer == link.peer
            if first_hand and not has_claimed and link.version < 3 and self._claims.get(link.peer) != address:
                self._pass_on_address(link, address)
            has_claimed = has_claimed or first_hand
            self._book.add_heard(address, item.peer, by=link.peer, first_hand=first_hand)

    def _pass_on_address(self, link: SessionLink, address: str) -> None:
        peer = link.peer
        self._claims.pop(peer, None)
        self._claims[peer] = address
        if len(self._claims) > BOOK_MAX:
            strangers = (one for one in self._claims if self._is_stranger(one))
            del self._claims[next(strangers, next(iter(self._claims)))]
        link.addresses_passed_on += 1
        if link.addresses_passed_on > (1 if self._is_stranger(peer) else CLAIMS_MAX):
            return
        for other in self._links.values():
            if other.peer != peer:
                other.queue_message(PeerAddresses((PeerAddress(peer, address),)), Priority.CONTROL)


def _complete(address: str, link: PeerLink) -> str:
    """The address with the host that the peer is seen at, if it listens on all of its interfaces."""
    try:
        host, port = parse_address(address)
    except UserError as error:
        raise RemoteProtocolError("bad-address", str(error)) from None
    return format_address(parse_address(link.address)[0] if host in WILDCARDS else host, port)
