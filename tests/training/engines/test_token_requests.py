"""Requests for samples and scores by token ids at an engine, without a worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import FolkmootError, UserError
from protocol.sampling import EndReason, SamplingOptions
from tests.training.engines.test_engine import JOB, SPEC, TRAINER, engine_of
from training.engines.request_handlers import WorkerContext, generate_tokens, ping, score_tokens
from training.objectives.objective import Objective
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import initial_parameters
from training.worker_protocol import (
    GenerateTokensReply,
    GenerateTokensRequest,
    PingRequest,
    ScoreTokensRequest,
    TokenSample,
)
from training.worker_protocol import generate_tokens as whole_samples

HOW = SamplingOptions(max_tokens=12, temperature=1.0, seed=2)
PROMPT = b"The end"


def encoded(tokens: bytes | list[int]) -> bytes:
    return np.array(list(tokens), "<u2").tobytes()


def decoded(sample: TokenSample) -> list[int]:
    return np.frombuffer(sample.tokens, "<u2").tolist()


class Worker:
    """Handlers with one open job, whose model is on disk."""

    def __init__(self, text: Path, folder: Path) -> None:
        none: Any = None
        self.context, self.engine = WorkerContext(none, lambda: None, 4), engine_of(text)
        self.context.add_engine(JOB, self.engine)
        ReplicatedModel.initial(JOB, SPEC).save(folder / "model")
        self.request = GenerateTokensRequest(JOB, str(folder / "model"), encoded(PROMPT), HOW, samples=3)
        self.between: Callable[[], object] = lambda: None  # is called before each slice

    async def ask(self, request: GenerateTokensRequest) -> GenerateTokensReply:
        self.between()
        return generate_tokens(self.context, request)

    def score(self, tokens: list[int]) -> list[float]:
        request = ScoreTokensRequest(JOB, self.request.model_directory, encoded(tokens))
        return np.frombuffer(score_tokens(self.context, request).logprobs, "<f4").tolist()


@pytest.fixture
def worker(text: Path, tmp_path: Path) -> Worker:
    return Worker(text, tmp_path)


@pytest.fixture
def one_pass_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.token_generation.SLICE_SECONDS", -1.0)


async def test_a_sample_has_the_log_probabilities_that_a_score_of_it_has(worker: Worker) -> None:
    found = await whole_samples(worker.ask, worker.request)
    assert len({sample.tokens for sample in found}) == 3
    for sample in found:
        made = decoded(sample)
        assert len(made) == 12 and sample.end is EndReason.LENGTH
        scores = worker.score([*PROMPT, *made])
        assert len(scores) == len(PROMPT) + 11
        assert np.frombuffer(sample.logprobs, "<f4") == pytest.approx(scores[len(PROMPT) - 1 :], abs=1e-5)
    assert np.mean(np.exp(np.frombuffer(found[0].logprobs, "<f4"))) < 0.5, "the fresh model is sure of no token"


@pytest.mark.usefixtures("one_pass_a_slice")
async def test_what_the_worker_computes_between_slices_changes_nothing_of_samples(worker: Worker) -> None:
    alone = await whole_samples(worker.ask, worker.request)
    other = initial_parameters(replace(SPEC, seed=9))
    worker.between = lambda: worker.engine.local_steps(other, JOB, 0, TRAINER)
    assert await whole_samples(worker.ask, worker.request) == alone


@pytest.mark.usefixtures("one_pass_a_slice")
async def test_two_requests_can_take_turns(worker: Worker) -> None:
    alone = [await whole_samples(worker.ask, replace(worker.request, sampling=replace(HOW, seed=seed))) for seed in (1, 2)]
    requests = [replace(worker.request, sampling=replace(HOW, seed=seed), number=1_000 + seed) for seed in (1, 2)]
    found: list[tuple[list[bytes], ...]] = [([], [], []), ([], [], [])]
    for told in range(0, 36, 3):
        for request, parts in zip(requests, found, strict=True):
            reply = generate_tokens(worker.context, replace(request, told_tokens=told))
            for part, sample in zip(parts, reply.samples, strict=True):
                part.append(sample.tokens)
    assert [[b"".join(part) for part in parts] for parts in found] == [[each.tokens for each in whole] for whole in alone]
    assert alone[0] != alone[1]


async def test_stops_end_samples(worker: Worker) -> None:
    one, other, _ = [decoded(sample) for sample in await whole_samples(worker.ask, worker.request)]
    stops = replace(worker.request, stop_sequences=(encoded(one[3:5]), encoded([other[2]])))
    found = await whole_samples(worker.ask, stops)
    assert decoded(found[0]) == one[:5] and decoded(found[1]) == other[:3]
    assert [sample.end for sample in found[:2]] == [EndReason.STOP] * 2
    letter = next(token for token in one if token < 128)
    text = replace(worker.request, sampling=replace(HOW, stop=(chr(letter),)))
    assert decoded((await whole_samples(worker.ask, text))[0]) == one[: one.index(letter) + 1]


@pytest.mark.usefixtures("one_pass_a_slice")
def test_a_ping_drops_unfinished_samples(worker: Worker) -> None:
    generate_tokens(worker.context, worker.request)
    assert worker.context.samples._open
    ping(worker.context, PingRequest())
    assert not worker.context.samples._open


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt": encoded([1] * 33)}, "the prompt has 33 tokens, at most 32 are allowed: .* context of 32"),
        ({"prompt": encoded([1, 300])}, "the prompt contains token 300, but the model of 't' has 256 tokens"),
        ({"stop_sequences": (encoded([256]),)}, "a stop sequence contains token 256"),
        ({"sampling": SamplingOptions(beams=2, temperature=0.0)}, "beams 2: samples are drawn"),
        ({"sampling": SamplingOptions(top_p=0.0)}, "top_p 0 is not a probability"),
        ({"sampling": SamplingOptions(temperature=float("nan"))}, "temperature nan"),
        ({"job": b"x" * 32}, "job 78787878 is not open"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_value(worker: Worker, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FolkmootError, match=told):
        generate_tokens(worker.context, replace(worker.request, **changes))


def test_a_sequence_has_one_token_more_than_the_context_at_most(worker: Worker) -> None:
    assert len(worker.score([1] * 33)) == 32 and worker.score([1]) == []
    with pytest.raises(UserError, match=r"the sequence has 34 tokens, at most 33 are allowed: .* context of 32"):
        worker.score([1] * 34)


def test_a_job_that_withholds_texts_gives_no_samples(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "moderates_output", lambda self, job: True)
    with pytest.raises(UserError, match="'t' gives no samples by token ids"):
        generate_tokens(worker.context, worker.request)
