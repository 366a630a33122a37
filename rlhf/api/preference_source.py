"""Where the preferences of a reward model come from, for people."""

from __future__ import annotations

from ledger.jobs import Job, QueuedJob
from ledger.ledger_state import LedgerState
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.rpc import PreferencesView
from training.job_spec import JobSpec


def describe_preference_source(state: LedgerState, job: bytes) -> PreferencesView | None:
    """Of a job that learns from preferences, or will. None if neither the job nor its plan is known any more."""
    known = state.module_state(RlhfState)
    plan = next((plan for plan in known.plans.values() if plan.stages[0].job == job), None)
    lined: dict[bytes, Job | QueuedJob] = {**{waiting.job: waiting for waiting in state.jobs.queue}, **state.jobs.jobs}
    spec = lined[job].spec if job in lined else plan.stages[0].spec if plan else b""
    claim = plan.claim if plan else None
    data = claim.set if claim else JobSpec.decode(spec).data if spec else None
    if data is None:
        return None
    decided = known.sets.get(data)
    source = decided.source if decided else claim.source if claim else None
    if source is None:
        return PreferencesView(data.hex(), False)
    agree = sum(found == data for found in claim.attestations.values()) if claim else 0
    return PreferencesView(
        set=data.hex(),
        decided_by_annotators=decided is not None or (claim is not None and claim.is_decided),
        project=source.project.hex(),
        height=source.height,
        redacted=decided.redacted if decided else 0,
        attesting_voters=agree,
        dissenting_voters=len(claim.attestations) - agree if claim else 0,
    )
