"""Sampled audits: their records in the state, the transactions of members, and the work that is due for a peer.

A drawn auditor replays an accepted proposal and reports. A report that the proposal is false is a challenge: it opens a dispute
about that proposal, and the round's re-executors judge it. A re-executor may volunteer while the round's window is open: it is
drawn for all proposals of the round. No block waits for an audit: a report or verdict that does not come in time lapses.
`ledger.audits.audit_tables` names the files of the rules, `ledger.audits.transitions` has the states and transitions.

Tables of a round have the keys of that round, because a trainer's data is assigned by its key; a member speaks for its key of
that round with its key of now. Tables of persons are by their keys of now.
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

# Proposals of a job under audit at once: 3 MB of state, 11 MB where 66 liars of 200 voters draw themselves for each. Beyond it
# the oldest go, first those without an awaited report.
AUDITABLE_PROPOSALS_MAX = 4_096
# Proposals of a job on which a loss was reported and whose trainer has not opened its own: as many as are under audit, which they
# were before. 1 MB of state, 25 MB where 66 liars report on each. Beyond it the oldest go, and nothing is lost.
UNOPENED_MAX = AUDITABLE_PROPOSALS_MAX
CHALLENGES_OPEN_MAX = 4  # disputes of one challenger in a job at once: each costs every re-executor a replay
# After so many refuted challenges a challenger is unheard: neither drawn nor heard for as long as a first suspension takes. After
# so many refuted claims about one trainer, within as long, an auditor is apart from it: not drawn for it.
FALSE_CHALLENGES_MAX = 3
DISPUTES_MAX = VOTERS_MAX * CHALLENGES_OPEN_MAX
AUDIT_LOG_MAX = 64  # the last results, for people

ProposalKey = tuple[int, bytes]  # round, trainer as in the round
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
    pending_auditors: VoterKeys  # no bound below the number of voters: liars would take the places of honest auditors


@dataclass(frozen=True, slots=True)
class RoundAudits:
    """The draws of a closed round, kept while its proposals may be drawn, a report is awaited, or a dispute is open."""

    # re-executors with a matching nonce; 0: everybody could foresee the draws
    nonce_count: Annotated[int, Between(0, VOTERS_MAX)]
    faults: Annotated[int, Between(0, VOTERS_MAX)]  # f of the round's voters
    reexecutors: VoterKeys  # may be drawn, may volunteer, and judge
    proposals: Annotated[dict[Key, AuditableProposal], Length(0, TRAINERS_MAX)]
    volunteers: VoterKeys = ()  # re-executors that have volunteered for the round
    # Time of a block soon after the round's closing, or after the last dispute that held up its reports. 0: no such block yet.
    closed_ms: Count = 0
    window_renewals: Count = 0  # disputes after which the time for its reports began anew
    undone: bool = False  # its step is in the model no more

    @property
    def may_renew_window(self) -> bool:
        """Whether the time for its reports may begin anew once more.

        After three refuted challenges a liar is not heard, and after three refuted claims it is not drawn for that trainer any
        more. But it may keep what it has drawn before, and dispute that later: without a bound it would put off an honest reward
        for ever.
        """
        return self.window_renewals < 2 * FALSE_CHALLENGES_MAX * self.faults


@dataclass(frozen=True, slots=True)
class Dispute:
    """An open dispute about one accepted proposal."""

    round: Count
    trainer: Key
    opened: Count  # the round that was open then
    # By auditors that were drawn for this proposal. Each challenge is a verdict, too.
    challenges: Annotated[dict[Key, ReplayFinding], Length(1, VOTERS_MAX)]
    voted_invalid: VoterKeys  # by their replay, or by what they got instead of something to replay
    voted_valid: VoterKeys
    # Time of a block soon after it became the trainer's oldest open dispute. 0: no such block is decided yet.
    opened_ms: Count = 0
    voted_withheld: VoterKeys = ()  # what they had to replay did not come

    @property
    def proposal_key(self) -> ProposalKey:
        return self.round, self.trainer

    @property
    def judges_heard(self) -> tuple[bytes, ...]:
        """The re-executors that have given a verdict."""
        return self.voted_invalid + self.voted_valid + self.voted_withheld

    def may_judge_again(self, judge: bytes) -> bool:
        """Whether it did not see the proposal, and somebody found it false and shows it meanwhile."""
        return judge in self.voted_withheld and bool(self.voted_invalid)


@dataclass(frozen=True, slots=True)
class JobAudits:
    """The audits of a job, while it runs and until the last report and dispute of it are over."""

    rounds: Annotated[dict[Count, RoundAudits], Length(0, AUDITABLE_PROPOSALS_MAX + DISPUTES_MAX)] = field(default_factory=dict)
    disputes: Annotated[tuple[Dispute, ...], Length(0, DISPUTES_MAX)] = ()  # in the order of their opening
    commitments: Annotated[dict[Key, NonceCommitment], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    suspended: RoundByMember = field(default_factory=dict)  # trainer -> the first open round in which it may train again
    # challenger -> the first open round in which it may challenge again
    ignored_challengers: RoundByMember = field(default_factory=dict)
    # Trainer -> the rounds whose rewards it may still lose.
    unvested_rounds: Annotated[dict[Key, Annotated[tuple[Count, ...], Length(1, UNVESTED_MAX)]], Length(0, MEMBERS_MAX)] = field(
        default_factory=dict
    )
    # Trainer -> auditor -> the rounds in which its last claims about this trainer were refuted.
    withheld_claims: Annotated[dict[Key, WithheldClaims], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # Suspended trainer -> the entry of the log that says why. The log itself forgets it sooner.
    suspension_causes: Annotated[dict[Key, AuditLogEntry], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # Round -> trainer -> the sealed losses of the reports on its proposal, until it opens its own or the time for that is over.
    unopened_losses: UnopenedRounds = field(default_factory=dict)
    loss_comparisons: Annotated[dict[Key, LossComparisons], Length(0, MEMBERS_MAX)] = field(default_factory=dict)  # by auditor

    @property
    def first_contestable_round(self) -> int | None:
        """The first round in the model that an audit may still refute; None if there is none."""
        return min((number for number, of in self.rounds.items() if not of.undone), default=None)


@dataclass(frozen=True, slots=True)
class MemberAuditRecord:
    """A member's counts over all jobs with sampled audits."""

    rewards: Count = 0  # accepted proposals whose window passed without a suspension
    rewards_lost: Count = 0  # rewards, by suspensions
    suspensions: Count = 0
    reports: Count = 0  # on proposals that it was drawn for
    lapsed: Count = 0  # proposals that it was drawn for and did not report on in time
    upheld: Count = 0  # its challenges that ended as `suspended`
    refuted: Count = 0  # its challenges but claims that ended as `refuted` or `shunned`
    wrong_losses: Count = 0  # its reports whose loss is another than the trainer opened


class AuditResult(enum.StrEnum):
    # Of one report or challenge
    PASSED = "passed"  # a drawn auditor says `match`
    CHALLENGED = "challenged"  # a drawn auditor says that a proposal is false
    LAPSED = "lapsed"  # a drawn auditor did not report in time
    # Of a dispute's end
    SUSPENDED = "suspended"  # enough judges say guilty, or could not see the proposal: the trainer is suspended
    REFUTED = "refuted"  # enough judges say innocent
    SHUNNED = "shunned"  # enough judges say innocent, but more than f auditors are apart from the trainer: it is suspended
    DROPPED = "dropped"  # neither side had enough in time
    # Of an opening
    WRONG_LOSS = "wrong-loss"  # the trainer opened another loss than the auditor had sealed
    LAZY = "lazy"  # more trainers contradict the auditor than may lie: it is suspended


@dataclass(frozen=True, slots=True)
class AuditLogEntry:
    """One line for people."""

    height: Count
    job: Digest
    round: Count
    trainer: Key
    auditor: Key  # of a dispute: the challenger with the smallest key
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

    | transaction       | author                                     | proposal      | findings                      |
    | `audit/report`    | an auditor that was drawn                  | the drawn one | all but MATCH are challenges  |
    | `audit/verdict`   | a re-executor of the round but the accused | disputed      | all; MATCH says innocent      |
    """

    finding: ReplayFinding
    relative_error_ppm: Count  # of the replayed change, ‖difference‖ / ‖change‖; 0 where nothing could be replayed
    loss: SealedLoss | None = None  # of a report with the finding MATCH


@dataclass(frozen=True, slots=True)
class AuditVolunteering:
    """A re-executor wants to be drawn for all proposals of a round."""

    job: Digest
    round: Count


FINDING_KINDS = ("audit/report", "audit/verdict")  # of an AuditFinding
LOSS_OPENING_KIND = "audit/open-loss"  # of a LossOpening
VOLUNTEER_KIND = "audit/volunteer"  # of a Volunteering


# Work that is due for a peer ------------------------------------------------------------------------------------------


class AppliedState(StateReader, Protocol):
    """The state after the last applied block."""

    @property
    def height(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AuditDuty(ProposalReference):
    """A proposal that a peer is to replay, and to report on or to judge before the window closes."""

    proposal: Proposal
    is_dispute: bool  # an `audit/verdict` is awaited, otherwise an `audit/report`
    since: int  # of a dispute: the round that was open when it opened; otherwise the audited round
    auditor: bytes = b""  # of an awaited report: my key, as in the round
    is_second_verdict: bool = False  # of a dispute: I did not see the proposal, and somebody who found it false can show it to me


def audit_duties(me: bytes, state: AppliedState) -> list[AuditDuty]:
    """The disputes that await my verdict, in the order of their opening, then the proposals that await my report, by round."""
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
    """The first of each job and trainer. The others wait, for windows are as long as the least link takes for one at a time.

    Jobs do not wait for one another: each has windows of its own, and disputes in one of them must not hold up another's.
    """
    first = dict[tuple[bytes, bytes], AuditDuty]()
    for item in due:
        first.setdefault((item.job, members.current_key(item.trainer)), item)
    return list(first.values())


@dataclass(frozen=True, slots=True)
class LossOpeningDuty(ProposalReference):
    """My proposal whose loss I am to open once no report on it can come any more."""


def loss_opening_duties(me: bytes, state: AppliedState) -> list[LossOpeningDuty]:
    """The first round first."""
    return [
        LossOpeningDuty(job, number, trainer)
        for job, audits in state.module_state(AuditsState).jobs.items()
        for number, of in audits.unopened_losses.items()
        for trainer in of
        if state.module_state(MembersState).current_key(trainer) == me
    ]


def auditable_proposals_of_others(me: bytes, state: AppliedState) -> list[AuditDuty]:
    """Others' accepted proposals, by round, of the rounds that I may re-execute."""
    current, found = state.module_state(MembersState).current_key, list[AuditDuty]()
    for job, audits in state.module_state(AuditsState).jobs.items():
        for number, of in audits.rounds.items():
            if me in map(current, of.reexecutors):
                others = [(trainer, drawn.proposal) for trainer, drawn in of.proposals.items() if current(trainer) != me]
                found += [AuditDuty(job, number, trainer, proposal, False, number) for trainer, proposal in others]
    return sorted(found, key=lambda due: (due.round, due.job, due.trainer))


def awaited_auditors(me: bytes, state: AppliedState) -> dict[bytes, set[tuple[bytes, ProposalKey]]]:
    """By auditor and judge: the proposals of mine, with their jobs, on which it has not said anything yet."""
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
    """My proposals whose buffers an auditor may still ask for."""
    return [
        drawn.proposal
        for audits in state.module_state(AuditsState).jobs.values()
        for of in audits.rounds.values()
        for trainer, drawn in of.proposals.items()
        if state.module_state(MembersState).current_key(trainer) == me
    ]
