"""Trainings that failed: jobs without an accepted update, or without one any more, and plans that ended before their policy."""

from __future__ import annotations

from collections.abc import Iterator

from features.peer_names import SHORT_ID_LENGTH
from features.text_tables import pluralize
from ledger.core.module import StateReader
from ledger.jobs import NO_PROGRESS_ROUNDS, Job, JobsState
from ledger.network_governance import NetworkState
from protocol.units import display_round_number
from protocol.verdicts import DIVERGING
from rlhf.ledger import tuning_plans
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives.ppo import MODULE, PPO
from rlhf.objectives.registry import PAIR_OBJECTIVES
from training.job_spec import INNER_RATE, INNER_RATE_MIN, MUON_RATE, InnerOptimizerKind, JobSpec

FAILURE_ALERT_HEIGHTS = 1_000  # for which a failure is an alert: the state keeps it longer


def find_failed_trainings(view: StateReader, height: int) -> Iterator[str]:
    """Those of the last heights, with reasons."""
    for job in view.module_state(JobsState).jobs.values():
        if tuning_plans.failed_rounds(job) and not job.made_no_progress and height - job.opened_height < FAILURE_ALERT_HEIGHTS:
            labels = JobSpec.decode(job.spec).resolved_objective.reason_labels
            yield f"job {job.name}: {tuning_plans.no_progress_text(job.rounds, tuning_plans.rejections(job), labels)}"
    known = view.module_state(RlhfState).plans if view.module_state(NetworkState).module_version(MODULE) else {}
    for plan in known.values():
        failure = plan.failure
        if failure is not None and failure.accuracy is not None and height - failure.height < FAILURE_ALERT_HEIGHTS:
            yield f"plan of job {plan.current.job.hex()[:SHORT_ID_LENGTH]}: {tuning_plans.failure_text(plan)}"


def find_stalled_jobs(view: StateReader, height: int) -> Iterator[str]:
    """Jobs of the last heights that ended without progress: after which round, all verdicts, and the way out."""
    for key, job in view.module_state(JobsState).jobs.items():
        if job.made_no_progress and height - job.opened_height < FAILURE_ALERT_HEIGHTS:
            spec = JobSpec.decode(job.spec)
            ended = f"job {job.name} ended after round {display_round_number(job.last_closed)}"
            nothing = f"no update was accepted in its last {pluralize(NO_PROGRESS_ROUNDS, 'round')}"
            of_all = (
                "of all its updates: "
                f"{tuning_plans.rejections_text(tuning_plans.rejections(job), spec.resolved_objective.reason_labels)}"
            )
            yield f"{ended}: {nothing} ({of_all}); {_way_out(key, job, spec)}"


def _way_out(key: bytes, job: Job, spec: JobSpec) -> str:
    if DIVERGING not in tuning_plans.rejections(job):
        return "`peer rounds` says who was refused, and why"
    is_planned = spec.objective in (PPO.name, *PAIR_OBJECTIVES)
    words = "rlhf start" if is_planned else f"train --from {key.hex()[:SHORT_ID_LENGTH]}"
    how = "" if is_planned else ", from its newest model"
    usual = MUON_RATE if spec.inner is InnerOptimizerKind.MUON else INNER_RATE
    rate = f"inner_rate={max(INNER_RATE_MIN, min(usual, spec.inner_rate / 10)):g}"
    fields = rate if is_planned else f"inner={spec.inner.value} {rate}"  # a plan's optimizer does not change
    way = f"start it again{how} and with a lower learning rate than {spec.inner_rate:g}: `peer {words} --set {fields}`"
    # Accepted steps may have spoilt the model.
    is_spoilt = "; without --from, if `peer rounds` shows that the loss of that model has grown"
    return way + is_spoilt * (bool(job.accepted) and not is_planned)
