"""The models of a peer's jobs on disk, moved on as blocks decide. numpy only: every voter runs this, with or without torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ledger.jobs import ClosedRound, JobTerms
from protocol import codec
from protocol.messages import Proposal
from training.replicated.model import Accepted, ReplicatedModel
from training.spec import Audit, JobSpec, Objective

ROUNDS_KEPT = 2  # the open round's model and the one before, which a late re-execution may still read


class ModelHost:
    """Implements `ledger.jobs.JobRules`. `step` may run in a thread; one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[bytes, ReplicatedModel] = {}

    def terms(self, spec: bytes) -> JobTerms:
        job = JobSpec.decode(spec)
        return JobTerms(
            name=job.name,
            objective=job.objective.value,
            rounds=job.rounds,
            audited=job.audit is Audit.FULL,
            needs_worker=job.objective is not Objective.SCRATCH,
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

    def _save(self, model: ReplicatedModel) -> bytes:
        directory = self.directory(model.job, model.round)
        model.save(directory)
        mapped = ReplicatedModel.open(directory)  # the pages of a memory-mapped model can be given back
        assert mapped.root == model.root
        self._models[model.job] = mapped
        return model.root

    def prune(self, job: bytes, number: int) -> None:
        """Deletes models older than what round `number` needs."""
        for directory in self.directory(job, number).parent.glob("[0-9]*"):
            if directory.name.isdigit() and int(directory.name) <= number - ROUNDS_KEPT:
                shutil.rmtree(directory, ignore_errors=True)
