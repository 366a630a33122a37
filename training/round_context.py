"""The narrow context that a role sees, and what it may do with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from features.peer_context import PeerContext
from ledger.audits.loss_commitments import LossOpening
from ledger.jobs import Job, ModelReference
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.verdicts import ReplayFinding, Verdict
from rounds.round_terms import RoundTerms
from storage.disk_blob_store import DiskBlobStore
from training.job_spec import JobSpec
from training.model_store import JobModelStore, round_directory

if TYPE_CHECKING:
    from training.replicated.replicated_model import ReplicatedModel
    from training.worker_protocol import AuditRequest, WorkerRequest

R = TypeVar("R")
EVALUATION_SECONDS = "evaluation_seconds"  # figure of a measured model, beside those of its objective
TRAINING_NATS = "training_nats"  # mean loss of a round's own steps, a token
REPLAYS = "replays"  # figure of a round: re-executions before the vote that this peer has begun
FetchBlob = Callable[[bytes, int, Iterable[bytes]], Awaitable[None]]  # (digest, most bytes, who may have it)


def audit_owner(job: bytes, number: int) -> object:
    return "audit", job, number


@dataclass(frozen=True, slots=True)
class RoundContext:
    """One round of one job, which may be over: what computing for it needs."""

    me: bytes
    spec: JobSpec
    model: ReplicatedModel  # what the round starts from
    model_directory: Path
    blobs: DiskBlobStore
    fetch: FetchBlob

    @property
    def job(self) -> bytes:
        return self.model.job

    @property
    def number(self) -> int:
        return self.model.round

    @property
    def base_directory(self) -> Path | None:
        """Where the model is that the job started from; None: it has no base."""
        return self._directory_of(self.spec.base)

    @property
    def read_directory(self) -> Path | None:
        """Where the model is that the job reads beside its own; None: it reads none."""
        return self._directory_of(self.spec.resolved_objective.required_model(self.spec))

    def _directory_of(self, other: ModelReference | None) -> Path | None:
        return round_directory(self.model_directory.parent.parent, other.job, other.round) if other else None

    @property
    def blob_owner(self) -> object:
        """As whose the blobs are expected to pass that this needs: audits need theirs when the round is closed, too."""
        return audit_owner(self.job, self.number)


@dataclass(frozen=True, slots=True)
class OpenRoundContext(RoundContext):
    """An open one. Whatever awaits here is cancelled when the round closes."""

    terms: RoundTerms
    wait_to_propose: Callable[[], Awaitable[None]]  # this peer can show what another proposal commits to in time
    make_loss_opening: Callable[[int], LossOpening]  # of the loss of our last inner step
    # Our proposal, and what it commits to where auditors are bound: durable, then sent.
    publish_proposal: Callable[[Proposal, LossOpening | None], Awaitable[None]]
    record_replay_start: Callable[[bytes], Awaitable[None]]  # all that re-executing this trainer's proposal needs is here
    # figures about this round: all finite ones are stored, or none
    record_metrics: Callable[[Mapping[str, float]], Awaitable[None]]

    @property
    def blob_owner(self) -> object:
        """Until the round is closed."""
        return self.job, self.number


@dataclass(frozen=True, slots=True)
class ReplayResult:
    finding: ReplayFinding
    relative_error: float = 0.0  # zero where nothing was replayed
    last_loss: int | None = None  # of the last inner step, in millionths; None: nothing was replayed


class WorkerClient(Protocol):
    """Whoever has a worker."""

    async def ask_worker(self, round: RoundContext, request: WorkerRequest[R]) -> R:
        """The worker's reply. Raises `WorkerFailed`."""

    async def evaluate_model(self, round: OpenRoundContext) -> None:
        """Returns when the figures of this model are stored. Raises `WorkerFailed`."""

    @property
    def text_folder(self) -> Path:
        """A folder for what the worker reads and writes."""


class RoundParticipant(Protocol):
    """What a peer does in the rounds of jobs: propose, check, re-execute, replay, measure."""

    @property
    def worker_client(self) -> WorkerClient | None:
        """None: this peer has no worker."""

    async def propose(self, round: OpenRoundContext) -> None:
        """Called once for each round in which this peer is among the trainers."""

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        """The cheap checks. Called once for each proposal of the round. The payload is not here yet."""

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        """Called once for each proposal for which this voter is to vouch. It calls `record_replay_start` first."""

    async def replay(self, round: RoundContext, request: AuditRequest) -> ReplayResult:
        """Called for each sampled audit of this peer, one at a time; what the request names is here."""

    async def observe_round(self, round: OpenRoundContext) -> None:
        """Called once for each round, beside everything else."""


class TrainingPeer(PeerContext, Protocol):
    """The running peer as those see it who make jobs and ask about their models."""

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
