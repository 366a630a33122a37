"""The trainer, which computes updates in its worker process, and re-executes proposals of other trainers to vouch for them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import trio

from peer.roles.voter import Voter, fetch_brief, propose_request, publish_proposal, read_bounded_blob
from peer.worker.supervisor import WorkerSupervisor
from protocol.errors import UserError
from protocol.limits import DATA_SHARD_BYTES, MESSAGE_BYTES_MAX
from protocol.sampling import WITHHELD_TEXT, SamplingOptions
from storage import durable_files
from storage.multipart_objects import LIST_SUFFIX
from training import corpus as data
from training import parameter_blob, worker_protocol
from training.data import text_files
from training.data.tokenizer import TOKENIZER_BYTES_MAX
from training.job_disk_space import require_disk_space
from training.objectives.objective import NATS
from training.replicated.replicated_model import ReplicatedModel
from training.round_context import EVALUATION_SECONDS, TRAINING_NATS, OpenRoundContext, RoundContext, WorkerClient

R = TypeVar("R")
log = logging.getLogger("peer")

# Pause between evaluations as a multiple of the last one's duration, so that the worker has time for training.
EVALUATION_PAUSE_FACTOR = 3.0
OBSERVE_SECONDS_MAX = 3_600.0  # longest work of one `observe_round`: later, no peer has the job's text any more
WORKER_DEATHS_MAX = 3  # deaths of the worker process during one request, after which the request fails

SAMPLE_INTERVAL_ROUNDS = 10  # rounds between two sample texts of a job
SAMPLES_KEPT = 2
SAMPLE_PROMPT, SAMPLE_OPTIONS = (
    "The ",
    SamplingOptions(max_tokens=120),
)  # prompt and options are the same for all samples, so that samples differ only by the model


@dataclass
class _JobProgress:
    """The state of this trainer's work for one job."""

    opening: trio.Lock = field(default_factory=trio.Lock)
    opened: bool = False
    opening_seconds: float = 0.0  # seconds that the worker has spent on opening the job and that no proposal has reported yet
    observed: bool = False  # True while `observe_round` runs
    to_evaluate: OpenRoundContext | None = None  # round whose model waits for its evaluation, the newest one
    evaluation: trio.Lock = field(default_factory=trio.Lock)
    evaluated: int | None = None  # round of the newest evaluated model


@dataclass
class Trainer(Voter):
    """A round participant with a worker process, which proposes updates and also votes.

    `local_data` is the text for jobs with local data. If `evaluates` is True, the trainer measures the held-out loss of as many
    models as it can.
    """

    worker: WorkerSupervisor
    text_folder: Path  # folder of the texts of jobs, of samples and of the worker's output files
    local_data: Path | None = None
    evaluates: bool = False
    _jobs: dict[bytes, _JobProgress] = field(default_factory=dict)
    _left: set[Path] = field(default_factory=set)  # output files of the worker for rounds that closed too early, to be deleted

    def __post_init__(self) -> None:
        self._left.update(self.text_folder.glob("*.buffer*"))  # output files that an earlier process left

    @property
    def worker_client(self) -> WorkerClient | None:
        return self

    async def propose(self, round: OpenRoundContext) -> None:
        if not round.spec.resolved_objective.needs_worker:
            await super().propose(round)
            return
        request = propose_request(round, self.text_folder / f"{round.job.hex()[:16]}-{round.number}.buffer")
        request = replace(request, brief=await fetch_brief(round))
        outs = (request.buffer_out, request.payload_out, request.inner_out, request.declared_out)
        # Each output file may have a list of its parts beside it.
        made = {Path(f"{out}{end}") for out in outs if out is not None for end in ("", LIST_SUFFIX)}
        try:
            done = await self.ask_worker(round, request)
            left = self._left - made  # the worker trains one job at a time, so it writes no older file now
            await round.wait_to_propose()
            await publish_proposal(round, request, done)
            await trio.to_thread.run_sync(_delete, left)
            self._left -= left
        finally:
            self._left |= made
        loss, job = TRAINING_NATS if round.spec.resolved_objective.loss_unit == NATS else "training_loss", self._job(round)
        seconds = job.opening_seconds + done.seconds
        await round.record_metrics({"worker_seconds": seconds, loss: math.inf if done.loss is None else done.loss})
        job.opening_seconds = 0.0

    async def audit(self, round: RoundContext, request: worker_protocol.AuditRequest) -> worker_protocol.AuditReply:
        if not round.spec.resolved_objective.needs_worker:
            return await super().audit(round, request)
        return await self.ask_worker(round, request)

    async def observe_round(self, round: OpenRoundContext) -> None:
        """Open the job in the worker, then evaluate its newest model until no newer model waits. Models in between are skipped.
        The opening of the job continues when rounds close meanwhile.
        """
        if not round.spec.resolved_objective.needs_worker:
            return
        job = self._job(round)
        waiting, job.to_evaluate = job.to_evaluate, round
        if waiting is not None or job.observed:
            return
        job.observed = True
        try:
            with trio.move_on_after(OBSERVE_SECONDS_MAX):
                await self._open(round)
                while self.evaluates and (newest := job.to_evaluate) is not None:
                    job.to_evaluate = None
                    await trio.sleep(EVALUATION_PAUSE_FACTOR * (await self._evaluate(newest) + await self._sample(newest)))
        finally:
            job.observed, job.to_evaluate = False, None

    async def evaluate_model(self, round: OpenRoundContext) -> None:
        await self._open(round)
        await self._evaluate(round)

    async def _evaluate(self, round: OpenRoundContext) -> float:
        """Evaluate a model unless it has been evaluated. Return the seconds that the worker took."""
        job = self._job(round)
        async with job.evaluation:
            if job.evaluated == round.number:
                return 0.0
            try:
                done = await self._until_alive(worker_protocol.EvaluateRequest(round.job, str(round.model_directory)))
            except worker_protocol.WorkerFailed:
                if round.model_directory.exists():
                    raise
                return 0.0  # rounds were faster than this evaluation, so the model was deleted meanwhile
            await round.record_metrics({**done.figures, EVALUATION_SECONDS: done.seconds})
            job.evaluated = round.number
            return done.seconds

    async def _sample(self, round: OpenRoundContext) -> float:
        """Generate and store a sample text of the model if a sample is due. Return the seconds of the generation."""
        if not round.spec.has_text or not is_sample_due(self.text_folder, round.job, round.number):
            return 0.0
        began = trio.current_time()
        asked = worker_protocol.GenerateRequest(round.job, str(round.model_directory), SAMPLE_PROMPT, SAMPLE_OPTIONS)
        try:
            done = await worker_protocol.generate_text(self._until_alive, asked)
        except worker_protocol.WorkerFailed:
            if round.model_directory.exists():
                raise
            return 0.0  # the model was deleted meanwhile
        save_sample(self.text_folder, round.job, round.number, WITHHELD_TEXT if done.is_withheld else done.text)
        return trio.current_time() - began

    async def ask_worker(self, round: RoundContext, request: worker_protocol.WorkerRequest[R]) -> R:
        """Return the worker's reply to a request about a round. The end of the round cancels the call. Raises `WorkerFailed`."""
        await self._open(round)
        return await self._until_alive(request)

    def _job(self, round: RoundContext) -> _JobProgress:
        return self._jobs.setdefault(round.job, _JobProgress())

    async def _open(self, round: RoundContext) -> None:
        """Fetch the job's text and open the job in the worker, unless it is open. Concurrent calls wait for the first call."""
        job = self._job(round)
        async with job.opening:
            if job.opened and round.job in self.worker.open_jobs:
                return
            text, tokenizer, tokens, tokenized = None, None, None, False
            if round.spec.data is not None:
                text, manifest = await self._shared_text(round, round.spec.data)
                tokens, tokenized = manifest.tokens, manifest.tokenized
            elif round.spec.resolved_objective.reads_text:
                if self.local_data is None:
                    raise UserError("this job trains on local data: set your text with `peer run --local-data PATH`")
                text = self.text_folder / f"local-{hashlib.sha256(str(self.local_data).encode()).hexdigest()[:16]}.txt"
                await trio.to_thread.run_sync(_copy_text, self.local_data, text)
            if round.spec.tokenizer is not None:
                await _fetch(round, round.spec.tokenizer, TOKENIZER_BYTES_MAX)
                tokenizer = str(round.blobs.path(round.spec.tokenizer))
            path, base = (str(place) if place else None for place in (text, round.base_directory))
            opening = worker_protocol.OpenJobRequest(round.job, round.spec.encode(), path, tokenizer, tokenized, tokens, base)
            files = dict(round.spec.resolved_objective.required_files(round.spec))
            if round.spec.initial_model is not None and round.spec.resolved_objective.refers_to_first:
                files[round.spec.initial_model] = parameter_blob.blob_bytes(round.spec)
            for other, size in files.items():
                await _fetch(round, other, size)
                opening.files[other] = str(round.blobs.path(other))
            if (read := round.read_directory) is not None:
                digest = ReplicatedModel.open(read).spec.data
                opening = replace(opening, required_model=str(read))
                if digest is not None and round.spec.resolved_objective.reads_required_data:
                    text, manifest = await self._shared_text(round, digest)
                    opening = replace(opening, other_text=str(text), other_tokens=manifest.tokens)
            began = trio.current_time()
            await self._until_alive(opening)
            job.opened, job.opening_seconds = True, trio.current_time() - began

    async def _until_alive(self, request: worker_protocol.WorkerRequest[R]) -> R:
        """Return the worker's reply. If the worker process dies, repeat the request, until it has died `WORKER_DEATHS_MAX` times.
        Raises `WorkerFailed` if the worker refuses the request, or dies each time.
        """
        for _ in range(WORKER_DEATHS_MAX):
            with contextlib.suppress(worker_protocol.WorkerDied):
                return await self.worker.ask(request)
        raise worker_protocol.WorkerFailed(f"the worker died {WORKER_DEATHS_MAX} times of {type(request).__name__}")

    async def _shared_text(self, round: RoundContext, digest: bytes) -> tuple[Path, data.DataManifest]:
        """Return the file of a job's text or tokens, and its manifest."""
        await _fetch(round, digest, MESSAGE_BYTES_MAX)
        manifest = data.DataManifest.decode(read_bounded_blob(round, digest, MESSAGE_BYTES_MAX))
        path = data.text_path(self.text_folder, manifest)
        if not path.exists():
            require_disk_space(self.text_folder, manifest.size)
            for shard in manifest.shards:
                await _fetch(round, shard, DATA_SHARD_BYTES)
            await trio.to_thread.run_sync(data.assemble_text, manifest, round.blobs.read_range, path)
        return path, manifest


async def _fetch(round: RoundContext, digest: bytes, size_max: int) -> None:
    """Fetch a blob and pin it, so that the blob store keeps it even if a faulty peer names it as temporary data."""
    await round.fetch(digest, size_max, ())
    round.blobs.pin_blob(digest)


def _copy_text(source: Path, path: Path) -> None:
    findings = text_files.TextFileReport()
    with durable_files.atomic_write(path) as file:
        for piece in text_files.read_text(source, findings=findings):
            file.write(piece)
    for note in findings.report_lines():
        log.warning("local data: %s", note.strip())


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_sample_due(folder: Path, job: bytes, round: int) -> bool:
    """Return whether this round needs a sample text: the first evaluated one of `SAMPLE_INTERVAL_ROUNDS` rounds does."""
    last = _sample_files(folder, job.hex())[-1:]
    return not last or round // SAMPLE_INTERVAL_ROUNDS > _sample_round(last[0]) // SAMPLE_INTERVAL_ROUNDS


def save_sample(folder: Path, job: bytes, round: int, text: str) -> None:
    part = folder / f"{job.hex()}.part"
    part.write_bytes(text.encode())
    part.replace(folder / f"{job.hex()}-{round:08}.sample")
    for old in _sample_files(folder, job.hex())[:-SAMPLES_KEPT]:
        old.unlink(missing_ok=True)


def saved_samples(folder: Path) -> list[tuple[str, int, str]]:
    """Return (job, round, text) of the stored samples, the oldest of each job first."""
    found = []
    for path in _sample_files(folder, "*"):
        found.append((path.stem.partition("-")[0], _sample_round(path), path.read_bytes().decode(errors="replace")))
    return found


def _sample_files(folder: Path, job: str) -> list[Path]:
    return sorted(folder.glob(f"{job}-*.sample"))


def _sample_round(path: Path) -> int:
    return int(path.stem.partition("-")[2])
