"""A trainer's first round in a worker of this process, and those who look at it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from peer.worker.main import WorkerRequestHandler
from protocol.verdicts import Verdict
from rlhf.data.preference_sets import PromptRecord, encode_records
from training import worker_protocol
from training.engines.pytorch.backend import BACKEND
from training.engines.request_handlers import WorkerContext
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel

JOB, TRAINER = bytes([1]) * 32, bytes([2]) * 32


def write(path: Path, some: Iterable[PromptRecord]) -> str:
    """A set as a file."""
    path.write_bytes(b"".join(encode_records(some)))
    return str(path)


class Seat:
    def __init__(self, folder: Path, spec: JobSpec, some: Iterable[PromptRecord]) -> None:
        self.folder, self.spec = folder, spec
        self.set = write(folder / "set", some)
        self.model = ReplicatedModel.initial(JOB, spec)
        self.model.save(folder / "model")

    def worker(self, file: str | None = None, micro_batch: int = 1 << 30) -> WorkerRequestHandler:
        jobs = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, micro_batch))
        opened = jobs.handle_request(worker_protocol.OpenJobRequest(JOB, self.spec.encode(), file or self.set, None))
        assert isinstance(opened, worker_protocol.OpenJobReply) and opened.train_tokens and opened.held_out_tokens
        return jobs

    def propose(self, jobs: WorkerRequestHandler) -> worker_protocol.ProposeReply:
        done = jobs.handle_request(
            worker_protocol.ProposeRequest(JOB, 0, TRAINER, str(self.folder / "model"), None, None, str(self.folder / "m"))
        )
        assert isinstance(done, worker_protocol.ProposeReply)
        (self.folder / "m.payload").rename(self.folder / "payload")
        return done

    def audited(self, jobs: WorkerRequestHandler) -> Verdict:
        files = (str(self.folder / "payload"), None, None, None)
        found = jobs.handle_request(worker_protocol.AuditRequest(JOB, 0, TRAINER, str(self.folder / "model"), *files))
        assert isinstance(found, worker_protocol.AuditReply)
        return found.verdict
