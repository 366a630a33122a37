"""The trainer: computes updates in its worker process, and re-executes what the others propose before it votes on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import trio

from ledger import durable
from ledger.genesis import TRAINER
from peer.roles.base import Judged, OpenRound
from peer.roles.voter import Voter, audit_request, propose_request, publish
from peer.worker import Worker, WorkerDied, WorkerFailed
from protocol.errors import UserError
from protocol.identity import Signed
from protocol.limits import DATA_SHARD_BYTES, MESSAGE_BYTES_MAX
from protocol.messages import Proposal
from protocol.reasons import Verdict
from training import data, tasks
from training.spec import Audit, Objective

R = TypeVar("R")
TOKENIZER_BYTES_MAX = 16 << 20  # a byte-level BPE of 65536 tokens is about 4 MB of JSON


@dataclass
class Trainer(Voter):
    """`local_data` is the text for jobs whose data is local; `evaluates` measures the held-out loss of every model it can."""

    worker: Worker
    texts: Path  # where assembled texts are kept
    local_data: Path | None = None
    evaluates: bool = False
    registered: ClassVar[tuple[str, ...]] = (TRAINER,)
    _opening: trio.Lock = field(default_factory=trio.Lock)
    _opened: set[bytes] = field(default_factory=set)
    _evaluating: bool = False
    _to_evaluate: OpenRound | None = None

    async def propose(self, round: OpenRound) -> None:
        if round.spec.objective is Objective.SCRATCH:
            await super().propose(round)
            return
        request = propose_request(round, self.texts / f"{round.job.hex()[:16]}-{round.number}.buffer")
        done = await self.ask(round, request)
        await round.measured("training_nats", done.loss)
        await publish(round, request, done)

    async def judge(self, round: OpenRound, signed: Signed, proposal: Proposal) -> Judged:
        if round.spec.objective is Objective.SCRATCH or round.spec.audit is Audit.OFF:
            return await super().judge(round, signed, proposal)
        verdict = await self.check(round, signed, proposal)
        if verdict is not Verdict.ACCEPT or signed.signer == round.me:
            return Judged(verdict)
        request = await audit_request(round, signed.signer, proposal)
        await round.delivered(signed.signer)
        audited = await self.ask(round, request)
        return Judged(audited.verdict, audited.seconds)

    async def observe(self, round: OpenRound) -> None:
        """Measures the newest model; those that come while one is being measured are skipped but for the last."""
        if not self.evaluates or round.spec.objective is Objective.SCRATCH:
            return
        waiting, self._to_evaluate = self._to_evaluate, round
        if waiting is not None or self._evaluating:
            return
        self._evaluating = True
        try:
            while (newest := self._to_evaluate) is not None:
                self._to_evaluate = None
                try:
                    done = await self.ask(newest, tasks.Evaluate(newest.job, str(newest.model_directory)))
                except WorkerFailed:
                    if newest.model_directory.exists():
                        raise
                    continue  # rounds go by faster than they are measured: this model was pruned meanwhile
                if done.bits_per_byte is not None:
                    await newest.measured("held_out_bits_per_byte", done.bits_per_byte)
        finally:
            self._evaluating = False

    async def ask(self, round: OpenRound, request: tasks.Request[R]) -> R:
        """The worker's reply, however often it has to be started again. Cancelled with the round."""
        await self._open(round)
        return await self._until_alive(request)

    async def _open(self, round: OpenRound) -> None:
        """Gets a job's text once and hands it to the worker; the others that come meanwhile wait."""
        async with self._opening:
            if round.job in self._opened:
                return
            text = await self._local_text() if round.spec.data is None else await self._shared_text(round, round.spec.data)
            tokenizer = None
            if round.spec.tokenizer is not None:
                await round.fetch(round.spec.tokenizer, TOKENIZER_BYTES_MAX, ())
                tokenizer = str(round.blobs.path(round.spec.tokenizer))
            await self._until_alive(tasks.OpenJob(round.job, round.spec.encode(), str(text), tokenizer))
            self._opened.add(round.job)

    async def _until_alive(self, request: tasks.Request[R]) -> R:
        while True:
            try:
                return await self.worker.ask(request)
            except WorkerDied:
                continue  # it is being started again, after a pause that grows

    async def _local_text(self) -> Path:
        if self.local_data is None:
            raise UserError("this job trains on local data: name yours with `peer run --local-data PATH`")
        path = self.texts / f"local-{hashlib.sha256(str(self.local_data).encode()).hexdigest()[:16]}.txt"
        await trio.to_thread.run_sync(_copy_text, self.local_data, path)
        return path

    async def _shared_text(self, round: OpenRound, digest: bytes) -> Path:
        await round.fetch(digest, MESSAGE_BYTES_MAX, ())
        manifest = data.Manifest.decode(round.blobs.read(digest))
        path = self.texts / f"{manifest.text.hex()[:32]}.txt"
        if not path.exists():
            for shard in manifest.shards:
                await round.fetch(shard, DATA_SHARD_BYTES, ())
            await trio.to_thread.run_sync(data.assemble, manifest, round.blobs.read, path)
        return path


def _copy_text(source: Path, path: Path) -> None:
    with durable.writing(path) as file:
        for piece in data.read_text(source):
            file.write(piece)
