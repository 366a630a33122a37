"""The state machine of sampled audits: the steps of each transaction and each block, as rules on the tables of a job.

`ledger.audits.transitions` lists every transition. `ledger.audits.audit_tables` lists the files of the rules.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from ledger.audits import assignments, disputes, loss_openings
from ledger.audits.audit_state import (
    FINDING_KINDS,
    LOSS_OPENING_KIND,
    VOLUNTEER_KIND,
    AppliedState,
    AuditDuty,
    AuditFinding,
    AuditsState,
    AuditVolunteering,
    JobAudits,
    LossOpeningDuty,
    auditable_proposals_of_others,
    loss_opening_duties,
)
from ledger.audits.audit_tables import LATER_THAN_ANY_ROUND, AuditTables, follow_key_rotations
from ledger.audits.loss_commitments import LossOpening
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.jobs import (
    WINDING_UP_MAX,
    ClosedRound,
    ContestableRound,
    Job,
    JobPhase,
    JobRetained,
    JobRolledBack,
    JobSpecRules,
    JobsState,
    JobStarted,
    SuspendedTrainers,
)
from ledger.members import MembersState
from protocol import codec
from protocol.messages import Proposal
from protocol.verdicts import ReplayFinding

POST_JOB_AUDIT_HEIGHTS = 1_000  # blocks after a job's end in which its audits may continue: transactions have the same lifetime


class AuditsModule(Module[AuditsState]):
    name = "audits"
    contents: ClassVar[Mapping[str, type]] = {
        **dict.fromkeys(FINDING_KINDS, AuditFinding),
        LOSS_OPENING_KIND: LossOpening,
        VOLUNTEER_KIND: AuditVolunteering,
    }
    # Cost of each transaction, in signature checks: a transaction copies and scans the tables of its job.
    costs: ClassVar[Mapping[str, int]] = {"audit/report": 2, "audit/verdict": 6, LOSS_OPENING_KIND: 6, VOLUNTEER_KIND: 24}
    state_type = AuditsState

    def __init__(self, rules: JobSpecRules) -> None:
        self.rules = rules

    def follow_key_rotations(self, state: AuditsState, current: Callable[[bytes], bytes]) -> AuditsState:
        return follow_key_rotations(state, current)

    # Steps of a block

    def apply_transaction(
        self, state: AuditsState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        found: AuditFinding | LossOpening | AuditVolunteering = said.content
        if found.job not in view.module_state(JobsState).jobs or found.job not in state.jobs:
            raise Refused(f"job {found.job.hex()[:8]} has no open audits")
        tables = self._job_tables(state, found.job, view, context.height)
        match said.transaction.kind, found:
            case "audit/report", AuditFinding():
                auditor, proposal = assignments.take_report(tables, said.author, found)
                loss_openings.keep_sealed_loss(tables, auditor, found, proposal)
                event = AuditEvent.PASSES if found.finding is ReplayFinding.MATCH else AuditEvent.FAILS
                moved = AUDIT_TRANSITIONS[AuditStage.AWAITED, event]
                tables.log_result(found.proposal_key, auditor, moved.result, found.finding, found.relative_error_ppm)
                assert moved.effects[:1] == (AuditEffect.COUNT_REPORT,) and {*moved.effects[1:]} <= {AuditEffect.DISPUTE}
                tables.count(tables.current_key(auditor), reports=1)
                if AuditEffect.DISPUTE in moved.effects:
                    disputes.challenge_proposal(tables, auditor, found)
            case "audit/verdict", AuditFinding():
                disputes.apply_verdict(tables, said.author, found)
            case _, LossOpening():
                loss_openings.apply_loss_opening(tables, said.author, found)
            case _, AuditVolunteering():
                assignments.apply_volunteering(tables, said.author, found.round)
        return StateChange(tables.new_state(), tuple(tables.rollbacks_due))

    def settle_block(self, state: AuditsState, view: StateReader, context: BlockContext) -> StateChange:
        """End windows of closed rounds, vest rewards and draw audits.

        Facts tell the module of jobs which trainers are suspended.
        """
        for closed in context.facts_of(ClosedRound):
            if closed.job in state.jobs:
                tables = self._job_tables(state, closed.job, view, context.height)
                accepted = {signed.signer: codec.decode_message(signed.body, (Proposal,)) for signed in closed.proposals}
                _close_windows(tables, closed.round, context.time_ms)
                assignments.assign_audits(tables, closed, accepted)
                disputes.add_rewards(tables, closed.round, accepted)
                state = tables.new_state()
        jobs = view.module_state(JobsState).jobs
        for key in [key for key in state.jobs if jobs[key].phase is JobPhase.SETTLING]:
            # The job is over, so no further round opens and windows end by time alone.
            tables = self._job_tables(state, key, view, context.height)
            tables.closed = LATER_THAN_ANY_ROUND
            is_over = context.height > jobs[key].opened_height + POST_JOB_AUDIT_HEIGHTS
            end_windows(tables, None if is_over else context.time_ms)
            state = tables.new_state()
        reached = {key: audits.first_contestable_round for key, audits in state.jobs.items()}
        doubtful = (ContestableRound(key, number) for key, number in reached.items() if number is not None)
        barred = (SuspendedTrainers(key, audits.suspended) for key, audits in state.jobs.items() if audits.suspended)
        return StateChange(state, (*barred, *doubtful, *map(JobRetained, state.jobs)))

    def end_block(self, state: AuditsState, view: StateReader, context: BlockContext) -> StateChange:
        """Add audits for each started job with sampled audits, stop audits of undone rounds, and end the audits of ended jobs."""
        for back in context.facts_of(JobRolledBack):
            if back.job in state.jobs:
                tables = self._job_tables(state, back.job, view, context.height)
                assignments.undo_rounds(tables, back.anchor.round)
                state = tables.new_state()
        jobs, started = view.module_state(JobsState).jobs, [fact.job for fact in context.facts_of(JobStarted)]
        sampled = {key: JobAudits() for key in started if self.rules.terms_of_spec(jobs[key].spec).audits is not None}
        state = replace(state, jobs={**state.jobs, **sampled}) if sampled else state
        for key in sorted(state.jobs):
            if key not in jobs:
                state = _without_job(state, key)
            elif jobs[key].phase is JobPhase.FINISHED:
                # Audits outlive their job: otherwise its last rounds would never be audited. `new_state` forgets proposals that
                # are only kept for volunteers.
                state = self._job_tables(state, key, view, context.height).new_state()
                audits, last = state.jobs[key], jobs[key].opened_height + POST_JOB_AUDIT_HEIGHTS
                if context.height > last or not (audits.rounds or audits.disputes or audits.unopened_losses):
                    state = self._end_audits(state, key, view, context.height)
        winding = {key: jobs[key] for key in state.jobs if jobs[key].phase is JobPhase.FINISHED}
        while len(winding) > WINDING_UP_MAX:
            key = self._crowded_out(state, winding, view.module_state(MembersState))
            del winding[key]
            state = self._end_audits(state, key, view, context.height)
        return StateChange(state)

    # Audits after a job's end

    def _end_audits(self, state: AuditsState, key: bytes, view: StateReader, height: int) -> AuditsState:
        """End all windows of a job, vest its rewards and delete its tables."""
        tables = self._job_tables(state, key, view, height)
        _close_windows(tables, LATER_THAN_ANY_ROUND, None)
        return _without_job(tables.new_state(), key)

    def _crowded_out(self, state: AuditsState, winding: Mapping[bytes, Job], members: MembersState) -> bytes:
        """Return the ended job whose audits end early, because too many ended jobs have open audits.

        A job with an open dispute is the last choice. A scratch job is the first choice, because it earns no rewards. Among
        equals, the author with the most ended jobs under audit loses the audits of its oldest.
        """
        # One silent auditor keeps the audits of a job open for POST_JOB_AUDIT_HEIGHTS. To end them sooner, an attacker has to
        # start WINDING_UP_MAX other jobs with real work, and the job must have no open dispute.
        begun = Counter(members.current_key(job.author) for job in winding.values())

        def order(key: bytes) -> tuple[bool, bool, int, int, bytes]:
            job = winding[key]
            is_paid = self.rules.terms_of_spec(job.spec).needs_worker
            return bool(state.jobs[key].disputes), is_paid, -begun[members.current_key(job.author)], job.opened_height, key

        return min(winding, key=order)

    # Queries of a peer

    def awaited_job(self, content: AuditFinding | LossOpening | AuditVolunteering) -> bytes:
        """Return the job of the transaction, which may wait for the job's next round certificate: windows end only when a round
        closes.
        """
        return content.job

    def loss_openings_due(self, me: bytes, state: AppliedState) -> list[LossOpeningDuty]:
        """Return the proposals of this peer, as a trainer, whose loss it may open now."""
        mine = loss_opening_duties(me, state)
        tables = {
            key: self._job_tables(state.module_state(AuditsState), key, state, state.height + 1)
            for key in {due.job for due in mine}
        }
        return [due for due in mine if loss_openings.may_open_loss(tables[due.job], due.round, due.trainer)]

    def proposals_to_volunteer_for(self, me: bytes, state: AppliedState) -> list[AuditDuty]:
        """Return the proposals for which this peer would be drawn if it volunteered for their round now, by round."""
        others, trainers = auditable_proposals_of_others(me, state), dict[tuple[bytes, int], list[bytes]]()
        for job, number in {(due.job, due.round) for due in others}:
            tables = self._job_tables(state.module_state(AuditsState), job, state, state.height + 1)
            with contextlib.suppress(Refused):
                _, trainers[job, number] = assignments.proposals_left_to(tables, me, number)
        return [due for due in others if due.trainer in trainers.get((due.job, due.round), ())]

    def _job_tables(self, state: AuditsState, key: bytes, view: StateReader, height: int) -> AuditTables:
        """Return the tables of a job's audits, for a rule that acts in the block of this height."""
        job, members = view.module_state(JobsState).jobs[key], view.module_state(MembersState)
        return AuditTables(state, key, job, self.rules.terms_of_spec(job.spec), members, height)


def _without_job(state: AuditsState, key: bytes) -> AuditsState:
    return replace(state, jobs={other: audits for other, audits in state.jobs.items() if other != key})


def _close_windows(tables: AuditTables, closed: int, now_ms: int | None) -> None:
    """Advance audits after a round has closed: end windows, vest rewards, and end suspensions.

    `now_ms` is the parent block's time; None: windows depend on rounds alone.
    """
    tables.closed = closed
    end_windows(tables, now_ms)
    loss_openings.end_unopened_losses(tables, now_ms)
    disputes.vest_rewards(tables)
    disputes.end_suspensions(tables)
    disputes.forget_claims(tables)


# Windows: the time for reports and verdicts. A window ends once its rounds have closed and its time is over. ---------------


def end_windows(tables: AuditTables, now_ms: int | None) -> None:
    """Let reports lapse and end disputes after the end of their windows.

    `now_ms` is the parent block's time; None: windows depend on rounds alone.
    """
    if now_ms is not None:
        # The block that closes a round does not know its own time, and the parent's time may be much earlier. A window that
        # began at the parent's time would be too short. The window therefore begins at the parent of the block that closes the
        # next round. Judges download the data of one disputed proposal of a trainer at a time (`first_duty_of_each_trainer`).
        # The window of the trainer's next dispute therefore begins when the former dispute ends.
        begun_ms = max(1, now_ms)
        for number, audits in tables.rounds.items():
            if not audits.closed_ms:
                tables.rounds[number] = replace(audits, closed_ms=begun_ms)
        first = {tables.current_key(dispute.trainer): dispute for dispute in reversed(tables.disputes.values())}
        for dispute in first.values():
            if not dispute.opened_ms and dispute.opened < tables.closed:  # other disputes may have begun in this block
                tables.disputes[dispute.proposal_key] = replace(dispute, opened_ms=begun_ms)
    # Reports on proposals of these trainers wait for the end of a dispute, so their windows do not end.
    held_up = frozenset(tables.current_key(dispute.trainer) for dispute in tables.disputes.values())
    for number, audits in list(tables.rounds.items()):
        if not tables.has_rounds(number) and not _has_time(tables, number, audits.closed_ms, now_ms):
            assignments.lapse_reports(tables, number, held_up if now_ms is not None and audits.may_renew_window else frozenset())
    for dispute in list(tables.disputes.values()):
        # A judge that lacks the proposal's data requests them from judges that found the proposal false, which takes a second
        # window.
        windows = 2 if dispute.voted_invalid and dispute.voted_withheld else 1
        has_time = _has_time(tables, dispute.round, dispute.opened_ms, now_ms, windows)
        if not tables.has_rounds(dispute.opened) and not has_time:
            disputes.end_dispute(tables, AuditEvent.TIME, dispute)


def _has_time(tables: AuditTables, number: int, since_ms: int, now_ms: int | None, windows: int = 1) -> bool:
    """Return whether time is left of `windows` audit windows that began at `since_ms`.

    The length of a window depends on the number of re-executors in round `number`.
    """
    window_ms = tables.terms.window_ms(len(tables.rounds[number].reexecutors))
    if tables.closed == LATER_THAN_ANY_ROUND:  # no further rounds close, so the time of the rounds counts as well
        window_ms += tables.window_rounds_ms
    return now_ms is not None and (not since_ms or now_ms < since_ms + windows * window_ms)
