"""Classes of peers, and the policy by which links classify a peer."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from protocol.messages import GuestInvitation


class PeerClass(enum.IntEnum):
    """Classes of peers in the order in which their links are evicted, strangers first."""

    STRANGER = 0  # any key that knows the chain id; a new key costs nothing
    GUEST = 1  # a key with an open invitation of a voter, which bounds the number of guests
    MEMBER = 2
    VOTER = 3


class PeerPolicy(ABC):
    """The classes of peers, as links need them: by the decided state, and by the invitations that peers have presented."""

    @abstractmethod
    def classify(self, peer: bytes) -> PeerClass: ...

    @abstractmethod
    def is_member(self, peer: bytes) -> bool:
        """Return whether `peer` is a member. A member relays only between members, and uses only members as relays."""

    @abstractmethod
    def has_gone(self, peer: bytes) -> bool:
        """Return whether `peer` is a former member that no part of this peer waits for."""

    @abstractmethod
    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        """Record an invitation that a peer has shown. Raises `RemoteProtocolError` if it is invalid."""

    @abstractmethod
    def own_invitation(self) -> GuestInvitation | None:
        """Return the invitation that this peer presents to other peers. None: this peer is a member, or has no invitation."""


class EverybodyIsMember(PeerPolicy):
    """The policy of links without a ledger, as in benchmarks of transport: each peer counts as a member."""

    def classify(self, peer: bytes) -> PeerClass:
        return PeerClass.MEMBER

    def is_member(self, peer: bytes) -> bool:
        return True

    def has_gone(self, peer: bytes) -> bool:
        return False

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        pass

    def own_invitation(self) -> GuestInvitation | None:
        return None


EVERYBODY_IS_MEMBER = EverybodyIsMember()
