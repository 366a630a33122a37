"""Models that a job reads: reward models of other pairs, and references other than its base, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ledger.jobs import ModelReference
from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.errors import FolkmootError, StorageError, UserError
from protocol.verdicts import Verdict, verdict_label
from rlhf.data import tokenized_records
from rlhf.data.preference_sets import PreferencePair, split_held_out
from rlhf.data.tokenized_records import draw_pairs
from rlhf.objectives.ppo import PpoSettings
from rlhf.objectives.supervised_objectives import REWARD, SCORE_HEAD, MeanRewardSettings, TrainableParameters
from rlhf.pair_accuracy import ACCURACY, CALIBRATION
from rlhf.pytorch import score_pairs
from rlhf.pytorch.supervised_objectives import NormalizedRewardModel, preference_metrics
from tests.rlhf.seat import JOB, TRAINER, Seat, write
from training import worker_protocol
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.engine import DeclaringEngine, RequiredModel
from training.engines.pytorch.backend import BACKEND
from training.engines.request_handlers import WorkerContext
from training.formats import checkpoint
from training.job_spec import AuditMode, JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import ModelSpec

SPEC = JobSpec(
    name="reward",
    objective="reward",
    model=ModelSpec(context=16, width=16, layers=1, hidden=16),
    data=bytes(32),
    held_out_permille=300,
    local_steps=4,
    batch=8,
    inner_rate=1e-2,
    rounds=3,
    feedback_decay=0.0,
    audit=AuditMode.SAMPLED,
)


def some_pairs(count: int = 60) -> list[PreferencePair]:
    """Return pairs in which the response of vowels is preferred."""
    good, bad = ("aei", "oua", "eeo"), ("xkt", "bd", "zzrk")

    def pair(number: int) -> PreferencePair:
        of = good[number % 3], bad[number % 7 % 3]
        first, second = of if number % 2 else of[::-1]
        return PreferencePair(number.to_bytes(8, "big"), f"q{number}: ", first, second, 1000 * (number % 2))

    return [pair(number) for number in range(1, count + 1)]


MEAN = replace(SPEC, objective="reward-mean", objective_settings=codec.encode(MeanRewardSettings()), weight_decay=0.0)
ALL_OF_MEAN = replace(MEAN, objective_settings=codec.encode(MeanRewardSettings(learns=TrainableParameters.ALL)))
ALL_OR_LAST = pytest.mark.parametrize("spec", [SPEC, MEAN], ids=lambda spec: spec.objective)


def seat_of(folder: Path, spec: JobSpec = SPEC) -> Seat:
    return Seat(folder, spec, some_pairs())


@ALL_OR_LAST
def test_an_honest_proposal_passes_every_check_whatever_the_parts_of_a_batch(spec: JobSpec, tmp_path: Path) -> None:
    world = seat_of(tmp_path, spec)
    world.propose(world.worker())
    assert world.audited(world.worker(micro_batch=3)) is Verdict.ACCEPT


def test_turned_preferences_are_found_out(tmp_path: Path) -> None:
    world = seat_of(tmp_path)
    world.propose(world.worker(write(tmp_path / "turned", [replace(pair, p=1000 - pair.p) for pair in some_pairs()])))
    assert world.audited(world.worker()) is Verdict.REPLAY


@ALL_OR_LAST
def test_what_people_prefer_is_learned_and_measured_on_prompts_never_trained_on(spec: JobSpec, tmp_path: Path) -> None:
    found = tokenized_records.open_pairs(spec, Path(write(tmp_path / "set", some_pairs())), ByteTokenizer())
    engine, parameters = BACKEND.open_engine(spec, found, ByteTokenizer(), None), ReplicatedModel.initial(JOB, spec).parameters
    assert not layout_of(spec).tensor_views(parameters)[SCORE_HEAD].any() and engine.compute_main_metric(parameters) == 0.5
    for number in range(3):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER)
        parameters = parameters - delta
    figures = engine.compute_metrics(parameters)
    assert figures["held_out_accuracy"] == 1.0 and 0 < figures["calibration_error"] < 0.5
    prompts = [{pair.prompt for pair in side} for side in split_held_out(some_pairs(), SPEC.held_out_permille)]
    assert all(prompts) and prompts[0].isdisjoint(prompts[1]) and len(found.held_out_split) == len(prompts[1])


@pytest.mark.parametrize("spec", [SPEC, MEAN, ALL_OF_MEAN], ids=["last token", "mean, words", "mean, all"])
def test_layers_stay_as_they_are_where_words_alone_learn(spec: JobSpec, tmp_path: Path) -> None:
    found = tokenized_records.open_pairs(spec, Path(write(tmp_path / "set", some_pairs())), ByteTokenizer())
    engine, parameters = BACKEND.open_engine(spec, found, ByteTokenizer(), None), ReplicatedModel.initial(JOB, spec).parameters
    moved = layout_of(spec).tensor_views(engine.local_steps(parameters, JOB, 0, TRAINER)[0])
    layers = {name for name in moved if name.startswith("layers.")}
    stays = layers if spec is MEAN else set()
    assert len(layers) == 9 and {name for name, tensor in moved.items() if not tensor.any()} == stays


def test_layers_that_stay_are_not_shrunk_either() -> None:
    assert MEAN.problem() is None and replace(ALL_OF_MEAN, weight_decay=0.1).problem() is None
    assert "weight_decay 0.1 would change the frozen layers" in (replace(MEAN, weight_decay=0.1).problem() or "")


def test_a_step_is_made_of_the_pairs_that_were_drawn_for_it(tmp_path: Path) -> None:
    some = some_pairs(20)
    found = tokenized_records.tokenize_pairs(SPEC, some, ByteTokenizer())
    drawn = draw_pairs(JOB, 2, TRAINER, 3, count=5, pairs=len(found.train_split), seed=0)
    x, last, p = REWARD.batch_arrays(SPEC, drawn, found)
    for row, number in enumerate(drawn):
        pair = split_held_out(some, SPEC.held_out_permille)[0][number]
        texts = [(pair.prompt + response).encode() for response in (pair.first, pair.second)]
        assert [bytes(x[row, side, : last[row, side] + 1].astype(np.uint8)) for side in range(2)] == texts
        assert p[row] == pair.p / 1000
    assert x.shape == (5, 2, last.max() + 1)


def test_a_response_beyond_the_context_is_told_with_its_line() -> None:
    some = [*some_pairs(3), PreferencePair((4).to_bytes(8, "big"), "q" * 15, "a", "bb", 0)]
    with pytest.raises(UserError, match="line 4: prompt and response are 17 tokens, more than the context of 16"):
        tokenized_records.tokenize_pairs(SPEC, some, ByteTokenizer())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"data": None}, "learns from preferences"),
        ({"audit": AuditMode.OFF}, "audit 'off' would let trainers invent preferences"),
        ({"model": replace(SPEC.model, vocabulary=6)}, "model.vocabulary 6 needs a tokenizer"),
        ({"local_steps": 1}, "would train only the head in the first round"),
    ],
)
def test_a_job_that_cannot_be_is_told_why(other: dict[str, object], why: str) -> None:
    assert why in (replace(MEAN, **other).problem() or "")
    assert why in (replace(SPEC, **other).problem() or "")


def test_scores_of_the_held_out_responses_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    found = tokenized_records.open_pairs(SPEC, Path(write(tmp_path / "set", some_pairs())), ByteTokenizer())
    parameters = ReplicatedModel.initial(JOB, SPEC).parameters.copy()
    layout_of(SPEC).tensor_views(parameters)[SCORE_HEAD][:] = np.linspace(-1, 2, SPEC.model.width)
    scorer = NormalizedRewardModel(RequiredModel(SPEC, parameters, found), lambda: None)
    x, last, _ = map(
        torch.from_numpy, tokenized_records.pair_batch(found.held_out, found.held_out_split, np.arange(len(found.held_out_split)))
    )
    scored = scorer.scores(x.flatten(0, 1), last.flatten(), lambda: None).double()
    assert abs(float(scored.mean())) < 1e-5 and abs(float(scored.std(correction=0)) - 1) < 1e-5


def test_a_policy_is_rewarded_by_the_model_that_its_job_reads(tmp_path: Path) -> None:
    """An auditor confirms the trainer's figures with the same model, and rejects them with another one."""
    parameters = ReplicatedModel.initial(JOB, SPEC).parameters.copy()
    layout_of(SPEC).tensor_views(parameters)[SCORE_HEAD][:] = np.linspace(-1, 2, SPEC.model.width)
    first = ReplicatedModel.initial(JOB, SPEC)

    def job(name: str, parameters: Float32Array) -> JobSpec:
        """Return a job that reads this model."""
        model = ReplicatedModel.from_vectors(replace(first.state, round=3), {**first.vectors, "parameters": parameters})
        model.save(tmp_path / name)
        read = ModelReference(JOB, 3, model.root)
        spec = replace(
            SPEC,
            objective="ppo",
            objective_settings=codec.encode(
                PpoSettings(reward="model", reward_model=read, prompt_tokens=4, response_tokens=6, epochs=2)
            ),
        )
        assert spec.problem() is None and spec.resolved_objective.required_model(spec) == read
        return spec

    jobs_of = {"reward": job("reward", parameters), "other": job("other", -parameters)}
    spec = jobs_of["reward"]
    ReplicatedModel.initial(TRAINER, spec).save(tmp_path / "model")
    (tmp_path / "text").write_bytes(default_text()[:20_000])

    def worker(reward: str, by: str | None = None) -> WorkerRequestHandler:
        jobs, text = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30)), write(tmp_path / "set", some_pairs())
        opening = worker_protocol.OpenJobRequest(
            TRAINER,
            jobs_of[by or reward].encode(),
            str(tmp_path / "text"),
            None,
            required_model=str(tmp_path / reward),
            other_text=text,
        )
        jobs.handle_request(opening)
        return jobs

    out = {name: str(tmp_path / name) for name in ("buffer_out", "declared_out")}
    done = worker("reward").handle_request(
        worker_protocol.ProposeRequest(TRAINER, 0, TRAINER, str(tmp_path / "model"), None, None, **out)
    )
    assert isinstance(done, worker_protocol.ProposeReply)
    declared = worker_protocol.DeclarationFiles(
        done.declaration, {bytes.fromhex(file.name): str(file) for file in (tmp_path / "declared_out").iterdir()}
    )
    files = f"{out['buffer_out']}.payload", None, None, None
    audit = worker_protocol.AuditRequest(TRAINER, 0, TRAINER, str(tmp_path / "model"), *files, declared=declared)
    with pytest.raises(
        StorageError, match="holds a model that differs"
    ):  # a worker that continued would call honest trainers liars
        worker("other", by="reward")
    verdicts = [found.verdict for found in (worker(of).handle_request(audit) for of in ("reward", "other"))]  # type: ignore[union-attr]
    assert verdicts[0] is Verdict.ACCEPT and verdict_label(verdicts[1], spec.resolved_objective.reason_labels) == "figures"


@ALL_OR_LAST
def test_an_exported_reward_model_scores_a_file_without_a_peer(spec: JobSpec, tmp_path: Path) -> None:
    """Texts of different lengths in one pass do not change each other's scores."""
    parameters = ReplicatedModel.initial(JOB, SPEC).parameters.copy()
    layout_of(SPEC).tensor_views(parameters)[SCORE_HEAD][:] = np.linspace(-1, 2, SPEC.model.width)
    checkpoint.write_checkpoint(tmp_path / "reward.safetensors", spec, parameters, checkpoint.CheckpointOrigin(JOB, 3, bytes(32)))
    lines = [{"prompt": pair.prompt, "chosen": pair.first, "rejected": pair.second} for pair in some_pairs(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = list(score_pairs.score_pairs(tmp_path / "reward.safetensors", tmp_path / "pairs.jsonl", None))
    engine = BACKEND.open_engine(
        SPEC, tokenized_records.tokenize_pairs(SPEC, some_pairs(), ByteTokenizer()), ByteTokenizer(), None
    )
    engine.load_parameters(parameters)
    for pair, both in zip(some_pairs(3), told, strict=True):
        for response, found in zip((pair.first, pair.second), both, strict=True):
            said = (
                engine.model.features(torch.tensor([list((pair.prompt + response).encode())]))[0] @ engine.model.heads[SCORE_HEAD]
            )
            assert found == pytest.approx((said.mean() if spec is MEAN else said[-1]).item(), abs=1e-5)
    with pytest.raises(UserError, match=f"{tmp_path} is a folder: give a file"):
        next(score_pairs.score_pairs(tmp_path, tmp_path / "pairs.jsonl", None))
    with pytest.raises(UserError, match="takes bytes: leave --tokenizer out"):
        next(score_pairs.score_pairs(tmp_path / "reward.safetensors", tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl"))


def test_scores_of_a_diverged_model_rank_no_pair() -> None:
    """Without figures no voter could report on the model, and its plan would wait for 10,000 heights."""
    figures = preference_metrics(torch.tensor([torch.nan, torch.nan, torch.inf]), torch.tensor([1.0, 0.0, 1.0]))
    assert figures[ACCURACY] == (0.5 + 0.5 + 1) / 3 and 0 <= figures[CALIBRATION] <= 1


OF_POLICY, OF_BASE = bytes([1]) * 32, bytes([3]) * 32
BASE = JobSpec(name="base", model=ModelSpec(context=16, width=16, layers=1, hidden=16), data=bytes(32), seed=7)


@pytest.fixture
def base(tmp_path: Path) -> ReplicatedModel:
    (tmp_path / "text").write_bytes(default_text()[:20_000])
    model = ReplicatedModel.initial(OF_BASE, BASE.validated())
    model.save(tmp_path / "base")
    return model


def first(folder: Path, root: bytes, directory: Path | None) -> DeclaringEngine:
    own = codec.encode(PpoSettings(reward="rule:vowels", prompt_tokens=4, response_tokens=6))
    spec = replace(
        BASE, name="ppo", objective="ppo", objective_settings=own, local_steps=4, base=ModelReference(OF_BASE, 1, root)
    ).validated()
    jobs = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1))
    path = str(directory) if directory else None
    jobs.handle_request(worker_protocol.OpenJobRequest(OF_POLICY, spec.encode(), str(folder / "text"), None, base=path))
    engine = jobs.context.find_engine(OF_POLICY)
    assert isinstance(engine, DeclaringEngine)
    return engine


def test_the_reference_is_the_base(tmp_path: Path, base: ReplicatedModel) -> None:
    reference = first(tmp_path, base.root, tmp_path / "base").first_parameters
    assert reference is not None and (reference[: base.layout.size] == base.parameters).all()


def missing(folder: Path) -> Path | None:
    return None


def of_another_seed(folder: Path) -> Path:
    ReplicatedModel.initial(OF_BASE, replace(BASE, seed=8)).save(folder / "other")
    return folder / "other"


def damaged(folder: Path) -> Path:
    """Flip one bit of one number."""
    file = next((folder / "base").glob("parameters*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return folder / "base"


@pytest.mark.parametrize("planted", [missing, of_another_seed, damaged])
def test_no_other_model_becomes_the_reference(
    tmp_path: Path, base: ReplicatedModel, planted: Callable[[Path], Path | None]
) -> None:
    """A peer with another reference would call every honest trainer a liar."""
    with pytest.raises(FolkmootError, match=r"holds a model that differs|does not match|names no base"):
        first(tmp_path, base.root, planted(tmp_path))
