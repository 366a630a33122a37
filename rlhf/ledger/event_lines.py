"""What people are told of tuning: what a block changed, and which plans failed."""

from __future__ import annotations

from collections.abc import Iterator

from features.feature import EventLine
from features.peer_names import SHORT_ID_LENGTH
from ledger.core.module import StateReader
from ledger.jobs import JobsState
from ledger.network_governance import NetworkState
from protocol.units import display_round_number
from rlhf.ledger import tuning_plans
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives import policy_monitors
from rlhf.objectives.ppo import MODULE
from training.api.training_failures import FAILURE_ALERT_HEIGHTS


def policy_event_lines(before: StateReader, after: StateReader) -> Iterator[EventLine]:
    """The figures of each closed round, and a job's warning once."""
    if not all(state.module_state(NetworkState).module_version(MODULE) for state in (before, after)):
        return
    old, jobs = before.module_state(RlhfState).jobs, after.module_state(JobsState).jobs
    for key, course in after.module_state(RlhfState).jobs.items():
        known = old.get(key)
        if known == course:
            continue
        spec, newest = jobs[key].spec, course.rounds[-1]
        yield EventLine(
            "figures",
            (
                f"round {display_round_number(newest.round)} of job {jobs[key].name}: "
                f"{policy_monitors.metrics_view(key, spec, newest).summary_line}"
            ),
            key,
        )
        if course.warned is not None and (known is None or known.warned is None):
            yield EventLine("warning", policy_monitors.diversity_warning(course, spec), key)


def find_failed_plans(view: StateReader, height: int) -> Iterator[str]:
    """Plans of the last heights that ended before their policy, with reasons."""
    known = view.module_state(RlhfState).plans if view.module_state(NetworkState).module_version(MODULE) else {}
    for plan in known.values():
        failure = plan.failure
        if failure is not None and failure.accuracy is not None and height - failure.height < FAILURE_ALERT_HEIGHTS:
            yield f"plan of job {plan.current.job.hex()[:SHORT_ID_LENGTH]}: {tuning_plans.failure_text(plan)}"
