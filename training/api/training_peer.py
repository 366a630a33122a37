"""The running peer as those see it who make jobs and ask about their models."""

from __future__ import annotations

from typing import Protocol

from features.peer_context import PeerContext
from ledger.jobs import Job
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.round_context import OpenRoundContext, WorkerClient


class TrainingPeer(PeerContext, Protocol):
    @property
    def models(self) -> JobModelStore: ...

    @property
    def local_data(self) -> str:
        """The path of this peer's own text, for jobs on local data; empty: it has none."""

    @property
    def evaluates_models(self) -> bool:
        """Whether its worker measures models unasked."""

    @property
    def worker_client(self) -> WorkerClient | None:
        """None: this peer has no worker."""

    def make_round_context(self, job: bytes, round: int, of: Job) -> OpenRoundContext:
        """What a role sees of the job's open round, or of a finished job."""

    def audit_window_ms(self, spec: JobSpec) -> int:
        """How long the audits of one round of such a job may take."""
