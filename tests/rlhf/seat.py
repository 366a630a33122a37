"""A trainer's first round in a worker of this process, a worker's text to its end, and the desk of one member of a ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from peer.worker.main import WorkerRequestHandler
from protocol.verdicts import Verdict
from rlhf.data.preference_sets import PromptRecord, encode_records
from tests.ledger.world import World
from training import worker_protocol
from training.engines.pytorch.backend import BACKEND
from training.engines.request_handlers import WorkerContext
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.worker_protocol import GenerateReply, GenerateRequest

JOB, TRAINER = bytes([1]) * 32, bytes([2]) * 32


def write(path: Path, some: Iterable[PromptRecord]) -> str:
    """Write a set to a file."""
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


def whole(jobs: WorkerRequestHandler, request: GenerateRequest) -> GenerateReply:
    told = ""
    while True:
        done = jobs.handle_request(replace(request, text_number=1, told_characters=len(told)))
        assert isinstance(done, GenerateReply)
        told += done.text
        if done.is_over:
            return replace(done, text=told)


class WorldDesk:
    def __init__(self, world: World, me: bytes) -> None:
        self.world, self.me = world, me

    @property
    def state(self) -> Any:
        return self.world.state

    @property
    def height(self) -> int:
        return self.world.state.height

    async def wait_for_block_above(self, height: int) -> None:
        while self.height <= height:  # noqa: ASYNC110
            await trio.sleep(0.01)
