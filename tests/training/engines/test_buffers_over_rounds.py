"""Buffers of real rounds, in every kind of job: auditors accept honest work on any machine, and find lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.messages import Proposal
from protocol.verdicts import Verdict
from tests.training.engines.test_sampled import JOB, SIZES, TRAINER
from training import worker_protocol
from training.corpus import open_tokens
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.engine import TorchEngine
from training.job_spec import ESTIMATES, AuditMode, FeedbackMemory, JobSpec, complete_fields
from training.replay import proposal_replay
from training.replay.inner_state import RELATIVE_ERROR_MAX
from training.replicated import codec, error_feedback
from training.replicated.codec.payload import HEADER_BYTES
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array

SEVERAL = {"local_steps": 5, "compression_warmup_rounds": 0}
OF: dict[str, dict[str, Any]] = {
    "residual": SEVERAL,
    "residual, no audits": {**SEVERAL, "audit": AuditMode.OFF},
    "residual, single steps": {"local_steps": 1, "inner_rate": 1e-3},
    "residual, opening": {"local_steps": 5, "compression_warmup_rounds": 2},
    "residual, four bits": {**SEVERAL, "bits": 4},
    "residual, two bits": {**SEVERAL, "bits": 2},
    "estimates": ESTIMATES | {"rounds": 60, "warmup_rounds": 3},
    "estimates, audits": ESTIMATES | {"rounds": 60, "warmup_rounds": 3, "audit": AuditMode.FULL},
    "estimates, several steps": {**SEVERAL, "memory": FeedbackMemory.ESTIMATES, "initial_norm": 1.0},
}
NORMS_BEFORE = {2: 1, 4: 2}  # round -> number of rejections for the norm before it
LAST = 4
OTHER_MACHINE = 2e-6  # of the norm: difference of another machine's updates


class World:
    """One trainer's accepted proposals up to the last one, with their audits."""

    def __init__(self, folder: Path, said: dict[str, Any]) -> None:
        text = folder / "text"
        text.write_bytes(default_text()[:50_000])
        self.folder, self.spec = folder, JobSpec(**(SIZES | complete_fields(said))).validated()
        self.engine = TorchEngine(self.spec, open_tokens(self.spec, text, ByteTokenizer()), ByteTokenizer())
        self.model, self.audits, self.went_on = (
            ReplicatedModel.initial(JOB, self.spec),
            list[worker_protocol.AuditReply](),
            list[bool](),
        )
        for self.number in range(LAST + 1):
            for _ in range(NORMS_BEFORE.get(self.number, 0)):
                self.model = self.model.apply_round([], {TRAINER: Verdict.NORM})
            self.model.save(Path(self.path("model")), durable=False)
            done = self.propose()
            self.audits.append(self.audit())
            self.went_on.append(done.feedback is not None)
            if self.number < LAST:
                self.accept(done)

    def path(self, name: str, before: int = 0) -> str:
        return str(self.folder / f"{name}{self.number - before}")

    def update(self, parameters: Float32Array, *place: Any, **_: object) -> tuple[Float32Array, Sequence[float]]:
        job, round, trainer, inner, _on_state = place
        return self.engine.local_steps(parameters, job, round, trainer, inner=inner)

    def elsewhere(self, *arguments: Any, **more: Any) -> tuple[Float32Array, Sequence[float]]:
        delta, losses = self.update(*arguments, **more)
        noise = np.random.default_rng(self.number).standard_normal(len(delta), dtype=np.float32)
        return delta + noise * np.float32(OTHER_MACHINE * np.linalg.norm(delta) / np.linalg.norm(noise)), losses

    def before(self) -> tuple[str | None, str | None]:
        """Return the buffer and the payload of the previous round. Jobs of estimates have only the buffer."""
        if not self.number:
            return None, None
        return self.path("m", 1), None if self.spec.has_estimates else self.path("payload", 1)

    def propose(self, update: proposal_replay.ComputeUpdate | None = None) -> worker_protocol.ProposeReply:
        request = worker_protocol.ProposeRequest(
            JOB, self.model.round, TRAINER, self.path("model"), *self.before(), self.path("m")
        )
        done = proposal_replay.make_proposal(request, update or self.update)
        Path(request.payload_out).rename(self.path("payload"))
        return done

    def audit(self) -> worker_protocol.AuditReply:
        paths = (self.path(name) for name in ("model", "payload", "m"))
        return proposal_replay.audit_proposal(
            worker_protocol.AuditRequest(JOB, self.model.round, TRAINER, *paths, *self.before()), self.elsewhere
        )

    def accept(self, done: worker_protocol.ProposeReply) -> None:
        digests = done.payload_digest, done.payload_bytes, done.buffer_digest
        proposal = Proposal(JOB, self.model.round, self.model.root, *digests, done.feedback)
        payload = Path(self.path("payload")).read_bytes()
        assert self.model.check_proposal(TRAINER, proposal, payload) is Verdict.ACCEPT
        self.model = self.model.apply_round([AcceptedProposal(TRAINER, proposal, payload)], {})

    def e(self) -> Float32Array:
        payload = None if self.spec.has_estimates else Path(self.path("payload", 1)).read_bytes()
        return self.model.feedback_of(TRAINER, error_feedback.read_buffer(Path(self.path("m", 1)), self.spec), payload)

    def m(self, e: Float32Array) -> Float32Array:
        """Return the true update plus the residual `e`."""
        delta, _ = self.update(np.array(self.model.parameters), JOB, self.model.round, TRAINER, None, None)
        return error_feedback.accumulate_feedback(e, delta, self.spec.feedback_decay, self.spec.update_weight)

    def commit(self, blob: bytes) -> None:
        """Commit to a buffer, with the payload derived from it."""
        Path(self.path("m")).write_bytes(blob)
        said = error_feedback.read_buffer(Path(self.path("m")), self.spec).dequantize()
        Path(self.path("payload")).write_bytes(self.model.encode_payload(TRAINER, said))

    def levels(self, m: Float32Array) -> bytes:
        buffer = error_feedback.make_buffer(m, self.model.header(TRAINER), self.spec)
        assert buffer is not None
        return buffer.encode()

    def is_refused(self) -> bool:
        audited = self.audit()
        return audited.verdict is Verdict.REPLAY and audited.relative_error > 2 * self.spec.replay_tolerance


@pytest.fixture(scope="module", params=OF)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), OF[request.param])


def test_honest_rounds_pass_on_another_machine_and_go_on_from_each_other(world: World) -> None:
    assert [audited.verdict for audited in world.audits] == [Verdict.ACCEPT] * (LAST + 1)
    assert max(audited.relative_error for audited in world.audits) < world.spec.replay_tolerance / 10
    assert world.went_on == [False] + [True] * LAST
    assert world.model.records[TRAINER].halvings == NORMS_BEFORE[LAST]
    assert Path(world.path("m", 1)).stat().st_size == error_feedback.buffer_bytes(world.spec) < 1.05 * world.model.layout.size


@pytest.mark.parametrize("factor", [-1.0, 0.5, 0.9, 1.25])
def test_another_update_is_found(world: World, factor: float) -> None:
    def lie(*arguments: Any, **more: Any) -> tuple[Float32Array, Sequence[float]]:
        delta, losses = world.update(*arguments, **more)
        return delta * np.float32(factor), losses

    world.propose(lie)
    assert world.is_refused()


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0 ** NORMS_BEFORE[LAST]])
def test_going_on_from_another_vector_than_the_records_is_found(world: World, factor: float) -> None:
    """The last factor takes back the halvings for rejected norms."""
    assert np.linalg.norm(world.e()) > 0
    world.commit(world.levels(world.m(world.e())))
    assert world.audit().verdict is Verdict.ACCEPT
    world.commit(world.levels(world.m(world.e() * np.float32(factor))))
    assert world.is_refused()


@pytest.mark.parametrize("how", ["level", "scale", "sign"])
def test_one_forged_byte_of_a_buffer_is_found(world: World, how: str) -> None:
    honest, layout = world.levels(world.m(world.e())), world.model.layout
    blob, chunks = bytearray(honest), len(layout.chunk_lengths)
    levels = np.frombuffer(honest, np.int8, offset=HEADER_BYTES + chunks)
    largest = layout.tensors[0].elements  # the embedding, of full chunks
    if how == "level":
        place = int(np.argmin(np.abs(levels[largest])))
        blob[HEADER_BYTES + chunks + place] = 100
    elif how == "sign":
        place = int(np.argmax(np.abs(levels[largest])))
        blob[HEADER_BYTES + chunks + place] = -int(levels[place]) % 256
    else:
        blob[HEADER_BYTES] -= 1  # the next smaller scale, so that another one is the largest of the payload
    world.commit(bytes(blob))
    assert world.is_refused()


@pytest.mark.parametrize("of", ["the vector before rounding", "nothing that is held", "another vector"])
def test_a_payload_that_does_not_follow_from_the_buffer_is_far_off(world: World, of: str) -> None:
    m, header, layout = world.m(world.e()), world.model.header(TRAINER), world.model.layout
    world.commit(world.levels(m))
    said = error_feedback.read_buffer(Path(world.path("m")), world.spec).dequantize()
    if of == "nothing that is held" and not world.spec.has_estimates:
        pytest.skip("nobody holds anything of it")
    wrong = {
        "the vector before rounding": world.model.encode_payload(TRAINER, m),
        "nothing that is held": codec.encode_payload(header, said, layout),
        "another vector": world.model.encode_payload(TRAINER, -said),
    }
    Path(world.path("payload")).write_bytes(wrong[of])
    audited = world.audit()
    assert (audited.verdict, audited.relative_error) == (Verdict.REPLAY, RELATIVE_ERROR_MAX)
