"""Sampled audits of real rounds: trainers show only two buffers, honest work passes on any machine, and lies fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import LocalProtocolError
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from tests.training.engines.stepping import inner_step
from training import worker_protocol
from training.corpus import open_tokens
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import AuditMode, JobSpec, complete_fields
from training.objectives.objective import InnerStep
from training.replay import proposal_replay
from training.replay.inner_state import RELATIVE_ERROR_MAX, InnerState
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.transformer import ModelSpec

JOB, TRAINER = b"j" * 32, b"t" * 32
MODEL = ModelSpec(context=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
SIZES = {"name": "t", "data": bytes(32), "model": MODEL, "batch": 4, "micro_batch": 4, "rounds": 10}
SPEC = JobSpec(**SIZES, **complete_fields({"audit": AuditMode.SAMPLED, "local_steps": 5})).validated()


class World:
    """Rounds 0 and 1 of one trainer. Its proposal of round 0 was accepted, its proposal of round 1 continues from it."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.engine = folder, TorchEngine(SPEC, open_tokens(SPEC, text, ByteTokenizer()), ByteTokenizer())
        ReplicatedModel.initial(JOB, SPEC).save(folder / "model0")
        self.losses: Sequence[float] = ()
        self.accept(self.propose(0))
        self.done = self.propose(1)

    def model(self, round: int) -> ReplicatedModel:
        return ReplicatedModel.open(self.folder / f"model{round}")

    def path(self, name: str, round: int) -> str:
        return str(self.folder / f"{name}{round}")

    def update(self, parameters: Float32Array, *place: Any, **_: object) -> tuple[Float32Array, Sequence[float]]:
        job, round, trainer, inner, _on_state = place
        delta, self.losses = self.engine.local_steps(parameters, job, round, trainer, inner=inner)
        return delta, self.losses

    def propose(self, round: int, update: proposal_replay.ComputeUpdate | None = None) -> worker_protocol.ProposeReply:
        before = (self.path("m", round - 1), self.path("payload", round - 1)) if round else (None, None)
        request = worker_protocol.ProposeRequest(JOB, round, TRAINER, self.path("model", round), *before, self.path("m", round))
        done = proposal_replay.make_proposal(request, update or self.update)
        Path(request.payload_out).rename(self.path("payload", round))
        return done

    def accept(self, done: worker_protocol.ProposeReply) -> None:
        model, payload = self.model(0), Path(self.path("payload", 0)).read_bytes()
        digests = done.payload_digest, done.payload_bytes, done.buffer_digest
        proposal = Proposal(JOB, 0, model.root, *digests, None, done.inner)
        assert model.check_proposal(TRAINER, proposal, payload) is Verdict.ACCEPT
        model.apply_round([AcceptedProposal(TRAINER, proposal, payload)], {}).save(self.folder / "model1")

    def audit(self, round: int = 1) -> worker_protocol.AuditReply:
        before = (self.path("m", 0), self.path("payload", 0)) if round else (None, None)
        paths = (self.path(name, round) for name in ("model", "payload", "m"))
        return proposal_replay.audit_proposal(worker_protocol.AuditRequest(JOB, round, TRAINER, *paths, *before), self.update)

    def commit(self, m: Float32Array, round: int = 1) -> None:
        """Commit as if this m was the trainer's result; everything derived from it is right."""
        model = self.model(round)
        buffer = error_feedback.make_buffer(m, model.header(TRAINER), SPEC)
        Path(self.path("m", round)).write_bytes(buffer.encode())
        Path(self.path("payload", round)).write_bytes(model.encode_payload(TRAINER, buffer.dequantize()))

    def m(self, round: int = 1) -> Float32Array:
        return error_feedback.read_buffer(Path(self.path("m", round)), SPEC).dequantize()


@pytest.fixture
def world(tmp_path: Path, text: Path) -> World:
    return World(tmp_path, text)


def test_honest_rounds_pass_also_with_another_number_of_threads_and_show_two_bytes_a_parameter(world: World) -> None:
    assert [world.audit(round).verdict for round in (0, 1)] == [Verdict.ACCEPT] * 2
    torch.set_num_threads(2)
    try:
        audited = world.audit()
    finally:
        torch.set_num_threads(1)
    assert audited.verdict is Verdict.ACCEPT and audited.relative_error < SPEC.replay_tolerance / 3
    assert world.done.inner is None
    assert sum(Path(world.path("m", round)).stat().st_size for round in (0, 1)) < 2.05 * world.model(1).layout.size


def test_the_loss_that_binds_an_auditor_is_of_the_last_step(world: World) -> None:
    """An auditor that replays only the first step does not know this loss."""
    assert world.done.last_loss == round(1e6 * world.losses[-1]) == world.audit().last_loss


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("how", ["skipped", "wrong data", "turned back"])
def test_a_lie_in_one_step_is_found_whichever_it_is(world: World, how: str, step: int) -> None:
    def lie(
        parameters: Float32Array, job: bytes, round: int, trainer: bytes, *_: object, **__: object
    ) -> tuple[Float32Array, Sequence[float]]:
        now, state = parameters, InnerState.fresh(SPEC)
        for number in range(SPEC.local_steps):
            data = number + 100 if (number, how) == (step, "wrong data") else number
            after, state = inner_step(world.engine, now.copy(), state, InnerStep(job, round, trainer, data))
            if number != step or how == "wrong data":
                now = after
            elif how == "turned back":
                now = now - (after - now)
        return parameters - now, [0.0] * SPEC.local_steps

    world.propose(1, lie)
    audited = world.audit()
    assert audited.verdict is Verdict.REPLAY and audited.relative_error > 5 * SPEC.replay_tolerance


@pytest.mark.parametrize("factor", [0.98, 1.5])
def test_a_residual_that_was_invented_is_found_in_the_round_that_commits_to_it(world: World, factor: float) -> None:
    """With one bit most levels agree: the payload nearly equals the honest one, and later payloads would add the lie."""
    before, layout = Path(world.path("payload", 0)).read_bytes(), world.model(0).layout
    world.commit(world.m(0) * np.float32(factor), 0)
    after = Path(world.path("payload", 0)).read_bytes()
    signs = [np.sign(codec.read_payload(payload, layout).dequantize()) for payload in (before, after)]
    assert np.mean(signs[0] == signs[1]) > 0.99
    audited = world.audit(0)
    assert audited.verdict is Verdict.REPLAY and audited.relative_error > 5 * SPEC.replay_tolerance


def test_a_round_that_goes_on_from_another_residual_than_it_says_is_found(world: World) -> None:
    world.commit(world.m() + world.m(0))
    audited = world.audit()
    assert audited.verdict is Verdict.REPLAY and audited.relative_error > 5 * SPEC.replay_tolerance


def test_the_residual_before_must_be_the_one_that_was_committed_to(world: World) -> None:
    payload = Path(world.path("payload", 0)).read_bytes()
    world.commit(world.m(0) * np.float32(1.1), 0)
    Path(world.path("payload", 0)).write_bytes(payload)
    with pytest.raises(LocalProtocolError, match="does not match the record"):
        world.audit()


def test_a_payload_that_says_another_buffer_is_far_off_however_near_that_is(world: World) -> None:
    model, path = world.model(1), Path(world.path("payload", 1))
    path.write_bytes(codec.encode_payload(model.header(TRAINER), -world.m(), model.layout))
    audited = world.audit()
    assert (audited.verdict, audited.relative_error) == (Verdict.REPLAY, RELATIVE_ERROR_MAX)


@pytest.mark.parametrize("blob", [b"", bytes(5)], ids=len)
def test_a_buffer_that_is_none_is_a_failed_replay(world: World, blob: bytes) -> None:
    Path(world.path("m", 1)).write_bytes(blob)
    assert world.audit().verdict is Verdict.REPLAY
