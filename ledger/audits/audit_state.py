"""Sampled audits: their records in the state, their transactions, and the duties of a peer.

A drawn auditor replays an accepted proposal and reports. A report that the proposal is false is a challenge: it opens a dispute
about the proposal, which the round's re-executors judge. A re-executor may volunteer while the round's window is open, and is
then drawn for all proposals of the round. Blocks do not wait for audits: a report or verdict that misses its window lapses.
`ledger.audits.audit_tables` lists the files of the rules. `ledger.audits.transitions` lists the stages and transitions.

Tables of a round are by the keys of that round, because a trainer's data is assigned by its key. A member acts for its key of
that round with its present key. Tables of members are by their present keys.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from ledger.audits.loss_commitments import LossComparisons, ProposalReference, SealedLoss, UnopenedLosses
from ledger.audits.sortition import NonceCommitment
from ledger.core.module import StateReader
from ledger.jobs import FINISHED_KEPT_MAX, NO_SUSPENSIONS, RUNNING_MAX, SuspendedUntil
from ledger.members import MembersState
from protocol.codec import Between, Count, Digest, Key, Length
from protocol.limits import AUDIT_WINDOW_MAX, MEMBERS_MAX, TRAINERS_MAX, VOTERS_MAX
from protocol.messages import Proposal
from protocol.verdicts import ReplayFinding

# Maximum number of proposals of one job that are under audit at once: 3 MB of state, or 11 MB if 66 faulty voters of 200 draw
# themselves for each proposal. Beyond this number, the oldest proposals are dropped, first those without an awaited report.
AUDITABLE_PROPOSALS_MAX = 4_096
# Maximum number of proposals of one job with sealed losses in reports, whose trainer has not opened its own loss. All these
# proposals were under audit before, so the bound is the same: 1 MB of state, or 25 MB if 66 faulty auditors report on each
# proposal. The oldest are dropped without harm.
UNOPENED_MAX = AUDITABLE_PROPOSALS_MAX
CHALLENGES_OPEN_MAX = 4  # open disputes of one challenger in a job: each one makes every re-executor replay a round
# Number of refuted challenges after which a challenger is ignored for the duration of a first suspension: it is not drawn, and
# its challenges are refused. Also the number of refuted claims about one trainer in that time, after which an auditor is
# separated from the trainer: it is no longer drawn for the trainer's proposals.
FALSE_CHALLENGES_MAX = 3
DISPUTES_MAX = VOTERS_MAX * CHALLENGES_OPEN_MAX
AUDIT_LOG_MAX = 64  # number of newest results in the log, which is for people

ProposalKey = tuple[int, bytes]  # round, trainer's key in that round
VoterKeys = Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)]
# Maximum number of rounds whose rewards one trainer may still lose: rounds in the window, with an awaited report, with an open
# dispute, or with a loss that the trainer has not opened.
UNVESTED_MAX = AUDIT_WINDOW_MAX + AUDITABLE_PROPOSALS_MAX + DISPUTES_MAX + UNOPENED_MAX
RoundByMember = Annotated[dict[Key, Count], Length(0, MEMBERS_MAX)]
WithheldClaims = Annotated[dict[Key, Annotated[tuple[Count, ...], Length(1, FALSE_CHALLENGES_MAX)]], Length(0, MEMBERS_MAX)]
UnopenedRounds = Annotated[dict[Count, Annotated[dict[Key, UnopenedLosses], Length(1, TRAINERS_MAX)]], Length(0, UNOPENED_MAX)]


# State ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditableProposal:
    """One accepted proposal, and the auditors whose reports on it are pending."""

    proposal: Proposal
    # Auditors whose reports are awaited, at most one per voter: with a smaller bound, faulty auditors could displace honest
    # ones.
    pending_auditors: VoterKeys


@dataclass(frozen=True, slots=True)
class RoundAudits:
    """The draws of a closed round. They stay while auditors may still be drawn for its proposals, report or judge."""

    # Number of re-executors with a nonce that matches its commitment. 0: every peer could foresee the draws.
    nonce_count: Annotated[int, Between(0, VOTERS_MAX)]
    faults: Annotated[int, Between(0, VOTERS_MAX)]  # number of faulty voters that the round tolerates
    reexecutors: VoterKeys  # re-executors that may be drawn, may volunteer, and judge disputes
    proposals: Annotated[dict[Key, AuditableProposal], Length(0, TRAINERS_MAX)]
    volunteers: VoterKeys = ()  # re-executors that have volunteered for the round
    # Time of a block soon after the round closed, or after the last dispute that delayed reports on the round. 0: no such block
    # yet.
    closed_ms: Count = 0
    window_renewals: Count = 0  # number of disputes that restarted the window for reports on the round
    undone: bool = False  # whether a rollback removed the round's step from the model

    @property
    def may_renew_window(self) -> bool:
        """True if the window for reports on the round may restart once more.

        A faulty auditor is ignored after three refuted challenges, and no longer drawn for a trainer after three refuted
        claims. It may still challenge later if it was drawn before. Without this bound, it would delay the reward of an honest
        trainer for ever.
        """
        return self.window_renewals < 2 * FALSE_CHALLENGES_MAX * self.faults


@dataclass(frozen=True, slots=True)
class Dispute:
    """An open dispute about one accepted proposal."""

    round: Count
    trainer: Key
    opened: Count  # number of the job's open round when the dispute began
    # Challenging auditor -> finding. The challengers are auditors that were drawn for this proposal. Each one is also a
    # verdict.
    challenges: Annotated[dict[Key, ReplayFinding], Length(1, VOTERS_MAX)]
    voted_invalid: VoterKeys  # judges whose replay gave another update, or that got data that cannot be replayed
    voted_valid: VoterKeys
    # Time of a block soon after the dispute became the trainer's oldest open one. 0: no such block yet.
    opened_ms: Count = 0
    voted_withheld: VoterKeys = ()  # judges that did not receive the data for a replay

    @property
    def proposal_key(self) -> ProposalKey:
        return self.round, self.trainer

    @property
    def judges_heard(self) -> tuple[bytes, ...]:
        """The judges that have given a verdict."""
        return self.voted_invalid + self.voted_valid + self.voted_withheld

    def may_judge_again(self, judge: bytes) -> bool:
        """Return whether this judge lacked the proposal's data, which judges that found the proposal false can now send."""
        return judge in self.voted_withheld and bool(self.voted_invalid)


@dataclass(frozen=True, slots=True)
class JobAudits:
    """The audits of a job, from its start until its last report and dispute are over."""

    rounds: Annotated[dict[Count, RoundAudits], Length(0, AUDITABLE_PROPOSALS_MAX + DISPUTES_MAX)] = field(default_factory=dict)
    disputes: Annotated[tuple[Dispute, ...], Length(0, DISPUTES_MAX)] = ()  # disputes in the order in which they began
    commitments: Annotated[dict[Key, NonceCommitment], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    suspended: RoundByMember = field(default_factory=dict)  # trainer -> the first open round in which it may train again
    # challenger -> the first open round in which it may challenge again
    ignored_challengers: RoundByMember = field(default_factory=dict)
    # trainer -> the rounds whose rewards it may still lose
    unvested_rounds: Annotated[dict[Key, Annotated[tuple[Count, ...], Length(1, UNVESTED_MAX)]], Length(0, MEMBERS_MAX)] = field(
        default_factory=dict
    )
    # Trainer -> auditor -> rounds in which the auditor's last claims about this trainer were refuted.
    withheld_claims: Annotated[dict[Key, WithheldClaims], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # Suspended trainer -> log entry with the reason of the suspension. The log itself drops the entry sooner.
    suspension_causes: Annotated[dict[Key, AuditLogEntry], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # Round -> trainer -> sealed losses of the reports on the trainer's proposal, until the trainer opens its own loss or its
    # time for that is over.
    unopened_losses: UnopenedRounds = field(default_factory=dict)
    # Auditor -> results of comparing the losses in the auditor's reports with the trainers' losses.
    loss_comparisons: Annotated[dict[Key, LossComparisons], Length(0, MEMBERS_MAX)] = field(default_factory=dict)

    @property
    def first_contestable_round(self) -> int | None:
        """The first round in the model that an audit may still refute; None: there is none."""
        return min((number for number, of in self.rounds.items() if not of.undone), default=None)


@dataclass(frozen=True, slots=True)
class MemberAuditRecord:
    """A member's counts of rewards, reports and challenges over all jobs with sampled audits."""

    rewards: Count = 0  # accepted proposals whose window passed without a suspension
    rewards_lost: Count = 0  # rewards lost by suspensions, or by losses that the member as a trainer did not open in time
    suspensions: Count = 0
    reports: Count = 0  # reports on proposals for which the member was drawn
    lapsed: Count = 0  # proposals for which the member was drawn, but did not report in time
    upheld: Count = 0  # challenges of the member that ended as `suspended`
    refuted: Count = 0  # challenges of the member, without claims, that ended as `refuted` or `shunned`
    wrong_losses: Count = 0  # reports of the member whose loss differs from the trainer's


class AuditResult(enum.StrEnum):
    # Results of a report or challenge:
    PASSED = "passed"  # a drawn auditor reports `match`
    CHALLENGED = "challenged"  # a drawn auditor reports that a proposal is false
    LAPSED = "lapsed"  # a drawn auditor did not report in time
    # Results of a dispute:
    SUSPENDED = "suspended"  # enough judges found the proposal false, or did not receive its data: the trainer is suspended
    REFUTED = "refuted"  # enough judges found the proposal correct
    SHUNNED = "shunned"  # as `refuted`, but more than f auditors are now separated from the trainer: it is suspended
    DROPPED = "dropped"  # neither side had enough verdicts in time
    # Results of opening a loss:
    WRONG_LOSS = "wrong-loss"  # the trainer's opened loss differs from the loss that the auditor had sealed
    LAZY = "lazy"  # more than f trainers that vote opened other losses than the auditor had sealed: the auditor is suspended


@dataclass(frozen=True, slots=True)
class AuditLogEntry:
    """One entry of the log, for people."""

    height: Count
    job: Digest
    round: Count
    trainer: Key
    auditor: Key  # auditor that reported; in a dispute, the challenger with the smallest key
    result: AuditResult
    finding: ReplayFinding | None = None
    relative_error_ppm: Count | None = None


@dataclass(frozen=True, slots=True)
class AuditsState:
    jobs: Annotated[dict[Digest, JobAudits], Length(0, RUNNING_MAX + FINISHED_KEPT_MAX)] = field(default_factory=dict)
    member_records: Annotated[dict[Key, MemberAuditRecord], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    log: Annotated[tuple[AuditLogEntry, ...], Length(0, AUDIT_LOG_MAX)] = ()  # last entries of the log, the oldest first

    def suspensions_in(self, job: bytes) -> SuspendedUntil:
        return self.jobs[job].suspended if job in self.jobs else NO_SUSPENSIONS


# Transactions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditFinding(ProposalReference):
    """A re-executor's finding about one accepted proposal.

    | transaction     | author                                            | proposal     | findings                          |
    | `audit/report`  | an auditor that was drawn for it                  | any drawn    | all but MATCH are challenges      |
    | `audit/verdict` | a re-executor of the round other than the accused | any disputed | all; MATCH means innocent         |
    """

    finding: ReplayFinding
    relative_error_ppm: Count  # ‖difference‖ / ‖change‖ in millionths, of the replayed change; 0 without a replay
    loss: SealedLoss | None = None  # sealed loss of the auditor, only in a report with the finding MATCH


@dataclass(frozen=True, slots=True)
class AuditVolunteering:
    """A re-executor's request to be drawn for all proposals of a round."""

    job: Digest
    round: Count


FINDING_KINDS = ("audit/report", "audit/verdict")  # content: AuditFinding
LOSS_OPENING_KIND = "audit/open-loss"  # content: LossOpening
VOLUNTEER_KIND = "audit/volunteer"  # content: AuditVolunteering


# Duties of a peer -----------------------------------------------------------------------------------------------------


class AppliedState(StateReader, Protocol):
    """The state after the last applied block."""

    @property
    def height(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AuditDuty(ProposalReference):
    """A proposal that this peer must replay before the window ends, to report on it or to judge a dispute."""

    proposal: Proposal
    is_dispute: bool  # True: an `audit/verdict` is due; False: an `audit/report`
    since: int  # in a dispute, the job's open round when the dispute began; otherwise the audited round
    auditor: bytes = b""  # key of this peer in the audited round, for a report
    # This judge lacked data before, and can now get them from a judge that found the proposal false.
    is_second_verdict: bool = False


def audit_duties(me: bytes, state: AppliedState) -> list[AuditDuty]:
    """Return this peer's duties: open disputes to judge, the oldest first, then proposals to report on, by round."""
    current, found = state.module_state(MembersState).current_key, list[AuditDuty]()
    for job, audits in state.module_state(AuditsState).jobs.items():
        for dispute in audits.disputes:
            of = audits.rounds[dispute.round]
            proposal = of.proposals[dispute.trainer].proposal
            for judge in of.reexecutors if me != current(dispute.trainer) else ():
                is_second = dispute.may_judge_again(judge)
                if current(judge) == me and (is_second or judge not in dispute.judges_heard):
                    due = AuditDuty(job, *dispute.proposal_key, proposal, True, dispute.opened, is_second_verdict=is_second)
                    found.append(due)
        for number, of in audits.rounds.items():
            for trainer, drawn in of.proposals.items():
                mine = [auditor for auditor in drawn.pending_auditors if current(auditor) == me]
                found += [AuditDuty(job, number, trainer, drawn.proposal, False, number, auditor) for auditor in mine]
    return sorted(found, key=lambda due: (not due.is_dispute, due.since))


def first_duty_of_each_trainer(due: Iterable[AuditDuty], members: MembersState) -> list[AuditDuty]:
    """Return the first duty for each pair of job and trainer.

    The trainer's other proposals wait: audit windows allow its slow link only one transfer at a time. Jobs do not wait for one
    another. Each job has its own windows, and disputes in one job must not delay another job.
    """
    first = dict[tuple[bytes, bytes], AuditDuty]()
    for item in due:
        first.setdefault((item.job, members.current_key(item.trainer)), item)
    return list(first.values())


@dataclass(frozen=True, slots=True)
class LossOpeningDuty(ProposalReference):
    """A proposal of this peer, as a trainer, whose loss it must open because no report on the proposal is awaited any more."""


def loss_opening_duties(me: bytes, state: AppliedState) -> list[LossOpeningDuty]:
    """Return the proposals whose losses this peer must open, by round."""
    return [
        LossOpeningDuty(job, number, trainer)
        for job, audits in state.module_state(AuditsState).jobs.items()
        for number, of in audits.unopened_losses.items()
        for trainer in of
        if state.module_state(MembersState).current_key(trainer) == me
    ]


def auditable_proposals_of_others(me: bytes, state: AppliedState) -> list[AuditDuty]:
    """Return other trainers' accepted proposals in rounds in which this peer is a re-executor, by round."""
    current, found = state.module_state(MembersState).current_key, list[AuditDuty]()
    for job, audits in state.module_state(AuditsState).jobs.items():
        for number, of in audits.rounds.items():
            if me in map(current, of.reexecutors):
                others = [(trainer, drawn.proposal) for trainer, drawn in of.proposals.items() if current(trainer) != me]
                found += [AuditDuty(job, number, trainer, proposal, False, number) for trainer, proposal in others]
    return sorted(found, key=lambda due: (due.round, due.job, due.trainer))


def awaited_auditors(me: bytes, state: AppliedState) -> dict[bytes, set[tuple[bytes, ProposalKey]]]:
    """Return auditor or judge -> this peer's proposals on which its report or verdict is awaited, each with its job."""
    current, found = state.module_state(MembersState).current_key, dict[bytes, set[tuple[bytes, ProposalKey]]]()
    for job, audits in state.module_state(AuditsState).jobs.items():
        for number, of in audits.rounds.items():
            for trainer, drawn in of.proposals.items():
                for auditor in drawn.pending_auditors if current(trainer) == me else ():
                    found.setdefault(current(auditor), set()).add((job, (number, trainer)))
        for dispute in audits.disputes:
            judges = set(audits.rounds[dispute.round].reexecutors) - set(dispute.judges_heard)
            for judge in judges if current(dispute.trainer) == me else ():
                found.setdefault(current(judge), set()).add((job, dispute.proposal_key))
    found.pop(me, None)
    return found


def proposals_to_serve(me: bytes, state: AppliedState) -> list[Proposal]:
    """Return this peer's proposals whose buffers an auditor may still request."""
    return [
        drawn.proposal
        for audits in state.module_state(AuditsState).jobs.values()
        for of in audits.rounds.values()
        for trainer, drawn in of.proposals.items()
        if state.module_state(MembersState).current_key(trainer) == me
    ]
