"""The ledger's module of client runs: training loops of people's own programs, each step of which is a round of a job.

A gateway is the peer that serves the program. It opens a run, and requests one step after the other. A run is a job on request
(`ledger.jobs.JobBrief`), so the network does nothing for it until its gateway requests a step.

| the open step's round | the step |
|---|---|
| opens | waits until no other round that needs a worker is open |
| accepts the update | is done |
| accepts nothing | stays open, and its next round has another trainer |
| accepts nothing for the last of `ATTEMPTS_MAX` times, or once by each trainer | failed; the model is unchanged |

The gateway computes the update of the first round, because it already has the gradients. The hash of job and step determines the
order of the other trainers.

Steps take turns with other jobs. Between two steps, a training job gets one round, and a queued job may start. Among several
waiting steps, the oldest comes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

from clients.records import StepBrief
from ledger.core.genesis import TRAINER
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.jobs import (
    JOBS_MAX,
    ClosedRound,
    Job,
    JobBrief,
    JobHalt,
    JobHold,
    JobLaunch,
    JobPhase,
    JobsModule,
    JobSpecRules,
    JobsState,
    job_id,
)
from ledger.members import MembersState
from protocol.codec import Count, Digest, Key, Length, encode
from protocol.identity import short_id
from protocol.limits import TRANSACTION_BYTES_MAX
from protocol.messages import Name
from protocol.verdicts import ABSENT, Verdict

MODULE: Final = "clients"
OBJECTIVE: Final = "client"
ATTEMPTS_MAX: Final = 8  # rounds of one step: after eight trainers have failed, the step's data are at fault
RUNS_OF_MEMBER_MAX: Final = 32  # unfinished runs of one gateway, which therefore cannot fill `ledger.jobs.ON_REQUEST_MAX` alone
REASONS_MAX: Final = len(Verdict) + 2  # reasons of rejections: the verdicts, those of the objective together, and `absent`


@dataclass(frozen=True, slots=True)
class OpenRun:
    """`client/open`: a member opens a run, with the specification of its job."""

    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class RequestStep:
    """`client/step`: the owner requests the next step of its run."""

    job: Digest
    brief: StepBrief


@dataclass(frozen=True, slots=True)
class EndRun:
    """`client/end`: the owner ends its run."""

    job: Digest


@dataclass(frozen=True, slots=True)
class OpenStep:
    brief: StepBrief
    since: Count  # height of the block with the request
    attempts: Count = 0  # closed rounds of this step, which accepted nothing


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a run's last step."""

    step: Count
    round: Count  # the step's last round
    is_accepted: bool
    # Reason -> number of rounds in which the trainer's update was refused for it, or was absent.
    rejected: Annotated[dict[Name, Count], Length(0, REASONS_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientRun:
    owner: Key
    next_step: Count = 0
    open_step: OpenStep | None = None
    last: StepOutcome | None = None  # outcome of the last step, or of the open step so far


@dataclass(frozen=True, slots=True)
class ClientsState:
    runs: Annotated[dict[Digest, ClientRun], Length(0, JOBS_MAX)] = field(default_factory=dict)  # job -> its run


class ClientsModule(Module[ClientsState]):
    name = MODULE
    contents: ClassVar[Mapping[str, type]] = {"client/open": OpenRun, "client/step": RequestStep, "client/end": EndRun}
    # `client/open` reads all members that can train, like the start of a job.
    costs: ClassVar[Mapping[str, int]] = {"client/open": 96, "client/step": 2, "client/end": 8}
    state_type = ClientsState

    def __init__(self, rules: JobSpecRules) -> None:
        self._rules, self._jobs = rules, JobsModule(rules)

    def apply_transaction(
        self, state: ClientsState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        members = view.module_state(MembersState)
        match said.content:
            case OpenRun(spec):
                if self._rules.terms_of_spec(spec).objective != OBJECTIVE:
                    raise Refused(f"a run is a job of the objective {OBJECTIVE!r}")
                mine = sum(members.current_key(run.owner) == said.author for run in state.runs.values())
                if mine >= RUNS_OF_MEMBER_MAX:
                    raise Refused(f"{short_id(said.author)} has {RUNS_OF_MEMBER_MAX} runs, the maximum: end one of them")
                key = job_id(said.author, said.transaction)
                # A refusal of the launch is silent, so this trial start reports the reason to the author.
                self._jobs.start_job(view.module_state(JobsState), view, key, spec, said.author, context.height)
                runs = {**state.runs, key: ClientRun(said.author)}
                return StateChange(ClientsState(runs), (JobLaunch(key, spec, said.author),))
            case RequestStep(key, brief):
                run = _own(state, members, key, said.author)
                if run.open_step is not None:
                    raise Refused(f"step {run.open_step.brief.step} is open: request the next step after its outcome")
                if brief.step != run.next_step:
                    raise Refused(f"step {brief.step} is not the next one, which is {run.next_step}")
                if problem := brief.optimizer.problem():
                    raise Refused(problem)
                run = replace(run, open_step=OpenStep(brief, context.height))
                return StateChange(ClientsState({**state.runs, key: run}))
            case EndRun(key):
                _own(state, members, key, said.author)
                runs = {other: run for other, run in state.runs.items() if other != key}
                return StateChange(ClientsState(runs), (JobHalt(key, said.author),))
        raise AssertionError(said.content)

    def settle_block(self, state: ClientsState, view: StateReader, context: BlockContext) -> StateChange:
        """Record the outcomes of closed rounds, and let the next step or another job begin."""
        jobs, members = view.module_state(JobsState).jobs, view.module_state(MembersState)
        runs, closed = dict(state.runs), {fact.job: fact for fact in context.facts_of(ClosedRound)}
        for key in runs.keys() & closed.keys():
            runs[key] = _after_round(runs[key], closed[key], len(trainers_in_order(jobs[key], key, runs[key], members)))
        return StateChange(ClientsState(runs), tuple(self._requests(runs, view, context, closed.keys() & jobs.keys())))

    def end_block(self, state: ClientsState, view: StateReader, context: BlockContext) -> StateChange:
        """Drop the runs whose jobs are over or were not started."""
        jobs = view.module_state(JobsState).jobs
        left = {key: run for key, run in state.runs.items() if key in jobs and jobs[key].phase is not JobPhase.FINISHED}
        return StateChange(ClientsState(left) if left.keys() != state.runs.keys() else state)

    def follow_key_rotations(self, state: ClientsState, current: Any) -> ClientsState:
        moved = {key: replace(run, owner=current(run.owner)) for key, run in state.runs.items()}
        return ClientsState(moved) if moved != state.runs else state

    def _requests(
        self, runs: Mapping[bytes, ClientRun], view: StateReader, context: BlockContext, closed: set[bytes]
    ) -> Iterator[JobBrief | JobHold]:
        """Yield the facts of one block: the brief of the step whose round may open, and the job that waits for this round.

        `closed` are the jobs whose rounds close in this block.
        """
        jobs, members = view.module_state(JobsState), view.module_state(MembersState)
        needs_worker = {key: job for key, job in jobs.jobs.items() if self._rules.terms_of_spec(job.spec).needs_worker}
        running = {key for key, job in needs_worker.items() if job.phase is JobPhase.RUNNING}
        for key in running & runs.keys() - closed:  # the trainer of an open round may have left
            job = needs_worker[key]
            if not any(map(members.may_be_awaited, job.trainers)):
                yield from _brief(key, job, runs[key], members, job.trainers)
        waiting = [
            key for key, run in runs.items() if run.open_step is not None and key in jobs.jobs and key not in running - closed
        ]
        waiting.sort(key=lambda key: (_since(runs[key]), key))
        if not waiting or running - closed:
            return
        # The round of another job comes between two steps.
        held = {fact.job for fact in context.facts_of(JobHold)}
        paused = {key for key, job in needs_worker.items() if job.phase is JobPhase.PAUSED} - runs.keys() - held
        if closed & runs.keys() and (paused or self._jobs.has_startable_job(jobs, members, context.height, held)):
            return
        key = waiting[0]
        yield from (JobHold(other) for other in running - runs.keys())
        yield from _brief(key, jobs.jobs[key], runs[key], members)


def _since(run: ClientRun) -> int:
    assert run.open_step is not None
    return run.open_step.since


def _after_round(run: ClientRun, closed: ClosedRound, trainers: int) -> ClientRun:
    """Return the run after a round of its open step. `trainers` is the number of members that may train."""
    assert run.open_step is not None, "a round opens for a step"
    step, outcome = run.open_step, closed.outcome
    rejected = dict(run.last.rejected) if run.last is not None and run.last.step == step.brief.step else {}
    for trainer in sorted({*outcome.rejected, *outcome.absent}):
        reason = ABSENT if trainer in outcome.absent else outcome.rejection_reason(trainer)
        rejected[reason] = rejected.get(reason, 0) + 1
    run = replace(run, last=StepOutcome(step.brief.step, closed.round, bool(outcome.accepted), rejected))
    attempts = step.attempts + 1
    if outcome.accepted or attempts >= min(ATTEMPTS_MAX, trainers):
        return replace(run, next_step=run.next_step + 1, open_step=None)
    return replace(run, open_step=replace(step, attempts=attempts))


def _brief(key: bytes, job: Job, run: ClientRun, members: MembersState, present: tuple[bytes, ...] = ()) -> Iterator[JobBrief]:
    """Yield the brief of the open step's next round, or of its open round whose trainers `present` have left.

    Nothing is yielded if nobody can train.
    """
    assert run.open_step is not None
    order = trainers_in_order(job, key, run, members)
    successors = [trainer for trainer in map(members.current_key, present) if trainer in order]
    if order:
        trainer = successors[0] if successors else order[run.open_step.attempts % len(order)]
        yield JobBrief(key, trainer, encode(run.open_step.brief))


def _own(state: ClientsState, members: MembersState, key: bytes, author: bytes) -> ClientRun:
    """Return an unfinished run for a transaction of its owner. Raises `Refused` for other members."""
    run = state.runs.get(key)
    if run is None:
        raise Refused(f"no run {key.hex()[:8]}, or it is over")
    if members.current_key(run.owner) != author:
        raise Refused(f"only the member that opened run {key.hex()[:8]} may do this")
    return run


def trainers_in_order(job: Job, key: bytes, run: ClientRun, members: MembersState) -> list[bytes]:
    """Return the members that may train the run's next step, in the order of their attempts.

    The owner is first, if it trains. Suspended trainers are left out, unless no other is there.
    """
    step = run.next_step
    trains = [member for member, of in members.members.items() if TRAINER in of.roles and members.may_be_awaited(member)]
    able = [member for member in trains if member not in job.suspended_trainers] or trains
    owner = members.current_key(run.owner)
    return sorted(able, key=lambda member: (member != owner, hashlib.sha256(encode((key, step, member))).digest()))
