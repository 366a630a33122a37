"""Who somebody is to this peer: by the state that it has applied last, and by invitations that guests have shown."""

from __future__ import annotations

from collections import OrderedDict

from ledger.ledger_state import CurrentState, LedgerState
from ledger.members import Invitation, token_preimage
from peer.settings.invitation import InvitationString, make_admission
from protocol.errors import RemoteProtocolError
from protocol.identity import Verifier, open_signed
from protocol.messages import GuestInvitation
from transport.peer_policy import PeerClass, PeerPolicy

GUESTS_MAX = 64  # at once; the first of them is a stranger again


class PeerClassifier(PeerPolicy):
    def __init__(
        self,
        me: bytes,
        chain_id: bytes,
        verifier: Verifier,
        applied: CurrentState,
        invitation: InvitationString | None = None,
    ) -> None:
        """`invitation`: with which this peer asks to be admitted."""
        self._invitation = invitation
        self._me, self._chain_id, self._verifier, self._applied = me, chain_id, verifier, applied
        self._seen: LedgerState | None = None
        self._voters = frozenset[bytes]()
        self._guests: OrderedDict[bytes, tuple[bytes, Invitation]] = OrderedDict()  # token -> guest, and what it showed

    def classify(self, peer: bytes) -> PeerClass:
        state = self._applied.current
        members = state.members
        if state is not self._seen:
            self._look(state)
        if not members.is_current_key(self._me):
            return PeerClass.MEMBER  # a newcomer's state may know none of those that help it, and nobody waits for its vote
        if members.is_current_key(peer):
            return PeerClass.VOTER if peer in self._voters else PeerClass.MEMBER
        return PeerClass.GUEST if any(guest == peer for guest, _ in self._guests.values()) else PeerClass.STRANGER

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        """An invitation makes one guest: the last that showed it. One that admits nobody makes none.

        Raises `RemoteProtocolError` for what no honest peer shows.
        """
        members = self._applied.current.members
        inviter = shown.invitation.signer
        if inviter not in members.voters or not members.is_current_key(inviter):
            return
        invitation = open_signed(shown.invitation, self._chain_id, self._verifier, (Invitation,))
        if not self._verifier.verify(invitation.token, token_preimage(self._chain_id, peer), shown.token_signature):
            raise RemoteProtocolError("bad-signature", "invitation token")
        self._guests[invitation.token] = peer, invitation
        self._look(self._applied.current)

    def _look(self, state: LedgerState) -> None:
        """Forgets guests whose invitation was used, or admits nobody any more."""
        self._seen, self._voters = state, frozenset((*state.members.voters, *state.members.upcoming))
        revoked = {token for tokens in state.members.revoked_tokens.values() for token in tokens}
        for token, (_, invitation) in list(self._guests.items()):
            if token in state.members.used_tokens or token in revoked or invitation.expires < state.time_ms:
                del self._guests[token]
        while len(self._guests) > GUESTS_MAX:
            self._guests.popitem(last=False)

    def is_member(self, peer: bytes) -> bool:
        return self._applied.current.members.is_current_key(peer)

    def has_gone(self, peer: bytes) -> bool:
        return self._applied.current.members.is_departed_key(peer)

    def own_invitation(self) -> GuestInvitation | None:
        if self._invitation is None or self._me in self._applied.current.members.members:
            return None
        shown = make_admission(self._invitation, self._me, "")
        return GuestInvitation(shown.invitation, shown.token_signature)
