"""Calls about the network: its members and newcomers, its blocks and rows, what it runs, and how it moves on."""

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
from ledger.network_governance import PARAMETERS_LIMIT, ModuleUpgrade, NetworkLimit, NetworkState
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
from protocol.limits import ADVERTISED_MAX, PARAMETERS_ALLOWED_MAX
from protocol.messages import Commit
from transport.connections.peer_link import PeerLink
from transport.wire.link_measurements import MINUTE_SECONDS, MinuteStats

UPGRADE_HEIGHTS = 100  # from now to an upgrade whose height nobody names: minutes of a network that trains

RETIREMENT_VOTE_DAYS = 7  # how long a wish to retire somebody counts: whoever came back since is not retired by surprise


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
        return f"{count} of the {needed} voters needed want {wish.version} from height {wish.height}"

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        self.peer.require_member()
        known = _known()
        _, versions = known.get(module, (None, ()))
        if version not in versions:
            has = f"it knows {module} {', '.join(map(str, versions))}" if versions else f"it knows {', '.join(known)}"
            raise UserError(f"this program has no {module} {version} ({has}): it could not go on itself after that upgrade")
        wish = ModuleUpgrade(module, version, height or self.peer.driver.state.height + UPGRADE_HEIGHTS)
        await self.peer.submitter.submit("network/upgrade", wish)
        if wish in self._network.due_upgrades:
            return f"decided: the network runs {module} {version} from height {wish.height} on; peers that lack it stop before"
        return self._wish(wish, self._wishes(module)[wish])

    async def limits(self) -> tuple[LimitView, ...]:
        wishes = tuple(self._limit_wish(wish, count) for wish, count in Counter(self._network.limit_votes.values()).items())
        return (LimitView(PARAMETERS_LIMIT, self._network.parameters_max, wishes),)

    async def set_limit(self, name: str, most: int) -> str:
        self.peer.require_member()
        if name != PARAMETERS_LIMIT:
            raise UserError(f"{name!r} is no limit that voters set; say `limit {PARAMETERS_LIMIT} N`")
        if most > PARAMETERS_ALLOWED_MAX:
            raise UserError(f"{PARAMETERS_LIMIT} {most}: {PARAMETERS_ALLOWED_MAX} are the most that voters can allow")
        wish = NetworkLimit(name, most)
        await self.peer.submitter.submit("network/limit", wish)
        if self._network.parameters_max == most:
            return f"decided: models of jobs have {most} {name} at most from now on"
        return self._limit_wish(wish, Counter(self._network.limit_votes.values())[wish])

    def _limit_wish(self, wish: NetworkLimit, count: int) -> str:
        needed = VoterSet(self.peer.driver.state.members.voters).quorum
        return f"{count} of the {needed} voters needed want models of at most {wish.most} {wish.name}"


def _known() -> dict[str, tuple[Feature, tuple[int, ...]]]:
    """By module: the feature of this program that brings it, and the versions that it knows."""
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
            raise UserError(f"there is no block of height {height} here: this peer has applied height {state.height}")
        block, certificate = decided.decode(), decided.certificate
        voters = next((voters for voters in self._sets(state) if voters.hash == block.voters), None)
        if voters is None:
            raise UserError(f"this peer no longer knows who voted at height {height}")
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
        """All sets of voters that this peer knows, the newest first as far as that is cheap."""
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
            raise UserError("no state is certified yet: the next decided block certifies the one before it")
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
            seen.append(f"stands as a voter: {self._approvals(key)}")
        if wishes := retirement_vote_count(members, key):
            seen.append(f"{wishes} of {VoterSet(members.voters).quorum} want it retired")
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
            return f"{short_id(candidate)} has the approvals it needs and votes two heights later"
        return f"{short_id(candidate)} has {self._approvals(candidate)}"

    async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
        subject = resolve_peer(peer, self.peer.driver.state.members)
        before = self.peer.driver.state.members.retirement_votes.get(self.peer.me)
        await self.peer.submitter.submit(
            "member/retire", RetireMember(subject, lower_tolerance, self.peer.now_ms + RETIREMENT_VOTE_DAYS * DAY_MS)
        )
        members = self.peer.driver.state.members
        if self.peer.me not in members.retirement_votes:  # they go when they have acted
            text = f"{short_id(subject)} is retired: it loses its vote and roles, nothing waits for it, and it stays a member"
            return f"{text}. Should it come back, it trains at once, and votes when people have approved it anew"
        wanted = f"{retirement_vote_count(members, subject)} of the {VoterSet(members.voters).quorum} voters needed want"
        text = f"{wanted} {short_id(subject)} retired; each wish counts for {RETIREMENT_VOTE_DAYS} days"
        if before is not None and before.subject != subject:
            text += f". Your wish about {short_id(before.subject)} is withdrawn by this one"
        return text

    async def resign_as_voter(self) -> str:
        warning = warning_for_removal(len(self.peer.driver.state.members.voters))
        self.peer.membership.wants_to_vote = False  # first: the peer must not ask for its vote again as soon as it is without
        try:
            await self.peer.submitter.submit("member/resign", ResignAsVoter())
        except UserError:
            self.peer.membership.wants_to_vote = self.peer.config.stand
            raise
        text = "this peer stops voting in two heights; start it with --no-stand, or it asks for its vote again"
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
