"""The models of a peer's jobs on disk, moved on as blocks decide. numpy only: every voter runs this, with or without torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ledger.jobs import ClosedRound, JobTerms
from protocol import codec
from protocol.errors import StorageError
from protocol.messages import Proposal
from training.replicated import files
from training.replicated.incoming import IncomingModel, part_of
from training.replicated.model import Accepted, ReplicatedModel
from training.spec import Audit, JobSpec, Objective

ROUNDS_KEPT = 2  # the open round's model and the one before, which a late re-execution may still read


class ModelHost:
    """Implements `ledger.jobs.JobRules`. `step` may run in a thread; one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[bytes, ReplicatedModel] = {}
        self._served: ReplicatedModel | None = None  # whose parts somebody asked for last
        self._pinned: frozenset[tuple[bytes, int]] = frozenset()  # models of snapshots that others may ask for

    def terms(self, spec: bytes) -> JobTerms:
        job = JobSpec.decode(spec)
        return JobTerms(
            name=job.name,
            objective=job.objective.value,
            rounds=job.rounds,
            audited=job.audit is Audit.FULL,
            needs_worker=job.objective is not Objective.SCRATCH,
            proposal_seconds=job.proposal_seconds,
        )

    def directory(self, job: bytes, number: int) -> Path:
        """Where the model that round `number` starts from is."""
        return self._folder / job.hex()[:32] / f"{number:08d}"

    def model(self, job: bytes, number: int) -> ReplicatedModel:
        """The model that round `number` starts from. `StorageError` if it is damaged."""
        model = self._models.get(job)
        if model is None or model.round != number:
            model = self._models[job] = ReplicatedModel.open(self.directory(job, number))
        return model

    def create(self, job: bytes, spec: bytes) -> bytes:
        return self._save(ReplicatedModel.initial(job, JobSpec.decode(spec)))

    def step(self, closed: ClosedRound, payload: Callable[[bytes], bytes]) -> bytes:
        """Applies a closed round; `payload` gives the bytes of a digest. Returns the new model root."""
        accepted = []
        for signed in closed.proposals:
            proposal = codec.decode_message(signed.body, (Proposal,))
            accepted.append(Accepted(signed.signer, proposal, payload(proposal.payload)))
        return self._save(self.model(closed.job, closed.round).apply(accepted, closed.outcome.rejected))

    # Snapshots: implements `ledger.snapshot.Models` ------------------------------------------------------------------

    def manifest(self, job: bytes, number: int) -> bytes:
        return files.read_manifest(self.directory(job, number))

    def part(self, job: bytes, number: int, index: int) -> bytes:
        served = self._served
        if served is None or (served.job, served.round) != (job, number):
            served = self._served = ReplicatedModel.open(self.directory(job, number))
        return part_of(served, index)

    def receive(self, job: bytes, number: int, root: bytes, manifest: bytes) -> IncomingModel:
        return IncomingModel(self.directory(job, number), job, number, root, manifest, partial(self._forget, job))

    def _forget(self, job: bytes) -> None:
        self._models.pop(job, None)
        self._served = None

    def holds(self, job: bytes, number: int, root: bytes) -> bool:
        try:
            model = ReplicatedModel.open(self.directory(job, number))
            model.verify()
        except StorageError:
            return False
        return model.root == root

    def pin(self, models: frozenset[tuple[bytes, int]]) -> None:
        self._pinned = models

    def _save(self, model: ReplicatedModel) -> bytes:
        directory = self.directory(model.job, model.round)
        model.save(directory)
        mapped = ReplicatedModel.open(directory)  # the pages of a memory-mapped model can be given back
        assert mapped.root == model.root
        self._models[model.job] = mapped
        return model.root

    def prune(self, job: bytes, number: int) -> None:
        """Deletes models older than what round `number` needs, but for pinned ones, and what a crash left of them."""
        for directory in self.directory(job, number).parent.glob("*"):
            of = directory.name.removeprefix(".").partition(".")[0]
            if of.isdigit() and int(of) <= number - ROUNDS_KEPT and (job, int(of)) not in self._pinned:
                shutil.rmtree(directory, ignore_errors=True)
