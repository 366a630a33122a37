"""The jobs that learn from preferences, and their rounds, as this peer has seen them."""

from __future__ import annotations

from collections.abc import Iterator

from ledger.jobs import JobsState
from protocol.verdicts import ABSENT
from rlhf.objectives.registry import PAIR_OBJECTIVES
from rlhf.pair_trace import RoundTrainers, TracedJob
from storage.ledger_store import LedgerStore
from training.job_spec import JobSpec

ACCEPTED = "accept"  # among the verdicts of a round that is stored


def jobs_with_preferences(jobs: JobsState, store: LedgerStore) -> Iterator[TracedJob]:
    """In the order in which they were started."""
    for key, job in sorted(jobs.jobs.items(), key=lambda item: item[1].started_height):
        spec = JobSpec.decode(job.spec)
        if spec.objective in PAIR_OBJECTIVES:
            rounds = [found for number in range(job.round) if (found := _round(store, key, number)) is not None]
            yield TracedJob(key, spec, rounds, job.round - len(rounds))


def _round(store: LedgerStore, job: bytes, number: int) -> RoundTrainers | None:
    closed = store.closed_round(job, number)
    if closed is None:
        return None
    return RoundTrainers(number, {trainer: said == ACCEPTED for trainer, said in closed.verdicts.items() if said != ABSENT})
