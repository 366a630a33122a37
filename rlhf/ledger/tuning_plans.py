"""Tuning plans: sequences of one or two jobs, which the ledger starts by itself. Pure rules of the ledger.

A plan is either a reward model, optionally followed by a policy that this model rewards; or only a policy, tuned by a rule or by
DPO. The plan also continues while its author is offline. A plan with preferences of a project first waits for the attestation of
its set (`rlhf.ledger.preference_set_attestation`). In each block:

| job of the current stage, after the block | the plan |
|---|---|
| does not exist yet | waits, for 10,000 blocks; each of them tries to start the job |
| is queued or runs | waits |
| has closed all its rounds, without an accepted update | fails |
| ended early, after eight rounds without progress | fails |
| has closed all its rounds, in the last stage | is finished |
| has closed all its rounds, before another stage | waits for reports, for 10,000 blocks; then starts the next stage, or fails |
| was cancelled, or removed from the queue | is cancelled |

A plan whose wait of 10,000 blocks ends is cancelled. A quorum of the voters can end any plan.

A paused plan closes its open round and opens no further round. Its queued job stays queued, and the plan starts no job. Otherwise
the table applies, but paused blocks do not count for the waits. A plan that was paused for 10,000 blocks in all is cancelled,
because it counts for PLANS_RUNNING_MAX.

Voters report how many held-out pairs the reward model ranks as people do (`rlhf.pair_accuracy`). The policy starts if f + 1
voters find the model better than chance, and the plan fails if f + 1 voters do not. A plan with `ignores_accuracy` does not wait
for reports.

A stage starts at the earliest one block after the last round of its predecessor. Peers compute the predecessor's last model while
they apply the block of that round. Only the next block has a state root that includes this model, so a peer with another model
cannot apply that block.
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

PLANS_RUNNING_MAX: Final = 4  # running plans of all members: each keeps a base and a reward model on every peer's disk
PLANS_OF_MEMBER_MAX: Final = 1  # running plans of one member, so that one member cannot use up PLANS_RUNNING_MAX
PLANS_KEPT_MAX: Final = 16  # ended plans in the ledger, for `rlhf status`
# Blocks in which the start of a stage's job may be refused: hours, with rounds of a few seconds.
REFUSED_HEIGHTS_MAX: Final = 10_000
PAUSED_HEIGHTS_MAX: Final = 10_000  # blocks of all pauses of a plan together: a paused plan still occupies its models' disk space
REASONS_MAX: Final = len(Verdict) + 2  # reasons of rejections: the verdicts, `diverging` and `absent`
# Bytes of a specification: the objective's settings, and numbers, names and digests.
SPEC_BYTES_MAX: Final = SETTINGS_BYTES_MAX + 4_096

assert 3 * PLANS_RUNNING_MAX <= PLANNED_MAX  # each plan retains a base and both stages

Spec = Annotated[bytes, Length(0, SPEC_BYTES_MAX)]


class PlanPhase(enum.StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Transaction `rlhf/start`, by any member: starts a plan."""

    first: Annotated[bytes, Length(1, SPEC_BYTES_MAX)]  # specification of a `reward` or `dpo` job, or of a `ppo` job with a rule
    policy: Spec = b""  # specification of the second job, without its `reward_model`; empty: there is no second job
    # origin of the first job's set; None: no voter vouches for the preferences
    source: PreferenceSetSource | None = None
    ignores_accuracy: bool = False  # the policy starts with any accuracy of the reward model


@dataclass(frozen=True, slots=True)
class CancelPlan:
    """`rlhf/cancel`, by the plan's author or a quorum of the voters: ends the plan and its current job."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class PausePlan:
    """Transaction `rlhf/pause`, by the plan's author: the open round closes, and no further round or stage begins."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Transaction `rlhf/resume`, by the plan's author: ends the pause of the plan."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class ReportAccuracy:
    """Transaction `rlhf/report-accuracy`, by a voter: the accuracy of a plan's reward model, as the voter measured it."""

    plan: Digest
    accuracy: PairAccuracy


@dataclass(frozen=True, slots=True)
class PlanFailure:
    """The reason for which a plan failed."""

    height: Count
    rejected: Annotated[dict[Name, Count], Length(0, REASONS_MAX)]  # verdict -> number of updates with it in the current stage
    accuracy: PairAccuracy | None = None  # accuracy of the reward model, if the plan failed because of it
    rounds: Count = 0  # consecutive rounds without an accepted update, if the plan failed because of them


@dataclass(frozen=True, slots=True)
class PlanStage:
    job: Digest
    objective: Name
    rounds: Annotated[int, Between(1, ROUNDS_MAX)]
    spec: Spec  # specification of the job; empty once the job has started, because the job holds it
    root: Digest | None = None  # model root of a first stage's last model, once that stage is over
    accuracy: PairAccuracy | None = None  # accuracy of the stage's last model, as the voters decided


@dataclass(frozen=True, slots=True)
class TuningPlan:
    author: Key
    start_height: Count
    base: Digest | None  # job whose last model all stages start from; None: a new model
    stages: Annotated[tuple[PlanStage, ...], Length(1, 2)]
    stage_height: Count  # height at which the plan reached the current stage, plus the blocks of later pauses
    stage_index: Annotated[int, Between(0, 1)] = 0  # index of the current stage
    phase: PlanPhase = PlanPhase.RUNNING
    paused_at: Count | None = None  # height at which the plan was paused; None: it is not paused
    paused_heights: Count = 0  # length of earlier pauses, in blocks
    stop_requests: TrainerKeys = ()  # voters that voted to end the plan
    claim: PreferenceSetClaim | None = None  # the claim of a set from a project; None: the set is not from a project
    ignores_accuracy: bool = False
    # reports on the model of the current stage, by voter
    reports: Annotated[dict[Key, PairAccuracy], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    failure: PlanFailure | None = None

    @property
    def current(self) -> PlanStage:
        return self.stages[self.stage_index]

    def with_current(self, stage: PlanStage) -> TuningPlan:
        return replace(self, stages=(*self.stages[: self.stage_index], stage, *self.stages[self.stage_index + 1 :]))


def stage_job_id(plan: bytes, stage: int) -> bytes:
    """Return the id of a stage's job."""
    return hashlib.sha256(b"folkmoot/rlhf-stage\x00" + plan + bytes([stage])).digest()


def create_plan(rules: JobSpecRules, key: bytes, author: bytes, said: StartPlan, view: StateReader, height: int) -> TuningPlan:
    """Return the plan that a transaction starts.

    Raises `Refused` for an invalid plan, or `RemoteProtocolError` for a malformed specification.
    """
    first, network = rules.terms_of_spec(said.first), view.module_state(NetworkState)
    network.require_parameters_allowed(first.parameters)
    if first.objective == PPO.name:
        if said.policy or said.source or first.read is not None:
            raise Refused("a plan that begins with a job of the objective 'ppo' has only this job, with a rule as its reward")
    elif first.objective not in PAIR_OBJECTIVES or first.base is None:
        raise Refused(
            "a plan begins with a job of the objective 'reward', 'reward-mean' or 'dpo' that starts from another's model"
        )
    stages = [PlanStage(stage_job_id(key, 0), first.objective, first.rounds, said.first)]
    if said.policy:
        # Only the model root is unknown now, so a policy that can never start is refused before any training.
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
    """Return the specification of a policy with its reward model inserted.

    Raises `RemoteProtocolError` unless `spec` is of a `ppo` job with the reward `model` that names no reward model yet.
    """
    job = codec.decode(JobSpec, spec)
    own = codec.decode(PpoSettings, job.objective_settings) if job.objective == PPO.name else None
    if own is None or own.reward != MODEL_REWARD or own.reward_model is not None:
        raise RemoteProtocolError(
            "bad-job", f"its policy must be a `ppo` job with the reward {MODEL_REWARD!r} and without reward_model"
        )
    return replace(job, objective_settings=codec.encode(replace(own, reward_model=model))).encode()


def pause_plan(plan: TuningPlan, height: int) -> TuningPlan:
    if plan.paused_at is not None:
        raise Refused("the plan is already paused: `rlhf resume` continues it")
    return replace(plan, paused_at=height)


def resume_plan(plan: TuningPlan, height: int) -> TuningPlan:
    """Resume a paused plan. The pause does not count for `REFUSED_HEIGHTS_MAX`."""
    if plan.paused_at is None:
        raise Refused("the plan is not paused")
    rest = height - plan.paused_at
    return replace(plan, paused_at=None, stage_height=plan.stage_height + rest, paused_heights=plan.paused_heights + rest)


def has_pause_expired(plan: TuningPlan, height: int) -> bool:
    return plan.paused_at is not None and plan.paused_heights + height - plan.paused_at >= PAUSED_HEIGHTS_MAX


def awaits_reports(plan: TuningPlan, jobs: JobsState) -> bool:
    """Return True if the plan's reward model is trained and the voters have to report on it."""
    job = jobs.jobs.get(plan.current.job)
    is_trained = not plan.current.spec and job is not None and job.is_done
    return is_trained and plan.phase is PlanPhase.RUNNING and not plan.ignores_accuracy


def add_report(
    plan: TuningPlan | None, jobs: JobsState, voters: Sequence[bytes], voter: bytes, accuracy: PairAccuracy
) -> TuningPlan:
    """Return the plan with one more report, and without those of former voters. Raises `Refused` for an invalid report."""
    if plan is None or not awaits_reports(plan, jobs):
        raise Refused("no plan waits for reports on this reward model")
    if voter not in voters:
        raise Refused("only voters report on a reward model")
    if voter in plan.reports:
        raise Refused("this voter has already reported on the reward model")
    if accuracy.halves > 2 * accuracy.pairs:
        raise Refused(f"{accuracy.halves} half pairs are more than the {accuracy.pairs} pairs")
    kept = {key: other for key, other in plan.reports.items() if key in voters}
    return replace(plan, reports=kept | {voter: accuracy})


def advance_stage(plan: TuningPlan, jobs: JobsState, voters: Sequence[bytes], height: int) -> TuningPlan:
    """Move a plan to its next stage if the current one is over. Called before the block at `height` closes rounds."""
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
    """Yield the requests of a running plan to the block: to retain models, and to start or hold its job.

    `author` is the author's current key.
    """
    if plan.base is not None:
        yield JobRetained(plan.base)
    yield from (JobRetained(stage.job) for stage in plan.stages[: plan.stage_index + 1])
    if plan.paused_at is not None:
        yield JobHold(plan.current.job)
    elif plan.current.spec and (plan.claim is None or plan.claim.is_decided):
        yield JobLaunch(plan.current.job, plan.current.spec, author)


def models_needed_by_audits(rules: JobSpecRules, audited: Iterable[bytes], jobs: JobsState) -> Iterator[JobRetained]:
    """Yield the references and reward models of policies under audit, which must not be deleted.

    Re-execution of a policy reads both models. Without retention, a dishonest trainer could start many other jobs so that both
    models are deleted. Then its last rounds could not be audited.
    """
    for terms in (rules.terms_of_spec(jobs.jobs[key].spec) for key in audited):
        if terms.objective == PPO.name:
            yield from (JobRetained(of.job) for of in (terms.base, terms.read) if of is not None)


def update_after_block(plan: TuningPlan, jobs: JobsState, height: int) -> TuningPlan:
    """Update a plan after the block at `height` has ended and started jobs."""
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
    """Describe why a plan failed, for people, or return "" if it did not fail."""
    if plan.failure is None:
        return ""
    if plan.failure.accuracy is None:
        labels = next(kind.reason_labels for kind in OBJECTIVES if kind.name == plan.current.objective)
        return no_progress_text(plan.failure.rounds, plan.failure.rejected, labels)
    way = "give more pairs, or let the policy start with `rlhf start … --ignore-accuracy`"
    return f"its reward model is not better than chance: {plan.failure.accuracy}; {way}"


def drop_oldest_plans(plans: dict[bytes, TuningPlan]) -> dict[bytes, TuningPlan]:
    """Return the plans without the oldest ended ones beyond `PLANS_KEPT_MAX`."""
    over = sorted(
        (key for key in plans if plans[key].phase is not PlanPhase.RUNNING), key=lambda key: (plans[key].start_height, key)
    )
    return {key: plan for key, plan in plans.items() if key not in over[: max(0, len(over) - PLANS_KEPT_MAX)]}
