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

A checkpoint is a name for a model of a run. Every peer keeps the model until the checkpoint expires, also if the
run is over. Another run can start from it.

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
    SAVING_MAX,
    ClosedRound,
    Job,
    JobBrief,
    JobHalt,
    JobHold,
    JobLaunch,
    JobPhase,
    JobRetained,
    JobsModule,
    JobSpecRules,
    JobsState,
    SavedJobModels,
    job_id,
)
from ledger.members import MembersState
from ledger.model_anchors import SAVED_MODELS_MAX, ModelAnchor
from protocol.codec import Count, Digest, Key, Length, encode
from protocol.identity import short_id
from protocol.limits import TRANSACTION_BYTES_MAX
from protocol.messages import Name
from protocol.verdicts import ABSENT, Verdict

MODULE: Final = "clients"
OBJECTIVE: Final = "client"
ATTEMPTS_MAX: Final = 8  # rounds of one step: after eight trainers have failed, the step's data are at fault
RUNS_OF_MEMBER_MAX: Final = 32  # unfinished runs of one gateway, which therefore cannot fill `ledger.jobs.ON_REQUEST_MAX` alone
SAVING_RUNS_OF_MEMBER_MAX: Final = 32  # runs of one member with checkpoints, also those that are over
SAVED_BYTES_OF_MEMBER_MAX: Final = 8 << 30  # bytes of all saved models of one member, which every disk keeps
BYTES_PER_PARAMETER: Final = 12  # a parameter and the two moments of AdamW, each float32
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
class SaveModel:
    """`client/save`: the owner names the present model of its run. A checkpoint of this name is replaced."""

    job: Digest
    name: Name
    expires_ms: Count  # time of the network at which the checkpoint expires; 0: never


@dataclass(frozen=True, slots=True)
class SetExpiry:
    """`client/expire`: the owner sets when a checkpoint expires. A time in the past deletes it."""

    job: Digest
    name: Name
    expires_ms: Count


@dataclass(frozen=True, slots=True)
class Checkpoint:
    model: ModelAnchor
    expires_ms: Count  # 0: never


@dataclass(frozen=True, slots=True)
class OpenStep:
    brief: StepBrief
    since: Count  # height of the block with the request
    tried: Annotated[tuple[Key, ...], Length(0, ATTEMPTS_MAX)] = ()  # trainers of this step's closed rounds, in order
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
    checkpoints: Annotated[dict[Name, Checkpoint], Length(0, SAVED_MODELS_MAX)] = field(default_factory=dict)
    is_over: bool = False  # True: the run stays for its checkpoints alone


@dataclass(frozen=True, slots=True)
class ClientsState:
    runs: Annotated[dict[Digest, ClientRun], Length(0, JOBS_MAX)] = field(default_factory=dict)  # job -> its run


class ClientsModule(Module[ClientsState]):
    name = MODULE
    contents: ClassVar[Mapping[str, type]] = {
        "client/open": OpenRun,
        "client/step": RequestStep,
        "client/save": SaveModel,
        "client/expire": SetExpiry,
        "client/end": EndRun,
    }
    # `client/open` reads all members that can train, like the start of a job.
    costs: ClassVar[Mapping[str, int]] = {
        "client/open": 96,
        "client/step": 2,
        "client/save": 4,
        "client/expire": 2,
        "client/end": 8,
    }
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
                mine = sum(not run.is_over for run in _runs_of(state, members, said.author).values())
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
            case SaveModel(key, name, expires_ms):
                run = _own(state, members, key, said.author)
                if run.open_step is not None:
                    raise Refused(f"step {run.open_step.brief.step} is open: save the model after its outcome")
                job = _started(view.module_state(JobsState), key)
                model = ModelAnchor(job.round, job.rounds_in_model, job.model_root)
                run = replace(run, checkpoints={**run.checkpoints, name: Checkpoint(model, expires_ms)})
                if len(run.checkpoints) > SAVED_MODELS_MAX:
                    raise Refused(f"run {key.hex()[:8]} has {SAVED_MODELS_MAX} checkpoints, the maximum: delete one of them")
                if not state.runs[key].checkpoints and sum(bool(of.checkpoints) for of in state.runs.values()) >= SAVING_MAX:
                    raise Refused(f"{SAVING_MAX} runs of this network have checkpoints, the maximum: delete those of one run")
                self._require_room({**_runs_of(state, members, said.author), key: run}, view.module_state(JobsState))
                return _changed(state, key, run)
            case SetExpiry(key, name, expires_ms):
                run = _own(state, members, key, said.author, also_over=True)
                if name not in run.checkpoints:
                    raise Refused(f"run {key.hex()[:8]} has no checkpoint {name!r}")
                checkpoint = replace(run.checkpoints[name], expires_ms=expires_ms)
                return _changed(state, key, replace(run, checkpoints={**run.checkpoints, name: checkpoint}))
            case EndRun(key):
                run = _own(state, members, key, said.author)
                _started(view.module_state(JobsState), key)
                runs = {**state.runs, key: replace(run, open_step=None, is_over=True)}
                return StateChange(ClientsState(runs), (JobHalt(key, said.author),))
        raise AssertionError(said.content)

    def _require_room(self, runs: Mapping[bytes, ClientRun], jobs: JobsState) -> None:
        """Raise `Refused` if a member with these runs has too many saved models."""
        saving = [key for key, run in runs.items() if run.checkpoints]
        if len(saving) > SAVING_RUNS_OF_MEMBER_MAX:
            raise Refused(f"{SAVING_RUNS_OF_MEMBER_MAX} of your runs have checkpoints, the maximum: delete those of one run")
        size = sum(
            BYTES_PER_PARAMETER * self._rules.terms_of_spec(jobs.jobs[key].spec).parameters * len(_saved_models(runs[key]))
            for key in saving
        )
        if size > SAVED_BYTES_OF_MEMBER_MAX:
            kept = f"{size / 1e9:.1f} GB of checkpoints would be kept for you"
            raise Refused(f"{kept}, {SAVED_BYTES_OF_MEMBER_MAX / 1e9:.1f} GB are allowed: delete some of them")

    def settle_block(self, state: ClientsState, view: StateReader, context: BlockContext) -> StateChange:
        """Record the outcomes of closed rounds, and let the next step or another job begin."""
        jobs, members = view.module_state(JobsState).jobs, view.module_state(MembersState)
        runs, closed = dict(state.runs), {fact.job: fact for fact in context.facts_of(ClosedRound)}
        for key in runs.keys() & closed.keys():
            if runs[key].open_step is None:  # This block ends the run.
                continue
            runs[key] = _after_round(runs[key], closed[key], len(trainers_in_order(jobs[key], key, runs[key], members)))
        saved = list[SavedJobModels | JobRetained]()
        for key, run in runs.items():
            left = {name: of for name, of in run.checkpoints.items() if not 0 < of.expires_ms <= context.time_ms}
            runs[key] = run = run if len(left) == len(run.checkpoints) else replace(run, checkpoints=left)
            if key in jobs and (models := _saved_models(run)) != jobs[key].saved_models:
                saved.append(SavedJobModels(key, models))
            if run.checkpoints:
                saved.append(JobRetained(key))
        return StateChange(ClientsState(runs), (*saved, *self._requests(runs, view, context, closed.keys() & jobs.keys())))

    def end_block(self, state: ClientsState, view: StateReader, context: BlockContext) -> StateChange:
        """Drop the runs whose jobs were not started, and those that are over and have no checkpoints."""
        jobs, left = view.module_state(JobsState).jobs, dict[bytes, ClientRun]()
        for key, run in state.runs.items():
            if key in jobs and jobs[key].phase is JobPhase.FINISHED and not run.is_over:
                run = replace(run, open_step=None, is_over=True)
            if key in jobs and (run.checkpoints or not run.is_over):
                left[key] = run
        return StateChange(ClientsState(left) if left != state.runs else state)

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
            if runs[key].open_step is not None and not any(map(members.may_be_awaited, job.trainers)):
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
    outcome = closed.outcome
    step = replace(run.open_step, tried=(*run.open_step.tried, *sorted({*outcome.rejected, *outcome.absent})))
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


def _started(jobs: JobsState, key: bytes) -> Job:
    """Return the job of a run. Raises `Refused` in the block that opens the run, whose job starts at the end of the block."""
    job = jobs.jobs.get(key)
    if job is None:
        raise Refused(f"run {key.hex()[:8]} begins in this block: wait for the next one")
    return job


def _changed(state: ClientsState, key: bytes, run: ClientRun) -> StateChange:
    return StateChange(ClientsState({**state.runs, key: run}))


def _runs_of(state: ClientsState, members: MembersState, owner: bytes) -> dict[bytes, ClientRun]:
    return {key: run for key, run in state.runs.items() if members.current_key(run.owner) == owner}


def _saved_models(run: ClientRun) -> tuple[ModelAnchor, ...]:
    """Return the models of a run's checkpoints, in the order of their rounds. Several names may have one model."""
    models = {checkpoint.model.round: checkpoint.model for checkpoint in run.checkpoints.values()}
    return tuple(models[number] for number in sorted(models))


def _own(state: ClientsState, members: MembersState, key: bytes, author: bytes, also_over: bool = False) -> ClientRun:
    """Return a run for a transaction of its owner. Raises `Refused` for other members.

    Raises it also if the run is over, unless `also_over`.
    """
    run = state.runs.get(key)
    if run is None or (run.is_over and not also_over):
        raise Refused(f"no run {key.hex()[:8]}, or it is over")
    if members.current_key(run.owner) != author:
        raise Refused(f"only the member that opened run {key.hex()[:8]} may do this")
    return run


def trainers_in_order(job: Job, key: bytes, run: ClientRun, members: MembersState) -> list[bytes]:
    """Return the members that may train the run's next step, in the order of their attempts.

    First are those that have tried, so that their suspension takes no attempt from others. Then follows the owner, if it trains.
    Suspended trainers are left out, unless no other is there.
    """
    step, before = run.next_step, run.open_step.tried if run.open_step is not None else ()
    tried = [members.current_key(member) for member in before]
    trains = [member for member, of in members.members.items() if TRAINER in of.roles and members.may_be_awaited(member)]
    able = {member for member in trains if member not in job.suspended_trainers} or {*trains}
    owner = members.current_key(run.owner)
    rest = sorted(
        able.difference(tried), key=lambda member: (member != owner, hashlib.sha256(encode((key, step, member))).digest())
    )
    return [*tried, *rest] if rest else [member for member in tried if member in trains]
