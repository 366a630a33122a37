"""This peer's membership as its operator configured it: admission, roles, standing as a voter, and automatic approvals.

The module shows the operator pending votes of other voters. It classifies other peers by the applied state and by their
invitations.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ledger.ledger_state import CurrentState, LedgerState
from ledger.members import (
    ADMIT_KIND,
    ApproveVoter,
    Invitation,
    RegisterRoles,
    RenameMember,
    RotateKey,
    StandAsVoter,
    lowers_tolerance,
    rotation_preimage,
    token_preimage,
)
from ledger.network_governance import NetworkState
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.invitation import InvitationString, make_admission
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Verifier, open_signed, short_id
from protocol.messages import GuestInvitation
from transport.peer_policy import PeerClass, PeerPolicy

JOIN_RETRY_SECONDS = 1.0  # seconds between two attempts of a guest to send its admission: a guest may get no blocks
NOT_DECIDED = "its admission is not decided yet"

GUESTS_MAX = 64  # guests at one time, a bound of memory: one more guest makes the oldest guest a stranger


@dataclass
class Membership:
    driver: Driver
    submitter: TransactionSubmitter
    name: str
    roles: tuple[str, ...]
    wants_to_vote: bool
    approve_invited: int  # number of members that this voter approves as voters without its operator
    invitation: InvitationString | None
    former_submitter: TransactionSubmitter | None = None  # signs with this peer's old key until the change of keys is decided
    forget_former: Callable[[], None] = lambda: None
    _told: frozenset[bytes] = field(default_factory=frozenset)
    _told_wanted: frozenset[bytes] = frozenset()
    _told_retired: dict[bytes, int] | None = None  # retired member -> height of the retirement, as last shown
    # True if this process has set the peer's name: two peers with one key and two names would otherwise rename it forever.
    _has_said_name: bool = False

    async def run(self) -> None:
        """After each block, submit the next transaction that the operator's settings need, such as an admission or a new name."""
        while True:
            applied = self.driver.block_applied
            try:
                await self._do_next_step()
            except UserError as error:
                self.driver.observer.report_membership_problem(str(error))
            self._tell_candidates()
            self._tell_retirements()
            is_member = self.driver.signer.public in self.driver.state.members.members
            with trio.move_on_after(float("inf") if is_member else JOIN_RETRY_SECONDS):
                await applied.wait()

    async def report_upgrades(self) -> None:
        """Show upgrades and limits of the network after each block: new votes, decisions, and upgrades that took effect."""
        before = self.driver.state
        while True:
            applied, now = self.driver.block_applied, self.driver.state
            if now is not before:
                self._report_upgrades(before.module_state(NetworkState), now.module_state(NetworkState))
                self._report_limits(before, now)
            before = now
            await applied.wait()

    def _report_upgrades(self, before: NetworkState, now: NetworkState) -> None:
        me, add = self.driver.signer.public, self.driver.events.add
        is_voter = me in self.driver.state.members.voters
        for wish in dict.fromkeys(now.upgrade_votes.values()):
            if is_voter and wish not in before.upgrade_votes.values() and now.upgrade_votes.get(me) != wish:
                command = f"`peer upgrade {wish.module} {wish.version} --at {wish.height}`"
                add(
                    "network",
                    f"a voter voted for {wish.module} {wish.version} from height {wish.height}: to agree, run {command}",
                )
        for upgrade in now.due_upgrades:
            if upgrade not in before.due_upgrades:
                add("network", f"decided: {upgrade.module} {upgrade.version} from height {upgrade.height}")
        for running in now.modules:
            if running not in before.modules:
                add("network", f"the network now runs {running.name} {running.version}")

    def _report_limits(self, before: LedgerState, now: LedgerState) -> None:
        me, add = self.driver.signer.public, self.driver.events.add
        is_voter = me in now.members.voters
        known = self.driver.rules.voted_limits(before)
        for name, (terms, limit) in self.driver.rules.voted_limits(now).items():
            if name not in known or limit == known[name][1]:
                continue
            earlier = known[name][1]
            for most in dict.fromkeys(limit.votes.values()):
                if is_voter and most not in earlier.votes.values() and limit.votes.get(me) != most:
                    wanted = f"{name} {most}"
                    add("network", f"a voter voted for the limit {wanted}: to agree, run `peer limit {wanted}`")
            if limit.most != earlier.most:
                add("network", f"decided: {terms.describe(limit.most)}")

    def _tell_candidates(self) -> None:
        """Show the operator of a voter new candidates that the voter may approve."""
        members, me = self.driver.state.members, self.driver.signer.public
        standing = frozenset(members.candidates)
        for candidate in sorted(standing - self._told):
            if me in members.voters:
                self.driver.events.add(
                    "member",
                    f"{short_id(candidate)} is a voter candidate: to approve it, run `peer approve {short_id(candidate)}`",
                    peer=candidate,
                )
        self._told = standing

    def _tell_retirements(self) -> None:
        """Show new votes to retire a member to the operator of a voter, and newly retired members to every operator."""
        members, me = self.driver.state.members, self.driver.signer.public
        wanted = frozenset(wish.subject for wish in members.retirement_votes.values())
        for subject in sorted(wanted - self._told_wanted):
            mine = members.retirement_votes.get(me)
            if me in members.voters and (mine is None or mine.subject != subject):
                command = f"peer retire {short_id(subject)}" + (
                    " --lower-tolerance" if lowers_tolerance(members, subject) else ""
                )
                instead = f" (this replaces your vote to retire {short_id(mine.subject)})" if mine else ""
                self.driver.events.add(
                    "member",
                    f"another voter voted to retire {short_id(subject)}: to agree, run `{command}`{instead}",
                    peer=subject,
                )
        self._told_wanted = wanted
        retired = {key: member.retired for key, member in members.members.items() if member.retired is not None}
        for key, height in sorted(retired.items()):
            if self._told_retired is not None and self._told_retired.get(key) != height:
                self.driver.events.add("member", f"{short_id(key)} was retired at height {height}: it stays a member", peer=key)
        self._told_retired = retired

    async def _do_next_step(self) -> None:
        state, me = self.driver.state, self.driver.signer.public
        member = state.members.members.get(me)
        is_to_vote = any(state.members.current_key(key) == me for key in state.members.upcoming)
        if state.members.is_expelled(me):
            raise UserError("this peer was expelled: its key signed two statements that exclude each other")
        if self.former_submitter is not None and self.former_submitter.signer.public in state.members.members:
            await self._replace(self.former_submitter)
        elif member is None:
            await self._join()
        elif member.roles != self.roles:
            await self.submitter.submit("member/register", RegisterRoles(self.roles))
        elif self.name and member.name != self.name and not self._has_said_name:
            await self.submitter.submit("member/rename", RenameMember(self.name))
            self._has_said_name = True
        elif self.wants_to_vote and not is_to_vote and me not in state.members.candidates and state.certified_roots:
            height = max(state.certified_roots)
            await self.submitter.submit("member/stand", StandAsVoter(height, state.certified_roots[height]))
            self.driver.events.add("member", f"{short_id(me)} is a voter candidate: a quorum must approve it with `peer approve`")
        elif me in state.members.voters:
            await self._approve()

    async def _replace(self, former: TransactionSubmitter) -> None:
        """Replace the key of `former` in the ledger by this peer's new key, unless this change is decided already.

        Raises `UserError` if the old key was expelled, or was replaced by another key.
        """
        me, old, members = self.driver.signer, former.signer.public, self.driver.state.members
        if members.is_current_key(old):
            await former.submit("member/rotate", RotateKey(me.public, me.sign(rotation_preimage(self.driver.chain_id, old))))
        elif members.current_key(old) == me.public:
            self.former_submitter = None
            self.forget_former()
        else:
            raise UserError(f"the old key {short_id(old)} cannot be replaced: it was expelled, or has another successor")

    async def _join(self) -> None:
        if self.invitation is None:
            return
        witness = self.driver.observer
        witness.membership_problem = witness.membership_problem or NOT_DECIDED
        is_known = self.invitation.invitation.signer in self.driver.state.members.voters
        if not is_known or not self.driver.network.connected_peers():
            return
        if self.submitter.has_pending:  # other peers have sent back this peer's admission from before a restart
            return
        me = self.driver.signer.public
        try:
            await self.submitter.submit(ADMIT_KIND, make_admission(self.invitation, me, self.name or short_id(me)), math.inf)
        except UserError:
            if not self.submitter.has_pending:  # other peers may have sent back this peer's earlier admission meanwhile
                raise

    async def _approve(self) -> None:
        """Approve one invited candidate that was not retired, if this voter has approved fewer than `approve_invited`."""
        state, me = self.driver.state.members, self.driver.signer.public
        invited = {key for key, member in state.members.items() if member.invited_by is not None and member.retired is None}
        given = sum(key in state.voters for key in invited) + sum(me in approvals for approvals in state.candidates.values())
        for candidate, approvals in sorted(state.candidates.items()):
            if given < self.approve_invited and me not in approvals and candidate in invited:
                await self.submitter.submit("member/approve", ApproveVoter(candidate))
                self.driver.events.add(
                    "member", f"approved {short_id(candidate)} as a voter (setting `approve_invited`)", peer=candidate
                )
                return


class PeerClassifier(PeerPolicy):
    def __init__(
        self,
        me: bytes,
        chain_id: bytes,
        verifier: Verifier,
        applied: CurrentState,
        invitation: InvitationString | None = None,
    ) -> None:
        """Create a classifier. `invitation` is the invitation with which this peer itself joins, if it has one."""
        self._invitation = invitation
        self._me, self._chain_id, self._verifier, self._applied = me, chain_id, verifier, applied
        self._seen: LedgerState | None = None
        self._voters = frozenset[bytes]()
        # Token of an invitation -> (guest, its invitation).
        self._guests: OrderedDict[bytes, tuple[bytes, Invitation]] = OrderedDict()

    def classify(self, peer: bytes) -> PeerClass:
        state = self._applied.current
        members = state.members
        if state is not self._seen:
            self._look(state)
        if not members.is_current_key(self._me):
            # A guest cannot tell members from strangers: its old state may not contain the members that help it.
            return PeerClass.MEMBER
        if members.is_current_key(peer):
            return PeerClass.VOTER if peer in self._voters else PeerClass.MEMBER
        return PeerClass.GUEST if any(guest == peer for guest, _ in self._guests.values()) else PeerClass.STRANGER

    def admit_guest(self, peer: bytes, shown: GuestInvitation) -> None:
        """Make `peer` the guest of an invitation, in place of the invitation's earlier guest.

        Invitations of non-voters admit no guests. Raises `RemoteProtocolError` if the invitation or its token signature is false.
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
        """Follow a new state: forget guests whose invitation was used or revoked, or has expired."""
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
