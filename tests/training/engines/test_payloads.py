"""Audits of jobs without state between rounds: a trainer shows only the payload, and auditors compare only that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.messages import Proposal
from protocol.verdicts import Verdict
from tests.training.engines.stepping import inner_step
from tests.training.engines.test_sampled import JOB, SIZES, TRAINER
from training import worker_protocol
from training.corpus import open_tokens
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import AuditMode, FeedbackMemory, JobSpec, complete_fields
from training.objectives.objective import InnerStep
from training.replay import proposal_replay
from training.replay.inner_state import InnerState
from training.replicated import codec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array

SAID: dict[str, dict[str, Any]] = {
    "one bit": {"local_steps": 5},
    "one step": {"local_steps": 1, "inner_rate": 1e-3},
    "four bits": {"local_steps": 5, "bits": 4},
    "two bits": {"local_steps": 5, "bits": 2},
    "estimates": {"local_steps": 5, "memory": FeedbackMemory.ESTIMATES},
    "sampled": {"local_steps": 5, "audit": AuditMode.SAMPLED},
}


class Round:
    """The first round of one trainer."""

    def __init__(self, folder: Path, said: dict[str, Any]) -> None:
        text = folder / "text"
        text.write_bytes(default_text()[:50_000])
        self.folder, self.spec = (
            folder,
            JobSpec(**SIZES, **complete_fields({"feedback_decay": 0.0, "compression_warmup_rounds": 0} | said)).validated(),
        )
        self.engine = TorchEngine(self.spec, open_tokens(self.spec, text, ByteTokenizer()), ByteTokenizer())
        self.model = ReplicatedModel.initial(JOB, self.spec)
        self.model.save(folder / "model")

    def update(self, parameters: Float32Array, *place: Any, **_: object) -> tuple[Float32Array, Sequence[float]]:
        job, round, trainer, inner, _on_state = place
        return self.engine.local_steps(parameters, job, round, trainer, inner=inner)

    def propose(self, update: proposal_replay.ComputeUpdate) -> worker_protocol.ProposeReply:
        request = worker_protocol.ProposeRequest(JOB, 0, TRAINER, str(self.folder / "model"), None, None, str(self.folder / "m"))
        return proposal_replay.make_proposal(request, update)

    @property
    def payload(self) -> Path:
        return self.folder / "m.payload"

    def audit(self) -> worker_protocol.AuditReply:
        request = worker_protocol.AuditRequest(JOB, 0, TRAINER, str(self.folder / "model"), str(self.payload), None, None, None)
        return proposal_replay.audit_proposal(request, self.update)


@pytest.fixture(params=SAID)
def round(request: pytest.FixtureRequest, tmp_path: Path) -> Round:
    return Round(tmp_path, SAID[request.param])


def test_honest_rounds_pass_also_with_another_number_of_threads_and_show_nothing(round: Round) -> None:
    done = round.propose(round.update)
    torch.set_num_threads(2)
    try:
        audited = round.audit()
    finally:
        torch.set_num_threads(1)
    assert audited.verdict is Verdict.ACCEPT and audited.relative_error < round.spec.replay_tolerance / 3
    assert (done.buffer_digest, done.inner) == (None, None)
    assert {path.name for path in round.folder.iterdir()} == {"text", "model", "m.payload"}


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.25, 4.0])
def test_another_update_than_the_re_executed_one_is_found(round: Round, factor: float) -> None:
    def lie(*arguments: Any, **more: Any) -> tuple[Float32Array, Sequence[float]]:
        delta, losses = round.update(*arguments, **more)
        return delta * np.float32(factor), losses

    round.propose(lie)
    audited = round.audit()
    assert audited.verdict is Verdict.REPLAY and audited.relative_error > 5 * round.spec.replay_tolerance


@pytest.mark.parametrize("how", ["skipped", "wrong data"])
def test_a_lie_in_the_last_step_is_found(round: Round, how: str) -> None:
    def lie(
        parameters: Float32Array, job: bytes, number: int, trainer: bytes, *_: object, **__: object
    ) -> tuple[Float32Array, Sequence[float]]:
        now, state, last = parameters.copy(), InnerState.fresh(round.spec), round.spec.local_steps - 1
        for step in range(round.spec.local_steps):
            if step != last or how == "wrong data":
                data = step + 100 * (step == last)
                now, state = inner_step(round.engine, now, state, InnerStep(job, number, trainer, data))
        return parameters - now, [0.0] * round.spec.local_steps

    if round.spec.local_steps == 1 and how == "skipped":
        pytest.skip("an update of nothing at all")
    round.propose(lie)
    audited = round.audit()
    assert audited.verdict is Verdict.REPLAY and audited.relative_error > 5 * round.spec.replay_tolerance


def test_a_payload_that_says_something_else_is_found(round: Round) -> None:
    round.propose(round.update)
    said = codec.read_payload(round.payload.read_bytes(), round.model.layout).dequantize()
    said[::7] *= -1
    round.payload.write_bytes(codec.encode_payload(round.model.header(TRAINER), said, round.model.layout))
    assert round.audit().verdict is Verdict.REPLAY


def test_a_proposal_with_a_buffer_is_no_proposal_of_such_a_job(round: Round) -> None:
    done = round.propose(round.update)
    payload = round.payload.read_bytes()
    for buffer, verdict in ((None, Verdict.ACCEPT), (bytes(32), Verdict.COMMITMENT)):
        proposal = Proposal(JOB, 0, round.model.root, done.payload_digest, done.payload_bytes, buffer, None)
        assert round.model.check_proposal(TRAINER, proposal, payload) is verdict
