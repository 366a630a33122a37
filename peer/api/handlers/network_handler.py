"""Calls about the network: members, invitations, blocks, proofs of rows, module upgrades and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from consensus.block import encode_header, make_header
from consensus.light_client import TrustedBlock
from consensus.voter_set import VoterSet
from features.feature import Feature
from features.name_resolution import resolve_peer
from features.text_tables import pluralize
from ledger.core.voted_limit import LimitTerms, VotedLimit
from ledger.ledger_state import LedgerState
from ledger.members import (
    ApproveVoter,
    Member,
    ResignAsVoter,
    RetireMember,
    RevokeInvitation,
    retirement_vote_count,
    warning_for_removal,
)
from ledger.network_governance import ModuleUpgrade, NetworkState
from peer import features
from peer.api.running_peer import RunningPeer
from peer.export.row_proof_file import write_row_proof
from peer.settings.invitation import DAY_MS, IssuedInvitation, invitation_text, make_invitation
from protocol import codec
from protocol.addresses import NO_LISTEN_ADDRESS, check_dialable_address, is_loopback, parse_address
from protocol.api import (
    INVITATION_DAYS_MAX,
    BlockRpc,
    BlockView,
    InvitationRpc,
    InvitationView,
    LimitView,
    LinkMinute,
    LinkView,
    LivenessMatrix,
    MemberRpc,
    ModuleView,
    NetworkRpc,
    PeerView,
    RowProofRpc,
    RowProofView,
)
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from protocol.limits import ADVERTISED_MAX
from protocol.messages import Commit
from transport.connections.peer_link import PeerLink
from transport.wire.link_measurements import MINUTE_SECONDS, MinuteStats

UPGRADE_HEIGHTS = 100  # default delay of an upgrade in blocks: minutes in a network that trains

# Days after which a vote to retire a member expires: an old vote must not retire a member that has returned.
RETIREMENT_VOTE_DAYS = 7


@dataclass(frozen=True)
class NetworkRpcHandler(NetworkRpc):
    peer: RunningPeer

    async def voter_liveness(self) -> LivenessMatrix:
        return self.peer.liveness_monitor.liveness_matrix()

    async def modules(self) -> tuple[ModuleView, ...]:
        network = self._network
        mine, views = _known(), []
        for name in dict.fromkeys((*(running.name for running in network.modules), *mine)):
            feature, knows = mine.get(name, (None, ()))
            due = next((upgrade for upgrade in network.due_upgrades if upgrade.module == name), None)
            views.append(
                ModuleView(
                    module=name,
                    feature=feature.name if feature else "",
                    about=feature.about if feature else "",
                    active_version=network.module_version(name),
                    known_versions=knows,
                    due_version=due.version if due else 0,
                    due_height=due.height if due else 0,
                    wishes=tuple(self._wish(wish, count) for wish, count in self._wishes(name).items()),
                )
            )
        return tuple(views)

    @property
    def _network(self) -> NetworkState:
        return self.peer.driver.state.module_state(NetworkState)

    def _wishes(self, module: str) -> Counter[ModuleUpgrade]:
        return Counter(wish for wish in self._network.upgrade_votes.values() if wish.module == module)

    def _wish(self, wish: ModuleUpgrade, count: int) -> str:
        needed = VoterSet(self.peer.driver.state.members.voters).quorum
        return f"{count} of {needed} needed votes for version {wish.version} from height {wish.height}"

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        self.peer.require_member()
        known = _known()
        _, versions = known.get(module, (None, ()))
        if version not in versions:
            has = f"it knows {module} {', '.join(map(str, versions))}" if versions else f"it knows {', '.join(known)}"
            raise UserError(f"this program has no {module} {version} ({has}): install a release that has it first")
        wish = ModuleUpgrade(module, version, height or self.peer.driver.state.height + UPGRADE_HEIGHTS)
        await self.peer.submitter.submit("network/upgrade", wish)
        if wish in self._network.due_upgrades:
            return f"decided: the network runs {module} {version} from height {wish.height}; peers without it stop there"
        return self._wish(wish, self._wishes(module)[wish])

    async def limits(self) -> tuple[LimitView, ...]:
        return tuple(
            LimitView(
                name,
                limit.most,
                tuple(self._limit_votes(terms, most, count) for most, count in Counter(limit.votes.values()).items()),
                terms.describe(limit.most),
            )
            for name, (terms, limit) in self._limits.items()
        )

    async def set_limit(self, name: str, most: int) -> str:
        self.peer.require_member()
        if name not in self._limits:
            raise UserError(f"unknown limit {name!r}: this network has {', '.join(self._limits)}")
        terms, _ = self._limits[name]
        if most > terms.most:
            raise UserError(f"{name} {most}: voters can allow at most {terms.most}")
        await self.peer.submitter.submit(terms.kind, terms.make_vote(name, most))
        limit = self._limits[name][1]
        if limit.most == most:
            return f"decided: {terms.describe(most)}"
        return self._limit_votes(terms, most, Counter(limit.votes.values())[most])

    @property
    def _limits(self) -> dict[str, tuple[LimitTerms, VotedLimit]]:
        return self.peer.driver.rules.voted_limits(self.peer.driver.state)

    def _limit_votes(self, terms: LimitTerms, most: int, count: int) -> str:
        needed = VoterSet(self.peer.driver.state.members.voters).quorum
        return f"{count} of {needed} needed votes that {terms.describe(most)}"


def _known() -> dict[str, tuple[Feature, tuple[int, ...]]]:
    """Return the modules of the ledger: name -> the feature that brings the module, and the versions that this program knows."""
    return {
        name: (feature, versions) for feature in features.FEATURES for name, versions in features.versions_of(feature).items()
    }


@dataclass(frozen=True)
class BlockRpcHandler(BlockRpc):
    peer: RunningPeer

    async def block(self, height: int) -> BlockView:
        return await trio.to_thread.run_sync(self._block, height or self.peer.driver.state.height, self.peer.driver.state)

    def _block(self, height: int, state: LedgerState) -> BlockView:
        store = self.peer.driver.store
        decided = store.get_decision(height)
        if decided is None:
            raise UserError(f"this peer has no block of height {height}: it has applied height {state.height}")
        block, certificate = decided.decode(), decided.certificate
        voters = next((voters for voters in self._sets(state) if voters.hash == block.voters), None)
        if voters is None:
            raise UserError(f"this peer no longer has the voters of height {height}: ask another peer")
        return BlockView(
            height=height,
            digest=decided.digest.hex(),
            time_ms=block.time_ms,
            proposer=peer_id(block.proposer),
            view=codec.decode_message(certificate.vote, (Commit,)).view,
            signers=tuple(map(peer_id, certificate.signatures)),
            voters_count=len(voters),
            quorum=voters.quorum,
            certified_root=block.state_root.hex(),
            own_root=own.hex() if (own := store.state_root(height - 1)) else "",
            body_bytes=len(block.body),
            header=encode_header(make_header(block)).hex(),
            certificate=codec.encode(certificate).hex(),
            voters=codec.encode(voters.keys).hex(),
        )

    def _sets(self, state: LedgerState) -> Iterator[VoterSet]:
        """Yield all voter sets that this peer knows.

        The sets in the ledger's state come first: they are recent and cheap to read.
        """
        yield from map(VoterSet, (state.members.voters, state.members.previous, state.members.upcoming))
        yield from (
            VoterSet(link.next_voters) for link in self.peer.driver.store.light_blocks(0, state.height) if link.next_voters
        )
        yield self.peer.genesis.voters


@dataclass(frozen=True)
class RowProofRpcHandler(RowProofRpc):
    peer: RunningPeer

    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        proven = await self.peer.driver.state_sync.newest_certified_state()
        if proven is None:
            raise UserError("no state is certified yet: try again after the next decided block")
        state, links = proven
        return await trio.to_thread.run_sync(write_row_proof, self.peer.genesis, state, links, table, key, Path(path))


@dataclass(frozen=True)
class MemberRpcHandler(MemberRpc):
    peer: RunningPeer

    async def peers(self) -> tuple[PeerView, ...]:
        members = self.peer.driver.state.members
        links = {link.peer: link for link in self.peer.network.links()}
        return tuple(self._peer(key, links.get(key)) for key in sorted(set(members.members) | set(links) | {self.peer.me}))

    def _peer(self, key: bytes, link: PeerLink | None) -> PeerView:
        members = self.peer.driver.state.members
        member = members.members.get(key)
        accepted = sum(job.accepted.get(key, 0) for job in self.peer.driver.state.jobs.jobs.values())
        seen = [f"{pluralize(accepted, 'proposal')} accepted"] if accepted else []
        if key in members.candidates:
            seen.append(f"candidate: {self._approvals(key)}")
        if wishes := retirement_vote_count(members, key):
            seen.append(f"{wishes} of {VoterSet(members.voters).quorum} votes to retire it")
        if member and member.retired is not None and key not in members.upcoming:
            seen.append(f"retired at height {member.retired}")
        return PeerView(
            peer=peer_id(key),
            name=member.name if member else "",
            roles=member.roles if member else (),
            member=members.is_current_key(key),
            voter=key in members.voters,
            leader=key == self.peer.driver.replica.leader,
            me=key == self.peer.me,
            link=_link(link) if link else None,
            approvals=tuple(peer_id(k) for k in members.candidates.get(key, ())),
            membership=", ".join(seen),
            departed=_gone(member),
        )

    def _approvals(self, candidate: bytes) -> str:
        members = self.peer.driver.state.members
        return f"{len(members.candidates[candidate])} of {VoterSet(members.voters).quorum} approvals"

    async def approve_voter(self, peer: str) -> str:
        candidate = resolve_peer(peer, self.peer.driver.state.members)
        await self.peer.submitter.submit("member/approve", ApproveVoter(candidate))
        if candidate not in self.peer.driver.state.members.candidates:
            return f"{short_id(candidate)} has all needed approvals and votes two heights later"
        return f"{short_id(candidate)} has {self._approvals(candidate)}"

    async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
        subject = resolve_peer(peer, self.peer.driver.state.members)
        before = self.peer.driver.state.members.retirement_votes.get(self.peer.me)
        await self.peer.submitter.submit(
            "member/retire", RetireMember(subject, lower_tolerance, self.peer.now_ms + RETIREMENT_VOTE_DAYS * DAY_MS)
        )
        members = self.peer.driver.state.members
        # The ledger drops all votes to retire a member when a quorum has retired the member.
        if self.peer.me not in members.retirement_votes:
            text = f"{short_id(subject)} is retired: it loses its vote and its roles, and stays a member"
            return f"{text}. After its return it trains at once; its vote needs new approvals"
        votes = f"{retirement_vote_count(members, subject)} of {VoterSet(members.voters).quorum} needed votes"
        text = f"{votes} to retire {short_id(subject)}; each vote expires after {RETIREMENT_VOTE_DAYS} days"
        if before is not None and before.subject != subject:
            text += f". It replaces your vote to retire {short_id(before.subject)}"
        return text

    async def resign_as_voter(self) -> str:
        warning = warning_for_removal(len(self.peer.driver.state.members.voters))
        # Set before the request: otherwise this peer would apply again as a voter at once.
        self.peer.membership.wants_to_vote = False
        try:
            await self.peer.submitter.submit("member/resign", ResignAsVoter())
        except UserError:
            self.peer.membership.wants_to_vote = self.peer.config.stand
            raise
        text = "this peer stops voting in two heights; restart it only with --no-stand, otherwise it becomes a candidate again"
        return text + (f"; {warning}" if warning else "")


def _gone(member: Member | None) -> str:
    if member is None:
        return ""
    if member.expelled is not None:
        return f"expelled at height {member.expelled}"
    return f"now {short_id(member.successor)}" if member.successor else ""


def _link(link: PeerLink) -> LinkView:
    now = trio.current_time()
    return LinkView(
        peer=peer_id(link.peer),
        address=link.address,
        outgoing=link.dialed,
        connected_seconds=max(0.0, now - link.since),
        round_trip_ms=_ms(link.meter.round_trip_seconds),
        bytes_sent=sum(link.outbox.sent),
        bytes_received=sum(link.inbox.received),
        kind="relayed" if link.relay else "direct",
        relay=None if link.relay is None else peer_id(link.relay),
        mbit_per_second=_mbit(link.meter.history.bytes_per_second(now)),
        retransmitted=link.meter.history.retransmitted(now),
        silent_seconds=link.failure_detector.silent_seconds(now) if link.failure_detector.is_suspected(now) else None,
        history=tuple(_minute(minute, now) for minute in link.meter.history.minutes(now)),
    )


def _minute(minute: MinuteStats, now: float) -> LinkMinute:
    return LinkMinute(
        ago_seconds=max(0.0, now - MINUTE_SECONDS * (minute.number + 1)),
        pings=minute.trips,
        round_trip_ms=_ms(minute.trip_sum / minute.trips) if minute.trips else None,
        round_trip_ms_least=_ms(minute.trip_least) if minute.trips else None,
        round_trip_ms_most=_ms(minute.trip_most) if minute.trips else None,
        mbit_per_second=_mbit(minute.bytes_per_second),
        retransmitted=max(0, minute.retransmitted) / minute.sent if minute.sent else None,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1_000 * seconds


def _mbit(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else 8e-6 * bytes_per_second


@dataclass(frozen=True)
class JoinRpcHandler(InvitationRpc):
    peer: RunningPeer

    async def create_invitation(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        if not 1 <= days <= INVITATION_DAYS_MAX:
            raise UserError(f"--days {days} is outside 1..{INVITATION_DAYS_MAX}")
        if self.peer.me not in self.peer.driver.state.members.voters:
            raise UserError("this peer is not a voter, so it cannot invite: `peer peers` shows the voters")
        decided = await trio.to_thread.run_sync(self.peer.driver.store.get_decision, self.peer.driver.state.height)
        anchor = TrustedBlock(decided.height, decided.digest) if decided else None
        now_ms = self.peer.now_ms
        expires_ms = now_ms + days * DAY_MS
        made = make_invitation(self.peer.driver.signer, self.peer.genesis, expires_ms, self._addresses(addresses), anchor)
        # The invitation is stored before it is shown, so that the operator can always revoke it.
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
        return f"invitation {made.token[:8]} is revoked: it admits no member from now on"

    async def dial_address(self, address: str) -> str:
        check_dialable_address(address.rpartition("@")[2], "connect")
        return f"connected to {short_id(await self.peer.network.connect(address))} at {address}"

    def _addresses(self, said: tuple[str, ...]) -> tuple[str, ...]:
        """Return the addresses for an invitation.

        Addresses in `said`, which the user typed, replace this peer's own. Dialed peers' come last.
        """
        if len(said) > ADVERTISED_MAX:
            raise UserError(f"--address: an invitation holds at most {ADVERTISED_MAX} addresses, {len(said)} were given")
        for address in said:
            check_dialable_address(address, "--address")
        mine = said or self.peer.addresses()
        others = sorted(link.address for link in self.peer.network.links() if link.dialed)
        if not mine and (self.peer.config.listen != NO_LISTEN_ADDRESS or not others):
            known = f"this peer listens on {self.peer.config.listen}, and knows only loopback addresses of this machine"
            raise UserError(
                f"{known}; give an address for newcomers: `peer invite --address HOST:PORT`, or the setting `advertise`"
            )
        # With a public address, newcomers are on other machines and cannot reach local addresses.
        if not all(_is_local(address) for address in mine):
            others = [address for address in others if not _is_local(address)]
        return tuple(dict.fromkeys((*mine, *others)))[:ADVERTISED_MAX]


def _is_local(address: str) -> bool:
    return is_loopback(parse_address(address)[0])
