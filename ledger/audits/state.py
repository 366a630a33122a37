"""Sampled audits: what of them is in the state, what members say in them, and what a peer has to do in them.

A drawn auditor replays one step of an accepted proposal and reports. A report that something is wrong is a challenge: it opens a
dispute about that step, on which the round's re-executors give their verdicts. While the round's window is open, one of them
that was not drawn may challenge a step as well. Nothing here looks into a model, and nothing waits for an audit: what has not
been said in time lapses. The rules are in `ledger.audits.docket`.

A round's tables keep the keys of that round, since a trainer's data is assigned by its key; who may speak for one of them is its
member's key of now. Tables of persons follow their keys.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from ledger.audits.draws import Commitment
from ledger.jobs import FINISHED_KEPT_MAX, NOBODY, RUNNING_MAX, JobsState, Suspended
from ledger.members import MembersState
from protocol.codec import Between, Count, Digest, Key, Length
from protocol.limits import MEMBERS_MAX, TRAINERS_MAX, VOTERS_MAX
from protocol.messages import Proposal
from protocol.reasons import Finding

# Proposals of a job under audit at once: 3 MB of state, 13 MB where 66 liars of 200 voters draw themselves for each. Beyond them
# the oldest go, first what nobody awaits.
DRAWN_MAX = 4_096
CHALLENGES_OPEN_MAX = 4  # disputes of one challenger in a job at once: each costs every re-executor a replay
# Then the challenger is neither drawn nor heard for as long as a first suspension takes; after so many because of a claim
# within as long it is not drawn for that trainer.
FALSE_CHALLENGES_MAX = 3
DISPUTES_MAX = VOTERS_MAX * CHALLENGES_OPEN_MAX
LOG_MAX = 64  # the last results, for people

Place = tuple[int, bytes, int]  # round, trainer as in the round, step
Keys = Annotated[tuple[Key, ...], Length(0, VOTERS_MAX)]
Rounds = Annotated[tuple[Count, ...], Length(1, DRAWN_MAX)]
Persons = Annotated[dict[Key, Count], Length(0, MEMBERS_MAX)]
Claims = Annotated[dict[Key, Annotated[tuple[Count, ...], Length(1, FALSE_CHALLENGES_MAX)]], Length(0, MEMBERS_MAX)]


# State ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """One accepted proposal, and which step of it each of its auditors is to replay."""

    proposal: Proposal
    # Of those that have neither reported nor let it lapse. Any bound on how many are drawn would be places that liars take.
    steps: Annotated[dict[Key, Count], Length(0, VOTERS_MAX)]


@dataclass(frozen=True, slots=True)
class RoundAudits:
    """What was drawn when a round closed, as long as it may be challenged or something of it is open."""

    nonces: Annotated[int, Between(0, VOTERS_MAX)]  # re-executors that revealed what they had committed to; 0: foreseeable
    faults: Annotated[int, Between(0, VOTERS_MAX)]  # f of the round's voters
    reexecutors: Keys  # who may be drawn, and judge
    drawn: Annotated[dict[Key, Drawn], Length(0, TRAINERS_MAX)]
    challengers: Keys = ()  # re-executors that have challenged a step that they were not drawn for


@dataclass(frozen=True, slots=True)
class Dispute:
    """About one step of one accepted proposal."""

    round: Count
    trainer: Key
    step: Count
    opened: Count  # the round that was open then
    # Of everybody that was drawn for this step, and of one that was not; each counts as a verdict too.
    challenges: Annotated[dict[Key, Finding], Length(1, VOTERS_MAX)]
    guilty: Keys
    innocent: Keys

    @property
    def place(self) -> Place:
        return self.round, self.trainer, self.step

    @property
    def judged(self) -> tuple[bytes, ...]:
        """Who has given a verdict."""
        return self.guilty + self.innocent


@dataclass(frozen=True, slots=True)
class JobAudits:
    """Of a job with sampled audits, while it runs and until the last of it is settled."""

    rounds: Annotated[dict[Count, RoundAudits], Length(0, DRAWN_MAX + DISPUTES_MAX)] = field(default_factory=dict)
    disputes: Annotated[tuple[Dispute, ...], Length(0, DISPUTES_MAX)] = ()  # in the order of their opening
    commitments: Annotated[dict[Key, Commitment], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    suspended: Persons = field(default_factory=dict)  # trainer -> the first round in which it may train again
    unheard: Persons = field(default_factory=dict)  # challenger -> the first round in which it may be drawn again
    # Trainer -> the rounds whose reward is not its own yet.
    unvested: Annotated[dict[Key, Rounds], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # Trainer -> re-executor -> the last rounds in which most others found nothing of what it had claimed.
    withheld: Annotated[dict[Key, Claims], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    causes: Annotated[dict[Key, Entry], Length(0, MEMBERS_MAX)] = field(default_factory=dict)  # of those in `suspended`


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a member from all jobs with sampled audits."""

    rewards: Count = 0  # one for each accepted proposal that was not found false in time
    lost: Count = 0  # rewards
    suspensions: Count = 0
    reports: Count = 0  # as a drawn auditor
    lapsed: Count = 0  # audits that it did not report on
    upheld: Count = 0  # challenges that ended in a suspension
    refuted: Count = 0  # challenges that most re-executors found false


class Result(enum.StrEnum):
    PASSED = "passed"  # an auditor found nothing wrong
    CHALLENGED = "challenged"  # a re-executor, drawn or not, found something wrong
    LAPSED = "lapsed"  # an auditor did not report in time
    SUSPENDED = "suspended"  # most re-executors confirm a challenge
    REFUTED = "refuted"  # most re-executors find nothing wrong
    SHUNNED = "shunned"  # so they do, but more than can lie could not get what this trainer commits to: it is suspended
    DROPPED = "dropped"  # neither, in time


@dataclass(frozen=True, slots=True)
class Entry:
    """One line for people."""

    height: Count
    job: Digest
    round: Count
    trainer: Key
    auditor: Key  # of a dispute: who challenged, the smallest key
    step: Count
    result: Result
    finding: Finding | None = None
    relative_error_ppm: Count | None = None


@dataclass(frozen=True, slots=True)
class AuditsState:
    jobs: Annotated[dict[Digest, JobAudits], Length(0, RUNNING_MAX + FINISHED_KEPT_MAX)] = field(default_factory=dict)
    standings: Annotated[dict[Key, Standing], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    log: Annotated[tuple[Entry, ...], Length(0, LOG_MAX)] = ()  # the oldest first

    def suspended(self, job: bytes) -> Suspended:
        return self.jobs[job].suspended if job in self.jobs else NOBODY


# Transactions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepFinding:
    """What somebody found at a step of an accepted proposal.

    `audit/report`, by a drawn auditor: at the step that was drawn for it. `audit/verdict`, by a re-executor of the round: at a
    disputed step; anything but MATCH says guilty. `audit/challenge`, by a re-executor that was not asked: neither MATCH nor
    a claim that is never held against who makes it.
    """

    job: Digest
    round: Count
    trainer: Key  # as in the round
    step: Count
    finding: Finding
    relative_error_ppm: Count  # of the replayed change, ‖difference‖ / ‖change‖; 0 where nothing could be replayed

    @property
    def place(self) -> Place:
        return self.round, self.trainer, self.step


KINDS = ("audit/report", "audit/verdict", "audit/challenge")  # of a StepFinding


# What a peer has to do -----------------------------------------------------------------------------------------------


class Applied(Protocol):
    """What is read here of the state after the last applied block."""

    @property
    def height(self) -> int: ...

    @property
    def members(self) -> MembersState: ...

    @property
    def jobs(self) -> JobsState: ...

    @property
    def audits(self) -> AuditsState: ...


@dataclass(frozen=True, slots=True)
class Due:
    """A step that a peer is to replay and to speak about, as long as the job's window is open."""

    job: bytes
    round: int
    trainer: bytes  # as in the round
    step: int
    proposal: Proposal
    is_dispute: bool  # an `audit/verdict` is awaited, otherwise an `audit/report`
    since: int  # the round after whose closing, or in which, the window opened

    @property
    def place(self) -> Place:
        return self.round, self.trainer, self.step


def due_for(me: bytes, state: Applied) -> list[Due]:
    """The disputes that await my verdict, then the audits that I have not reported yet; the most urgent first."""
    found: list[Due] = []
    for key, audits in state.audits.jobs.items():
        found += _verdicts_due(me, key, audits, state.members)
        found += _reports_due(me, key, audits, state.members)
    return sorted(found, key=lambda due: (not due.is_dispute, due.since, due.job, due.round, due.trainer, due.step))


def _verdicts_due(me: bytes, job: bytes, audits: JobAudits, members: MembersState) -> Iterator[Due]:
    for dispute in audits.disputes:
        of = audits.rounds[dispute.round]
        mine = [key for key in of.reexecutors if members.current(key) == me and key not in dispute.judged]
        if mine and members.current(dispute.trainer) != me:
            yield Due(job, *dispute.place, of.drawn[dispute.trainer].proposal, True, dispute.opened)


def _reports_due(me: bytes, job: bytes, audits: JobAudits, members: MembersState) -> Iterator[Due]:
    for number, of in audits.rounds.items():
        for trainer, drawn in of.drawn.items():
            for auditor, step in drawn.steps.items():
                if members.current(auditor) == me:
                    yield Due(job, number, trainer, step, drawn.proposal, False, number)


def others_audited(me: bytes, state: Applied) -> list[Due]:
    """Others' accepted proposals of rounds that I re-execute and have not challenged, by round. Step 0 stands for any."""
    current, found = state.members.current, list[Due]()
    for job, audits in state.audits.jobs.items():
        for number, of in audits.rounds.items():
            if me in {current(key) for key in of.reexecutors if key not in of.challengers}:
                others = [(trainer, drawn.proposal) for trainer, drawn in of.drawn.items() if current(trainer) != me]
                found += [Due(job, number, trainer, 0, proposal, False, number) for trainer, proposal in others]
    return sorted(found, key=lambda due: (due.round, due.job, due.trainer))


def asked_of(me: bytes, state: Applied) -> list[Proposal]:
    """My proposals of which somebody may still want the trace, the states and the buffers."""
    return [
        drawn.proposal
        for audits in state.audits.jobs.values()
        for of in audits.rounds.values()
        for trainer, drawn in of.drawn.items()
        if state.members.current(trainer) == me
    ]
