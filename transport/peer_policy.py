"""Classes of peers, and who the others are to this peer, as its links ask."""

from __future__ import annotations

import enum

from protocol.messages import GuestInvitation


class PeerClass(enum.IntEnum):
    """The order in which links give way: strangers first."""

    STRANGER = 0  # any key that knows the chain id; a new one costs nothing
    GUEST = 1  # holds an invitation of a voter that admits it; there are no more of them than open invitations
    MEMBER = 2
    VOTER = 3


class PeerPolicy:
    """Everybody is a member, as for links without a ledger in benchmarks of transport. A peer decides by the decided state, and
    by invitations that were shown.
    """

    def classify(self, peer: bytes) -> PeerClass:
        return PeerClass.MEMBER

    def is_member(self, peer: bytes) -> bool:
        """Whether this peer forwards for that one, and asks it to."""
        return True

    def has_gone(self, peer: bytes) -> bool:
        """Whether it was a member, and nobody waits for it."""
        return False

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        """A peer has shown this. Raises `RemoteProtocolError` for what is no invitation."""

    def own_invitation(self) -> GuestInvitation | None:
        """What this peer shows to others while it is no member."""
        return None


EVERYBODY_IS_MEMBER = PeerPolicy()
