"""Texts about jobs for people: reasons of failures, and changes to a person's file during its preparation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from features.peer_names import SHORT_ID_LENGTH
from features.text_tables import pluralize
from ledger.core.module import StateReader
from ledger.jobs import NO_PROGRESS_ROUNDS, Job, JobsState
from protocol.units import display_round_number
from protocol.verdicts import DIVERGING, verdict_label_by_name
from training.job_spec import INNER_RATE, INNER_RATE_MIN, MUON_RATE, InnerOptimizerKind, JobSpec, PreparationCounts
from training.objectives.objective import Objective

FAILURE_ALERT_HEIGHTS = 1_000  # heights during which the failure of a job is an alert; the state contains the job longer


def find_failed_jobs(view: StateReader, height: int) -> Iterator[str]:
    """Yield a text on each recent job that ended without an accepted update, except jobs that ended for lack of progress."""
    for job in view.module_state(JobsState).jobs.values():
        if job.failed_rounds and not job.made_no_progress and height - job.opened_height < FAILURE_ALERT_HEIGHTS:
            labels = JobSpec.decode(job.spec).resolved_objective.reason_labels
            yield f"job {job.name}: {no_progress_text(job.rounds, job.rejections, labels)}"


def find_stalled_jobs(view: StateReader, height: int) -> Iterator[str]:
    """Yield a text for people on each recent job that ended without progress: its last round, all verdicts, and the remedy."""
    for key, job in view.module_state(JobsState).jobs.items():
        if job.made_no_progress and height - job.opened_height < FAILURE_ALERT_HEIGHTS:
            spec = JobSpec.decode(job.spec)
            ended = f"job {job.name} ended after round {display_round_number(job.last_closed)}"
            nothing = f"no update was accepted in its last {pluralize(NO_PROGRESS_ROUNDS, 'round')}"
            of_all = f"verdicts on all its updates: {rejections_text(job.rejections, spec.resolved_objective.reason_labels)}"
            yield f"{ended}: {nothing} ({of_all}); {_way_out(key, job, spec)}"


def _way_out(key: bytes, job: Job, spec: JobSpec) -> str:
    if DIVERGING not in job.rejections:
        return "run `peer rounds` to see the rejected trainers and the reasons"
    command = spec.resolved_objective.start_command
    is_planned = command != Objective.start_command
    words = command if is_planned else f"{command} --from {key.hex()[:SHORT_ID_LENGTH]}"
    how = "" if is_planned else " from its newest model"
    usual = MUON_RATE if spec.inner is InnerOptimizerKind.MUON else INNER_RATE
    rate = f"inner_rate={max(INNER_RATE_MIN, min(usual, spec.inner_rate / 10)):g}"
    fields = rate if is_planned else f"inner={spec.inner.value} {rate}"  # A tuning plan fixes the inner optimizer.
    way = f"start it again{how} with a learning rate below {spec.inner_rate:g}: `peer {words} --set {fields}`"
    # Accepted updates may have damaged the newest model, so the text mentions a start without `--from`.
    is_spoilt = "; leave out --from if `peer rounds` shows that the loss of that model has grown"
    return way + is_spoilt * (bool(job.accepted) and not is_planned)


def no_progress_text(rounds: int, rejected: Mapping[str, int], labels: Sequence[str]) -> str:
    """Return a text for people on a job without accepted updates. `labels` are the reasons of the job's objective."""
    return f"no update was accepted in {pluralize(rounds, 'round')}: {rejections_text(rejected, labels) or 'no trainer sent one'}"


def rejections_text(rejected: Mapping[str, int], labels: Sequence[str]) -> str:
    """Return counts of rejections as text, such as `8 diverging, 1 replay`."""
    return ", ".join(f"{count} {verdict_label_by_name(name, labels)}" for name, count in sorted(rejected.items()))


def preparation_notes(spec: JobSpec) -> tuple[str, ...]:
    """Return texts for people on the counts from the preparation of a person's file, each with a remedy."""
    counts = spec.preparation or PreparationCounts()
    told = []
    if counts.left_out:
        told.append(f"{pluralize(counts.left_out, 'line')} left out: unusable, or labelled as bad")
    if counts.shortened:
        told.append(f"{pluralize(counts.shortened, 'line')} shortened to the context of {spec.model.context} tokens")
    if counts.holding_stop:
        way_out = (
            "leave `stop_token` out with a model that has an end-of-text token"
            if spec.resolved_objective.example_job_builder
            else "teach the model to end its answers first (`train --from JOB FILE`)"
        )
        many = pluralize(counts.holding_stop, "response")
        ends = "with the stop text before the end: the model's answers will end there"
        told.append(f"{many} {ends}; to avoid this, {way_out}, or use --set stop_token=none")
    return tuple(told)
