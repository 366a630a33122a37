"""The rules of sampled audits: what is drawn when a round closes, how a dispute ends, and what follows from it.

`ledger.audits.transitions` has every transition as a table; here is when each of them happens. Decisions 0028 (draws) and 0033
(disputes and suspension) say why the rules are these.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from consensus.quorum import faults_tolerated
from ledger.audits import loss_commitments, sortition
from ledger.audits.audit_state import (
    AUDIT_LOG_MAX,
    AUDITABLE_PROPOSALS_MAX,
    CHALLENGES_OPEN_MAX,
    FALSE_CHALLENGES_MAX,
    FINDING_KINDS,
    LOSS_OPENING_KIND,
    UNOPENED_MAX,
    VOLUNTEER_KIND,
    AppliedState,
    AuditableProposal,
    AuditDuty,
    AuditFinding,
    AuditLogEntry,
    AuditResult,
    AuditsState,
    AuditVolunteering,
    Dispute,
    JobAudits,
    LossOpeningDuty,
    MemberAuditRecord,
    ProposalKey,
    RoundAudits,
    WithheldClaims,
    auditable_proposals_of_others,
    loss_opening_duties,
)
from ledger.audits.loss_commitments import LossComparisons, LossOpening, SealedLoss, UnopenedLosses
from ledger.audits.sortition import NonceCommitment
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage, AuditTransition
from ledger.core.genesis import Genesis
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.jobs import (
    SUSPENSION_DOUBLINGS_MAX,
    WINDING_UP_MAX,
    AuditTerms,
    ClosedRound,
    ContestableRound,
    Job,
    JobPhase,
    JobRetained,
    JobRolledBack,
    JobSpecRules,
    JobsState,
    JobStarted,
    JobTerms,
    RollbackDue,
    SuspendedTrainers,
)
from ledger.members import MembersState
from ledger.model_anchors import UndoReason
from protocol import codec
from protocol.identity import short_id
from protocol.messages import LossCommitment, Proposal
from protocol.units import display_round_number
from protocol.verdicts import ReplayFinding

POST_JOB_AUDIT_HEIGHTS = 1_000  # after a job's end its audits go on for so long; a transaction may wait as long
LATER_THAN_ANY_ROUND = 2**53 - 1  # later than any

T = TypeVar("T")


class AuditsModule(Module[AuditsState]):
    name = "audits"
    contents: ClassVar[Mapping[str, type]] = {
        **dict.fromkeys(FINDING_KINDS, AuditFinding),
        LOSS_OPENING_KIND: LossOpening,
        VOLUNTEER_KIND: AuditVolunteering,
    }
    # The tables of the job are copied and looked through.
    costs: ClassVar[Mapping[str, int]] = {"audit/report": 2, "audit/verdict": 6, LOSS_OPENING_KIND: 6, VOLUNTEER_KIND: 24}
    state_type = AuditsState

    def __init__(self, rules: JobSpecRules) -> None:
        self.rules = rules

    def genesis_state(self, genesis: Genesis) -> AuditsState:
        return AuditsState()

    def apply_transaction(
        self, state: AuditsState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        found: AuditFinding | LossOpening | AuditVolunteering = said.content
        job = view.module_state(JobsState).jobs.get(found.job)
        if job is None or found.job not in state.jobs:
            raise Refused("no audits of such a job are open")
        docket = self._docket(state, found.job, job, view.module_state(MembersState), context.height)
        match said.transaction.kind, found:
            case "audit/report", AuditFinding():
                docket.apply_report(said.author, found)
            case "audit/verdict", AuditFinding():
                docket.apply_verdict(said.author, found)
            case _, LossOpening():
                docket.apply_loss_opening(said.author, found)
            case _, AuditVolunteering():
                docket.apply_volunteering(said.author, found.round)
        return StateChange(docket.new_state(), tuple(docket.rollbacks_due))

    def follow_key_rotations(self, state: AuditsState, current: Callable[[bytes], bytes]) -> AuditsState:
        return follow_key_rotations(state, current)

    def settle_block(self, state: AuditsState, view: StateReader, context: BlockContext) -> StateChange:
        """Audits of closed rounds lapse, rewards vest, audits are drawn. Suspended trainers are barred from the next rounds."""
        members, jobs = view.module_state(MembersState), view.module_state(JobsState).jobs
        for closed in context.facts_of(ClosedRound):
            state = self.close_round_audits(state, jobs[closed.job], members, context, closed)
        for key in [key for key in state.jobs if jobs[key].phase is JobPhase.SETTLING]:
            docket = self._docket(state, key, jobs[key], members, context.height)
            is_over = context.height > jobs[key].opened_height + POST_JOB_AUDIT_HEIGHTS
            docket.end_windows_by_time(None if is_over else context.time_ms)
            state = docket.new_state()
        reached = {key: audits.first_contestable_round for key, audits in state.jobs.items()}
        doubtful = (ContestableRound(key, number) for key, number in reached.items() if number is not None)
        barred = (SuspendedTrainers(key, audits.suspended) for key, audits in state.jobs.items() if audits.suspended)
        return StateChange(state, (*barred, *doubtful, *map(JobRetained, state.jobs)))

    def end_block(self, state: AuditsState, view: StateReader, context: BlockContext) -> StateChange:
        """A job that started gets its tables; rounds that were undone are audited no more; a job that ended is wound up."""
        for back in context.facts_of(JobRolledBack):
            if back.job in state.jobs:
                docket = self._docket(
                    state, back.job, view.module_state(JobsState).jobs[back.job], view.module_state(MembersState), context.height
                )
                docket.undo_rounds(back.anchor.round)
                state = docket.new_state()
        started = [fact.job for fact in context.facts_of(JobStarted)]
        return StateChange(
            self._moved_on(state, view.module_state(JobsState).jobs, started, view.module_state(MembersState), context.height)
        )

    def awaited_job(self, content: AuditFinding | LossOpening | AuditVolunteering) -> bytes:
        """Until the job's next closing: windows end there and nowhere else, so nothing is late before it."""
        return content.job

    def loss_openings_due(self, me: bytes, state: AppliedState) -> list[LossOpeningDuty]:
        """My proposals whose loss I may open now."""
        mine = loss_opening_duties(me, state)
        dockets = {key: self._of(key, state) for key in {due.job for due in mine}}
        return [due for due in mine if dockets[due.job].may_open_loss(due.round, due.trainer)]

    def proposals_to_volunteer_for(self, me: bytes, state: AppliedState) -> list[AuditDuty]:
        """Proposals that I am drawn for if I volunteer for their round now, by round."""
        others, trainers = auditable_proposals_of_others(me, state), dict[tuple[bytes, int], list[bytes]]()
        for job, number in {(due.job, due.round) for due in others}:
            with contextlib.suppress(Refused):
                _, trainers[job, number] = self._of(job, state).left_to(me, number)
        return [due for due in others if due.trainer in trainers.get((due.job, due.round), ())]

    def _of(self, key: bytes, state: AppliedState) -> AuditStateMachine:
        """As the next block finds it."""
        return self._docket(state.audits, key, state.jobs.jobs[key], state.members, state.height + 1)

    def close_round_audits(
        self, state: AuditsState, job: Job, members: MembersState, context: BlockContext, closed: ClosedRound
    ) -> AuditsState:
        """`job` is still the closed round's."""
        if closed.job not in state.jobs:
            return state
        docket = self._docket(state, closed.job, job, members, context.height)
        docket.apply_round_close(closed.round, context.time_ms)
        docket.assign_audits(closed)
        return docket.new_state()

    def _moved_on(
        self, state: AuditsState, jobs: Mapping[bytes, Job], started: Iterable[bytes], members: MembersState, height: int
    ) -> AuditsState:
        sampled = {key: JobAudits() for key in started if self.rules.terms_of_spec(jobs[key].spec).audits is not None}
        state = replace(state, jobs={**state.jobs, **sampled}) if sampled else state
        for key in sorted(state.jobs):
            job = jobs.get(key)
            if job is None or job.phase is JobPhase.FINISHED:
                state = self._wind_up(state, key, job, members, height)
        winding = {key: jobs[key] for key in state.jobs if jobs[key].phase is JobPhase.FINISHED}
        while len(winding) > WINDING_UP_MAX:
            key = self._crowded_out(state, winding, members)
            state = self._settled(state, key, winding.pop(key), members, height)
        return state

    def _crowded_out(self, state: AuditsState, winding: Mapping[bytes, Job], members: MembersState) -> bytes:
        """The ended job whose audits make room for another's. A job with an open dispute goes last, a scratch job first: it paid
        nobody. Among equals the author who began most of these jobs loses its oldest.
        """
        # One silent auditor keeps a job here for POST_JOB_AUDIT_HEIGHTS. A liar that wants the audits of a job over sooner has to
        # start WINDING_UP_MAX others with real work in them, and no dispute may be open in that job.
        begun = Counter(members.current_key(job.author) for job in winding.values())

        def order(key: bytes) -> tuple[bool, bool, int, int, bytes]:
            job = winding[key]
            is_paid = self.rules.terms_of_spec(job.spec).needs_worker
            return bool(state.jobs[key].disputes), is_paid, -begun[members.current_key(job.author)], job.opened_height, key

        return min(winding, key=order)

    def _wind_up(self, state: AuditsState, key: bytes, job: Job | None, members: MembersState, height: int) -> AuditsState:
        """Audits outlive their job: otherwise nobody would have to fear them in its last rounds."""
        if job is None:
            return _without_job(state, key)
        # `new_state` forgets proposals that are only kept for volunteers.
        state = self._docket(state, key, job, members, height).new_state()
        audits = state.jobs[key]
        if (audits.rounds or audits.disputes or audits.unopened_losses) and height <= job.opened_height + POST_JOB_AUDIT_HEIGHTS:
            return state
        return self._settled(state, key, job, members, height)

    def _settled(self, state: AuditsState, key: bytes, job: Job, members: MembersState, height: int) -> AuditsState:
        """What is open runs out, every reward vests, and the job's tables go."""
        docket = self._docket(state, key, job, members, height)
        docket.apply_round_close(LATER_THAN_ANY_ROUND, None)
        return _without_job(docket.new_state(), key)

    def _docket(self, state: AuditsState, key: bytes, job: Job, members: MembersState, height: int) -> AuditStateMachine:
        terms = self.rules.terms_of_spec(job.spec)
        return AuditStateMachine(follow_key_rotations(state, members.current_key), key, job, terms, members, height)


def _without_job(state: AuditsState, key: bytes) -> AuditsState:
    return replace(state, jobs={other: audits for other, audits in state.jobs.items() if other != key})


# Rules ---------------------------------------------------------------------------------------------------------------


class AuditStateMachine:
    """The audits of one job while a block changes them. Raises `Refused`, and is then thrown away."""

    def __init__(self, state: AuditsState, key: bytes, job: Job, terms: JobTerms, members: MembersState, height: int) -> None:
        assert terms.audits is not None
        self._state, self._key, self._job, self._members, self._height = state, key, job, members, height
        self._terms: AuditTerms = terms.audits
        self._rounds_ms = round(1_000 * terms.proposal_seconds * terms.audits.window)  # the longest that a window's rounds take
        self._is_rewarded = terms.needs_worker  # everybody knows the update of a scratch job: it costs its trainer nothing
        self._closed = job.round - 1  # the last closed round
        audits = state.jobs[key]
        self._rounds, self._disputes = dict(audits.rounds), list(audits.disputes)
        self._commitments, self._unvested = dict(audits.commitments), dict(audits.unvested_rounds)
        self._suspended, self._unheard = dict(audits.suspended), dict(audits.ignored_challengers)
        self._withheld, self._causes = dict(audits.withheld_claims), dict(audits.suspension_causes)
        self._unopened, self._compared = (
            {key: dict(of) for key, of in audits.unopened_losses.items()},
            dict(audits.loss_comparisons),
        )
        self._standings, self._log = dict(state.member_records), list(state.log)
        self.rollbacks_due: list[RollbackDue] = []  # of updates that are in the model

    def new_state(self) -> AuditsState:
        self._tidy()
        self._bound_unopened()
        self._assert_sound()
        unopened = {number: of for number, of in self._unopened.items() if of}
        tables = (self._suspended, self._unheard, self._unvested, self._withheld, self._causes, unopened, self._compared)
        audits = JobAudits(self._rounds, tuple(self._disputes), self._commitments, *tables)
        return AuditsState({**self._state.jobs, self._key: audits}, self._standings, tuple(self._log[-AUDIT_LOG_MAX:]))

    def _assert_sound(self) -> None:
        assert self._causes.keys() == self._suspended.keys(), "every suspended trainer is told why"
        for dispute in self._disputes:
            assert dispute.trainer in self._rounds[dispute.round].proposals, "judges need the proposal"
            assert dispute.opened <= self._job.round or self._job.phase is JobPhase.FINISHED, "only an end takes its number back"

    # What members say

    def apply_report(self, author: bytes, report: AuditFinding) -> None:
        """A drawn auditor says what it found."""
        drawn = self._drawn(report.round, report.trainer)
        auditor = self._speaking_for(drawn.pending_auditors, author) if drawn else None
        if drawn is None or auditor is None:
            raise Refused(f"no report of {short_id(author)} on that proposal is awaited")
        self._require_loss(report, drawn.proposal)
        self._put(report.round, report.trainer, _without(drawn, auditor))
        if report.loss is not None and drawn.proposal.loss is not None:
            self._seal(report, auditor, report.loss, drawn.proposal.loss)
        event = AuditEvent.PASSES if report.finding is ReplayFinding.MATCH else AuditEvent.FAILS
        self._move_audit(event, report.proposal_key, auditor, report)

    def apply_volunteering(self, author: bytes, number: int) -> None:
        """A re-executor is drawn for all proposals of a round in the window that it has not reported on."""
        auditor, trainers = self.left_to(author, number)
        assert AUDIT_TRANSITIONS[AuditStage.UNDISPUTED, AuditEvent.VOLUNTEERED] == AuditTransition(AuditStage.AWAITED)
        audits = self._rounds[number]
        pending = {key: tuple(sorted({*audits.proposals[key].pending_auditors, auditor})) for key in trainers}
        drawn = {key: replace(audits.proposals[key], pending_auditors=pending[key]) for key in trainers}
        self._rounds[number] = replace(audits, proposals={**audits.proposals, **drawn}, volunteers=(*audits.volunteers, auditor))

    def left_to(self, author: bytes, number: int) -> tuple[bytes, list[bytes]]:
        """The author's key of that round, and whose proposals it is drawn for if it volunteers. Raises `Refused` if it may not.

        It has to report on all that it volunteered for before it volunteers again: otherwise liars would be awaited everywhere,
        and hold up what honest auditors report.
        """
        audits = self._rounds.get(number)
        if audits is None or not self._has_rounds(number) or self._job.is_trained:
            raise Refused(f"no proposal of round {display_round_number(number)} can be drawn now")
        auditor = self._speaking_for(audits.reexecutors, author)
        if auditor is None or not self._is_trusted(author):
            raise Refused(f"{short_id(author)} may not re-execute round {display_round_number(number)}")
        self._require_heard(author)
        for other, of in self._rounds.items():
            key = self._speaking_for(of.volunteers, author)
            if key is not None and other == number:
                raise Refused(f"{short_id(author)} has volunteered for round {display_round_number(number)} already")
            if key is not None and any(key in drawn.pending_auditors for drawn in of.proposals.values()):
                raise Refused(f"{short_id(author)} has not reported yet on all of round {display_round_number(other)}")
        current, disputed, sealed = self._members.current_key, self._disputed(number), self._unopened.get(number, {})
        found = [
            trainer
            for trainer in audits.proposals
            if author != current(trainer)
            and author not in _apart(self._withheld.get(current(trainer), {}))
            and trainer not in disputed
            and (trainer not in sealed or auditor not in sealed[trainer].reports)
        ]
        if not found:
            raise Refused(f"nothing of round {display_round_number(number)} is left to draw for {short_id(author)}")
        return auditor, found

    def apply_verdict(self, author: bytes, verdict: AuditFinding) -> None:
        """A judge gives its verdict on an open dispute."""
        self._refuse_loss(verdict)
        dispute = self._dispute(verdict.proposal_key)
        if dispute is None:
            raise Refused("no dispute about that proposal is open")
        judge = self._speaking_for(self._judges(dispute.round, dispute.trainer), author)
        if judge is None:
            raise Refused(f"{short_id(author)} may not judge this dispute")
        is_second = dispute.may_judge_again(judge) and verdict.finding is not ReplayFinding.WITHHELD
        if judge in dispute.judges_heard and not is_second:
            raise Refused(f"{short_id(author)} has given its verdict")
        others = replace(dispute, voted_withheld=tuple(key for key in dispute.voted_withheld if key != judge))
        self._judge(dispute, self._with_verdict(others, judge, verdict.finding))

    def _with_verdict(self, dispute: Dispute, judge: bytes, finding: ReplayFinding) -> Dispute:
        if finding is ReplayFinding.MATCH:
            return replace(dispute, voted_valid=(*dispute.voted_valid, judge))
        if finding is ReplayFinding.WITHHELD:
            return replace(dispute, voted_withheld=(*dispute.voted_withheld, judge))
        return replace(dispute, voted_invalid=(*dispute.voted_invalid, judge))

    def _require_heard(self, challenger: bytes) -> None:
        if self._unheard.get(challenger, 0) > self._job.round:
            raise Refused(f"{short_id(challenger)} was found wrong too often to be heard for now")
        mine = [dispute for dispute in self._disputes if self._speaking_for(dispute.challenges, challenger) is not None]
        if len(mine) >= CHALLENGES_OPEN_MAX:
            raise Refused(f"{CHALLENGES_OPEN_MAX} challenges of {short_id(challenger)} are open, the most at once")

    # Transitions: `AUDIT_TRANSITIONS` says what follows from each

    def _move_audit(self, event: AuditEvent, place: ProposalKey, auditor: bytes, said: AuditFinding | None = None) -> None:
        """`auditor` is its key of that round; `said` is nil where it did not report in time."""
        moved, person = AUDIT_TRANSITIONS[AuditStage.AWAITED, event], self._members.current_key(auditor)
        if said is None:
            self._write(place, auditor, moved.result)
        else:
            self._write(place, auditor, moved.result, said.finding, said.relative_error_ppm)
        for effect in moved.effects:
            match effect:
                case AuditEffect.COUNT_REPORT:
                    self._count(person, reports=1)
                case AuditEffect.COUNT_LAPSE:
                    self._count(person, lapsed=1)
                case AuditEffect.DISPUTE:
                    assert said is not None
                    self._challenge(place, auditor, person, said.finding)
                case _:
                    raise AssertionError(f"{effect!r} of an audit")

    def _challenge(self, place: ProposalKey, auditor: bytes, person: bytes, finding: ReplayFinding) -> None:
        """Opens a dispute or joins it. A challenge counts as a verdict, unless its author gave one before."""
        self._require_heard(person)
        dispute = self._dispute(place)
        if dispute is None:
            dispute = Dispute(*place, self._job.round, {auditor: finding}, (), ())
            self._disputes.append(dispute)
        challenges = dict(sorted({**dispute.challenges, auditor: finding}.items()))
        judged = dispute if auditor in dispute.judges_heard else self._with_verdict(dispute, auditor, finding)
        self._judge(dispute, replace(judged, challenges=challenges))

    def _judge(self, before: Dispute, dispute: Dispute) -> None:
        self._disputes[self._disputes.index(before)] = dispute
        audits, judges = self._rounds[dispute.round], self._judges(dispute.round, dispute.trainer)
        assert len(set(dispute.judges_heard)) == len(dispute.judges_heard), "one verdict each"
        assert dispute.challenges.keys() <= set(dispute.judges_heard) <= set(audits.reexecutors), "a challenge is a verdict"
        # More than half of the judges, so that both sides cannot have it; and more than f, so that one of them is honest.
        needed = max(len(judges) // 2 + 1, audits.faults + 1)
        assert 2 * needed > len(judges) and needed > audits.faults
        guilty, unseen = len(dispute.voted_invalid), len(dispute.voted_withheld)
        if guilty >= needed or is_shown_selectively(guilty, unseen, needed, audits.faults):
            event = AuditEvent.GUILTY
        elif unseen >= needed:
            event = AuditEvent.UNSEEN
        elif len(dispute.voted_valid) >= needed:
            event = AuditEvent.SHUNNED if self._is_to_be_shunned(dispute) else AuditEvent.INNOCENT
        else:
            event = AuditEvent.JUDGED
        self._move_dispute(event, dispute)

    def _judges(self, number: int, trainer: bytes) -> list[bytes]:
        """The round's re-executors but the accused, under whatever key."""
        accused = self._members.current_key(trainer)
        return [key for key in self._rounds[number].reexecutors if self._members.current_key(key) != accused]

    def _move_dispute(self, event: AuditEvent, dispute: Dispute) -> None:
        moved = AUDIT_TRANSITIONS[AuditStage.OPEN, event]
        if moved.after is AuditStage.OPEN:
            return
        self._disputes.remove(dispute)
        self._make_time(self._members.current_key(dispute.trainer))
        challengers = {self._members.current_key(key): finding for key, finding in dispute.challenges.items()}
        if moved.result is not None:
            first = next(iter(dispute.challenges))
            finding = ReplayFinding.WITHHELD if event is AuditEvent.UNSEEN else dispute.challenges[first]
            self._write(dispute.proposal_key, first, moved.result, finding)
        for effect in moved.effects:
            match effect:
                case AuditEffect.UPHOLD:
                    for person in challengers:
                        self._count(person, upheld=1)
                case AuditEffect.HOLD_AGAINST:
                    for person in (person for person, finding in challengers.items() if finding is not ReplayFinding.WITHHELD):
                        self._hold_against(person)
                case AuditEffect.NOTE_CLAIMS:
                    if ReplayFinding.WITHHELD in challengers.values():
                        self._withheld[self._members.current_key(dispute.trainer)] = self._claims_with(dispute)
                case AuditEffect.SUSPEND:
                    self._suspend(self._members.current_key(dispute.trainer), self._log[-1])
                case AuditEffect.ROLL_BACK:
                    reason = UndoReason.WITHHELD if event is AuditEvent.UNSEEN else UndoReason.FALSE
                    if not self._rounds[dispute.round].undone:
                        self.rollbacks_due.append(RollbackDue(self._key, dispute.round, reason, dispute.trainer))
                case _:
                    raise AssertionError(f"{effect!r} of a dispute")

    def _suspend(self, trainer: bytes, cause: AuditLogEntry) -> None:
        """One suspension is enough for all that the trainer did before it."""
        if trainer in self._suspended:
            return
        times = min(self._standing(trainer).suspensions, SUSPENSION_DOUBLINGS_MAX)
        self._suspended[trainer] = self._job.round + 1 + (self._terms.suspension_rounds << times)
        self._causes[trainer] = cause
        for effect in AUDIT_TRANSITIONS[AuditStage.TRAINS, AuditEvent.CONVICTED].effects:
            match effect:
                case AuditEffect.LOSE_REWARDS:
                    self._count(trainer, suspensions=1, rewards_lost=len(self._unvested.pop(trainer, ())))
                case AuditEffect.FORGET:
                    self._forget(trainer)
                case _:
                    raise AssertionError(f"{effect!r} of a trainer")

    def _forget(self, trainer: bytes) -> None:
        """Its disputes and the reports on its updates go on: each of them may be about another lie in the model."""
        self._withheld.pop(trainer, None)
        self._compared.pop(trainer, None)
        for of in self._unopened.values():
            for key in [key for key in of if self._members.current_key(key) == trainer]:
                del of[key]

    def undo_rounds(self, first: int) -> None:
        """The rounds from this one on were undone. Reports on them are awaited no more; disputes about them go on."""
        for number, audits in list(self._rounds.items()):
            if number >= first:
                drawn = {trainer: replace(of, pending_auditors=()) for trainer, of in audits.proposals.items()}
                self._rounds[number] = replace(audits, proposals=drawn, undone=True)
                self._forget_unawaited(number, self._rounds[number])

    def _hold_against(self, challenger: bytes) -> None:
        self._count(challenger, refuted=1)
        if self._standing(challenger).refuted % FALSE_CHALLENGES_MAX == 0:
            self._unheard[challenger] = self._job.round + 1 + self._terms.suspension_rounds

    # Claims. An auditor says `withheld`, most judges disagree: auditor or trainer lies, we cannot tell which. So the claim counts
    # against neither. After three claims the auditor is apart from the trainer: it is not drawn for it. At most f auditors lie,
    # so a trainer apart from more than f auditors is the liar: it is shunned.

    def _claims_with(self, dispute: Dispute) -> WithheldClaims:
        """The noted claims about the dispute's trainer, once its own are among them."""
        claims = dict(self._withheld.get(self._members.current_key(dispute.trainer), {}))
        for key, finding in dispute.challenges.items():
            if finding is ReplayFinding.WITHHELD:
                auditor = self._members.current_key(key)
                claims[auditor] = (*claims.get(auditor, ()), self._job.round)[-FALSE_CHALLENGES_MAX:]
        return claims

    def _is_to_be_shunned(self, dispute: Dispute) -> bool:
        if ReplayFinding.WITHHELD not in dispute.challenges.values():
            return False  # a challenge without a claim tells nothing about who is apart
        audits = self._rounds[dispute.round]
        # f of this round's voters may lie. An auditor outside this round may be a liar of other voters, and gone.
        reexecutors = {self._members.current_key(key) for key in audits.reexecutors}
        return len(_apart(self._claims_with(dispute)) & reexecutors) > audits.faults

    # Losses. Decision 0061: a loss convicts an auditor alone, and only where more voters contradict it than may lie.

    def _require_loss(self, report: AuditFinding, proposal: Proposal) -> None:
        is_bound = self._is_rewarded and report.finding is ReplayFinding.MATCH and proposal.loss is not None
        if is_bound and report.loss is None:
            raise Refused("a match carries a sealed loss")
        if not is_bound:
            self._refuse_loss(report)

    def _refuse_loss(self, said: AuditFinding) -> None:
        if said.loss is not None:
            raise Refused("no loss belongs here")

    def _seal(self, report: AuditFinding, auditor: bytes, loss: SealedLoss, commitment: LossCommitment) -> None:
        of = self._unopened.setdefault(report.round, {})
        known = of.get(report.trainer, UnopenedLosses(commitment, {}, len(self._rounds[report.round].reexecutors)))
        of[report.trainer] = replace(known, reports={**known.reports, auditor: loss})

    def apply_loss_opening(self, author: bytes, opening: LossOpening) -> None:
        """A trainer opens the loss that its proposal committed to, and each report on it is compared."""
        of, trainer = self._unopened.get(opening.round, {}), opening.trainer
        known = of.get(trainer)
        if known is None or self._members.current_key(trainer) != author:
            raise Refused(
                f"no loss of {short_id(trainer)} in round {display_round_number(opening.round)} is to be "
                f"opened by {short_id(author)}"
            )
        if not self.may_open_loss(opening.round, trainer):
            raise Refused("reports on that proposal may still come")
        if not loss_commitments.is_valid_opening(known.commitment, opening):
            raise Refused("that is not what the proposal commits to")
        del of[trainer]
        for auditor, report in known.reports.items():
            if self._is_trusted(auditor):
                self._compare(auditor, trainer, report, opening)

    def may_open_loss(self, number: int, trainer: bytes) -> bool:
        """Whether no report on this proposal can come any more. A re-executor that missed the round may draw for it at each
        closing in the window. The block that ends the job may close a round too, so draws end with that block.
        """
        drawn = self._drawn(number, trainer)
        is_awaited = drawn is not None and bool(drawn.pending_auditors)
        has_ended = self._job.is_trained and self._job.opened_height < self._height
        return not is_awaited and (has_ended or not self._has_rounds(number))

    def _compare(self, auditor: bytes, trainer: bytes, report: SealedLoss, opening: LossOpening) -> None:
        current, faults = self._members.current_key, faults_tolerated(len(self._job.voters))
        person, about = current(auditor), current(trainer)
        said = loss_commitments.unseal_loss(report, self._key, opening.round, trainer, auditor, opening.secret)
        wrong = loss_commitments.is_wrong_loss(said, opening.loss)
        known = loss_commitments.add_comparison(self._compared.get(person, LossComparisons()), about, wrong, faults)
        if not wrong:
            event = AuditEvent.LOSS_RIGHT
        elif loss_commitments.is_lazy_auditor(known, {current(key) for key in self._job.voters}, faults):
            event = AuditEvent.LOSS_LAZY
        else:
            event = AuditEvent.LOSS_WRONG
        moved = AUDIT_TRANSITIONS[AuditStage.SEALED, event]
        if moved.result is not None:
            self._write((opening.round, trainer), auditor, moved.result, ReplayFinding.MATCH)
        for effect in moved.effects:
            match effect:
                case AuditEffect.COMPARE:
                    self._compared[person] = known
                case AuditEffect.COUNT_WRONG:
                    self._count(person, wrong_losses=1)
                case AuditEffect.SUSPEND_AUDITOR:
                    self._suspend(person, self._log[-1])
                case _:
                    raise AssertionError(f"{effect!r} of a sealed loss")

    def _settle_unopened(self, closed: int, now_ms: int | None) -> None:
        """A trainer has as long to open its loss as auditors had to report. What it does not open costs it that reward. After
        the job's end it costs nothing: its peer may have been stopped.
        """
        if closed == LATER_THAN_ANY_ROUND:
            self._unopened.clear()
        for number, of in list(self._unopened.items()):
            for trainer, known in list(of.items()):
                if known.since is None:
                    if self.may_open_loss(number, trainer):
                        of[trainer] = replace(known, since=closed, since_ms=now_ms or 0)
                    continue
                time_ms = self._terms.window_ms(known.reexecutors)
                if known.since + self._terms.window <= closed and (now_ms or 0) >= known.since_ms + time_ms:
                    del of[trainer]
                    self._lose(number, trainer)

    def _bound_unopened(self) -> None:
        """Beyond UNOPENED_MAX the oldest proposals' sealed losses go."""
        waiting = [(number, trainer) for number, of in sorted(self._unopened.items()) for trainer in of]
        for number, trainer in waiting[: max(0, len(waiting) - UNOPENED_MAX)]:
            del self._unopened[number][trainer]

    def _lose(self, number: int, trainer: bytes) -> None:
        assert AUDIT_TRANSITIONS[AuditStage.SEALED, AuditEvent.TIME].effects == (AuditEffect.LOSE_REWARD,)
        person = self._members.current_key(trainer)
        rounds = self._unvested.get(person, ())
        if number in rounds:
            self._count(person, rewards_lost=1)
            self._keep_unvested(person, tuple(other for other in rounds if other != number))

    # Time

    def apply_round_close(self, closed: int, now_ms: int | None) -> None:
        """This round closes: audits and disputes run out, rewards vest, suspensions end, claims are forgotten.

        `now_ms` is the time of the parent block. Without it windows are counted in rounds alone.
        """
        self._closed = closed
        self._end_windows(now_ms)
        self._settle_unopened(closed, now_ms)
        for trainer, rounds in list(self._unvested.items()):
            self._vest(trainer, rounds, closed)
        # for a trainer whose round has come
        assert AUDIT_TRANSITIONS[AuditStage.SUSPENDED, AuditEvent.TIME].after is AuditStage.TRAINS
        self._suspended = {key: until for key, until in self._suspended.items() if until > closed + 1}
        self._causes = {key: self._causes[key] for key in self._suspended}
        self._unheard = {key: until for key, until in self._unheard.items() if until > closed + 1}
        remembered = {trainer: self._remembered(claims, closed) for trainer, claims in self._withheld.items()}
        self._withheld = {trainer: claims for trainer, claims in remembered.items() if claims}

    def end_windows_by_time(self, now_ms: int | None) -> None:
        """All rounds of the job are taken, so windows end by time alone. `now_ms` as for `settle`; without it all end now."""
        self._closed = LATER_THAN_ANY_ROUND
        self._end_windows(now_ms)

    def _end_windows(self, now_ms: int | None) -> None:
        if now_ms is not None:
            self._date(max(1, now_ms))
        for number, audits in list(self._rounds.items()):
            if not self._has_rounds(number) and not self._has_time(number, audits.closed_ms, now_ms):
                may_wait = now_ms is not None and audits.window_renewals < window_renewals_max(audits.faults)
                self._lapse(number, audits, self._held_up() if may_wait else frozenset())
        for dispute in list(self._disputes):
            has_rounds = dispute.opened + self._terms.window > self._closed
            # who did not see it gets it from those who did
            windows = 2 if dispute.voted_invalid and dispute.voted_withheld else 1
            if not has_rounds and not self._has_time(dispute.round, dispute.opened_ms, now_ms, windows):
                self._move_dispute(AuditEvent.TIME, dispute)

    def _remembered(self, claims: WithheldClaims, closed: int) -> WithheldClaims:
        """The claims of the last `suspension_rounds` rounds: an honest auditor's bad days must not add up over years, and a liar
        gets no more claims in that time than three.
        """
        first = closed + 1 - self._terms.suspension_rounds
        recent = {key: tuple(number for number in rounds if number >= first) for key, rounds in claims.items()}
        return {key: rounds for key, rounds in recent.items() if rounds}

    def _date(self, now_ms: int) -> None:
        """Notes a time for each round that closed, and each dispute that opened, before the parent block.

        The block that closes a round does not know its own time, and its parent may be much older: a window that began then would
        be too short. So the window begins at the parent of the block that closes the next round. Judges fetch one disputed
        proposal of a trainer at a time (`state.in_turn`), so the window of the next dispute begins when the one before it ends.
        """
        for number, audits in self._rounds.items():
            if not audits.closed_ms:
                self._rounds[number] = replace(audits, closed_ms=now_ms)
        first = dict[bytes, int]()
        for at, dispute in enumerate(self._disputes):
            first.setdefault(self._members.current_key(dispute.trainer), at)
        for at in first.values():
            dispute = self._disputes[at]
            if not dispute.opened_ms and dispute.opened < self._closed:  # others may have opened in this very block
                self._disputes[at] = replace(dispute, opened_ms=now_ms)

    def _has_rounds(self, number: int) -> bool:
        """Whether rounds are left of the window of that closed round."""
        return number + self._terms.window > self._closed

    def _has_time(self, number: int, since_ms: int, now_ms: int | None, windows: int = 1) -> bool:
        """Whether time is left of so many windows that began then, for what re-executors of that round have to say."""
        if now_ms is None:
            return False
        window_ms = self._terms.window_ms(len(self._rounds[number].reexecutors))
        if self._closed == LATER_THAN_ANY_ROUND:  # no rounds close in which re-executors work
            window_ms += self._rounds_ms
        return not since_ms or now_ms < since_ms + windows * window_ms

    def _held_up(self) -> frozenset[bytes]:
        """The trainers on whom reports wait for a dispute: time does not run for these."""
        return frozenset(self._members.current_key(dispute.trainer) for dispute in self._disputes)

    def _make_time(self, trainer: bytes) -> None:
        """A dispute about this trainer is over: auditors go on with its other proposals, so the time for these begins anew."""
        for number, audits in self._rounds.items():
            is_awaited = any(
                drawn.pending_auditors and self._members.current_key(key) == trainer for key, drawn in audits.proposals.items()
            )
            if is_awaited and audits.window_renewals < window_renewals_max(audits.faults):
                self._rounds[number] = replace(audits, closed_ms=0, window_renewals=audits.window_renewals + 1)

    def _lapse(self, number: int, audits: RoundAudits, held_up: frozenset[bytes] = frozenset()) -> None:
        """Reports on this round are awaited on these trainers alone. Its open disputes go on, so their proposals stay."""
        disputed, kept = self._disputed(number), dict[bytes, AuditableProposal]()
        for trainer, drawn in audits.proposals.items():
            if self._members.current_key(trainer) in held_up:
                kept[trainer] = drawn
                continue
            for auditor in drawn.pending_auditors:
                self._move_audit(AuditEvent.TIME, (number, trainer), auditor)
            if trainer in disputed:
                kept[trainer] = replace(drawn, pending_auditors=())
        self._rounds[number] = replace(audits, proposals=kept)

    def _vest(self, trainer: bytes, rounds: tuple[int, ...], closed: int) -> None:
        """A reward is the trainer's own once the window of its round is over, no dispute about that round is open, no report on
        it is awaited, and none waits for the trainer's loss.
        """
        current = self._members.current_key
        open_rounds = {dispute.round for dispute in self._disputes if current(dispute.trainer) == trainer}
        open_rounds |= {number for number, of in self._unopened.items() if any(current(key) == trainer for key in of)}
        for number, audits in self._rounds.items():
            if any(drawn.pending_auditors and current(key) == trainer for key, drawn in audits.proposals.items()):
                open_rounds.add(number)  # a report is awaited
        waiting = tuple(number for number in rounds if number + self._terms.window > closed or number in open_rounds)
        self._count(trainer, rewards=len(rounds) - len(waiting))
        self._keep_unvested(trainer, waiting)

    def _keep_unvested(self, trainer: bytes, rounds: tuple[int, ...]) -> None:
        if rounds:
            self._unvested[trainer] = rounds
        else:
            del self._unvested[trainer]

    # Drawing

    def assign_audits(self, closed: ClosedRound) -> None:
        """The audits of a closed round, but of updates that were re-executed before the ballot. A trainer that was suspended
        meanwhile gets no reward for it.
        """
        job, current = self._job, self._members.current_key
        vouched = job.round_terms(self._key).trainers_to_vouch_for
        accepted = {signed.signer: codec.decode_message(signed.body, (Proposal,)) for signed in closed.proposals}
        reexecutors = tuple(key for key in job.reexecutors if self._is_trusted(key) and current(key) not in self._unheard)
        revealed = sortition.matching_reveals(closed.reveals, self._commitments)
        self._make_up(revealed)
        nonces = {key: revealed[key] for key in reexecutors if key in revealed}
        # Without nonces, which honest re-executors reveal, all draw by the model root, as everybody can foresee.
        tickets = nonces or dict.fromkeys(reexecutors, job.model_root)
        drawn = {
            trainer: AuditableProposal(proposal, self._auditors(closed.round, trainer, reexecutors, tickets))
            for trainer, proposal in accepted.items()
            if trainer not in vouched
        }
        faults = faults_tolerated(len(job.voters))
        self._rounds[closed.round] = RoundAudits(len(nonces), faults, reexecutors, drawn)
        self._remember(closed)
        self._bound()
        for trainer, proposal in accepted.items() if self._is_rewarded else ():
            if proposal.loss is not None and self._is_trusted(trainer):
                person = current(trainer)
                self._unvested[person] = (*self._unvested.get(person, ()), closed.round)

    def _make_up(self, revealed: Mapping[bytes, bytes]) -> None:
        """Re-executors whose ballots were left out draw now for the rounds that they missed.

        So a leader that leaves out the ballots that would find its accomplice delays their draws by a round, and no more.
        """
        for number, audits in list(self._rounds.items()):
            missed = (key for key in audits.reexecutors if key in revealed and self._commitments[key].round < number)
            nonces = {key: revealed[key] for key in missed}
            is_open = self._has_rounds(number) and not audits.undone
            if audits.nonce_count and is_open:  # without nonces all drew by the model root
                more = {trainer: self._auditors(number, trainer, audits.reexecutors, nonces) for trainer in audits.proposals}
                drawn = {
                    key: replace(old, pending_auditors=tuple(sorted({*old.pending_auditors, *more[key]})))
                    for key, old in audits.proposals.items()
                }
                self._rounds[number] = replace(audits, nonce_count=audits.nonce_count + len(nonces), proposals=drawn)

    def _is_trusted(self, key: bytes) -> bool:
        person = self._members.current_key(key)
        return person not in self._suspended and not self._members.is_expelled(person)

    def _auditors(
        self, number: int, trainer: bytes, reexecutors: tuple[bytes, ...], nonces: Mapping[bytes, bytes]
    ) -> tuple[bytes, ...]:
        """The owners of these nonces that are drawn for this trainer's proposal."""
        current = self._members.current_key
        apart = _apart(self._withheld.get(current(trainer), {}))
        others = [key for key in reexecutors if current(key) != current(trainer) and current(key) not in apart]
        tickets = sortition.lottery_tickets(self._key, number, nonces, trainer, others)
        rate = sortition.audit_rate_of_round(self._terms.rate, self._job.rounds_in_model, self._job.rounds, self._terms.closing)
        return sortition.draw_auditors(tickets, len(others), self._terms.auditors, rate)

    def _remember(self, closed: ClosedRound) -> None:
        """The commitments of the voters. A voter whose ballot was not decided keeps its earlier one."""
        kept = {key: known for key, known in self._commitments.items() if key in self._job.voters and key not in closed.ballots}
        new = {key: NonceCommitment(closed.round, digest) for key, digest in closed.commitments.items()}
        self._commitments = dict(sorted({**kept, **new}.items()))

    def _bound(self) -> None:
        """Beyond AUDITABLE_PROPOSALS_MAX the oldest proposals go: first those that nobody has to report on, then the others."""
        self._tidy()
        excess = sum(len(audits.proposals) for audits in self._rounds.values()) - AUDITABLE_PROPOSALS_MAX
        for forget in (self._forget_unawaited, self._lapse):
            for number, audits in sorted(self._rounds.items()):
                if excess > 0:
                    forget(number, audits)
                    excess -= len(audits.proposals) - len(self._rounds[number].proposals)

    # Tables

    def _drawn(self, number: int, trainer: bytes) -> AuditableProposal | None:
        audits = self._rounds.get(number)
        return audits.proposals.get(trainer) if audits else None

    def _put(self, number: int, trainer: bytes, drawn: AuditableProposal) -> None:
        audits = self._rounds[number]
        self._rounds[number] = replace(audits, proposals={**audits.proposals, trainer: drawn})

    def _tidy(self) -> None:
        """Forgets proposals about which nobody may say anything any more."""
        for number, audits in list(self._rounds.items()):
            if self._job.is_trained or audits.undone or not self._has_rounds(number):
                self._forget_unawaited(number, audits)
        self._rounds = {number: audits for number, audits in self._rounds.items() if audits.proposals}

    def _forget_unawaited(self, number: int, audits: RoundAudits) -> None:
        disputed = self._disputed(number)
        drawn = {trainer: drawn for trainer, drawn in audits.proposals.items() if drawn.pending_auditors or trainer in disputed}
        self._rounds[number] = replace(audits, proposals=drawn)

    def _disputed(self, number: int) -> set[bytes]:
        """The trainers whose proposals of that round are disputed."""
        return {dispute.trainer for dispute in self._disputes if dispute.round == number}

    def _dispute(self, place: ProposalKey) -> Dispute | None:
        return next((dispute for dispute in self._disputes if dispute.proposal_key == place), None)

    def _speaking_for(self, keys: Iterable[bytes], author: bytes) -> bytes | None:
        """The author's among these keys of a round."""
        return next((key for key in keys if self._members.current_key(key) == author), None)

    def _standing(self, person: bytes) -> MemberAuditRecord:
        return self._standings.get(person, MemberAuditRecord())

    def _count(self, person: bytes, **more: int) -> None:
        known = self._standing(person)
        if any(more.values()):
            self._standings[person] = replace(known, **{name: getattr(known, name) + count for name, count in more.items()})

    def _write(
        self,
        place: ProposalKey,
        auditor: bytes,
        result: AuditResult | None,
        finding: ReplayFinding | None = None,
        ppm: int | None = None,
    ) -> None:
        assert result is not None
        self._log.append(AuditLogEntry(self._height, self._key, *place, auditor, result, finding, ppm))


def window_renewals_max(faults: int) -> int:
    """How often the time for reports on a round begins anew at most.

    After three refuted challenges a liar is not heard, and after three refuted claims it is not drawn for that trainer any more.
    But it may keep what it has drawn before, and dispute that later: without a bound it would put off an honest reward for ever.
    """
    return 2 * FALSE_CHALLENGES_MAX * faults


def is_shown_selectively(guilty: int, unseen: int, needed: int, faults: int) -> bool:
    """Whether a liar showed its false proposal to some judges alone. Of more than f that found it false one is honest."""
    return guilty > faults and guilty + unseen >= needed


def _apart(claims: WithheldClaims) -> set[bytes]:
    """The auditors that are not drawn for a trainer about which they made these claims."""
    return {auditor for auditor, rounds in claims.items() if len(rounds) == FALSE_CHALLENGES_MAX}


def _without(drawn: AuditableProposal, auditor: bytes) -> AuditableProposal:
    return replace(drawn, pending_auditors=tuple(key for key in drawn.pending_auditors if key != auditor))


def follow_key_rotations(state: AuditsState, current: Callable[[bytes], bytes]) -> AuditsState:
    """With the tables of persons by the keys that they have now."""
    if all(current(key) == key for key in _persons(state)):
        return state

    def rekeyed(table: Mapping[bytes, T]) -> dict[bytes, T]:
        followed = {current(key): value for key, value in table.items()}
        assert len(followed) == len(table)  # a rotation's new key was nobody's before
        return followed

    jobs = {
        key: replace(
            audits,
            suspended=rekeyed(audits.suspended),
            ignored_challengers=rekeyed(audits.ignored_challengers),
            unvested_rounds=rekeyed(audits.unvested_rounds),
            suspension_causes=rekeyed(audits.suspension_causes),
            loss_comparisons=rekeyed(
                {key: replace(known, wrong=rekeyed(known.wrong)) for key, known in audits.loss_comparisons.items()}
            ),
            withheld_claims=rekeyed({key: rekeyed(claims) for key, claims in audits.withheld_claims.items()}),
        )
        for key, audits in state.jobs.items()
    }
    return replace(state, jobs=jobs, member_records=rekeyed(state.member_records))


def _persons(state: AuditsState) -> Iterator[bytes]:
    yield from state.member_records
    for audits in state.jobs.values():
        yield from audits.suspended
        yield from audits.ignored_challengers
        yield from audits.unvested_rounds
        yield from audits.withheld_claims
        yield from audits.loss_comparisons
        yield from (person for known in audits.loss_comparisons.values() for person in known.wrong)
        yield from (person for claims in audits.withheld_claims.values() for person in claims)
