"""A step of a run at its trainer and at a re-executor: proposals, verdicts, and the model after the step."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.objective import ClientObjective
from clients.pytorch.adapted_model import AdaptedModel, PassResult
from clients.pytorch.engine import ClientEngine, clip_gradient
from clients.records import (
    LOSS_DEFAULTS,
    ClientLoss,
    Example,
    ListedBody,
    Manifest,
    OptimizerStep,
    RequestBody,
    StepBrief,
    StepDeclaration,
)
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.messages import Proposal
from protocol.verdicts import OBJECTIVE_CODES_FIRST, Verdict
from tests.clients.runs import MODEL, base_model, body, client_spec, floats, tokens, with_example
from training.data.tokenizer import load_tokenizer
from training.engine_resources import EngineResources
from training.engines.pytorch.device import CPU
from training.job_spec import JobSpec
from training.model_store import _terms
from training.replay import proposal_replay
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.worker_protocol import AuditRequest, BriefFiles, DeclarationFiles, ProposeReply, ProposeRequest

JOB, TRAINER, OTHER = b"j" * 32, b"t" * 32, b"o" * 32
ADAMW = OptimizerStep(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)
TOKENS, LOSS = (Verdict(OBJECTIVE_CODES_FIRST + number) for number in range(2))


class Run:
    """A run with its model on disk, and an engine for each member."""

    def __init__(self, folder: Path, spec: JobSpec | None = None) -> None:
        self.folder, self.spec = folder, spec or client_spec()
        self.model = ReplicatedModel.initial(JOB, self.spec)
        self.engines: dict[bytes, ClientEngine] = {}

    def engine(self, member: bytes) -> ClientEngine:
        if member not in self.engines:
            known, tokenizer = base_model(), load_tokenizer(None, self.spec.model.vocabulary)
            engine = ClientEngine(self.spec, known.data, tokenizer, None, CPU, EngineResources())
            engine.required_model = known
            self.engines[member] = engine
        return self.engines[member]

    @property
    def directory(self) -> Path:
        directory = self.folder / f"{self.model.round:08}"
        if not directory.exists():
            self.model.save(directory)
        return directory

    def brief(self, *bodies: RequestBody, step: int = 0, optimizer: OptimizerStep = ADAMW, said: int | None = None) -> BriefFiles:
        blobs = [codec.encode(each) for each in bodies]
        manifest = codec.encode(Manifest(tuple(ListedBody(hashlib.sha256(blob).digest(), len(blob)) for blob in blobs)))
        files = {}
        for blob in (*blobs, manifest):
            digest = hashlib.sha256(blob).digest()
            path = self.folder / digest.hex()
            path.write_bytes(blob)
            files[digest] = str(path)
        counted = sum(each.tokens for each in bodies) if said is None else said
        brief = StepBrief(step, hashlib.sha256(manifest).digest(), counted, optimizer)
        return BriefFiles(codec.encode(brief), files)

    def update(self, member: bytes) -> proposal_replay.ComputeUpdate:
        engine = self.engine(member)

        def compute(parameters, job, round, trainer, inner, on_state, *, taken, declaration=None):  # type: ignore[no-untyped-def]
            return engine.local_steps(parameters, job, round, trainer, declaration=declaration, taken=taken)

        return compute

    def propose(self, brief: BriefFiles, member: bytes = TRAINER) -> ProposeReply:
        request = ProposeRequest(
            JOB,
            self.model.round,
            member,
            str(self.directory),
            None,
            None,
            str(self.folder / "buffer"),
            declared_out=str(self.folder / "declared"),
            brief=brief,
        )
        return proposal_replay.make_proposal(request, self.update(member), self.engine(member))

    def audit(self, brief: BriefFiles, declaration: bytes, payload: Path | None = None, member: bytes = OTHER) -> Verdict:
        request = AuditRequest(
            JOB,
            self.model.round,
            TRAINER,
            str(self.directory),
            str(payload or self.folder / "buffer.payload"),
            None,
            None,
            None,
            declared=DeclarationFiles(declaration),
            brief=brief,
        )
        return proposal_replay.audit_proposal(request, self.update(member), self.engine(member)).verdict

    def apply(self, brief: BriefFiles, done: ProposeReply) -> None:
        payload = (self.folder / "buffer.payload").read_bytes()
        proposal = Proposal(
            JOB,
            self.model.round,
            self.model.root,
            done.payload_digest,
            done.payload_bytes,
            None,
            None,
            declaration=done.declaration,
        )
        assert self.model.check_proposal(TRAINER, proposal, payload) is Verdict.ACCEPT
        self.model = self.model.apply_round([AcceptedProposal(TRAINER, proposal, payload)], {}, brief=brief.encoded)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_step_is_confirmed_by_a_re_execution_and_moves_the_adapters(run: Run) -> None:
    brief = run.brief(body(seed=1), body(seed=2))
    done = run.propose(brief)
    said = codec.decode(StepDeclaration, done.declaration)
    assert said.tokens == body(seed=1).tokens + body(seed=2).tokens and done.loss == pytest.approx(said.loss / 1e6 / said.tokens)
    assert run.audit(brief, done.declaration) is Verdict.ACCEPT
    before = run.model.parameters.copy()
    run.apply(brief, done)
    moved = np.abs(run.model.parameters - before)
    assert 0 < moved.max() <= 1.001 * ADAMW.rate and run.model.round == 1


def test_steps_lower_the_loss(run: Run) -> None:
    losses, request = [], body(examples=6)
    ones = replace(
        request, examples=tuple(replace(each, inputs={"weights": floats([1.0] * each.length)}) for each in request.examples)
    )
    for step in range(8):
        brief = run.brief(ones, step=step)
        done = run.propose(brief)
        losses.append(codec.decode(StepDeclaration, done.declaration).loss)
        run.apply(brief, done)
    assert losses[-1] < 0.8 * losses[0] and losses == sorted(losses, reverse=True)


def test_a_gradient_is_computed_once_for_its_program_and_its_step_and_is_not_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, computed, run_pass = run.engine(TRAINER), list[RequestBody](), AdaptedModel.run_pass

    def counted(self: AdaptedModel, request: RequestBody, **options: Any) -> PassResult:
        computed.append(request)
        return run_pass(self, request, **options)

    monkeypatch.setattr(AdaptedModel, "run_pass", counted)
    for step in range(3):
        requests = [body(seed=2 * step), body(seed=2 * step + 1)]
        for request in requests:
            engine.run_pass(run.model.parameters, run.model.round, request, backward=True)
        brief = run.brief(*requests, step=step)
        run.apply(brief, run.propose(brief))
        assert computed[2 * step :] == requests and len(engine._gradients) == 2


# Lies of a trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda said: replace(said, loss=said.loss + 10_000), LOSS),
        (lambda said: replace(said, loss=said.loss - 10_000), LOSS),
        (lambda said: replace(said, loss=-said.loss), LOSS),
        (lambda said: replace(said, tokens=said.tokens + 1), TOKENS),
        (lambda said: replace(said, loss=said.loss + 1), Verdict.ACCEPT),
    ],
    ids=["a hundredth more", "a hundredth less", "negated", "a token more", "a millionth more"],
)
def test_a_false_figure_is_refused_by_its_name(run: Run, change, verdict: Verdict) -> None:  # type: ignore[no-untyped-def]
    brief = run.brief(body(seed=1))
    done = run.propose(brief)
    assert run.audit(brief, codec.encode(change(codec.decode(StepDeclaration, done.declaration)))) is verdict


def encoded(run: Run, vector: Float32Array) -> Path:
    path = run.folder / "other.payload"
    path.write_bytes(run.model.encode_payload(TRAINER, vector))
    return path


@pytest.mark.parametrize("factor", [-1.0, 1.01, 0.0])
def test_another_sum_of_gradients_is_refused(run: Run, factor: float) -> None:
    brief = run.brief(body(seed=1))
    done = run.propose(brief)
    engine, record = run.engine(OTHER), codec.decode(StepDeclaration, done.declaration)
    assert run.audit(brief, done.declaration) is Verdict.ACCEPT
    ((gradient, _),) = engine._gradients.values()
    assert run.audit(brief, done.declaration, encoded(run, gradient)) is Verdict.ACCEPT
    assert run.audit(brief, done.declaration, encoded(run, gradient * np.float32(factor))) is Verdict.REPLAY
    assert record.tokens == body(seed=1).tokens


def test_an_update_from_other_requests_than_the_manifest_s_is_refused(run: Run) -> None:
    brief, other = run.brief(body(seed=1)), run.brief(body(seed=2))
    done = run.propose(other)
    assert run.audit(brief, done.declaration) in (TOKENS, LOSS)
    honest = run.propose(brief)
    run.propose(other)
    assert run.audit(brief, honest.declaration) is Verdict.REPLAY, "its figures are right, and its update is another one"


# Briefs that nobody can compute ----------------------------------------------------------------------------------------------


def test_a_brief_with_another_number_of_tokens_has_no_update(run: Run) -> None:
    with pytest.raises(RemoteProtocolError, match="its brief names 7"):
        run.propose(run.brief(body(), said=7))


@pytest.mark.parametrize("said", [0, 1])
def test_a_re_executor_refuses_a_brief_with_another_number_of_tokens(run: Run, said: int) -> None:
    """The number bounds the step's operations, so a false one must cost re-executors no pass."""
    done = run.propose(run.brief(body(seed=1)))
    assert run.audit(run.brief(body(seed=1), said=said), done.declaration) is Verdict.REPLAY
    assert not run.engine(OTHER)._gradients


@pytest.mark.parametrize("loss", list(ClientLoss))
def test_the_tokens_of_a_brief_bound_the_bytes_that_its_bodies_have(run: Run, loss: ClientLoss) -> None:
    one = body(loss, **LOSS_DEFAULTS[loss]).examples[0]
    shortest = Example(one.tokens[:2], one.targets[:2], {name: data[:4] for name, data in one.inputs.items()})
    largest = RequestBody(loss, dict(sorted(LOSS_DEFAULTS[loss].items())), (shortest,))
    many = replace(largest, examples=(shortest,) * 1_024)
    brief = run.brief(largest, many)
    files = {digest: Path(file) for digest, file in brief.files.items()}
    assert files == {digest: files[digest] for digest in ClientObjective().round_files(run.spec, brief.encoded, files)}
    few = replace(codec.decode(StepBrief, brief.encoded), tokens=100)
    with pytest.raises(RemoteProtocolError, match="100 tokens have at most"):
        ClientObjective().round_files(run.spec, codec.encode(few), files)


def test_a_pass_computes_with_the_whole_merged_model() -> None:
    merged = replace(MODEL, tied=False).parameters
    for trains, expected in ((True, merged), (False, MODEL.parameters)):
        spec = client_spec(train_unembed=trains)
        assert _terms(spec.encode(), spec.resolved_objective, 0).pass_parameters == expected
    assert MODEL.tied and merged == MODEL.parameters + MODEL.vocabulary * MODEL.width


REQUEST = body(examples=2)
WRONG = {
    "24..context": (with_example(REQUEST, tokens=tokens([1] * 25), targets=tokens([1] * 25)), "25 tokens are more than"),
    "targets": (with_example(REQUEST, tokens=tokens([1, 2]), targets=tokens([1, 2, 3])), "2 tokens and 3 targets"),
    "vocabulary": (
        with_example(REQUEST, tokens=tokens([257]), targets=tokens([1]), inputs={"weights": floats([1.0])}),
        "tokens contain 257, but the vocabulary has 257",
    ),
    "number": (
        with_example(REQUEST, tokens=tokens([1, 2]), targets=tokens([1, 2]), inputs={"weights": floats([1.0, float("nan")])}),
        "weights contain nan at token 1",
    ),
    "length": (
        with_example(REQUEST, tokens=tokens([1]), targets=tokens([1]), inputs={"weights": floats([1, 1])}),
        "2 weights for 1",
    ),
    "inputs": (with_example(REQUEST, inputs={"advantages": floats([1.0])}), "needs weights, not advantages"),
    "setting": (replace(REQUEST, config={"beta": 1.0}), "has no setting 'beta': its settings are none"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_request_has_no_update_and_its_fault_a_name(run: Run, name: str) -> None:
    wrong, words = WRONG[name]
    with pytest.raises(RemoteProtocolError, match=words):
        run.propose(run.brief(wrong))


def test_clipping_bounds_the_norm_and_zero_is_no_bound() -> None:
    vector = np.array([3, 4], dtype=np.float32)
    assert np.array_equal(clip_gradient(vector, 0.0), vector) and np.array_equal(clip_gradient(vector, 6.0), vector)
    assert np.allclose(clip_gradient(vector, 1.0), [0.6, 0.8])
