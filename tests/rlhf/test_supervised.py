"""Learning from given responses in the worker: what is proposed passes every check, and only responses are learned."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peer import features
from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.blob_digest import blob_digest
from protocol.errors import StorageError, UserError
from protocol.verdicts import Verdict
from rlhf.api.supervised_jobs import attach_set
from rlhf.data import tokenized_pairs
from rlhf.data.preference_sets import PromptRecord
from rlhf.data.tokenized_responses import InstructionExample, read_examples, response_batch, tokenize_responses
from rlhf.objectives.response_reader import open_responses
from rlhf.objectives.supervised_objectives import NATS, DpoTerms, InstructTerms
from tests.rlhf.seat import JOB, TRAINER, Seat, write
from tests.rlhf.test_reward import SPEC, some_pairs
from training import worker_protocol
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.backend import BACKEND
from training.engines.worker_context import WorkerContext
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import float32_bytes, layout_of

OF = {
    "instruct": replace(SPEC, objective="instruct", objective_settings=codec.encode(InstructTerms())),
    "dpo": replace(SPEC, objective="dpo", objective_settings=codec.encode(DpoTerms(beta=0.5))),
}


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


def some_examples(count: int = 60) -> list[InstructionExample]:
    return [
        InstructionExample(number.to_bytes(8, "big"), f"q{number}: ", "aeiou"[number % 3 :]) for number in range(1, count + 1)
    ]


def records(name: str) -> list[PromptRecord]:
    return [*some_examples()] if name == "instruct" else [*some_pairs()]


def seat_of(folder: Path, name: str) -> Seat:
    return Seat(folder, OF[name], records(name))


@pytest.mark.parametrize("name", OF)
def test_an_honest_proposal_passes_every_check_and_one_of_other_responses_none(tmp_path: Path, name: str) -> None:
    world = seat_of(tmp_path, name)
    other = world.worker(micro_batch=3)
    world.propose(world.worker())
    assert world.audited(other) is Verdict.ACCEPT
    false: list[PromptRecord] = [replace(example, response="zzz") for example in some_examples()]
    if name == "dpo":
        false = [replace(pair, p=1000 - pair.p) for pair in some_pairs()]
    world.propose(world.worker(write(tmp_path / "false", false)))
    assert world.audited(other) is Verdict.REPLAY


@pytest.mark.parametrize("name", OF)
def test_it_learns_and_is_measured_on_prompts_that_were_never_trained_on(tmp_path: Path, name: str) -> None:
    world = seat_of(tmp_path, name)
    found = open_responses(world.spec, Path(world.set), ByteTokenizer())
    parameters = ReplicatedModel.initial(JOB, world.spec).parameters
    engine = BACKEND.open_engine(world.spec, found, ByteTokenizer(), parameters)
    before = engine.compute_metrics(parameters)
    for number in range(4):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER)
        parameters = parameters - delta
    after = engine.compute_metrics(parameters)
    if name == "dpo":
        assert before["held_out_accuracy"] < 0.8 and after["held_out_accuracy"] == 1.0
    else:
        assert abs(before[NATS] - np.log(256)) < 0.5 and after[NATS] < before[NATS] - 1
    assert len(found.held_out_split) and len(found.train_split) + len(found.held_out_split) == 60


def test_the_reference_of_a_pair_is_what_the_first_model_gives_it_token_by_token(tmp_path: Path) -> None:
    world = seat_of(tmp_path, "dpo")
    found = open_responses(world.spec, Path(world.set), ByteTokenizer())
    first = ReplicatedModel.initial(JOB, world.spec).parameters
    engine = BACKEND.open_engine(world.spec, found, ByteTokenizer(), first)
    delta, _ = engine.local_steps(first + np.float32(0.1), JOB, 0, TRAINER)
    assert not np.isnan(delta).any()
    known = ~np.isnan(found.train_split.reference)
    assert 0 < known.sum() < len(known) and np.isnan(found.held_out_split.reference).all()
    engine.load_parameters(first)  # type: ignore[attr-defined]
    for text in np.flatnonzero(known)[:5]:
        start, response, end = (
            found.train_split.starts[text],
            found.train_split.responses[text],
            found.train_split.starts[text + 1],
        )
        ids = torch.from_numpy(found.train[start:end].astype(np.int64))
        logp = engine.model.logits(engine.model.features(ids[None, :-1])).log_softmax(-1)[0]  # type: ignore[attr-defined]
        summed = sum(logp[at - 1, ids[at]] for at in range(int(response - start), len(ids)))
        assert found.train_split.reference[text] == pytest.approx(float(summed.detach()), abs=1e-4)


def test_only_the_tokens_of_a_response_and_its_stop_are_learned() -> None:
    some = [InstructionExample(b"1", "ab", "xy"), InstructionExample(b"2", "c", "z\n")]
    found = tokenize_responses(replace(OF["instruct"], held_out_permille=0), some, ByteTokenizer())
    x, y, mask = response_batch(found.train, found.train_split, np.array([0, 1]))
    assert [bytes(row.astype(np.uint8)) for row in x] == [b"abxy", b"cz\0\0"]
    assert [bytes(y[row][mask[row]].astype(np.uint8)) for row in range(2)] == [b"xy\n", b"z\n"]
    assert found.train_split.tokens_mean == 2.5
    unstopped = replace(OF["instruct"], held_out_permille=0, objective_settings=codec.encode(InstructTerms(stop_token=None)))
    assert bytes(tokenize_responses(unstopped, some, ByteTokenizer()).train) == b"abxycz\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"f:2: no JSON"),
        ('{"prompt": "a"}', "f:2: response must be a text that is not empty, not null"),
        ('{"prompt": "a", "response": ""}', 'f:2: response must be a text that is not empty, not ""'),
        (
            json.dumps({"prompt": "a" * 9, "response": "b" * 9}),
            "line 2: prompt and response are 19 tokens",
        ),
        ('{"prompt": "", "response": "b"}', "line 2: its prompt is empty"),
    ],
)
def test_a_line_that_cannot_be_learned_is_named(line: str, why: str) -> None:
    file = f'{{"prompt": "a", "response": "b"}}\n{line}\n'
    with pytest.raises(UserError, match=why):
        tokenize_responses(
            replace(OF["instruct"], held_out_permille=0), read_examples("f", io.BytesIO(file.encode())), ByteTokenizer()
        )


def test_a_file_without_a_response_is_refused() -> None:
    with pytest.raises(UserError, match="f: there is no response in it"):
        read_examples("f", io.BytesIO(b"\n"))


@pytest.mark.parametrize(
    ("objective", "other", "why"),
    [
        ("instruct", {"data": None}, "learns from a set of responses"),
        ("dpo", {"objective_settings": codec.encode(DpoTerms(beta=0.0))}, "beta must be positive"),
        (
            "dpo",
            {"objective_settings": codec.encode(DpoTerms(stop_token=256))},
            "stop_token 256 is no token of",
        ),
        ("instruct", {"objective_settings": codec.encode(DpoTerms())}, ""),
    ],
)
def test_a_job_that_cannot_be_is_told_why(objective: str, other: dict[str, object], why: str) -> None:
    assert why in (replace(OF[objective], **other).problem() or "")


def test_the_reference_of_a_job_that_starts_from_parameters_is_these(tmp_path: Path) -> None:
    values = np.arange(layout_of(OF["instruct"]).size, dtype=np.float32) / 1e6
    (tmp_path / "start").write_bytes(float32_bytes(values))
    spec = replace(OF["instruct"], initial_model=blob_digest(float32_bytes(values))).validated()
    assert spec.initial_model is not None
    opening = worker_protocol.OpenJobRequest(
        JOB, spec.encode(), write(tmp_path / "set", some_examples()), None, files={spec.initial_model: str(tmp_path / "start")}
    )
    engine = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30))
    engine.handle_request(opening)
    reference = engine.context.find_engine(JOB).first_parameters
    assert reference is not None and np.array_equal(reference, values)
    (tmp_path / "start").write_bytes(float32_bytes(values[::-1]))
    with pytest.raises(StorageError, match="does not hold the parameters"):
        WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30)).handle_request(opening)


@pytest.mark.parametrize("objective", ["reward", "dpo", "instruct"])
def test_without_a_number_of_rounds_a_job_goes_over_its_set_so_many_times(objective: str) -> None:
    spec, pairs = {**OF, "reward": SPEC}[objective], some_pairs()
    records = (
        [InstructionExample(pair.id, pair.prompt or "x", pair.first) for pair in pairs] if objective == "instruct" else pairs
    )
    members = {bytes([number]) * 32: SimpleNamespace(roles=(spec.resolved_objective.role,)) for number in range(2)}
    state = SimpleNamespace(members=SimpleNamespace(members=members))
    peer: Any = SimpleNamespace(state=state, blobs=SimpleNamespace(add_bytes=blob_digest))
    tokenize = tokenized_pairs.tokenize_pairs if objective == "reward" else tokenize_responses
    tokens: Any = tokenize(spec, records, ByteTokenizer())
    made, manifest = attach_set(peer, spec, records, tokens, None, epochs=3)
    a_round = 2 * spec.local_steps * spec.batch  # records, of two trainers
    assert made.rounds == math.ceil(3 * len(tokens.train_split) / a_round) and made.data == manifest.digest
    assert attach_set(peer, spec, records, tokens, 7, epochs=3)[0].rounds == 7
