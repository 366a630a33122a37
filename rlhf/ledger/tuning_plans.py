"""Plans: jobs of which each begins by itself when the one before it is done. Pure rules of the decided state.

A plan is a reward model, and perhaps a policy that is tuned by it; or a policy that learns from preferences by itself, or by a
rule. It goes on whoever is away, its author too. Where it learns from what people decided in a project, it first waits until the
voters have derived its set (`rlhf.ledger.preference_set_attestation`). In each block:

| the current stage's job, after the block | the plan |
|---|---|
| is not there, since it was not started yet | waits; the next block tries to start it, for 10,000 blocks |
| was started, and waits in line or runs | waits |
| has closed all its rounds, and no update of them was accepted | fails |
| made no progress in its last eight rounds, and so ended before | fails |
| has closed all its rounds, and is the last stage | is finished |
| has closed all its rounds, another stage follows | waits for reports on its model; then starts that one with it, or fails |
| was ended before, or taken out of the line | is cancelled |

A paused plan holds its current job: the open round is closed as always, and then none begins; a job that waits, waits on. It
starts none. All else is as in the table. Once its pauses have lasted for 10,000 blocks together it is cancelled. Of the first row
only blocks count in which it was not paused: so nobody keeps a place for ever. A quorum of the voters ends any plan.

Voters report how many held-out pairs the reward model ranks as people do (`rlhf.pair_accuracy`). The policy starts if
f + 1 of them find it better than chance, and the plan fails if f + 1 do not. A plan with `ignores_accuracy` waits for no report.

The next block, and not this one: what the last round makes of the model is computed when its block is applied, and the next
block names the root of the state with it. Whoever has computed another model cannot apply that block.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from ledger.core.module import Refused, StateReader
from ledger.jobs import (
    PLANNED_MAX,
    JobHold,
    JobLaunch,
    JobPhase,
    JobRetained,
    JobSpecRules,
    JobsState,
    ModelReference,
    TrainerKeys,
)
from ledger.network_governance import NetworkState
from protocol import codec
from protocol.codec import Between, Count, Digest, Key, Length
from protocol.errors import RemoteProtocolError
from protocol.limits import VOTERS_MAX
from protocol.messages import Name
from protocol.verdicts import Verdict
from rlhf.ledger.preference_set_attestation import PreferenceSetClaim, PreferenceSetSource, create_claim
from rlhf.objectives.ppo import MODEL_REWARD, PPO, PpoSettings
from rlhf.objectives.supervised_objectives import OBJECTIVES, PAIR_OBJECTIVES
from rlhf.pair_accuracy import PairAccuracy, agreed_accuracy
from training.api.job_notes import no_progress_text
from training.job_spec import ROUNDS_MAX, SETTINGS_BYTES_MAX, JobSpec

PLANS_RUNNING_MAX: Final = 4  # plans at once, of all members: each holds a base and a reward model on every peer's disk
PLANS_OF_MEMBER_MAX: Final = 1  # running; so nobody alone fills them
PLANS_KEPT_MAX: Final = 16  # that are over, for `rlhf status`
REFUSED_HEIGHTS_MAX: Final = 10_000  # for which the current stage's job may be refused: hours of rounds of a few seconds
PAUSED_HEIGHTS_MAX: Final = 10_000  # of all pauses of a plan: paused it holds a place and models as one that runs
REASONS_MAX: Final = len(Verdict) + 2  # an update's verdicts, `diverging` and `absent`
SPEC_BYTES_MAX: Final = SETTINGS_BYTES_MAX + 4_096  # numbers, names and digests beside the objective's own record

assert 3 * PLANS_RUNNING_MAX <= PLANNED_MAX  # a base and both stages each

Spec = Annotated[bytes, Length(0, SPEC_BYTES_MAX)]


class PlanPhase(enum.StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StartPlan:
    """`rlhf/start`, by any member: a plan."""

    first: Annotated[bytes, Length(1, SPEC_BYTES_MAX)]  # specification of a `reward` or `dpo` job, or of a `ppo` job with a rule
    policy: Spec = b""  # of the job that a reward model then rewards, whose `reward_model` is left out; empty: there is none
    # of the set that the first job names; None: whose preferences they are is not known
    source: PreferenceSetSource | None = None
    ignores_accuracy: bool = False  # the policy starts, whatever the accuracy of the reward model


@dataclass(frozen=True, slots=True)
class CancelPlan:
    """`rlhf/cancel`, by the plan's author or a quorum of the voters: ends it, and the job that it has come to."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class PausePlan:
    """`rlhf/pause`, by the plan's author: after the open round none begins, and no stage, until it is resumed."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """`rlhf/resume`, by the plan's author."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class ReportAccuracy:
    """`rlhf/report-accuracy`, by a voter: its measurement of a trained reward model."""

    plan: Digest
    accuracy: PairAccuracy


@dataclass(frozen=True, slots=True)
class PlanFailure:
    """Why a plan failed."""

    height: Count
    rejected: Annotated[dict[Name, Count], Length(0, REASONS_MAX)]  # verdict -> updates of the current stage
    accuracy: PairAccuracy | None = None  # of the reward model, if updates were accepted
    rounds: Count = 0  # in a row that have accepted nothing, if that is why


@dataclass(frozen=True, slots=True)
class PlanStage:
    job: Digest
    objective: Name
    rounds: Annotated[int, Between(1, ROUNDS_MAX)]
    spec: Spec  # empty as soon as the job was started: it has it
    root: Digest | None = None  # of the job's last model, once the plan has gone on from it
    accuracy: PairAccuracy | None = None  # of that model, as the voters have decided it


@dataclass(frozen=True, slots=True)
class TuningPlan:
    author: Key
    start_height: Count  # height
    base: Digest | None  # job whose model all stages begin with; None: a first model
    stages: Annotated[tuple[PlanStage, ...], Length(1, 2)]
    stage_height: Count  # height at which the current stage became it
    stage_index: Annotated[int, Between(0, 1)] = 0  # the current stage
    phase: PlanPhase = PlanPhase.RUNNING
    paused_at: Count | None = None  # running, and since this height paused
    paused_heights: Count = 0  # heights that earlier pauses lasted for
    stop_requests: TrainerKeys = ()  # voters that want it to end
    claim: PreferenceSetClaim | None = None  # where its set is said to come from a project
    ignores_accuracy: bool = False
    # on the current stage's model
    reports: Annotated[dict[Key, PairAccuracy], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    failure: PlanFailure | None = None

    @property
    def current(self) -> PlanStage:
        return self.stages[self.stage_index]

    def with_current(self, stage: PlanStage) -> TuningPlan:
        return replace(self, stages=(*self.stages[: self.stage_index], stage, *self.stages[self.stage_index + 1 :]))


def stage_job_id(plan: bytes, stage: int) -> bytes:
    """The id of a stage's job."""
    return hashlib.sha256(b"folkmoot/rlhf-stage\x00" + plan + bytes([stage])).digest()


def create_plan(rules: JobSpecRules, key: bytes, author: bytes, said: StartPlan, view: StateReader, height: int) -> TuningPlan:
    """The plan of a transaction. Raises `Refused`, or `RemoteProtocolError` for what is no specification."""
    first, network = rules.terms_of_spec(said.first), view.module_state(NetworkState)
    network.require_parameters_allowed(first.parameters)
    if first.objective == PPO.name:
        if said.policy or said.source or first.read is not None:
            raise Refused("a plan that begins with a job of the objective 'ppo' is that job alone, and a rule rewards it")
    elif first.objective not in PAIR_OBJECTIVES or first.base is None:
        raise Refused(
            "a plan begins with a job of the objective 'reward', 'reward-mean' or 'dpo' that starts from another's model"
        )
    stages = [PlanStage(stage_job_id(key, 0), first.objective, first.rounds, said.first)]
    if said.policy:
        # Everything but the root is known now: so a policy that can never start is refused before anything is trained.
        spec = with_reward_model(said.policy, ModelReference(stages[0].job, first.rounds, bytes(32)))
        then = rules.terms_of_spec(spec)
        network.require_parameters_allowed(then.parameters)
        if then.objective != PPO.name or then.base != first.base:
            raise Refused("a plan ends with a job of the objective 'ppo' that starts from the same model")
        misread = rules.why_read_model_refused(said.first, spec)
        if misread:
            raise Refused(f"the policy cannot read that reward model: {misread}")
        stages.append(PlanStage(stage_job_id(key, 1), then.objective, then.rounds, said.policy))
    claim = None
    if said.source:
        named = JobSpec.decode(said.first).data
        assert named is not None, "such a job has a set"
        claim = create_claim(view, said.source, named, height)
    return TuningPlan(
        author=author,
        start_height=height,
        base=first.base.job if first.base else None,
        stages=tuple(stages),
        stage_height=height,
        claim=claim,
        ignores_accuracy=said.ignores_accuracy,
    )


def with_reward_model(spec: bytes, model: ModelReference) -> bytes:
    """The specification of a policy with the model that rewards it. Raises `RemoteProtocolError` if it is none."""
    job = codec.decode(JobSpec, spec)
    own = codec.decode(PpoSettings, job.objective_settings) if job.objective == PPO.name else None
    if own is None or own.reward != MODEL_REWARD or own.reward_model is not None:
        raise RemoteProtocolError("bad-job", f"its policy says reward {MODEL_REWARD!r}, and leaves out which model")
    return replace(job, objective_settings=codec.encode(replace(own, reward_model=model))).encode()


def pause_plan(plan: TuningPlan, height: int) -> TuningPlan:
    if plan.paused_at is not None:
        raise Refused("the plan is paused already: `rlhf resume` lets it go on")
    return replace(plan, paused_at=height)


def resume_plan(plan: TuningPlan, height: int) -> TuningPlan:
    """The time that its current stage may be refused stood still meanwhile."""
    if plan.paused_at is None:
        raise Refused("the plan is not paused")
    rest = height - plan.paused_at
    return replace(plan, paused_at=None, stage_height=plan.stage_height + rest, paused_heights=plan.paused_heights + rest)


def has_pause_expired(plan: TuningPlan, height: int) -> bool:
    return plan.paused_at is not None and plan.paused_heights + height - plan.paused_at >= PAUSED_HEIGHTS_MAX


def awaits_reports(plan: TuningPlan, jobs: JobsState) -> bool:
    """True if its reward model is trained, and reports on it are missing."""
    job = jobs.jobs.get(plan.current.job)
    is_trained = not plan.current.spec and job is not None and job.is_done
    return is_trained and plan.phase is PlanPhase.RUNNING and not plan.ignores_accuracy


def add_report(
    plan: TuningPlan | None, jobs: JobsState, voters: Sequence[bytes], voter: bytes, accuracy: PairAccuracy
) -> TuningPlan:
    """The plan with one more report. Reports of former voters are dropped."""
    if plan is None or not awaits_reports(plan, jobs):
        raise Refused("no plan waits for reports on this reward model")
    if voter not in voters:
        raise Refused("only a voter reports on a reward model")
    if voter in plan.reports:
        raise Refused("this voter has reported on the reward model")
    if accuracy.halves > 2 * accuracy.pairs:
        raise Refused(f"{accuracy.halves} half pairs are more pairs than {accuracy.pairs}")
    kept = {key: other for key, other in plan.reports.items() if key in voters}
    return replace(plan, reports=kept | {voter: accuracy})


def advance_stage(plan: TuningPlan, jobs: JobsState, voters: Sequence[bytes], height: int) -> TuningPlan:
    """Before a block closes rounds: at the next stage, if the current one is over. This block names the root of its model."""
    stage, job = plan.current, jobs.jobs.get(plan.current.job)
    if plan.phase is not PlanPhase.RUNNING or stage.spec or job is None or not job.is_done:
        return plan
    assert job.opened_height < height, "in the block that closes the last round its model is not computed yet"
    found = None
    if awaits_reports(plan, jobs):
        found = agreed_accuracy(plan.reports, voters)
        if found is None:
            is_late = plan.paused_at is None and height >= job.opened_height + plan.paused_heights + REFUSED_HEIGHTS_MAX
            return replace(plan, phase=PlanPhase.CANCELLED) if is_late else plan
    plan = plan.with_current(replace(stage, root=job.model_root, accuracy=found))
    if found is not None and not found.is_better_than_chance:
        return replace(plan, phase=PlanPhase.FAILED, failure=PlanFailure(height, {}, found), reports={})
    plan = replace(plan, stage_index=plan.stage_index + 1, stage_height=height, reports={})
    model = ModelReference(stage.job, job.round, job.model_root)
    return plan.with_current(replace(plan.current, spec=with_reward_model(plan.current.spec, model)))


def plan_requests(plan: TuningPlan, author: bytes) -> Iterator[JobRetained | JobLaunch | JobHold]:
    """What a running plan wants of the block. `author` is the author's key of now."""
    if plan.base is not None:
        yield JobRetained(plan.base)
    yield from (JobRetained(stage.job) for stage in plan.stages[: plan.stage_index + 1])
    if plan.paused_at is not None:
        yield JobHold(plan.current.job)
    elif plan.current.spec and (plan.claim is None or plan.claim.is_decided):
        yield JobLaunch(plan.current.job, plan.current.spec, author)


def models_needed_by_audits(rules: JobSpecRules, audited: Iterable[bytes], jobs: JobsState) -> Iterator[JobRetained]:
    """The jobs whose models replays of the policies among these read: the reference, and the reward model.

    Without them no auditor could report or judge. A liar could start so many other jobs that its last rounds are never audited.
    """
    for terms in (rules.terms_of_spec(jobs.jobs[key].spec) for key in audited):
        if terms.objective == PPO.name:
            yield from (JobRetained(of.job) for of in (terms.base, terms.read) if of is not None)


def update_after_block(plan: TuningPlan, jobs: JobsState, height: int) -> TuningPlan:
    """After the block at `height` has ended and started jobs."""
    if plan.phase is not PlanPhase.RUNNING:
        return plan
    stage, job = plan.current, jobs.jobs.get(plan.current.job)
    if job is None and all(waiting.job != stage.job for waiting in jobs.queue):
        is_to_come = stage.spec and (plan.paused_at is not None or height < plan.stage_height + REFUSED_HEIGHTS_MAX)
        return plan if is_to_come else replace(plan, phase=PlanPhase.CANCELLED)
    plan = plan.with_current(replace(stage, spec=b""))
    if job is None or job.phase is not JobPhase.FINISHED:
        return plan
    if failed := job.failed_rounds:
        return replace(plan, phase=PlanPhase.FAILED, failure=PlanFailure(height, job.rejections, rounds=failed))
    if not job.is_done:
        return replace(plan, phase=PlanPhase.CANCELLED)
    return replace(plan, phase=PlanPhase.FINISHED) if plan.stage_index == len(plan.stages) - 1 else plan


def failure_text(plan: TuningPlan) -> str:
    """For people. Empty: the plan did not fail."""
    if plan.failure is None:
        return ""
    if plan.failure.accuracy is None:
        labels = next(kind.reason_labels for kind in OBJECTIVES if kind.name == plan.current.objective)
        return no_progress_text(plan.failure.rounds, plan.failure.rejected, labels)
    way = "give more pairs, or let the policy start with `rlhf start … --ignore-accuracy`"
    return f"its reward model is not better than chance: {plan.failure.accuracy}; {way}"


def drop_oldest_plans(plans: dict[bytes, TuningPlan]) -> dict[bytes, TuningPlan]:
    """Without the oldest of those that are over."""
    over = sorted(
        (key for key in plans if plans[key].phase is not PlanPhase.RUNNING), key=lambda key: (plans[key].start_height, key)
    )
    return {key: plan for key, plan in plans.items() if key not in over[: max(0, len(over) - PLANS_KEPT_MAX)]}
