"""What the preparation of a set did to the file that a person gave."""

from __future__ import annotations

from features.text_tables import pluralize
from training.job_spec import JobSpec, PreparationCounts


def preparation_notes(spec: JobSpec) -> tuple[str, ...]:
    """For people: the counts of a set's file, each with the way out."""
    counts = spec.preparation or PreparationCounts()
    told = []
    if counts.left_out:
        told.append(f"{pluralize(counts.left_out, 'line')} left out: not usable, or labelled as bad")
    if counts.shortened:
        told.append(f"{pluralize(counts.shortened, 'line')} shortened to the context of {spec.model.context} tokens")
    if counts.holding_stop:
        way_out = (
            "leave `stop_token` out with a model that has an end-of-text token"
            if spec.resolved_objective.example_job_builder
            else "teach the model to end its answers first (`train --from JOB FILE`)"
        )
        many = pluralize(counts.holding_stop, "response")
        ends = "with the stop text before the end: answers of the model end there"
        told.append(f"{many} {ends}; to let them go on, {way_out}, or --set stop_token=none")
    return tuple(told)
