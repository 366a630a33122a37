"""Calls about newcomers and addresses: invitations, and dialing somebody at once."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from consensus.light_client import TrustedBlock
from ledger.members import RevokeInvitation
from peer.api.running_peer import RunningPeer
from peer.settings.invitation import DAY_MS, IssuedInvitation, invitation_text, make_invitation
from protocol.addresses import NO_LISTEN_ADDRESS, check_dialable_address, is_loopback, parse_address
from protocol.api import INVITATION_DAYS_MAX, InvitationRpc, InvitationView
from protocol.errors import UserError
from protocol.identity import short_id
from protocol.limits import ADVERTISED_MAX


@dataclass(frozen=True)
class JoinRpcHandler(InvitationRpc):
    peer: RunningPeer

    async def create_invitation(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        if not 1 <= days <= INVITATION_DAYS_MAX:
            raise UserError(f"--days {days} is outside 1..{INVITATION_DAYS_MAX}")
        if self.peer.me not in self.peer.driver.state.members.voters:
            raise UserError("only a voter can invite, and this peer does not vote (`peers` shows who does)")
        decided = await trio.to_thread.run_sync(self.peer.driver.store.get_decision, self.peer.driver.state.height)
        anchor = TrustedBlock(decided.height, decided.digest) if decided else None
        now_ms = self.peer.now_ms
        expires_ms = now_ms + days * DAY_MS
        made = make_invitation(self.peer.driver.signer, self.peer.genesis, expires_ms, self._addresses(addresses), anchor)
        # first: what was handed out can be taken back
        await self.peer.invitations.add_invitation(IssuedInvitation(made.invitation, now_ms, made.addresses))
        return invitation_text(made)

    async def invitations(self) -> tuple[InvitationView, ...]:
        state = self.peer.driver.state
        return tuple(
            InvitationView(made.token, made.outcome(state), made.made_ms, made.invitation.expires, made.addresses)
            for made in self.peer.invitations.issued
        )

    async def revoke_invitation(self, token: str) -> str:
        made = self.peer.invitations.find_invitation(token)
        await self.peer.submitter.submit("member/revoke", RevokeInvitation(made.signed))
        return f"invitation {made.token[:8]} is revoked: it admits nobody any more"

    async def dial_address(self, address: str) -> str:
        check_dialable_address(address.rpartition("@")[2], "connect")
        return f"connected to {short_id(await self.peer.network.connect(address))} at {address}"

    def _addresses(self, said: tuple[str, ...]) -> tuple[str, ...]:
        """For an invitation: what the operator names, else where this peer is reached, and others that it has reached itself."""
        if len(said) > ADVERTISED_MAX:
            raise UserError(f"--address: {len(said)} addresses are too many, an invitation holds {ADVERTISED_MAX}")
        for address in said:
            check_dialable_address(address, "--address")
        mine = said or self.peer.addresses()
        others = sorted(link.address for link in self.peer.network.links() if link.dialed)
        if not mine and (self.peer.config.listen != NO_LISTEN_ADDRESS or not others):
            known = f"this peer listens on {self.peer.config.listen}, and knows no address of this machine but loopback"
            raise UserError(f"{known}; say where newcomers reach it: `invite --address HOST:PORT`, or the setting `advertise`")
        if not all(_is_local(address) for address in mine):  # whoever joins is on another machine, then
            others = [address for address in others if not _is_local(address)]
        return tuple(dict.fromkeys((*mine, *others)))[:ADVERTISED_MAX]


def _is_local(address: str) -> bool:
    return is_loopback(parse_address(address)[0])
