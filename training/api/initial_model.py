"""The model that a new job starts from. A person names a finished job, a job at a round, or a folder with a foreign model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from features.name_resolution import resolve_job
from ledger.jobs import Job, JobPhase, ModelReference, QueuedJob
from protocol.api import TrainRequest
from protocol.blob_digest import BlobHasher
from protocol.errors import UserError
from storage.multipart_objects import write_list
from training import parameter_blob
from training.formats import huggingface_model
from training.job_disk_space import require_disk_space
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.round_context import TrainingPeer
from training.transformer import BYTE_VOCABULARIES, ModelSpec


@dataclass(frozen=True, slots=True)
class InitialModel:
    """An existing model that a new job can start from, with its tokenizer."""

    name: str  # name of the model for people
    model: ModelSpec
    tokenizer: bytes | None  # digest of a blob that this peer has or can fetch
    base: ModelReference | None = None  # model of a finished job, which every peer keeps
    stop: int | None = None  # the token that ends a text of this model; None: the model has no such token.
    # Function for a job that starts from a blob: it writes the parameters for the specification to a file and returns their hash.
    write: Callable[[JobSpec, BinaryIO], BlobHasher] | None = None

    def apply_to_spec(self, spec: JobSpec, model: ModelSpec) -> JobSpec:
        return replace(spec, base=self.base, model=model, tokenizer=self.tokenizer)

    def publish_parameters(self, peer: TrainingPeer, spec: JobSpec) -> JobSpec:
        """Publish the blob of parameters that the job starts from, if any. Return the specification with the blob's digest.

        Raises `UserError`.
        """
        if self.write is None:
            return spec
        folder = peer.store.path.parent
        require_disk_space(folder, parameter_blob.blob_bytes(spec), "initial model")
        with tempfile.TemporaryDirectory(prefix="start-", dir=folder) as made:
            file = Path(made) / "parameters"
            with file.open("wb") as stream:
                hashed = self.write(spec, stream)
            write_list(file, hashed.part_list)
            peer.blobs.adopt_file(file, hashed.digest())
        return replace(spec, initial_model=hashed.digest()).validated()


def resolve_initial_model(peer: TrainingPeer, request: TrainRequest) -> InitialModel:
    """Return the model that `train --from` names. Raises `UserError`."""
    jobs = peer.state.jobs
    live: dict[bytes, Job | QueuedJob] = {**jobs.jobs, **{waiting.job: waiting for waiting in jobs.queue}}
    is_job = any(_fits(request.initial_model, key, job) for key, job in live.items())
    if request.model_folder and is_job and "/" not in request.initial_model:
        both = f"--from {request.initial_model!r} names a job and a folder"
        raise UserError(f"{both}: write ./{request.initial_model} for the folder, or more characters of the job's id")
    if request.model_folder and not is_job:
        folder = Path(request.model_folder)
        if not huggingface_model.is_model_folder(folder):
            raise UserError(
                f"--from: {folder} is neither a job nor a folder with {huggingface_model.CONFIG}: `peer jobs` lists the jobs"
            )
        own = huggingface_model.open_huggingface_model(folder, as_bytes=request.vocabulary in BYTE_VOCABULARIES)
        tokenizer = None if own.tokenizer is None else peer.blobs.add_bytes(own.tokenizer)
        return InitialModel(str(folder), own.model, tokenizer, stop=own.stop, write=own.write_parameters)
    name, at, number = request.initial_model.rpartition("@")
    if at and not is_job and number.isdecimal():
        return _of_round(peer, name, int(number))
    return initial_model_from_job(peer, request.initial_model, "--from")


def initial_model_from_job(peer: TrainingPeer, text: str, argument: str) -> InitialModel:
    """Return the last model of a finished job. Raises `UserError`."""
    base, job, before = resolve_base_job(peer, text, argument)
    return InitialModel(f"job {job.name!r}", before.model, before.tokenizer, base, before.resolved_objective.stop_token(before))


def _fits(text: str, key: bytes, job: Job | QueuedJob) -> bool:
    return text == job.name or bool(text and key.hex().startswith(text.lower()))


def resolve_base_job(peer: TrainingPeer, text: str, argument: str) -> tuple[ModelReference, Job, JobSpec]:
    """Return the finished job that a person names as base of a new job. Raises `UserError`."""
    jobs = peer.state.jobs
    live: dict[bytes, Job | QueuedJob] = {**jobs.unfinished(), **{waiting.job: waiting for waiting in jobs.queue}}
    if any(_fits(text, key, job) for key, job in live.items()):
        raise UserError(f"{argument} {text!r}: the job is not finished: run `peer jobs` to see its progress")
    finished = {key: job for key, job in jobs.jobs.items() if job.phase is JobPhase.FINISHED and job.round}
    key = resolve_job(text, finished, "finished jobs")
    job, spec = finished[key], JobSpec.decode(finished[key].spec)
    if not spec.resolved_objective.makes_text:
        raise UserError(f"{argument} {text!r}: job {job.name!r} has no model that generates text")
    return ModelReference(key, job.round, job.model_root), job, spec


def _of_round(peer: TrainingPeer, name: str, number: int) -> InitialModel:
    """Return a job's model after `number` rounds. Raises `UserError`.

    Every peer keeps the last model of a finished job. Any other model becomes a blob, which is made from this peer's copy of the
    model.
    """
    jobs = peer.state.jobs.jobs
    key = resolve_job(name, jobs, "jobs")
    job, spec = jobs[key], JobSpec.decode(jobs[key].spec)
    if not spec.resolved_objective.makes_text:
        raise UserError(f"--from: job {job.name!r} has no model that generates text")
    stop = spec.resolved_objective.stop_token(spec)
    if job.phase is JobPhase.FINISHED and number == job.round:
        return InitialModel(f"job {job.name!r}", spec.model, spec.tokenizer, ModelReference(key, number, job.model_root), stop)
    final = peer.state.final_round(key)
    undone = any(rounds.first < number <= rounds.last for rounds in job.undone_rounds)
    if number > job.round and not undone:
        raise UserError(f"--from: job {job.name!r} has no model at round {number}: it has trained {job.round} rounds")
    if number > final or undone:
        undo = f"audits {'have undone' if undone else 'may still undo'} the model of job {job.name!r} at round {number}"
        raise UserError(f"--from: {undo}: use round {final}, which is final")
    model = peer.models.open_decided_model(peer.store, key, job, number)
    return InitialModel(f"job {job.name!r}", spec.model, spec.tokenizer, stop=stop, write=lambda spec, file: _write(model, file))


def _write(model: ReplicatedModel, file: BinaryIO) -> BlobHasher:
    hashed = BlobHasher()
    for data in parameter_blob.iter_parameters(model):
        file.write(data)
        hashed.update(data)
    return hashed
