"""Calls about sampled audits and challenges."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ledger.audits.state import CHALLENGES_OPEN_MAX, Entry, JobAudits, Standing
from ledger.state import State
from peer.api.naming import find
from peer.api.running import RunningPeer
from peer.driver.auditing import finding_label
from protocol.api import AuditCalls, AuditsView, AuditView, StandingView, SuspensionView
from protocol.errors import FolkmootError, UserError
from protocol.identity import peer_id, short_id
from protocol.units import nth_round


@dataclass(frozen=True)
class AuditAnswers(AuditCalls):
    peer: RunningPeer

    async def audits(self, last: int) -> AuditsView:
        state = self.peer.driver.state
        log = state.audits.log[-max(1, last) :]
        standings = tuple(standing_of(key, standing) for key, standing in sorted(state.audits.standings.items()))
        return AuditsView(standings, tuple(_audit(entry, state) for entry in log), suspensions(state))

    async def challenge(self, trainer: str, round: int | None) -> str:
        self.peer.require_member()
        state, accused = self.peer.driver.state, find(trainer, self.peer.driver.state.members)
        current = state.members.current
        found = [
            due
            for due in self.peer.driver.rules.audits.challengeable(self.peer.me, state)
            if current(due.trainer) == current(accused) and round in (None, due.round)
        ]
        if not found:
            which = f"proposal of {short_id(accused)}" + ("" if round is None else f" in round {nth_round(round)}")
            must = "be accepted in a job with audit=sampled, its window open, its trainer not suspended since"
            me = f"in good standing, with no challenge spent on that round and fewer than {CHALLENGES_OPEN_MAX} disputes open"
            raise UserError(f"no {which} can be challenged from here now: it must {must}, and this peer a re-executor {me}")
        try:
            return await self.peer.challenge_due(max(found, key=lambda due: (state.jobs.jobs[due.job].started, due.round)))
        except FolkmootError as error:
            raise UserError(str(error)) from None


def suspensions(state: State) -> tuple[SuspensionView, ...]:
    """Who may not train in running jobs, and why, however much was logged since."""
    found = []
    for key, job in state.jobs.running().items():
        audits = state.audits.jobs.get(key, JobAudits())
        for trainer, until in sorted(audits.suspended.items()):
            if until > job.round:
                cause = replace(audits.causes[trainer], trainer=trainer)  # a lazy auditor is suspended as a trainer, too
                found.append(SuspensionView(until, _audit(cause, state)))
    return tuple(found)


def standing_of(key: bytes, standing: Standing) -> StandingView:
    return StandingView(peer_id(key), **asdict(standing))


def _audit(entry: Entry, state: State) -> AuditView:
    members = state.members
    return AuditView(
        height=entry.height,
        job=entry.job.hex(),
        round=entry.round,
        trainer=peer_id(members.current(entry.trainer)),
        auditor=peer_id(members.current(entry.auditor)),
        result=entry.result.value,
        finding=finding_label(entry, state),
        relative_error=None if entry.relative_error_ppm is None else entry.relative_error_ppm / 1e6,
    )
