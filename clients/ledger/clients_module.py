"""The ledger's module of client runs: training loops of people's own programs, each step of which is a round of a job.

A gateway is the peer that serves the program. It opens a run, and requests one step after the other. A run is a job on request
(`ledger.jobs.JobBrief`), so the network does nothing for it until its gateway requests a step.

| the open step's round | the step |
|---|---|
| opens | waits until no other round that needs a worker is open |
| accepts the update | is done |
| accepts nothing | stays open, and its next round has another trainer |
| accepts nothing for the last of `ATTEMPTS_MAX` times, or of the last trainer | failed; the model is unchanged |

The gateway computes the update of the first round, because it already has the gradients. The other trainers follow, and those
that have failed more often in this run come later. A hash of job and step determines the order of equals.

A checkpoint is a name for a model of a run. Every peer keeps the model until the checkpoint expires, also if the run is over.
Another run can start from it. The run's base stays as long: this is the job whose model the run changes.

If the owner is expelled, or has neither a vote nor a candidacy nor a role, its runs are over, and their checkpoints expire. A
quorum can retire a member, so no checkpoint stays against the will of a quorum.

Voters set two limits: the floating-point operations of a step, since all its re-executors compute them, and the steps of a run,
since all voters keep their payloads.

Steps take turns with other jobs. Between two steps, a training job gets one round, and a queued job may start. Among several
waiting steps, the oldest comes first. A step is late if rounds of its owner have accepted nothing for too long: it begins only if
nothing else waits. In any time T, such rounds of one member take at most `LOST_MS_MAX` + T / `LOST_PART`, and one round, from
others.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

from clients.records import StepBrief
from consensus.voter_set import VoterSet
from ledger.core.genesis import TRAINER
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.core.voted_limit import LimitTerms, VotedLimit
from ledger.jobs import (
    BASES_ON_REQUEST_MAX,
    JOBS_MAX,
    ON_REQUEST_MAX,
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
from protocol.codec import COUNT_MAX, Between, Count, Digest, Key, Length, encode
from protocol.identity import short_id
from protocol.limits import MEMBERS_MAX, TRANSACTION_BYTES_MAX
from protocol.messages import Name
from protocol.verdicts import ABSENT, Verdict
from training.job_spec import ROUNDS_MAX

MODULE: Final = "clients"
OBJECTIVE: Final = "client"
ATTEMPTS_MAX: Final = 8  # rounds of one step: after eight trainers have failed, the step's data are at fault
# Bytes of all saved models of a network, which every disk keeps: as many as late audits of all jobs may keep
# (`training.model_store.AUDITED_BYTES_MAX`).
SAVED_BYTES_MAX: Final = 16 << 30
# Time of rounds without an accepted update after which a member's steps wait for others: an update may get lost twice, with the
# longest wait for it (`clients.objective.PROPOSAL_SECONDS_MAX`).
LOST_MS_MAX: Final = 120_000
# Most lost time of a member: a round that lasts through an outage of the network must not hold up later steps for days.
LOST_MS_KEPT_MAX: Final = 15 * LOST_MS_MAX
LOST_PART: Final = 10  # A tenth of the time since then is forgiven, which is the most that one member can take from others.
BYTES_PER_PARAMETER: Final = 12  # a parameter and the two moments of AdamW, each float32
FLOPS_LIMIT: Final = "client_flops"  # name of the limit on floating-point operations of one step
STEPS_LIMIT: Final = "client_steps"  # name of the limit on steps of one run
# Floating-point operations for each parameter and token: a multiplication and an addition in the forward pass, and twice as many
# in the backward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
FLOPS_PER_PARAMETER: Final = 6
# First limit of a step's floating-point operations. One core with AVX-512 computes 56 to 78 billion a second. So a machine with
# two cores, which has other work as well, finishes the step within the 60 s that a round waits for a proposal.
FLOPS_ALLOWED: Final = 2 * 10**12
# First limit of a run's steps. Tuning loops have 20 to some thousand steps. Each voter keeps the payloads of all steps, with two
# bytes for each parameter of the adapters.
STEPS_ALLOWED: Final = 10_000
STEPS_ALLOWED_MAX: Final = ROUNDS_MAX  # highest limit of steps that voters can set: each step takes a round of the run's job
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
class ClientLimit:
    """`client/limit`: a voter's vote that the limit of this name is `most`. A quorum of equal votes sets the limit."""

    name: Name  # name of the limit: `FLOPS_LIMIT` or `STEPS_LIMIT`
    most: Annotated[int, Between(1, COUNT_MAX)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    model: ModelAnchor
    expires_ms: Count  # 0: never


@dataclass(frozen=True, slots=True)
class OpenStep:
    brief: StepBrief
    since: Count  # height of the block with the request
    tried: Annotated[tuple[Key, ...], Length(0, ATTEMPTS_MAX)] = ()  # trainer of each closed round, which accepted nothing
    # Time of the block that opened the present round. 0: the last block opened it, whose time the next one has. None: no round is
    # open.
    opened_ms: Count | None = None

    @property
    def attempts(self) -> int:
        """Number of closed rounds of this step."""
        return len(self.tried)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a run's last step."""

    step: Count
    round: Count  # the step's last round
    is_accepted: bool
    # Reason -> number of rounds that refused an update for it, or in which the trainer's update was absent.
    rejected: Annotated[dict[Name, Count], Length(0, REASONS_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientRun:
    owner: Key
    next_step: Count = 0
    open_step: OpenStep | None = None
    last: StepOutcome | None = None  # outcome of the last step, or of the open step so far
    checkpoints: Annotated[dict[Name, Checkpoint], Length(0, SAVED_MODELS_MAX)] = field(default_factory=dict)
    is_over: bool = False  # True: the run stays for its checkpoints alone
    base: Digest | None = None  # finished job whose model the run changes, and which stays with the run


@dataclass(frozen=True, slots=True)
class LostTime:
    """The time that rounds of a member's runs took without an accepted update."""

    ms: Count
    at_ms: Count  # time of the network at which it was `ms`
    # Time at which a round opened that the last block ended. Its end is known from the next block on. 0: there is none.
    opened_ms: Count = 0

    def at(self, now_ms: int) -> LostTime:
        """Return the lost time at the time of the last block, with the round that this block ended."""
        left = max(0, self.ms - (now_ms - self.at_ms) // LOST_PART)
        added = now_ms - self.opened_ms if self.opened_ms else 0
        return LostTime(min(LOST_MS_KEPT_MAX, left + added), now_ms)


@dataclass(frozen=True, slots=True)
class ClientsState:
    runs: Annotated[dict[Digest, ClientRun], Length(0, JOBS_MAX)] = field(default_factory=dict)  # job -> its run
    flops: VotedLimit = field(default_factory=lambda: VotedLimit(FLOPS_ALLOWED))  # floating-point operations of a step
    steps: VotedLimit = field(default_factory=lambda: VotedLimit(STEPS_ALLOWED))  # steps of a run
    lost: Annotated[dict[Key, LostTime], Length(0, MEMBERS_MAX)] = field(default_factory=dict)  # owner of runs -> lost time


class ClientsModule(Module[ClientsState]):
    name = MODULE
    contents: ClassVar[Mapping[str, type]] = {
        "client/open": OpenRun,
        "client/step": RequestStep,
        "client/save": SaveModel,
        "client/expire": SetExpiry,
        "client/end": EndRun,
        "client/limit": ClientLimit,
    }
    # `client/open` reads all members that can train, like the start of a job. `client/save` counts the models of all checkpoints.
    costs: ClassVar[Mapping[str, int]] = {
        "client/open": 96,
        "client/step": 2,
        "client/save": 12,
        "client/expire": 2,
        "client/end": 8,
        "client/limit": 4,
    }
    limits: ClassVar[Mapping[str, LimitTerms]] = {
        FLOPS_LIMIT: LimitTerms(
            "client/limit", ClientLimit, COUNT_MAX, "a step of a client run may need at most {most} floating-point operations"
        ),
        STEPS_LIMIT: LimitTerms("client/limit", ClientLimit, STEPS_ALLOWED_MAX, "a client run may have at most {most} steps"),
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
                terms = self._rules.terms_of_spec(spec)
                if terms.objective != OBJECTIVE:
                    raise Refused(f"a run is a job of the objective {OBJECTIVE!r}")
                if _has_left(members, said.author):
                    raise Refused(
                        f"{short_id(said.author)} has no role and no vote: it must register a role before it opens a run"
                    )
                base = terms.read.job if terms.read is not None else None
                _require_places_of_run(state, members, said.author, base)
                key = job_id(said.author, said.transaction)
                # A refusal of the launch is silent, so this trial start reports the reason to the author.
                self._jobs.start_job(view.module_state(JobsState), view, key, spec, said.author, context.height)
                return _changed(state, key, ClientRun(said.author, base=base), JobLaunch(key, spec, said.author))
            case RequestStep(key, brief):
                run = _own(state, members, key, said.author)
                if run.open_step is not None:
                    raise Refused(f"step {run.open_step.brief.step} is open: request the next step after its outcome")
                if brief.step != run.next_step:
                    raise Refused(f"step {brief.step} is not the next one, which is {run.next_step}")
                if problem := brief.optimizer.problem():
                    raise Refused(problem)
                self._require_allowed(state, key, run, brief, view.module_state(JobsState))
                return _changed(state, key, replace(run, open_step=OpenStep(brief, context.height)))
            case SaveModel(key, name, expires_ms):
                run = _own(state, members, key, said.author)
                if run.open_step is not None:
                    raise Refused(f"step {run.open_step.brief.step} is open: save the model after its outcome")
                job = _started(view.module_state(JobsState), key)
                model = ModelAnchor(job.round, job.rounds_in_model, job.model_root)
                run = replace(run, checkpoints={**run.checkpoints, name: Checkpoint(model, expires_ms)})
                if len(run.checkpoints) > SAVED_MODELS_MAX:
                    raise Refused(f"run {key.hex()[:8]} has {SAVED_MODELS_MAX} checkpoints, the maximum: delete one of them")
                self._require_places_of_models(state, members, key, run, view.module_state(JobsState))
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
                return _changed(state, key, replace(run, is_over=True))
            case ClientLimit():
                return StateChange(_with_limit_vote(state, said.content, said.author, VoterSet(members.voters)))
        raise AssertionError(said.content)

    def _require_allowed(self, state: ClientsState, key: bytes, run: ClientRun, brief: StepBrief, jobs: JobsState) -> None:
        """Raise `Refused` for a step beyond the limits that the voters set."""
        raised = "or a quorum of voters raises that with `peer limit {} N`"
        if run.next_step >= state.steps.most:
            had = f"run {key.hex()[:8]} has had {run.next_step} steps, and this network allows {state.steps.most}"
            raise Refused(f"{had}: save its model and load it into another run, {raised.format(STEPS_LIMIT)}")
        parameters = self._rules.terms_of_spec(_started(jobs, key).spec).pass_parameters
        flops = FLOPS_PER_PARAMETER * parameters * brief.tokens
        if flops > state.flops.most:
            needs = f"{FLOPS_PER_PARAMETER} · {parameters} parameters · {brief.tokens} tokens = {flops} floating-point operations"
            most = f"this network allows {state.flops.most}"
            raise Refused(f"step {brief.step} needs {needs}, and {most}: send fewer tokens, {raised.format(FLOPS_LIMIT)}")

    def _require_places_of_models(
        self, state: ClientsState, members: MembersState, key: bytes, run: ClientRun, jobs: JobsState
    ) -> None:
        """Raise `Refused` if `run` has more saved models than before, which leave too little for the runs of other members."""
        if _saved_model_count(run) <= _saved_model_count(state.runs[key]):
            return
        counts = {of: _saved_model_count(other) for of, other in state.runs.items() if other.checkpoints}
        mine = _runs_of(state, members, members.current_key(run.owner)).keys()
        if key not in counts:
            way_out = "delete the checkpoints of one of them"
            _require_place(len(counts.keys() & mine), len(counts), SAVING_MAX, "runs with checkpoints", way_out)
        sizes = {
            of: BYTES_PER_PARAMETER * self._rules.terms_of_spec(jobs.jobs[of].spec).trained_parameters * count
            for of, count in {**counts, key: _saved_model_count(run)}.items()
        }
        own, size = sum(sizes[of] for of in sizes.keys() & mine), sum(sizes.values())
        if own > SAVED_BYTES_MAX - size:
            would = f"the checkpoints of this network would have {size / 1e9:.1f} GB, {own / 1e9:.1f} GB of them yours"
            raise Refused(f"{would}, of {SAVED_BYTES_MAX / 1e9:.1f} GB: {NO_MORE_THAN_FREE}; delete some of yours")

    def settle_block(self, state: ClientsState, view: StateReader, context: BlockContext) -> StateChange:
        """Record the outcomes of closed rounds, and let the next step or another job begin.

        Runs of members that are gone end without checkpoints.
        """
        jobs, members, now = view.module_state(JobsState).jobs, view.module_state(MembersState), context.time_ms
        lost = {owner: time.at(now) if time.opened_ms else time for owner, time in state.lost.items() if time.at(now).ms}
        runs, closed = dict(state.runs), {fact.job: fact for fact in context.facts_of(ClosedRound)}
        facts = list[SavedJobModels | JobRetained | JobHalt]()
        for key, run in state.runs.items():
            if key not in jobs:  # The run begins in this block.
                continue
            step, is_finished = run.open_step, jobs[key].phase is JobPhase.FINISHED
            if _has_left(members, run.owner):
                run = replace(run, checkpoints={}, is_over=True)
            # `run.owner` is the present key, although the owner may have rotated since its transaction in this block.
            facts += [JobHalt(key, run.owner)] if run.is_over and not is_finished else []
            if step is not None and step.opened_ms == 0:
                step = replace(step, opened_ms=now)
                run = replace(run, open_step=step)
            is_accepted = key in closed and bool(closed[key].outcome.accepted)
            # A round that the run's end abandons has cost others as much time as one that accepted nothing.
            if step is not None and step.opened_ms and not is_accepted and (key in closed or run.is_over or is_finished):
                lost = _with_round(lost, run.owner, step.opened_ms, now)
            if run.is_over:
                run = replace(run, open_step=None)
            elif key in closed:
                run = _after_round(run, closed[key], jobs[key], members)
            runs[key] = run
        for key, run in runs.items():
            left = {name: of for name, of in run.checkpoints.items() if not 0 < of.expires_ms <= now}
            runs[key] = run = run if len(left) == len(run.checkpoints) else replace(run, checkpoints=left)
            if key in jobs and (models := _saved_models(run)) != jobs[key].saved_models:
                facts.append(SavedJobModels(key, models))
            if run.checkpoints:
                facts += [JobRetained(key), *(JobRetained(base) for base in (run.base,) if base is not None)]
        voters = members.voters
        state = ClientsState(runs, state.flops.with_votes_of(voters), state.steps.with_votes_of(voters), lost)
        return StateChange(state, (*facts, *self._requests(state, view, context, closed.keys() & jobs.keys())))

    def end_block(self, state: ClientsState, view: StateReader, context: BlockContext) -> StateChange:
        """Note the rounds that open, and drop the runs whose jobs were not started or that are over and have no checkpoints."""
        jobs, left = view.module_state(JobsState).jobs, dict[bytes, ClientRun]()
        for key, run in state.runs.items():
            phase, step = jobs[key].phase if key in jobs else JobPhase.FINISHED, run.open_step
            if phase is JobPhase.FINISHED and not run.is_over:
                run = replace(run, open_step=None, is_over=True)
            elif phase is JobPhase.RUNNING and step is not None and step.opened_ms is None:
                run = replace(run, open_step=replace(step, opened_ms=0))
            if key in jobs and (run.checkpoints or not run.is_over):
                left[key] = run
        return StateChange(replace(state, runs=left) if left != state.runs else state)

    def follow_key_rotations(self, state: ClientsState, current: Any) -> ClientsState:
        runs = {key: replace(run, owner=current(run.owner)) for key, run in state.runs.items()}
        moved = replace(state, runs=runs, lost={current(owner): time for owner, time in state.lost.items()})
        return moved if moved != state else state

    def voted_limits(self, state: ClientsState) -> Mapping[str, VotedLimit]:
        return {FLOPS_LIMIT: state.flops, STEPS_LIMIT: state.steps}

    def _requests(
        self, state: ClientsState, view: StateReader, context: BlockContext, closed: set[bytes]
    ) -> Iterator[JobBrief | JobHold]:
        """Yield the facts of one block: the brief of the step whose round may open, and the job that waits for this round.

        `closed` are the jobs whose rounds close in this block.
        """
        jobs, members, runs = view.module_state(JobsState), view.module_state(MembersState), state.runs
        late = {owner for owner, time in state.lost.items() if time.at(context.time_ms).ms > LOST_MS_MAX}
        needs_worker = {key: job for key, job in jobs.jobs.items() if self._rules.terms_of_spec(job.spec).needs_worker}
        running = {key for key, job in needs_worker.items() if job.phase is JobPhase.RUNNING}
        # Runs that are over after this block. `jobs` counts last rounds later. It also executes halts later, and refuses none of
        # them, because each is in the name of the job's author and the job began in an earlier block.
        over = {key for key, run in runs.items() if run.is_over or _ends(jobs.jobs.get(key), key in closed)}
        stay_open = running - closed - over
        for key in stay_open & runs.keys():  # the trainer of an open round may have left
            job = needs_worker[key]
            if runs[key].open_step is not None and not any(map(members.may_be_awaited, job.trainers)):
                yield from _brief(key, job, runs[key], members, job.trainers)
        waiting = [key for key in jobs.jobs.keys() & runs.keys() - stay_open - over if runs[key].open_step is not None]
        is_late = {key: members.current_key(runs[key].owner) in late for key in waiting}
        waiting.sort(key=lambda key: (is_late[key], _since(runs[key]), key))
        if not waiting or stay_open:
            return
        # The round of another job comes between two steps.
        held = {fact.job for fact in context.facts_of(JobHold)}
        paused = {key for key, job in needs_worker.items() if job.phase is JobPhase.PAUSED} - runs.keys() - held
        ended = {key for key in over if key in running or runs[key].open_step is not None}
        key = waiting[0]
        gives_way = is_late[key] or bool((closed | ended) & runs.keys())
        # If no round was open before this block, a module that acts later holds whatever could begin.
        was_open = bool(running) or any(job.opened_height == context.height for job in needs_worker.values())
        if gives_way and was_open and (paused or self._jobs.has_startable_job(jobs, members, context.height, held)):
            return
        if not is_late[key]:  # A late step only begins if the job whose round this block closes is over.
            yield from (JobHold(other) for other in running - runs.keys())
        yield from _brief(key, jobs.jobs[key], runs[key], members)


def _ends(job: Job | None, is_closed: bool) -> bool:
    """Return whether a run's job is over after this block. `is_closed`: the block closes its round."""
    return job is not None and (job.phase is JobPhase.FINISHED or (is_closed and job.rounds_in_model + 1 >= job.rounds))


def _since(run: ClientRun) -> int:
    assert run.open_step is not None
    return run.open_step.since


def _after_round(run: ClientRun, closed: ClosedRound, job: Job, members: MembersState) -> ClientRun:
    """Return the run after a round of its open step."""
    step, outcome = run.open_step, closed.outcome
    assert step is not None, "a round opens for a step"
    rejected = dict(run.last.rejected) if run.last is not None and run.last.step == step.brief.step else {}
    if not outcome.accepted:
        reason = next(map(outcome.rejection_reason, sorted(outcome.rejected)), ABSENT)
        rejected[reason] = rejected.get(reason, 0) + 1
    last = StepOutcome(step.brief.step, closed.round, bool(outcome.accepted), rejected)
    # A renewed round also has former trainers. It awaits nobody if the last one has given up its role.
    step = replace(step, tried=(*step.tried, (*job.awaited, *job.trainers)[0]), opened_ms=None)
    run = replace(run, last=last, open_step=step)
    has_failed = step.attempts == ATTEMPTS_MAX or not trainers_in_order(job, closed.job, run, members)
    return replace(run, next_step=run.next_step + 1, open_step=None) if outcome.accepted or has_failed else run


def _with_round(lost: Mapping[bytes, LostTime], owner: bytes, opened_ms: int, now_ms: int) -> dict[bytes, LostTime]:
    """Return the lost times of members after a block that ends a round of the owner, which accepted nothing."""
    before = lost[owner].at(now_ms) if owner in lost else LostTime(0, now_ms)
    return {**lost, owner: replace(before, opened_ms=opened_ms)}


def _brief(key: bytes, job: Job, run: ClientRun, members: MembersState, present: tuple[bytes, ...] = ()) -> Iterator[JobBrief]:
    """Yield the brief of the open step's next round, or of its open round whose trainers `present` have left.

    Nothing is yielded if nobody can train.
    """
    assert run.open_step is not None
    # All others may have left since the last round.
    order = trainers_in_order(job, key, run, members) or trainers_in_order(job, key, replace(run, open_step=None), members)
    successors = [trainer for trainer in map(members.current_key, present) if trainer in order]
    for trainer in (*successors, *order)[:1]:
        yield JobBrief(key, trainer, encode(run.open_step.brief))


def _started(jobs: JobsState, key: bytes) -> Job:
    """Return the job of a run. Raises `Refused` in the block that opens the run, whose job starts at the end of the block."""
    job = jobs.jobs.get(key)
    if job is None:
        raise Refused(f"run {key.hex()[:8]} begins in this block: wait for the next one")
    return job


def _changed(state: ClientsState, key: bytes, run: ClientRun, *facts: object) -> StateChange:
    return StateChange(replace(state, runs={**state.runs, key: run}), facts)


def _with_limit_vote(state: ClientsState, vote: ClientLimit, author: bytes, voters: VoterSet) -> ClientsState:
    """Return the state with this voter's vote for a limit. Raises `Refused`."""
    terms = ClientsModule.limits.get(vote.name)
    if terms is None:
        raise Refused(f"unknown limit {vote.name!r}: the limits of client runs are {', '.join(ClientsModule.limits)}")
    if vote.most > terms.most:
        raise Refused(f"{vote.name} {vote.most}: voters can allow at most {terms.most}")
    limit = state.flops if vote.name == FLOPS_LIMIT else state.steps
    if problem := limit.vote_problem(vote.name, vote.most, author, voters):
        raise Refused(problem)
    limit = limit.with_vote(vote.most, author, voters)
    return replace(state, flops=limit) if vote.name == FLOPS_LIMIT else replace(state, steps=limit)


NO_MORE_THAN_FREE: Final = "nobody may have more than is left free"


def _require_place(mine: int, taken: int, most: int, what: str, way_out: str) -> None:
    """Raise `Refused` unless a member with `mine` of the `taken` places may have another one of `most`.

    A member has at most as many places as are free. It gets half of them if it is alone, and each further member half of what
    is left.
    """
    if mine >= most - taken:
        raise Refused(f"this network has {taken} of {most} {what}, {mine} of them yours: {NO_MORE_THAN_FREE}; {way_out}")


def _has_left(members: MembersState, owner: bytes) -> bool:
    """Return whether the member with this present key is expelled, or has neither a vote nor a candidacy nor a role.

    After a rotation, the member votes with its former key until its vote follows.
    """
    if not members.is_current_key(owner):
        return True
    return members.has_no_duties(owner) and owner not in map(members.current_key, members.upcoming)


def _require_places_of_run(state: ClientsState, members: MembersState, author: bytes, base: bytes | None) -> None:
    """Raise `Refused` if another run, with this base, would leave too little for other members."""
    mine = _runs_of(state, members, author)
    unfinished = {key for key, run in state.runs.items() if not run.is_over}
    way_out = "end one of them"
    _require_place(len(unfinished & mine.keys()), len(unfinished), ON_REQUEST_MAX, "unfinished runs", way_out)
    bases = {run.base for run in state.runs.values()} - {None}
    if base is None or base in bases:
        return
    of_others = {run.base for key, run in state.runs.items() if key not in mine}
    way_out = "end the runs of one of them, and delete their checkpoints"
    _require_place(len(bases - of_others), len(bases), BASES_ON_REQUEST_MAX, "models that runs change", way_out)


def _runs_of(state: ClientsState, members: MembersState, owner: bytes) -> dict[bytes, ClientRun]:
    return {key: run for key, run in state.runs.items() if members.current_key(run.owner) == owner}


def _saved_models(run: ClientRun) -> tuple[ModelAnchor, ...]:
    """Return the models of a run's checkpoints, in the order of their rounds. Several names may have one model."""
    models = {checkpoint.model.round: checkpoint.model for checkpoint in run.checkpoints.values()}
    return tuple(models[number] for number in sorted(models))


def _saved_model_count(run: ClientRun) -> int:
    return len({checkpoint.model.round for checkpoint in run.checkpoints.values()})


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
    """Return the members that may still train the run's open or next step, in the order of their attempts.

    The owner is first, if it trains. Trainers whose updates this run has refused or missed come later than others, so an absent
    trainer does not cost each step a round. Suspended trainers are left out, unless no other is there.
    """
    trains = [member for member, of in members.members.items() if TRAINER in of.roles and members.may_be_awaited(member)]
    able = {member for member in trains if member not in job.suspended_trainers} or {*trains}
    tried = map(members.current_key, run.open_step.tried if run.open_step is not None else ())
    owner, step, rejections = members.current_key(run.owner), run.next_step, Counter[bytes]()
    for trainer, reasons in job.rejected.items():
        rejections[members.current_key(trainer)] += sum(reasons.values())
    return sorted(
        able.difference(tried),
        key=lambda member: (member != owner, rejections[member], hashlib.sha256(encode((key, step, member))).digest()),
    )
