"""Calls about sampled audits and challenges."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from ledger.audits.state import (
    VOLUNTEERS,
    Due,
    Entry,
    JobAudits,
    Result,
    Standing,
    Volunteering,
    due_for,
    others_audited,
)
from ledger.state import State
from peer.api.naming import find
from peer.api.running import RunningPeer
from peer.driver.auditing import CHALLENGE_MARGIN, describe, finding_label
from protocol.api import AuditCalls, AuditsView, AuditView, StandingView, SuspensionView
from protocol.errors import FolkmootError, UserError
from protocol.identity import peer_id, short_id
from protocol.reasons import Finding
from protocol.units import nth_round
from training.spec import JobSpec


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
        if self.peer.driver.workshop.role.computing is None:
            raise UserError("this peer has no worker to re-execute with: ask one with --role trainer")
        accused = find(trainer, self.peer.driver.state.members)
        entry = None if round is None else self._reported(accused, round)
        if entry is None or entry.result is Result.LAPSED:
            due = self._to_audit(accused, round)
            if not due.auditor:
                try:
                    await self.peer.author.submit(VOLUNTEERS, Volunteering(due.job, due.round), math.inf)
                except FolkmootError as error:
                    raise UserError(str(error)) from None
            while due.place in {other.place for other in self._awaited() if other.job == due.job}:
                await self.peer.driver.applied.wait()
            entry = self._reported(accused, due.round, due.job)
        state = self.peer.driver.state
        if entry is None:
            raise UserError("this peer has not reported on that proposal: it is disputed, or its round was undone meanwhile")
        said, job = describe(entry, state), state.jobs.jobs.get(entry.job)
        if job is None or not (entry.relative_error_ppm or entry.finding is Finding.MATCH):
            return said  # nothing was replayed
        most = CHALLENGE_MARGIN * JobSpec.decode(job.spec).replay_tolerance
        return f"{said}; {(entry.relative_error_ppm or 0) / 1e6:.1e} of the change differs when replayed, up to {most:.0e} passes"

    def _to_audit(self, trainer: bytes, round: int | None) -> Due:
        """The last proposal of this trainer, in that round, that this peer reports on or may volunteer for."""
        me, state = self.peer.me, self.peer.driver.state
        disputed = {(job, of.place) for job, audits in state.audits.jobs.items() for of in audits.disputes}
        found = [
            due
            for due in (*others_audited(me, state), *self._awaited())
            if state.members.current(due.trainer) == trainer
            and round in (None, due.round)
            and (due.job, due.place) not in disputed
        ]
        if not found:
            which = f"proposal of {short_id(trainer)}" + ("" if round is None else f" in round {nth_round(round)}")
            must = "accepted in a job with audit=sampled, not long ago, and not disputed"
            raise UserError(
                f"no {which} can be re-executed now: it must be {must}, and this peer must not have volunteered before"
            )
        return max(found, key=lambda due: (state.jobs.jobs[due.job].started, due.round, due.auditor))

    def _awaited(self) -> list[Due]:
        return [due for due in due_for(self.peer.me, self.peer.driver.state) if not due.is_dispute]

    def _reported(self, trainer: bytes, round: int, job: bytes | None = None) -> Entry | None:
        """What this peer reported last on the proposal of this trainer in that round."""
        current, results = self.peer.driver.state.members.current, (Result.PASSED, Result.CHALLENGED, Result.LAPSED)
        for entry in reversed(self.peer.driver.state.audits.log):
            is_mine = entry.result in results and current(entry.auditor) == self.peer.me
            if is_mine and current(entry.trainer) == trainer and entry.round == round and job in (None, entry.job):
                return entry
        return None


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
