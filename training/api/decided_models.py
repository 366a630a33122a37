"""Models that this peer keeps, checked against what the network decided."""

from __future__ import annotations

from typing import Final

from ledger.jobs import Job
from protocol.errors import UserError
from storage.ledger_store import LedgerStore
from training.model_store import JobModelStore
from training.replicated.replicated_model import ReplicatedModel

ROUNDS_SHOWN_MAX: Final = 8


def require_stored_model(host: JobModelStore, key: bytes, job: Job, number: int) -> None:
    kept = host.stored_rounds(key)
    if number not in kept:
        shown = [str(round) for round in kept[-ROUNDS_SHOWN_MAX:]]
        are = f"this peer keeps {'…, ' * (len(kept) > len(shown))}{', '.join(shown)}" if kept else "this peer keeps none"
        raise UserError(f"the model of job {job.name!r} at round {number} is not here: {are}")


def open_decided_model(host: JobModelStore, store: LedgerStore, key: bytes, job: Job, number: int) -> ReplicatedModel:
    """The model of a job after so many rounds, if this peer keeps it and it is the decided one. Raises `UserError`."""
    require_stored_model(host, key, job, number)
    model = host.open_verified_model(key, number)
    closed = None if number == job.round else store.closed_round(key, number - 1)
    decided = job.model_root if number == job.round else closed.model_root if closed else model.root
    if model.root != decided:
        raise UserError(
            f"{host.round_directory(key, number)} holds another model than the network decided: take one of another round"
        )
    return model
