"""The computing of one machine in a job: its own steps, and re-executions of other machines' updates."""

from __future__ import annotations

from dataclasses import replace

from ledger.jobs import Job
from rounds.vouch_set import vouches_needed
from training.job_spec import AuditMode, JobSpec

BENCHMARK_REFERENCE = "'Equal machine time' in docs/benchmarks.md says what such samples are worth"


def describe_machine_time(key: bytes, job: Job, spec: JobSpec) -> str:
    """For people: the share of own steps, and the network's samples beside those of one machine in the same time.

    Empty if one machine trains alone, or without a worker.
    """
    trainers = len(job.trainers)
    if trainers < 2 or not spec.resolved_objective.needs_worker:
        return ""
    replays = replays_per_round(key, job, spec)
    gain = trainers / (1 + replays)
    spent = f"a machine spends {1 / (1 + replays):.0%} of its computing on its own steps"
    spent += f" and {replays / (1 + replays):.0%} on re-execution ({replays:.2g} updates a round)" if replays else ""
    if gain <= 1:
        return f"{spent}: in the same time, {trainers} machines train on no more samples than one machine alone"
    more = f"{gain:.1f} times the samples of one, less their waiting"
    return f"{spent}: in the same time, {trainers} machines train on {more}; {BENCHMARK_REFERENCE}"


def replays_per_round(key: bytes, job: Job, spec: JobSpec) -> float:
    """Updates that a machine with a worker re-executes in a round on average over the job, while nobody lies."""
    terms = replace(job.round_terms(key), reexecutors=frozenset(job.reexecutors), trainers_to_vouch_for=frozenset(job.trainers))
    vouched = sum(vouches_needed(terms, trainer) for trainer in job.trainers) / max(1, len(job.reexecutors))
    if spec.audit is not AuditMode.SAMPLED:
        return vouched if spec.audit is AuditMode.FULL else 0.0
    drawn = spec.audit_rate * spec.auditors * len(job.trainers) / max(1, len(job.reexecutors))
    closing = spec.final_full_audit_rounds / spec.rounds
    return drawn * (1 - closing) + vouched * closing
