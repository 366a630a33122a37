"""Classes of peers, and the policy by which links classify a peer."""

from __future__ import annotations

import enum

from protocol.messages import GuestInvitation


class PeerClass(enum.IntEnum):
    """Classes of peers in the order in which their links are evicted, strangers first."""

    STRANGER = 0  # any key that knows the chain id; a new key costs nothing
    GUEST = 1  # holds an open invitation of a voter, which bounds the number of guests
    MEMBER = 2
    VOTER = 3


class PeerPolicy:
    """A policy for links without a ledger, as in benchmarks of transport: each peer is a member.

    The policy of a real peer uses the decided state and the invitations that peers have shown.
    """

    def classify(self, peer: bytes) -> PeerClass:
        return PeerClass.MEMBER

    def is_member(self, peer: bytes) -> bool:
        """Return whether `peer` is a member. Members relay only for members, and through members."""
        return True

    def has_gone(self, peer: bytes) -> bool:
        """Return whether `peer` is a former member that nobody waits for."""
        return False

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        """Record an invitation that a peer has shown. Raises `RemoteProtocolError` if it is invalid."""

    def own_invitation(self) -> GuestInvitation | None:
        """Return the invitation that this peer shows to others. None: it is a member, or has no invitation."""
        return None


EVERYBODY_IS_MEMBER = PeerPolicy()
