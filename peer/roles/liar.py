"""Trainers that lie, for demos, scenarios and tests: each attack of `peer demo --attack`. No honest peer runs this.

A liar also votes dishonestly: it accepts its accomplices and says of everybody else that re-execution failed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from peer.roles.base import Judged, OpenRound
from peer.roles.trainer import Trainer
from peer.roles.voter import propose_request, publish
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.reasons import Verdict
from training.replicated import codec
from training.replicated.feedback import buffer_digest
from training.replicated.layout import Float32Array
from training.tasks import Propose, Proposed

ATTACKS = ("sign-flip", "scale", "nan", "garbage", "stale", "copy", "free-rider", "silent", "equivocate")
SCALE = np.float32(1e6)

SendPair = Callable[[Proposal, Proposal], Awaitable[None]]


@dataclass
class Liar(Trainer):
    attack: str = "sign-flip"
    accomplices: frozenset[bytes] = frozenset()
    equivocate: SendPair | None = None  # signs both proposals and shows each to half of the network
    _stale: Float32Array | None = None
    _copied: tuple[bytes, int] | None = None

    async def judge(self, round: OpenRound, signed: Signed, proposal: Proposal) -> Judged:
        if signed.signer == round.me or signed.signer in self.accomplices:
            return Judged(Verdict.ACCEPT)
        if self.attack == "copy" and self._copied != (round.job, round.number):
            self._copied = (round.job, round.number)
            await self._copy(round, signed.signer, proposal)
        return Judged(Verdict.REPLAY)

    async def propose(self, round: OpenRound) -> None:
        if self.attack in ("silent", "copy"):
            return
        request = propose_request(round, self.texts / f"{round.job.hex()[:16]}-{round.number}.buffer")
        if self.attack == "free-rider":
            request, done = _from_zero(request), _encoded(round, request, self._noise(round))
        else:
            done = await self.ask(round, request)
            request, done = self._corrupt(round, request, done)
        if self.attack == "equivocate" and self.equivocate is not None:
            await self._equivocate(round, request, done)
        else:
            await publish(round, request, done)

    def _corrupt(self, round: OpenRound, request: Propose, done: Proposed) -> tuple[Propose, Proposed]:
        m = np.fromfile(request.buffer_out, dtype="<f4")
        match self.attack:
            case "sign-flip":
                return request, _encoded(round, request, -m)
            case "scale":
                return request, _encoded(round, request, m * SCALE)
            case "stale":
                old, self._stale = self._stale, m
                return _from_zero(request), _encoded(round, request, m[::-1].copy() if old is None else old)
            case "nan":
                return request, _poisoned(round, request, done, m)
            case "garbage":
                return request, _forged(done, _noise_bytes(round, len(done.payload)))
        return request, done

    def _noise(self, round: OpenRound) -> Float32Array:
        """An update of a credible norm that cost nothing."""
        generator = np.random.default_rng(int.from_bytes(round.me[:8], "big") + round.number)
        noise = generator.standard_normal(round.model.layout.size, dtype=np.float32)
        return noise * np.float32(math.sqrt(round.model.norm_squared_max) / 32 / np.linalg.norm(noise))

    async def _copy(self, round: OpenRound, trainer: bytes, proposal: Proposal) -> None:
        """Somebody else's update under our own name."""
        size = 4 * round.model.layout.size
        round.blobs.expect_to_pass(proposal.buffer, (round.job, round.number))
        await round.fetch(proposal.buffer, size, (trainer,))
        request = _from_zero(propose_request(round, self.texts / f"{round.job.hex()[:16]}-{round.number}.buffer"))
        m = np.fromfile(round.blobs.path(proposal.buffer), dtype="<f4")
        m[0] += np.float32(1e-6)  # another buffer, so that nobody sees the copy by its digest
        await publish(round, request, _encoded(round, request, m))

    async def _equivocate(self, round: OpenRound, request: Propose, done: Proposed) -> None:
        assert self.equivocate is not None
        round.blobs.add(done.payload)
        record = round.model.records.get(round.me)
        feedback = record.buffer if record and request.previous_buffer else None
        first = Proposal(
            round.job, round.number, round.model.root, done.payload_digest, len(done.payload), done.buffer_digest, feedback
        )
        second = replace(first, buffer=hashlib.sha256(first.buffer).digest())
        round.blobs.expect_to_pass(done.buffer_digest, (round.job, round.number))
        round.blobs.adopt(Path(request.buffer_out), done.buffer_digest)
        await self.equivocate(first, second)


def _from_zero(request: Propose) -> Propose:
    return replace(request, previous_buffer=None, previous_payload=None)


def _encoded(round: OpenRound, request: Propose, m: Float32Array) -> Proposed:
    """A well-formed proposal for whatever m is."""
    m.astype("<f4").tofile(request.buffer_out)
    payload = codec.encode(round.model.header(round.me), m, round.model.layout)
    return Proposed(payload, hashlib.sha256(payload).digest(), buffer_digest(m), 0.0, 0.0)


def _poisoned(round: OpenRound, request: Propose, done: Proposed, m: Float32Array) -> Proposed:
    """Arithmetic that gave NaN everywhere: no honest encoder has bytes for it, so all scales are forged to the largest."""
    m[:] = np.nan
    m.tofile(request.buffer_out)
    honest = codec.read(done.payload, round.model.layout)
    forged = replace(honest, exponent=codec.EXPONENT_MAX, mantissas=np.full_like(honest.mantissas, 0xFFFF))
    return replace(_forged(done, forged.encode()), buffer_digest=buffer_digest(m))


def _forged(done: Proposed, payload: bytes) -> Proposed:
    return replace(done, payload=payload, payload_digest=hashlib.sha256(payload).digest())


def _noise_bytes(round: OpenRound, size: int) -> bytes:
    return np.random.default_rng(round.number).bytes(size)
