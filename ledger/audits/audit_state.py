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

# Proposals of a job under audit at once: 3 MB of state, or 11 MB if 66 faulty ones of 200 voters draw themselves for each. In
# excess of this, the oldest are dropped, first those without an awaited report.
AUDITABLE_PROPOSALS_MAX = 4_096
# Proposals of a job with reported losses whose trainer has not opened its own. All of them were under audit before, hence the
# same bound: 1 MB of state, or 25 MB if 66 faulty auditors report on each. The oldest are dropped without harm.
UNOPENED_MAX = AUDITABLE_PROPOSALS_MAX
CHALLENGES_OPEN_MAX = 4  # disputes of one challenger in a job at once: each makes every re-executor replay a round
# After this many refuted challenges, a challenger is ignored for the time of a first suspension: it is neither drawn nor heard.
# After this many refuted claims about one trainer in that time, an auditor is separated from it: it is not drawn for it.
FALSE_CHALLENGES_MAX = 3
DISPUTES_MAX = VOTERS_MAX * CHALLENGES_OPEN_MAX
AUDIT_LOG_MAX = 64  # the last results, for people

ProposalKey = tuple[int, bytes]  # round, trainer's key in that round
VoterKeys = Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)]
# Rounds of one trainer whose rewards wait: in the window, with an awaited report, with a dispute, or with losses to be opened.
UNVESTED_MAX = AUDIT_WINDOW_MAX + AUDITABLE_PROPOSALS_MAX + DISPUTES_MAX + UNOPENED_MAX
RoundByMember = Annotated[dict[Key, Count], Length(0, MEMBERS_MAX)]
WithheldClaims = Annotated[dict[Key, Annotated[tuple[Count, ...], Length(1, FALSE_CHALLENGES_MAX)]], Length(0, MEMBERS_MAX)]
UnopenedRounds = Annotated[dict[Count, Annotated[dict[Key, UnopenedLosses], Length(1, TRAINERS_MAX)]], Length(0, UNOPENED_MAX)]


# State ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditableProposal:
    """One accepted proposal, and the auditors whose reports on it are pending."""

    proposal: Proposal
    pending_auditors: VoterKeys  # a bound below the number of voters would let faulty auditors displace honest ones


@dataclass(frozen=True, slots=True)
class RoundAudits:
    """The draws of a closed round. They are kept while its proposals may be drawn, a report is awaited, or a dispute is open."""

    # re-executors with a matching nonce; 0: everybody could foresee the draws
    nonce_count: Annotated[int, Between(0, VOTERS_MAX)]
    faults: Annotated[int, Between(0, VOTERS_MAX)]  # number of faulty voters that the round tolerates
    reexecutors: VoterKeys  # voters that may be drawn, may volunteer, and judge
    proposals: Annotated[dict[Key, AuditableProposal], Length(0, TRAINERS_MAX)]
    volunteers: VoterKeys = ()  # re-executors that have volunteered for the round
    # Time of a block soon after the round's closing, or after the last dispute that delayed its reports. 0: no such block yet.
    closed_ms: Count = 0
    window_renewals: Count = 0  # number of disputes that restarted the time for its reports
    undone: bool = False  # whether its step was removed from the model

    @property
    def may_renew_window(self) -> bool:
        """True if the time for its reports may restart once more.

        A faulty auditor is ignored after three refuted challenges, and no longer drawn for a trainer after three refuted claims.
        It may still dispute earlier draws later. Without this bound it would delay an honest reward for ever.
        """
        return self.window_renewals < 2 * FALSE_CHALLENGES_MAX * self.faults


@dataclass(frozen=True, slots=True)
class Dispute:
    """An open dispute about one accepted proposal."""

    round: Count
    trainer: Key
    opened: Count  # the open round when the dispute opened
    # Challenges of auditors that were drawn for this proposal. Each one is also a verdict.
    challenges: Annotated[dict[Key, ReplayFinding], Length(1, VOTERS_MAX)]
    voted_invalid: VoterKeys  # judges whose replay differs, or who received data that cannot be replayed
    voted_valid: VoterKeys
    # Time of a block soon after it became the trainer's oldest open dispute. 0: no such block is decided yet.
    opened_ms: Count = 0
    voted_withheld: VoterKeys = ()  # judges that did not receive the data for a replay

    @property
    def proposal_key(self) -> ProposalKey:
        return self.round, self.trainer

    @property
    def judges_heard(self) -> tuple[bytes, ...]:
        """The re-executors that have given a verdict."""
        return self.voted_invalid + self.voted_valid + self.voted_withheld

    def may_judge_again(self, judge: bytes) -> bool:
        """Return whether this judge did not see the proposal, and may now get it from another judge that found it false."""
        return judge in self.voted_withheld and bool(self.voted_invalid)


@dataclass(frozen=True, slots=True)
class JobAudits:
    """The audits of a job, from its start until its last report and dispute are over."""

    rounds: Annotated[dict[Count, RoundAudits], Length(0, AUDITABLE_PROPOSALS_MAX + DISPUTES_MAX)] = field(default_factory=dict)
    disputes: Annotated[tuple[Dispute, ...], Length(0, DISPUTES_MAX)] = ()  # in the order of their opening
    commitments: Annotated[dict[Key, NonceCommitment], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    suspended: RoundByMember = field(default_factory=dict)  # trainer -> the first open round in which it may train again
    # challenger -> the first open round in which it may challenge again
    ignored_challengers: RoundByMember = field(default_factory=dict)
    # trainer -> the rounds whose rewards it may still lose
    unvested_rounds: Annotated[dict[Key, Annotated[tuple[Count, ...], Length(1, UNVESTED_MAX)]], Length(0, MEMBERS_MAX)] = field(
        default_factory=dict
    )
    # trainer -> auditor -> the rounds in which its last claims about this trainer were refuted
    withheld_claims: Annotated[dict[Key, WithheldClaims], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # suspended trainer -> the log entry with the reason, which the log itself drops sooner
    suspension_causes: Annotated[dict[Key, AuditLogEntry], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # round -> trainer -> sealed losses of the reports on its proposal, until it opens its own or the time for that is over
    unopened_losses: UnopenedRounds = field(default_factory=dict)
    # auditor -> results of the losses in its reports
    loss_comparisons: Annotated[dict[Key, LossComparisons], Length(0, MEMBERS_MAX)] = field(default_factory=dict)

    @property
    def first_contestable_round(self) -> int | None:
        """The first round in the model that an audit may still refute; None: there is none."""
        return min((number for number, of in self.rounds.items() if not of.undone), default=None)


@dataclass(frozen=True, slots=True)
class MemberAuditRecord:
    """A member's counts over all jobs with sampled audits."""

    rewards: Count = 0  # accepted proposals whose window passed without a suspension
    rewards_lost: Count = 0  # rewards lost by suspensions, or by losses that it did not open in time
    suspensions: Count = 0
    reports: Count = 0  # reports on proposals for which it was drawn
    lapsed: Count = 0  # proposals for which it was drawn and missed the time for a report
    upheld: Count = 0  # its challenges that ended as `suspended`
    refuted: Count = 0  # its challenges, without claims, that ended as `refuted` or `shunned`
    wrong_losses: Count = 0  # its reports whose loss differs from the trainer's


class AuditResult(enum.StrEnum):
    # Results of a report or challenge:
    PASSED = "passed"  # a drawn auditor reports `match`
    CHALLENGED = "challenged"  # a drawn auditor reports that a proposal is false
    LAPSED = "lapsed"  # a drawn auditor did not report in time
    # Results of a dispute:
    SUSPENDED = "suspended"  # enough judges found the proposal false, or did not see it: the trainer is suspended
    REFUTED = "refuted"  # enough judges found the proposal correct
    SHUNNED = "shunned"  # the same, but more than f auditors are separated from the trainer: it is suspended
    DROPPED = "dropped"  # neither side had enough verdicts in time
    # Results of an opening:
    WRONG_LOSS = "wrong-loss"  # the trainer opened another loss than the auditor had sealed
    LAZY = "lazy"  # more than f trainers that vote contradict the auditor: it is suspended


@dataclass(frozen=True, slots=True)
class AuditLogEntry:
    """One entry of the log, for people."""

    height: Count
    job: Digest
    round: Count
    trainer: Key
    auditor: Key  # in a dispute, the challenger with the smallest key
    result: AuditResult
    finding: ReplayFinding | None = None
    relative_error_ppm: Count | None = None


@dataclass(frozen=True, slots=True)
class AuditsState:
    jobs: Annotated[dict[Digest, JobAudits], Length(0, RUNNING_MAX + FINISHED_KEPT_MAX)] = field(default_factory=dict)
    member_records: Annotated[dict[Key, MemberAuditRecord], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    log: Annotated[tuple[AuditLogEntry, ...], Length(0, AUDIT_LOG_MAX)] = ()  # the oldest first

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
    relative_error_ppm: Count  # ‖difference‖ / ‖change‖ of the replayed change; 0 without a replay
    loss: SealedLoss | None = None  # only in a report with the finding MATCH


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
    """A proposal that this peer has to replay, and to report on or to judge before the window closes."""

    proposal: Proposal
    is_dispute: bool  # True: an `audit/verdict` is due; False: an `audit/report`
    since: int  # in a dispute, the open round when it opened; otherwise the audited round
    auditor: bytes = b""  # for a report: my key in that round
    is_second_verdict: bool = False  # I did not see the proposal before, and a judge that found it false can show it to me


def audit_duties(me: bytes, state: AppliedState) -> list[AuditDuty]:
    """Return disputes that await my verdict, in the order of their opening, then proposals that await my report, by round."""
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
    """Return the first duty of each job and trainer. The others wait: windows allow the slowest link one transfer at a time.
    Jobs do not wait for one another. Each has its own windows, and disputes in one of them must not delay another.
    """
    first = dict[tuple[bytes, bytes], AuditDuty]()
    for item in due:
        first.setdefault((item.job, members.current_key(item.trainer)), item)
    return list(first.values())


@dataclass(frozen=True, slots=True)
class LossOpeningDuty(ProposalReference):
    """A proposal of mine whose loss I have to open once all its reports are in or lapsed."""


def loss_opening_duties(me: bytes, state: AppliedState) -> list[LossOpeningDuty]:
    """Return my losses to open, the first round first."""
    return [
        LossOpeningDuty(job, number, trainer)
        for job, audits in state.module_state(AuditsState).jobs.items()
        for number, of in audits.unopened_losses.items()
        for trainer in of
        if state.module_state(MembersState).current_key(trainer) == me
    ]


def auditable_proposals_of_others(me: bytes, state: AppliedState) -> list[AuditDuty]:
    """Return other trainers' accepted proposals in rounds that I may re-execute, by round."""
    current, found = state.module_state(MembersState).current_key, list[AuditDuty]()
    for job, audits in state.module_state(AuditsState).jobs.items():
        for number, of in audits.rounds.items():
            if me in map(current, of.reexecutors):
                others = [(trainer, drawn.proposal) for trainer, drawn in of.proposals.items() if current(trainer) != me]
                found += [AuditDuty(job, number, trainer, proposal, False, number) for trainer, proposal in others]
    return sorted(found, key=lambda due: (due.round, due.job, due.trainer))


def awaited_auditors(me: bytes, state: AppliedState) -> dict[bytes, set[tuple[bytes, ProposalKey]]]:
    """Return my proposals, with their jobs, that wait for a report or verdict, by its auditor or judge."""
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
    """Return my proposals whose buffers an auditor may still request."""
    return [
        drawn.proposal
        for audits in state.module_state(AuditsState).jobs.values()
        for of in audits.rounds.values()
        for trainer, drawn in of.proposals.items()
        if state.module_state(MembersState).current_key(trainer) == me
    ]
