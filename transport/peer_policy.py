"""Who the others are to this peer, as its links ask: by the decided state, and by invitations that were shown."""

from __future__ import annotations

from typing import Protocol

from protocol.messages import GuestInvitation
from transport.quotas.peer_class import PeerClass


class PeerPolicy(Protocol):
    def classify(self, peer: bytes) -> PeerClass: ...

    def is_allowed(self, peer: bytes) -> bool:
        """Whether this peer wants any link with that one."""

    def is_member(self, peer: bytes) -> bool:
        """Whether this peer forwards for that one, and asks it to."""

    def has_gone(self, peer: bytes) -> bool:
        """Whether it was a member, and nobody waits for it."""

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        """A peer has shown this. Raises `RemoteProtocolError` for what is no invitation."""

    def own_invitation(self) -> GuestInvitation | None:
        """What this peer shows to others while it is no member."""


class EverybodyIsMember:
    """For links without a ledger, as in benchmarks of transport."""

    def classify(self, peer: bytes) -> PeerClass:
        return PeerClass.MEMBER

    def is_allowed(self, peer: bytes) -> bool:
        return True

    def is_member(self, peer: bytes) -> bool:
        return True

    def has_gone(self, peer: bytes) -> bool:
        return False

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        return None

    def own_invitation(self) -> GuestInvitation | None:
        return None


EVERYBODY_IS_MEMBER = EverybodyIsMember()
