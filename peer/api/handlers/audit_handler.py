"""Calls about sampled audits and challenges."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from features.name_resolution import resolve_peer
from ledger.audits.audit_state import (
    CHALLENGES_OPEN_MAX,
    VOLUNTEER_KIND,
    AuditDuty,
    AuditLogEntry,
    AuditResult,
    AuditVolunteering,
    JobAudits,
    MemberAuditRecord,
    ProposalKey,
    audit_duties,
    auditable_proposals_of_others,
)
from ledger.ledger_state import LedgerState
from peer.api.running_peer import RunningPeer
from peer.runtime.auditor import CHALLENGE_MARGIN, describe_audit_entry, finding_label
from protocol.api import AuditRecordView, AuditRpc, AuditsView, AuditView, SuspensionView
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from protocol.units import display_round_number
from protocol.verdicts import ReplayFinding
from training.job_spec import JobSpec


@dataclass(frozen=True)
class AuditRpcHandler(AuditRpc):
    peer: RunningPeer

    async def audits(self, last: int) -> AuditsView:
        state = self.peer.driver.state
        log = state.audits.log[-max(1, last) :]
        standings = tuple(audit_record_view(key, standing) for key, standing in sorted(state.audits.member_records.items()))
        return AuditsView(standings, tuple(_audit(entry, state) for entry in log), list_suspensions(state))

    async def challenge_trainer(self, trainer: str, round: int | None) -> str:
        self.peer.require_member()
        if self.peer.driver.round_executor.participant.worker_client is None:
            raise UserError("this peer cannot re-execute without a worker: use a peer with --role trainer")
        due = await self._to_audit(
            self.peer.driver.state.members.current_key(resolve_peer(trainer, self.peer.driver.state.members)), round
        )
        entry = self._reported(due)
        if entry is None:
            self.peer.auditor.asked.append(place := (due.job, due.proposal_key))
            try:
                await self._volunteer(due)
                while place in self._awaited():
                    await self.peer.driver.block_applied.wait()
            finally:
                self.peer.auditor.asked.remove(place)
            entry = self._reported(due)
        if entry is None:
            lost, undone = "the audit log no longer has the report of this peer", "the round was undone before this peer reported"
            job = self.peer.state.jobs.jobs.get(due.job)
            is_in_model = job is not None and not any(of.first <= due.round <= of.last for of in job.undone_rounds)
            why = lost if is_in_model else undone
            raise UserError(f"{why}: `peer audits` has the results")
        if entry.result is AuditResult.LAPSED:
            raise UserError(describe_audit_entry(entry, self.peer.driver.state))
        return _told(entry, self.peer.driver.state)

    async def _volunteer(self, due: AuditDuty) -> None:
        """Volunteer to audit the proposal's round, unless this peer already owes a report on the proposal."""
        place, applied = (due.job, due.proposal_key), self.peer.driver.block_applied
        if place in self._awaited():
            return
        try:
            await self.peer.submitter.submit(VOLUNTEER_KIND, AuditVolunteering(due.job, due.round), math.inf)
        except UserError:
            await applied.wait()  # another request or the auditor itself may have volunteered meanwhile
            if place not in self._awaited() and self._reported(due) is None:
                raise

    async def _to_audit(self, trainer: bytes, round: int | None) -> AuditDuty:
        """Return the duty to audit the trainer's newest proposal that this peer may audit or has audited.

        `round` limits the choice to one round. If this peer owes reports as a volunteer, the call waits for them: the ledger
        accepts no new volunteering before. Raises `UserError` if there is no such proposal.
        """
        me = self.peer.me
        while True:
            applied, state = self.peer.driver.block_applied, self.peer.driver.state
            awaited, jobs = self._awaited(), state.audits.jobs
            left = {
                (due.job, due.proposal_key) for due in self.peer.driver.rules.audits_module.proposals_to_volunteer_for(me, state)
            }
            busy = {job for (job, (number, _)), mine in awaited.items() if mine in jobs[job].rounds[number].volunteers}
            others = [
                due for due in auditable_proposals_of_others(me, state) if state.members.current_key(due.trainer) == trainer
            ]
            found = [due for due in others if round in (None, due.round)]
            for due in sorted(found, key=lambda due: (state.jobs.jobs[due.job].started_height, due.round), reverse=True):
                if (due.job, due.proposal_key) in left | awaited.keys() or self._reported(due) is not None:
                    return due
                if due.job in busy and me not in map(state.members.current_key, jobs[due.job].rounds[due.round].volunteers):
                    break
            else:
                raise UserError(self._why_not(trainer, round))
            await applied.wait()

    def _why_not(self, trainer: bytes, round: int | None) -> str:
        """Return a text for people: the reason why no proposal of this trainer can be re-executed.

        `round` None means any round.
        """
        state, which = self.peer.driver.state, "" if round is None else f" in round {display_round_number(round)}"
        whose = f"{short_id(trainer)}{which}"
        if trainer == self.peer.me:
            return "a peer cannot challenge its own proposals: choose another trainer"
        if not state.audits.jobs:
            return "no job with audit=sampled is running: `peer rounds` shows re-executions of other jobs"
        kept = (
            (number, key) for audits in state.audits.jobs.values() for number, of in audits.rounds.items() for key in of.proposals
        )
        if not any(state.members.current_key(key) == trainer and round in (None, number) for number, key in kept):
            when = "unless voters re-executed them before the vote, or the round was undone"
            return f"no proposal of {whose} can be audited: accepted proposals can be until their audit_window ends, {when}"
        standing = f"in good standing with fewer than {CHALLENGES_OPEN_MAX} open disputes and few claims of withheld buffers"
        needs = f"it needs an undisputed proposal, a peer {standing}, and no earlier challenge of this peer in the round"
        return f"this peer cannot challenge {whose}: {needs}"

    def _awaited(self) -> dict[tuple[bytes, ProposalKey], bytes]:
        """Return the reports that this peer owes: (job, proposal key) -> the public key with which this peer signs the report."""
        return {
            (due.job, due.proposal_key): due.auditor
            for due in audit_duties(self.peer.me, self.peer.driver.state)
            if not due.is_dispute
        }

    def _reported(self, due: AuditDuty) -> AuditLogEntry | None:
        """Return this peer's last report on the proposal, or None if the ledger's bounded log of audits has none."""
        current, results = (
            self.peer.driver.state.members.current_key,
            (AuditResult.PASSED, AuditResult.CHALLENGED, AuditResult.LAPSED),
        )
        for entry in reversed(self.peer.driver.state.audits.log):
            is_mine = entry.result in results and current(entry.auditor) == self.peer.me
            if is_mine and (entry.job, entry.round, entry.trainer) == (due.job, *due.proposal_key):
                return entry
        return None


def _told(entry: AuditLogEntry, state: LedgerState) -> str:
    said, job = describe_audit_entry(entry, state), state.jobs.jobs.get(entry.job)
    if job is not None:
        spec = JobSpec.decode(job.spec)
        meaning = {reason.label: reason.meaning for reason in spec.resolved_objective.rejection_reasons}.get(
            finding_label(entry, state)
        )
        if meaning is not None:
            said = f"{said}: {meaning}"
        elif entry.relative_error_ppm or entry.finding is ReplayFinding.MATCH:  # the auditor re-executed the proposal
            error, most = (entry.relative_error_ppm or 0) / 1e6, CHALLENGE_MARGIN * spec.replay_tolerance
            said = f"{said}; the re-executed update differs by {100 * error:.2g} % of its length (tolerance {100 * most:.2g} %)"
    return (
        f"{said}; the other auditors judge the challenge: see `peer audits`" if entry.result is AuditResult.CHALLENGED else said
    )


def list_suspensions(state: LedgerState) -> tuple[SuspensionView, ...]:
    """Return all suspensions in running jobs with their causes, also those whose entry the bounded log of audits has dropped."""
    found = []
    for key, job in state.jobs.running().items():
        audits = state.audits.jobs.get(key, JobAudits())
        for trainer, until in sorted(audits.suspended.items()):
            if until > job.round:
                # the log entry of a lazy auditor names the trainer that it audited, but the auditor itself is suspended
                cause = replace(audits.suspension_causes[trainer], trainer=trainer)
                found.append(SuspensionView(until, _audit(cause, state)))
    return tuple(found)


def audit_record_view(key: bytes, standing: MemberAuditRecord) -> AuditRecordView:
    return AuditRecordView(
        peer_id(key),
        rewards=standing.rewards,
        rewards_lost=standing.rewards_lost,
        suspensions=standing.suspensions,
        reports=standing.reports,
        reports_lapsed=standing.lapsed,
        challenges_upheld=standing.upheld,
        challenges_refuted=standing.refuted,
        wrong_losses=standing.wrong_losses,
    )


def _audit(entry: AuditLogEntry, state: LedgerState) -> AuditView:
    members = state.members
    return AuditView(
        height=entry.height,
        job=entry.job.hex(),
        round=entry.round,
        trainer=peer_id(members.current_key(entry.trainer)),
        auditor=peer_id(members.current_key(entry.auditor)),
        result=entry.result.value,
        finding=finding_label(entry, state),
        relative_error=None if entry.relative_error_ppm is None else entry.relative_error_ppm / 1e6,
    )
