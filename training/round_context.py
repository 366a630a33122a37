"""The data and calls that a role needs for its work in a round, and the interface of that work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from features.services import PeerContext
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
# Metric of a measured model beside the metrics of its objective: seconds that the measurement took.
EVALUATION_SECONDS = "evaluation_seconds"
TRAINING_NATS = "training_nats"  # metric of a round: mean training loss of this peer's own steps, in nats per token
REPLAYS = "replays"  # metric of a round: number of re-executions before the vote that this peer has begun
# Function that fetches a blob; arguments: digest, most bytes, peers that may have the blob.
FetchBlob = Callable[[bytes, int, Iterable[bytes]], Awaitable[None]]


def audit_owner(job: bytes, number: int) -> object:
    return "audit", job, number


@dataclass(frozen=True, slots=True)
class RoundContext:
    """A round of a job, open or closed, with everything that computations for this round need."""

    me: bytes
    spec: JobSpec
    model: ReplicatedModel  # the model that the round starts from
    model_directory: Path
    blobs: DiskBlobStore
    fetch: FetchBlob
    brief: bytes = field(kw_only=True, default=b"")  # brief of the round, in a job on request

    @property
    def job(self) -> bytes:
        return self.model.job

    @property
    def number(self) -> int:
        return self.model.round

    @property
    def base_directory(self) -> Path | None:
        """Directory of the model that the job started from; None: the job has no base."""
        return self._directory_of(self.spec.base)

    @property
    def read_directory(self) -> Path | None:
        """Directory of the model of another job that the objective requires; None: it requires none."""
        return self._directory_of(self.spec.resolved_objective.required_model(self.spec))

    def _directory_of(self, other: ModelReference | None) -> Path | None:
        return round_directory(self.model_directory.parent.parent, other.job, other.round) if other else None

    @property
    def blob_owner(self) -> object:
        """The owner of temporary blobs for this round. Audits need their blobs after the round closes."""
        return audit_owner(self.job, self.number)


@dataclass(frozen=True, slots=True)
class OpenRoundContext(RoundContext):
    """The context of an open round. When the round closes, all calls that await something in it are cancelled."""

    terms: RoundTerms
    wait_to_propose: Callable[[], Awaitable[None]]  # waits until this peer can serve the data of a further proposal in time
    # Returns the loss of this peer's last inner step with the secret that opens its commitment.
    make_loss_opening: Callable[[int], LossOpening]
    # Makes our proposal durable, then sends it. The second argument is the loss that the proposal commits to; None: it commits to
    # no loss.
    publish_proposal: Callable[[Proposal, LossOpening | None], Awaitable[None]]
    record_replay_start: Callable[[bytes], Awaitable[None]]  # records that this peer begins to re-execute a trainer's proposal
    # Stores metrics of this round. Values that are not finite are left out.
    record_metrics: Callable[[Mapping[str, float]], Awaitable[None]]

    @property
    def blob_owner(self) -> object:
        """The owner of temporary blobs for this round. It ends when the round closes."""
        return self.job, self.number


@dataclass(frozen=True, slots=True)
class ReplayResult:
    finding: ReplayFinding
    relative_error: float = 0.0  # relative error of the proposal; zero without a replay
    last_loss: int | None = None  # loss of the last inner step, in millionths; None without a replay


class WorkerClient(Protocol):
    """A peer's access to its worker."""

    async def ask_worker(self, round: RoundContext, request: WorkerRequest[R]) -> R:
        """Send a request to the worker and return its reply. Raises `WorkerFailed`."""

    async def evaluate_model(self, round: OpenRoundContext) -> None:
        """Measure the round's model and store its metrics. Raises `WorkerFailed`."""

    @property
    def text_folder(self) -> Path:
        """A folder for files that the worker reads and writes."""


class RoundParticipant(Protocol):
    """A peer's work in the rounds of jobs: propose, check, re-execute, replay and measure."""

    @property
    def worker_client(self) -> WorkerClient | None:
        """The client of this peer's worker; None: it has no worker."""

    async def propose(self, round: OpenRoundContext) -> None:
        """Propose an update. Called once for each round in which this peer is a trainer."""

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        """Fetch the payload of a proposal and do the cheap checks. Called once for each proposal of the round."""

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        """Re-execute a proposal before the vote. Called once for each proposal that this voter is to vouch for.

        The implementation calls `record_replay_start` when the trainer's buffers have arrived.
        """

    async def replay(self, round: RoundContext, request: AuditRequest) -> ReplayResult:
        """Replay a proposal for a sampled audit. Called for one audit at a time, when the request's files have arrived."""

    async def observe_round(self, round: OpenRoundContext) -> None:
        """Do work that needs no proposal, such as measuring the model.

        Called once for each round, concurrently with all other work.
        """


class TrainingPeer(PeerContext, Protocol):
    """The interface of the running peer for code that creates jobs and queries their models."""

    @property
    def models(self) -> JobModelStore: ...

    @property
    def local_data(self) -> str:
        """The path of this peer's own text, for jobs on local data; empty: the peer has no text."""

    @property
    def evaluates_models(self) -> bool:
        """True if this peer's worker measures models without a request."""

    @property
    def worker_client(self) -> WorkerClient | None:
        """The client of this peer's worker; None: it has no worker."""

    def make_round_context(self, job: bytes, round: int, of: Job) -> OpenRoundContext:
        """Return the context of a job's open round, or of the last model of a finished job."""

    def audit_window_ms(self, spec: JobSpec) -> int:
        """Return how long the audits of one round of a job with this specification may take, in milliseconds."""
