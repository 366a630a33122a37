"""Trainings that failed: jobs without an accepted update, and plans that ended before their policy."""

from __future__ import annotations

from collections.abc import Iterator

from features.names import SHORT
from ledger.core.module import View
from ledger.jobs import JobsState
from ledger.network import NetworkState
from rlhf import plans
from rlhf.module import RlhfState
from rlhf.objective import MODULE
from training.spec import JobSpec

FAILED_HEIGHTS = 1_000  # for which a failure is an alert: the state keeps it longer


def failures(view: View, height: int) -> Iterator[str]:
    """Those of the last heights, with reasons."""
    for job in view.of(JobsState).jobs.values():
        if plans.trained_nothing(job) and height - job.opened < FAILED_HEIGHTS:
            labels = JobSpec.decode(job.spec).kind.labels
            yield f"job {job.name}: {plans.nothing_accepted(job.rounds, plans.rejections(job), labels)}"
    known = view.of(RlhfState).plans if view.of(NetworkState).version(MODULE) else {}
    for plan in known.values():
        failure = plan.failure
        if failure is not None and failure.accuracy is not None and height - failure.height < FAILED_HEIGHTS:
            yield f"plan of job {plan.current.job.hex()[:SHORT]}: {plans.why_failed(plan)}"
