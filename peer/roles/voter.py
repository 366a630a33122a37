"""The lightweight voter: no torch, ever. It checks payloads, follows the majority of the re-executors, applies every update."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import trio

from ledger.blobs import Blobs
from peer.roles.base import Judged, OpenRound
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.reasons import Verdict
from training import proposals
from training.replicated.codec import payload_bytes_max
from training.spec import Objective
from training.tasks import Audit, Propose, Proposed


class Voter:
    registered: ClassVar[tuple[str, ...]] = ()

    async def propose(self, round: OpenRound) -> None:
        """Only scratch rounds, whose update is known: they need no worker."""
        if round.spec.objective is Objective.SCRATCH:
            with tempfile.TemporaryDirectory(dir=round.model_directory.parent) as folder:
                request = propose_request(round, Path(folder) / "buffer")
                done = await trio.to_thread.run_sync(proposals.propose, request, proposals.scratch_update(round.spec))
                await publish(round, request, done)

    async def judge(self, round: OpenRound, signed: Signed, proposal: Proposal) -> Judged:
        verdict = await self.check(round, signed, proposal)
        if verdict is Verdict.ACCEPT and round.spec.objective is Objective.SCRATCH:
            request = await audit_request(round, signed.signer, proposal)
            audited = await trio.to_thread.run_sync(proposals.audit, request, proposals.scratch_update(round.spec))
            return Judged(audited.verdict)
        return Judged(verdict)

    async def check(self, round: OpenRound, signed: Signed, proposal: Proposal) -> Verdict:
        """The cheap, exact checks that every voter makes alike."""
        if proposal.payload_bytes > payload_bytes_max(round.model.layout):
            return Verdict.MALFORMED
        await round.fetch(proposal.payload, proposal.payload_bytes, (signed.signer,))
        payload = round.blobs.read(proposal.payload)
        return await trio.to_thread.run_sync(round.model.check, signed.signer, proposal, payload)

    async def observe(self, round: OpenRound) -> None:
        """Nothing to measure without an engine."""


def propose_request(round: OpenRound, buffer_out: Path) -> Propose:
    """Continues from our last accepted proposal if its buffer is still here; starting again from zero is always allowed."""
    record = round.model.records.get(round.me)
    here = record is not None and None not in (round.blobs.size(record.buffer), round.blobs.size(record.payload))
    return Propose(
        job=round.job,
        round=round.number,
        trainer=round.me,
        model_directory=str(round.model_directory),
        previous_buffer=str(round.blobs.path(record.buffer)) if record and here else None,
        previous_payload=str(round.blobs.path(record.payload)) if record and here else None,
        buffer_out=str(buffer_out),
    )


async def publish(round: OpenRound, request: Propose, done: Proposed) -> None:
    """Payload and buffer become durable before the signed proposal does, and that before it is sent."""
    await trio.to_thread.run_sync(_keep, round.blobs, round, request, done)
    record = round.model.records.get(round.me)
    proposal = Proposal(
        job=round.job,
        round=round.number,
        model_root=round.model.root,
        payload=done.payload_digest,
        payload_bytes=len(done.payload),
        buffer=done.buffer_digest,
        feedback=record.buffer if record and request.previous_buffer else None,
    )
    await round.publish(proposal)


def _keep(blobs: Blobs, round: OpenRound, request: Propose, done: Proposed) -> None:
    blobs.add(done.payload)
    blobs.expect_to_pass(done.buffer_digest, (round.job, round.number))
    blobs.adopt(Path(request.buffer_out), done.buffer_digest)


async def audit_request(round: OpenRound, trainer: bytes, proposal: Proposal) -> Audit:
    """What re-execution needs, fetched: the committed buffer, and what the trainer's error feedback continues from."""
    size = 4 * round.model.layout.size
    previous = round.model.records.get(trainer) if proposal.feedback is not None else None
    for buffer in (proposal.buffer, previous.buffer if previous else None):
        if buffer is not None:
            round.blobs.expect_to_pass(buffer, (round.job, round.number))
            await round.fetch(buffer, size, (trainer,))
    if previous:
        await round.fetch(previous.payload, payload_bytes_max(round.model.layout), (trainer,))
    return Audit(
        job=round.job,
        round=round.number,
        trainer=trainer,
        model_directory=str(round.model_directory),
        payload=str(round.blobs.path(proposal.payload)),
        buffer=str(round.blobs.path(proposal.buffer)),
        previous_buffer=str(round.blobs.path(previous.buffer)) if previous else None,
        previous_payload=str(round.blobs.path(previous.payload)) if previous else None,
    )
