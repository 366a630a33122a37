"""Dishonest trainers for demos, scenarios and tests: the attacks of `peer demo --attack`. No honest peer runs this module. A
dishonest trainer also votes dishonestly: it accepts proposals of its accomplices, and rejects all others as if re-execution had
failed.

`python -m demo.lying_trainer ATTACK ACCOMPLICES run …` runs a complete peer with this attack. ACCOMPLICES are peer ids
separated by commas, or `-` for none.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import trio

from demo.command_line import ATTACKS
from peer.cli import build_parser
from peer.commands import local_commands
from peer.commands.command_line_parser import settings_from_options
from peer.daemon.daemon import ParticipantContext
from peer.roles.trainer import Trainer
from peer.roles.voter import fetch_audit_data, fetch_brief, proposal_of, propose_request, publish_proposal, store_proposal_files
from protocol import codec as wire
from protocol.errors import UserError
from protocol.identity import Signed, parse_peer_id, sign_message
from protocol.messages import GossipEnvelope, Proposal
from protocol.verdicts import ReplayFinding, Verdict
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import MILLIONTHS, PPO, PpoSettings, RolloutDeclaration
from rlhf.objectives.rule_rewards import RULES
from storage.disk_blob_store import JOB_BYTES
from storage.multipart_objects import write_object
from training.job_spec import AuditMode
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.replicated import codec, error_feedback
from training.replicated.tensor_layout import Float32Array
from training.round_context import OpenRoundContext, ReplayResult, RoundContext
from training.transformer import BYTES
from training.worker_protocol import AuditRequest, DeclarationFiles, ProposeReply, ProposeRequest
from transport.network import Priority

# Attacks on jobs with sampled audits. In jobs with full audits, the first three do the same as `sign-flip`.
AUDIT_ATTACKS = ("false-update", "withhold", "false-pass", "false-challenge", "lazy")
# Attacks on jobs with rollouts. In other jobs, they do the same as `sign-flip`.
ROLLOUT_ATTACKS = ("fabricate-rollouts", "choose-tokens", "false-figures", "other-reward")
SCALE = np.float32(1e6)
FABRICATED = tuple(b"aeiou")  # tokens from which fabricated responses are drawn
GUESSED_LOSS = 2_000_000  # loss in millionths that a report without re-execution states

SendPair = Callable[[Proposal, Proposal], Awaitable[None]]


@dataclass
class Liar(Trainer):
    attack: str = "sign-flip"
    accomplices: frozenset[bytes] = frozenset()
    equivocate: SendPair | None = None  # function that signs two proposals and sends each to half of the network
    _stale: Float32Array | None = None
    _copied: tuple[bytes, int] | None = None

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        if signed.signer == round.me or signed.signer in self.accomplices:
            return Verdict.ACCEPT
        if self.attack == "copy" and self._copied != (round.job, round.number):
            self._copied = (round.job, round.number)
            await self._copy(round, signed.signer, proposal)
        if self.attack in AUDIT_ATTACKS and round.spec.audit is AuditMode.SAMPLED:
            return await super().check_proposal(round, signed, proposal)  # attacks on sampled audits begin after the vote
        return Verdict.REPLAY

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        return Verdict.ACCEPT  # only accomplices' proposals come here: `check_proposal` has rejected all others

    async def replay(self, round: RoundContext, request: AuditRequest) -> ReplayResult:
        """Return a match for accomplices.

        For other trainers, `false-pass` and `lazy` return a match, and `false-challenge` a mismatch.
        """
        if request.trainer in self.accomplices or self.attack in ("false-pass", "lazy"):
            return ReplayResult(ReplayFinding.MATCH, 0.0, GUESSED_LOSS)
        if self.attack == "false-challenge":
            return ReplayResult(ReplayFinding.MISMATCH, 1.0)
        return await super().replay(round, request)

    async def propose(self, round: OpenRoundContext) -> None:
        if self.attack in ("silent", "copy"):
            return
        request = propose_request(round, self.text_folder / f"{round.job.hex()[:16]}-{round.number}.buffer")
        request = replace(request, brief=await fetch_brief(round))
        if self.attack == "free-rider":
            request = replace(request, previous_buffer=None, previous_payload=None)
            done = await trio.to_thread.run_sync(proposal_replay.make_proposal, request, partial(self._invent, round))
        elif self.attack in ROLLOUT_ATTACKS and round.spec.resolved_objective.declaration_type is RolloutDeclaration:
            request, done = await self._of_rollouts(round, request)
        else:
            done = await self.ask_worker(round, request)
            request, done = await trio.to_thread.run_sync(self._corrupt, round, request, done)
        if self.attack == "equivocate" and self.equivocate is not None:
            await self._equivocate(round, request, done)
        else:
            await publish_proposal(round, request, done)
        if self.attack == "withhold" and done.buffer_digest is not None:
            await trio.to_thread.run_sync(round.blobs.delete_rounds, [(round.job[:JOB_BYTES], round.number)])
            await trio.to_thread.run_sync(round.blobs.delete_blob, done.buffer_digest)

    async def _of_rollouts(self, round: OpenRoundContext, request: ProposeRequest) -> tuple[ProposeRequest, ProposeReply]:
        """Return a false declaration of rollouts, with an update that follows from it.

        An update that does not would be found earlier.
        """
        honest = await self.ask_worker(round, request)
        if self.attack == "false-figures":
            said = wire.decode(RolloutDeclaration, honest.declaration)
            better = replace(
                said, score=said.score + MILLIONTHS * PPO.responses_per_round(round.spec, round.spec.decoded_settings)
            )
            return request, replace(honest, declaration=wire.encode(better))
        lie = {"fabricate-rollouts": _fabricated, "choose-tokens": _chosen, "other-reward": _sampled}[self.attack]
        request = replace(request, declared=await trio.to_thread.run_sync(lie, round, request, honest))
        if self.attack != "other-reward":
            return request, await self.ask_worker(round, request)
        own = replace(round.spec.decoded_settings, beta=0.0, kl_target=None)
        other = replace(round.spec, seed=round.spec.seed + 1, objective_settings=wire.encode(own))
        self._job(round).opened = False
        try:
            return request, await self.ask_worker(replace(round, spec=other), request)
        finally:
            self._job(round).opened = False  # the worker must open the job again with the true reward

    def _corrupt(
        self, round: OpenRoundContext, request: ProposeRequest, done: ProposeReply
    ) -> tuple[ProposeRequest, ProposeReply]:
        m = decode_update(round, Path(request.payload_out), Path(request.buffer_out))
        match self.attack:
            case "withhold" if round.spec.audit is AuditMode.SAMPLED and done.buffer_digest is not None:
                return request, done
            case attack if attack in ("sign-flip", "false-update", "withhold", "false-pass", *ROLLOUT_ATTACKS):
                return request, encode_update(round, request, done, -m)
            case "scale":
                return request, encode_update(round, request, done, m * SCALE)
            case "stale":
                other, self._stale = m[::-1].copy() if self._stale is None else self._stale, m
                return request, replace(encode_update(round, request, done, other), feedback=None)
            case "nan":
                return request, _poisoned(round, request, done)
            case "garbage":
                return request, _with_payload(request, done, np.random.default_rng(round.number).bytes(done.payload_bytes))
        return request, done

    def _invent(
        self,
        round: OpenRoundContext,
        parameters: Float32Array,
        job: bytes,
        number: int,
        trainer: bytes,
        inner: InnerState | None,
        on_state: OnState | None,
        **_: object,
    ) -> tuple[Float32Array, Sequence[float]]:
        """Return an update without training (`free-rider`). Only re-execution finds that it is false."""
        noise, state = self._noise(round), inner or InnerState.fresh(round.spec)
        if on_state is not None:
            on_state(parameters - noise, InnerState(state.steps + round.spec.local_steps, state.moments))
        return noise, (0.0,)

    def _noise(self, round: OpenRoundContext) -> Float32Array:
        """Return a random update whose norm is plausible."""
        generator = np.random.default_rng(int.from_bytes(round.me[:8], "big") + round.number)
        noise = generator.standard_normal(round.model.layout.size, dtype=np.float32)
        return noise * np.float32(math.sqrt(round.model.norm_squared_max) / 32 / np.linalg.norm(noise))

    async def _copy(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> None:
        """Publish another trainer's update as our own (`copy`)."""
        if proposal.buffer is not None:
            await fetch_audit_data(round, proposal.buffer, error_feedback.buffer_bytes(round.spec), trainer)
        request = propose_request(round, self.text_folder / f"{round.job.hex()[:16]}-{round.number}.buffer")
        request = replace(request, inner_out=None)  # the copied trainer's inner state is not available
        done = ProposeReply(proposal.payload, 0, proposal.buffer, 0.0, 0.0, proposal.inner)
        blobs = round.blobs
        m = decode_update(round, blobs.path(proposal.payload), blobs.path(proposal.buffer) if proposal.buffer else None)
        m[0] += np.float32(1e-6)  # a small change gives the copy another digest
        await publish_proposal(round, request, encode_update(round, request, done, m))

    async def _equivocate(self, round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> None:
        assert self.equivocate is not None
        first = proposal_of(round, done)
        other = hashlib.sha256(first.buffer or first.payload).digest()
        second = replace(first, buffer=other) if first.buffer else replace(first, payload=other)
        await trio.to_thread.run_sync(store_proposal_files, round, request, done, first)
        await self.equivocate(first, second)


def _fabricated(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> DeclarationFiles:
    """Return a declaration of fabricated responses with high scores, and with the figures of the sampled responses."""
    bounds = PPO.rollout_limits(round.spec, round.spec.decoded_settings)
    draw = np.random.default_rng(round.number)
    invented = [draw.choice(FABRICATED, bounds.tokens_max) % bounds.vocabulary for _ in range(bounds.responses)]
    return _declared(round, request, done, [response.tolist() for response in invented])


def _chosen(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> DeclarationFiles:
    """Return a declaration of the sampled responses, in which each last token is replaced by the one with the best score."""
    own: PpoSettings = round.spec.decoded_settings
    bounds, reward = PPO.rollout_limits(round.spec, own), (own.reward_rule or RULES["vowels"]).make(round.spec.seed)
    last = [token for token in range(min(bounds.vocabulary, BYTES)) if token != bounds.stop]

    def score(ids: list[int]) -> float:
        return reward(ids, bytes(token % BYTES for token in ids))

    responses = _responses(round, request, done)
    unended = [ids[:-1] if ids[-1] == bounds.stop else ids for ids in responses]
    best = [max(([*ids[:-1], token] for token in last), key=score) if ids else [] for ids in unended]
    return _declared(round, request, done, [[*chosen, *ids[len(chosen) :]] for chosen, ids in zip(best, responses, strict=True)])


def _sampled(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> DeclarationFiles:
    return _declared(round, request, done, _responses(round, request, done))


def _responses(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> list[list[int]]:
    said = wire.decode(RolloutDeclaration, done.declaration)
    read = rollouts.read_rollouts(
        Path(request.declared_out or "") / said.blob.hex(), PPO.rollout_limits(round.spec, round.spec.decoded_settings)
    )
    return [response.tolist() for response in read]


def _declared(
    round: OpenRoundContext, request: ProposeRequest, done: ProposeReply, responses: list[list[int]]
) -> DeclarationFiles:
    """Return a declaration of the given responses with the figures of the sampled responses."""
    assert request.declared_out is not None
    said, stop = (
        wire.decode(RolloutDeclaration, done.declaration),
        PPO.rollout_limits(round.spec, round.spec.decoded_settings).stop,
    )
    blob = rollouts.encode_rollouts(responses)
    digest = hashlib.sha256(blob).digest()
    path = Path(request.declared_out) / digest.hex()
    path.write_bytes(blob)
    unfinished = sum(not rollouts.is_finished(np.array(response), stop) for response in responses)
    declared = replace(said, blob=digest, tokens=sum(map(len, responses)), unfinished=unfinished)
    return DeclarationFiles(wire.encode(declared), {digest: str(path)})


def encode_update(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply, m: Float32Array) -> ProposeReply:
    """Return the reply with a well-formed proposal for any update m."""
    buffer = error_feedback.make_buffer(m, round.model.header(round.me), round.spec)
    payload = round.model.encode_payload(round.me, m if buffer is None else buffer.dequantize())
    return _with_payload(request, _with_buffer(request, done, buffer), payload)


def decode_update(round: OpenRoundContext, payload: Path, buffer: Path | None) -> Float32Array:
    """Return the update m from the buffer, or in a job without buffers its compressed form from the payload."""
    if not round.spec.commits_to_buffer:
        return codec.read_payload(payload.read_bytes(), round.model.layout).dequantize()
    assert buffer is not None
    return error_feedback.read_buffer(buffer, round.spec).dequantize()


def _poisoned(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> ProposeReply:
    """Return a proposal that imitates an update full of NaN.

    The format cannot encode NaN, so all scales are set to the maximum.
    """
    payload = _scaled_up(codec.read_payload(Path(request.payload_out).read_bytes(), round.model.layout))
    if round.spec.commits_to_buffer:
        done = _with_buffer(request, done, _scaled_up(error_feedback.read_buffer(Path(request.buffer_out), round.spec)))
    return _with_payload(request, done, payload.encode())


def _scaled_up(update: codec.QuantizedUpdate) -> codec.QuantizedUpdate:
    return replace(update, exponent=codec.EXPONENT_MAX, codes=np.where(update.codes > 0, 255, 0).astype(np.uint8))


def _with_buffer(request: ProposeRequest, done: ProposeReply, buffer: codec.QuantizedUpdate | None) -> ProposeReply:
    if buffer is None:
        return replace(done, buffer_digest=None)
    return replace(done, buffer_digest=write_object(Path(request.buffer_out), buffer.encode()))


def _with_payload(request: ProposeRequest, done: ProposeReply, payload: bytes) -> ProposeReply:
    digest = write_object(Path(request.payload_out), payload)
    return replace(done, payload_digest=digest, payload_bytes=len(payload))


async def equivocate(context: ParticipantContext, first: Proposal, second: Proposal) -> None:
    """Sign two proposals of one round, and send each to half of the linked peers, without the driver."""
    for number, peer in enumerate(sorted(context.network.connected_peers())):
        signed = sign_message(context.signer, context.chain_id, (first, second)[number % 2])
        context.network.send(peer, wire.encode(GossipEnvelope(signed)), Priority.VOTE)


def main(arguments: list[str]) -> int:
    attack, accomplices, *rest = arguments
    if attack not in ATTACKS:
        raise UserError(f"unknown attack {attack!r}: choose one of {', '.join(ATTACKS)}")
    options = build_parser().parse_args(rest)
    keys = frozenset(parse_peer_id(text) for text in accomplices.split(",") if text != "-")

    def make_liar(context: ParticipantContext) -> Liar:
        assert context.worker is not None, "a dishonest peer must be a trainer"
        return Liar(context.worker, context.text_folder, attack=attack, accomplices=keys, equivocate=partial(equivocate, context))

    return local_commands.run_peer_with_config(settings_from_options(options).config, console=False, make_participant=make_liar)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"peer: error: {error}")
