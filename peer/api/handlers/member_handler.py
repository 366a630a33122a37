"""Calls about members: who takes part, who votes, who is gone."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from consensus.voter_set import VoterSet
from features.name_resolution import resolve_peer
from features.text_tables import pluralize
from ledger.members import ApproveVoter, Member, ResignAsVoter, RetireMember, retirement_vote_count, warning_for_removal
from peer.api.running_peer import RunningPeer
from peer.settings.invitation import DAY_MS
from protocol.api import LinkMinute, LinkView, MemberRpc, PeerView
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from transport.connections.peer_link import PeerLink
from transport.wire.link_measurements import MINUTE_SECONDS, MinuteStats

RETIREMENT_VOTE_DAYS = 7  # how long a wish to retire somebody counts: whoever came back since is not retired by surprise


@dataclass(frozen=True)
class MemberRpcHandler(MemberRpc):
    peer: RunningPeer

    async def peers(self) -> tuple[PeerView, ...]:
        members = self.peer.driver.state.members
        links = {link.peer: link for link in self.peer.network.links()}
        known = sorted(set(members.members) | set(links) | {self.peer.me})
        return tuple(self._peer(key, links.get(key)) for key in known)

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
        members = self.peer.driver.state.members
        if candidate not in members.candidates:
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
