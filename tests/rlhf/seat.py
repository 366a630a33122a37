"""A trainer's first round in a worker of this process, and those who look at it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from peer.worker.main import Jobs
from protocol.verdicts import Verdict
from rlhf.preferences import Record, packed
from training import tasks
from training.engines.pytorch.kind import KIND
from training.replicated.model import ReplicatedModel
from training.spec import JobSpec

JOB, TRAINER = bytes([1]) * 32, bytes([2]) * 32


def write(path: Path, some: Iterable[Record]) -> str:
    """A set as a file."""
    path.write_bytes(b"".join(packed(some)))
    return str(path)


class Seat:
    def __init__(self, folder: Path, spec: JobSpec, some: Iterable[Record]) -> None:
        self.folder, self.spec = folder, spec
        self.set = write(folder / "set", some)
        self.model = ReplicatedModel.initial(JOB, spec)
        self.model.save(folder / "model")

    def worker(self, file: str | None = None, micro_batch: int = 1 << 30) -> Jobs:
        jobs = Jobs(KIND, lambda: None, micro_batch)
        opened = jobs.answer(tasks.OpenJob(JOB, self.spec.encode(), file or self.set, None))
        assert isinstance(opened, tasks.Opened) and opened.train_tokens and opened.held_out_tokens
        return jobs

    def propose(self, jobs: Jobs) -> tasks.Proposed:
        done = jobs.answer(tasks.Propose(JOB, 0, TRAINER, str(self.folder / "model"), None, None, str(self.folder / "m")))
        assert isinstance(done, tasks.Proposed)
        (self.folder / "m.payload").rename(self.folder / "payload")
        return done

    def audited(self, jobs: Jobs) -> Verdict:
        files = (str(self.folder / "payload"), None, None, None)
        found = jobs.answer(tasks.Audit(JOB, 0, TRAINER, str(self.folder / "model"), *files))
        assert isinstance(found, tasks.Audited)
        return found.verdict
