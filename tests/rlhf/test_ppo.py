"""PPO in the worker: honest proposals pass every check, and a token that was not sampled is found at any margin."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.messages import Proposal
from protocol.sampling import SamplingOptions
from protocol.verdicts import Verdict, verdict_label
from rlhf.objectives import job_presets, rollouts, rule_rewards
from rlhf.objectives.ppo import MILLIONTHS, PPO, ROLLOUT, VALUE_HEAD, PpoSettings, RolloutDeclaration
from rlhf.objectives.rule_rewards import RULES
from rlhf.pytorch import policy_evaluation
from tests.rlhf.seat import whole
from training import worker_protocol
from training.data.default_text import default_text
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.backend import BACKEND
from training.engines.pytorch.log_probabilities import log_probabilities
from training.engines.request_handlers import WorkerContext
from training.job_spec import AuditMode, JobSpec, complete_fields
from training.model_store import audit_download_bytes_max
from training.objectives.objective import Declaration, RejectionReason
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import initial_parameters
from training.transformer import BYTES, BYTES_WITH_END, ModelSpec

JOB, TRAINER = bytes([1]) * 32, bytes([2]) * 32
OWN = PpoSettings(reward="rule:vowels", prompt_tokens=4, response_tokens=6, epochs=2)
SPEC = JobSpec(
    name="ppo",
    objective="ppo",
    model=ModelSpec(context=16, width=16, layers=1, hidden=16),
    data=bytes(32),
    objective_settings=codec.encode(OWN),
    local_steps=4,
    batch=8,
    rounds=3,
    feedback_decay=0.0,
    audit=AuditMode.SAMPLED,
)


@dataclass
class World:
    """One trainer's round, and its auditors. All share one worker."""

    folder: Path
    spec: JobSpec

    def __post_init__(self) -> None:
        (self.folder / "text").write_bytes(default_text()[:20_000])
        self.model = ReplicatedModel.initial(JOB, self.spec)
        self.model.save(self.folder / "model")
        self.jobs = self.worker()

    def worker(self, micro_batch: int = 1 << 30) -> WorkerRequestHandler:
        jobs = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, micro_batch))
        jobs.handle_request(worker_protocol.OpenJobRequest(JOB, self.spec.encode(), str(self.folder / "text"), None))
        return jobs

    def propose(self, declared: worker_protocol.DeclarationFiles | None = None) -> worker_protocol.ProposeReply:
        out = {"buffer_out": str(self.folder / "m"), "declared_out": str(self.folder / "declared")}
        done = self.jobs.handle_request(
            worker_protocol.ProposeRequest(JOB, 0, TRAINER, str(self.folder / "model"), None, None, **out, declared=declared)
        )
        assert isinstance(done, worker_protocol.ProposeReply)
        (self.folder / "m.payload").rename(self.folder / "payload")
        return done

    def declared(self, done: worker_protocol.ProposeReply) -> worker_protocol.DeclarationFiles:
        return worker_protocol.DeclarationFiles(
            done.declaration, {bytes.fromhex(file.name): str(file) for file in (self.folder / "declared").iterdir()}
        )

    def audited(self, done: worker_protocol.ProposeReply, jobs: WorkerRequestHandler | None = None) -> worker_protocol.AuditReply:
        files = {"payload": str(self.folder / "payload"), "buffer": None}
        request = worker_protocol.AuditRequest(
            JOB, 0, TRAINER, str(self.folder / "model"), **files, previous_buffer=None, previous_payload=None,
            declared=self.declared(done),
        )  # fmt: skip
        found = (jobs or self.worker()).handle_request(request)
        assert isinstance(found, worker_protocol.AuditReply)
        return found

    def say(self, responses: list[Any], done: worker_protocol.ProposeReply) -> worker_protocol.DeclarationFiles:
        """Return a declaration of these responses with unchanged figures."""
        blob = rollouts.encode_rollouts(responses)
        digest, said = hashlib.sha256(blob).digest(), codec.decode(RolloutDeclaration, done.declaration)
        path = self.folder / "declared" / digest.hex()
        path.write_bytes(blob)
        tokens = sum(map(len, responses))
        unfinished = sum(not rollouts.is_finished(np.array(response), OWN.stop_token) for response in responses)
        return worker_protocol.DeclarationFiles(
            codec.encode(replace(said, blob=digest, tokens=tokens, unfinished=unfinished)), {digest: str(path)}
        )

    def responses(self, done: worker_protocol.ProposeReply) -> list[Any]:
        said = codec.decode(RolloutDeclaration, done.declaration)
        return rollouts.read_rollouts(
            self.folder / "declared" / said.blob.hex(), PPO.rollout_limits(self.spec, self.spec.decoded_settings)
        )


@pytest.fixture
def full(tmp_path: Path) -> World:
    return World(tmp_path, replace(SPEC, audit=AuditMode.FULL).validated())


@pytest.fixture
def done(full: World) -> worker_protocol.ProposeReply:
    return full.propose()


def test_honest_work_passes_whole(full: World, done: worker_protocol.ProposeReply) -> None:
    said = codec.decode(RolloutDeclaration, done.declaration)
    assert said.k1 == 0 and said.tokens > 0, "before its first round a policy is its reference"
    found = full.audited(done)
    assert (found.verdict, found.relative_error) == (Verdict.ACCEPT, 0)


def invented(world: World, done: worker_protocol.ProposeReply) -> list[list[int]]:
    """Return responses that score better than all sampled ones."""
    return [[ord("a")] * OWN.response_tokens for _ in world.responses(done)]


def with_one_of_them(world: World, done: worker_protocol.ProposeReply) -> list[list[int]]:
    responses: list[list[int]] = [response.tolist() for response in world.responses(done)]
    responses[CHANGED] = invented(world, done)[CHANGED]
    return responses


CHANGED = 3  # index of the changed response


@pytest.mark.parametrize("lie", [invented, with_one_of_them])
def test_invented_responses_are_named_by_full_audits(
    full: World, lie: Callable[..., Any], done: worker_protocol.ProposeReply
) -> None:
    """The update is computed from the invented responses, and nothing else is false."""
    assert verdict_label(full.audited(full.propose(full.say(lie(full, done), done))).verdict, PPO.reason_labels) == "rollout"


@pytest.mark.parametrize("figure", ["tokens", "unfinished", "k1", "score", "distinct", "correlation", "blocked"])
def test_false_figures_are_named(full: World, figure: str, done: worker_protocol.ProposeReply) -> None:
    said = codec.decode(RolloutDeclaration, done.declaration)
    by = {"k1": MILLIONTHS, "score": MILLIONTHS, "correlation": 30_000, "blocked": 1}.get(figure, -1)
    false = replace(done, declaration=codec.encode(replace(said, **{figure: getattr(said, figure) + by})))
    assert verdict_label(full.audited(false).verdict, PPO.reason_labels) == "figures"


def test_bytes_that_are_no_rollouts_are_refused(full: World, done: worker_protocol.ProposeReply) -> None:
    said = codec.decode(RolloutDeclaration, done.declaration)
    (full.folder / "declared" / said.blob.hex()).write_bytes(b"no rollouts")
    assert full.audited(done).verdict is Verdict.REPLAY


@pytest.mark.parametrize(
    "fields, own, problem",
    [
        ({"batch": 4096, "local_steps": 4}, {"prompt_tokens": 2_000, "response_tokens": 6}, "tokens in prompts and responses"),
        ({"batch": 1 << 16, "local_steps": 128}, {"epochs": 64, "prompt_tokens": 4, "response_tokens": 6}, "in 64 epochs"),
    ],
)
def test_what_a_worker_cannot_hold_is_no_job(fields: dict[str, Any], own: dict[str, Any], problem: str) -> None:
    settings, model = codec.encode(replace(OWN, **own)), replace(SPEC.model, context=2_048)
    spec = replace(SPEC, **fields, objective_settings=settings, model=model)
    assert problem in str(PPO.spec_problem(spec, spec.decoded_settings))


def test_what_a_declaration_names_counts_where_audits_are_answered() -> None:
    beside = replace(SPEC, objective_settings=codec.encode(replace(OWN, response_tokens=7)))
    assert PPO.declared_bytes_max(SPEC) == 2 * 16 * (1 + 6)
    assert audit_download_bytes_max(beside) - audit_download_bytes_max(SPEC) == 2 * 16
    assert beside.audit_bytes - SPEC.audit_bytes == 2 * 16 * (SPEC.rounds_audited + 1)


def test_voters_without_torch_refuse_what_no_job_can_declare(full: World, done: worker_protocol.ProposeReply) -> None:
    said, payload = codec.decode(RolloutDeclaration, done.declaration), (full.folder / "payload").read_bytes()
    proposal = Proposal(
        JOB, 0, full.model.root, done.payload_digest, done.payload_bytes, done.buffer_digest, None, declaration=done.declaration
    )
    assert full.model.check_proposal(TRAINER, proposal, payload) is Verdict.ACCEPT
    for wrong in (replace(said, tokens=15), replace(said, tokens=97), replace(said, unfinished=17)):
        assert (
            full.model.check_proposal(TRAINER, replace(proposal, declaration=codec.encode(wrong)), payload) is Verdict.MALFORMED
        ), wrong


def test_a_job_begins_with_the_model_of_its_base_and_a_head_of_zeros() -> None:
    base = ReplicatedModel.initial(JOB, replace(SPEC, objective="language", objective_settings=b"", seed=7))
    model = ReplicatedModel.initial(JOB, SPEC, base)
    views = model.layout.tensor_views(model.parameters)
    assert not views.pop(VALUE_HEAD).any() and views.keys() == base.layout.tensor_views(base.parameters).keys()
    assert (model.parameters[: base.layout.size] == base.parameters).all()


def test_the_gradient_is_the_same_whatever_the_micro_batch(full: World) -> None:
    """Means are over the tokens of an inner step, and micro-batches have different numbers of them."""
    found = full.audited(full.propose(), full.worker(micro_batch=3))
    assert found.verdict is Verdict.ACCEPT and found.relative_error < 1e-4


def test_responses_end_with_the_end_of_text_where_the_job_says_so(tmp_path: Path) -> None:
    own = replace(OWN, stop_token=BYTES)
    model = replace(SPEC.model, vocabulary=BYTES_WITH_END)
    world = World(tmp_path, replace(SPEC, model=model, objective_settings=codec.encode(own), batch=256, seed=3))
    done = world.propose()
    assert world.audited(done).verdict is Verdict.ACCEPT
    said = codec.decode(RolloutDeclaration, done.declaration)
    found = rollouts.decode_rollouts((tmp_path / "declared" / said.blob.hex()).read_bytes(), PPO.rollout_limits(world.spec, own))
    ended = [response for response in found if response[-1] == BYTES]
    assert len(ended) == len(found) - said.unfinished > 0, "an untrained model says it as often as any token"
    assert not any(BYTES in response[:-1] for response in found)


def test_text_of_the_policy_and_of_its_reference(full: World) -> None:
    moved = full.folder / "moved"
    ReplicatedModel.initial(JOB, replace(full.spec, seed=5)).save(moved)

    def text(directory: str | None, *stop: str) -> str:
        return whole(
            full.jobs, worker_protocol.GenerateRequest(JOB, directory, "The ", SamplingOptions(20, temperature=0.0, stop=stop))
        ).text

    assert text(None) == text(str(full.folder / "model")) != text(str(moved))
    assert text(None, text(None)[3]) == text(None).partition(text(None)[3])[0]


def test_on_the_toy_a_policy_comes_near_the_best_that_there_is() -> None:
    """One trainer's updates are accepted unchanged. The best policy, and the distance to it, are known exactly."""
    own = PpoSettings(reward="rule:bigram", prompt_tokens=1, response_tokens=5, stop_token=None, beta=rule_rewards.TOY_BETA)
    model = ModelSpec(vocabulary=rule_rewards.TOY_VOCABULARY, context=8, width=16, layers=1, hidden=32)
    fields = complete_fields(job_presets.TOY_JOB | {"batch": 32, "inner_rate_floor": 0.1})
    spec = JobSpec(name="toy", objective="ppo", model=model, objective_settings=codec.encode(own), **fields).validated()
    first = initial_parameters(spec)
    engine: Any = BACKEND.open_engine(spec, TokenizedText.without_text(ByteTokenizer().token_bytes), ByteTokenizer(), first)
    rewards = policy_evaluation.toy_rewards(spec.seed)

    def logp(parameters: Any) -> Any:
        engine.load_parameters(parameters)
        responses = torch.from_numpy(policy_evaluation.toy_responses())
        prompted = torch.nn.functional.pad(responses[:, :-1], (1, 0), value=rule_rewards.TOY_PROMPT)
        with torch.no_grad():
            logits = engine.model.logits(engine.model.features(prompted))
        return log_probabilities(logits, responses).sum(1).double().numpy()

    reference, parameters = logp(first), first
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            by = engine.derive_step_data(
                parameters, JOB, number, TRAINER, engine.make_declaration(parameters, JOB, number, TRAINER, Path(folder))
            )
            delta, _ = engine.local_steps(parameters, JOB, number, TRAINER, declaration=by)
            parameters = parameters - delta
    assert policy_evaluation.gap_closed(logp(parameters), reference, rewards) > 0.85


MARGIN = 2.0**-10
RESPONSES = 4_096  # of a single, last token: about every thousandth has a runner-up within the margin
VOWELS = RULES["vowels"]


class OneToken:
    def __init__(self, folder: Path) -> None:
        self.folder, model = folder, ModelSpec(context=8, width=16, layers=1, hidden=16)
        own = PpoSettings(reward="rule:vowels", prompt_tokens=1, response_tokens=1, stop_token=None, epochs=1)
        self.spec = JobSpec(
            name="ppo", objective="ppo", model=model, objective_settings=codec.encode(own), local_steps=1, batch=RESPONSES
        ).validated()
        self.first = initial_parameters(self.spec)
        self.engine: Any = BACKEND.open_engine(
            self.spec, TokenizedText.without_text(ByteTokenizer().token_bytes), ByteTokenizer(), self.first
        )
        self.honest: Declaration = self.engine.make_declaration(self.first, JOB, 0, TRAINER, folder)
        (path,) = self.honest.files.values()
        self.responses = rollouts.read_rollouts(path, PPO.rollout_limits(self.spec, own))

    def runners_up(self) -> tuple[Any, Any]:
        """Return each response's runner-up: the margin by which it trails, and its token."""
        self.engine.load_parameters(self.first)
        with torch.no_grad():
            features = self.engine.model.features(torch.zeros((1, 1), dtype=torch.int64))[0]
            logits = self.engine.model.logits(features)  # equal for all responses: the prompt is token 0
        best = (
            logits
            + torch.from_numpy(
                rollouts.gumbel_noise(rollouts.RolloutId(JOB, 0, TRAINER), ((row, 0) for row in range(RESPONSES)), 256)
            )
        ).topk(2, dim=1)
        assert [int(response[0]) for response in self.responses] == best.indices[:, 0].tolist()
        return best.values[:, 0] - best.values[:, 1], best.indices[:, 1]

    def refutation(self, row: int, token: int) -> RejectionReason | None:
        """Refute the honest responses with another token in row `row` and figures that match it."""
        told, reward = [[*map(int, response)] for response in self.responses], VOWELS.make(self.spec.seed)
        was, told[row] = told[row], [token]
        moved = reward([token], bytes([token])) - reward(was, bytes(was))
        blob = rollouts.encode_rollouts(told)
        path, digest, said = self.folder / "told", hashlib.sha256(blob).digest(), self.honest.record
        path.write_bytes(blob)
        record = replace(said, blob=digest, score=said.score + round(moved * MILLIONTHS))
        found: RejectionReason | None = self.engine.why_declaration_refused(
            self.first, JOB, 0, TRAINER, Declaration(record, {digest: path})
        )
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> OneToken:
    return OneToken(tmp_path_factory.mktemp("epsilon"))


def test_a_runner_up_a_little_further_behind_is_no_sample(world: OneToken) -> None:
    behind, tokens = world.runners_up()
    row = int(behind.where(behind > 1.01 * MARGIN, torch.inf).argmin())
    assert behind[row] < 1.5 * MARGIN
    assert world.refutation(row, int(tokens[row])) is ROLLOUT


def test_a_runner_up_just_within_passes(world: OneToken) -> None:
    behind, tokens = world.runners_up()
    row = int(behind.where(behind < 0.99 * MARGIN, -torch.inf).argmax())
    assert behind[row] > 0.5 * MARGIN
    assert world.refutation(row, int(tokens[row])) is None
