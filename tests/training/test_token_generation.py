"""Slices of samples, stops, and the checks of token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from protocol.errors import UserError
from protocol.sampling import EndReason, SamplingOptions
from training import worker_protocol
from training.data.tokenizer import ByteTokenizer
from training.job_spec import JobSpec
from training.token_generation import SampledToken, TokenGeneration, TokenGenerations, parse_tokens, stop_condition
from training.transformer import ModelSpec
from training.worker_protocol import GenerateTokensReply, GenerateTokensRequest, TokenSample

SPEC = JobSpec(name="t", data=bytes(32), model=ModelSpec(context=8, width=16, layers=1, heads=2, kv_heads=1, hidden=24))
PASSES = 5


def encoded(*tokens: int) -> bytes:
    return np.array(tokens, "<u2").tobytes()


def drawn() -> Iterator[Sequence[SampledToken]]:
    """Yield two samples with 2 and 4 tokens, after a pass over a part of the prompt."""
    yield []
    for number in range(1, PASSES):
        ends = (EndReason.STOP if number == 2 else None, EndReason.LENGTH if number == 4 else None)
        yield [SampledToken(sample, 10 * sample + number, -number, ends[sample]) for sample in (0, 1) if number <= 2 or sample]


WHOLE = (
    TokenSample(encoded(1, 2), np.array([-1, -2], "<f4").tobytes(), EndReason.STOP),
    TokenSample(encoded(11, 12, 13, 14), np.array([-1, -2, -3, -4], "<f4").tobytes(), EndReason.LENGTH),
)
REQUEST = GenerateTokensRequest(bytes(32), "/model", encoded(1), SamplingOptions(), samples=2)


class Worker:
    """A worker that can lose its unfinished samples before a slice."""

    def __init__(self, lost_before: int | None = None) -> None:
        self.samples, self.lost_before, self.told, self.begun = TokenGenerations(), lost_before, list[int](), 0

    async def ask(self, request: GenerateTokensRequest) -> GenerateTokensReply:
        if len(self.told) == self.lost_before:
            self.samples = TokenGenerations()
        self.told.append(request.told_tokens)

        def begin() -> TokenGeneration:
            self.begun += 1
            return TokenGeneration(drawn(), 2, request.told_tokens)

        return self.samples.next_slice(request, begin)


@pytest.fixture
def one_pass_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr("training.token_generation.SLICE_SECONDS", 0.0)


@pytest.mark.usefixtures("one_pass_a_slice")
async def test_a_slice_has_the_tokens_of_a_pass_and_all_slices_together_the_samples() -> None:
    worker = Worker()
    assert await worker_protocol.generate_tokens(worker.ask, REQUEST) == WHOLE
    assert worker.told == [0, 0, 2, 4, 5] and worker.begun == 1
    assert not worker.samples._open


@pytest.mark.usefixtures("one_pass_a_slice")
@pytest.mark.parametrize("lost_before", range(1, PASSES))
async def test_samples_that_are_not_kept_any_more_begin_anew_and_come_to_the_same(lost_before: int) -> None:
    worker = Worker(lost_before)
    assert await worker_protocol.generate_tokens(worker.ask, REQUEST) == WHOLE and worker.begun == 2


@pytest.mark.usefixtures("one_pass_a_slice")
async def test_a_slice_that_is_requested_again_is_the_same() -> None:
    worker = Worker()

    async def slice_after(told: int) -> GenerateTokensReply:
        while True:  # Passes over the prompt, and over tokens that were returned before, give no tokens.
            reply = await worker.ask(replace(REQUEST, told_tokens=told))
            if any(sample.tokens for sample in reply.samples):
                return reply

    await slice_after(0)
    assert await slice_after(2) == await slice_after(2) and worker.begun == 2


async def test_a_slice_ends_with_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.token_generation.SLICE_SECONDS", 1e9)
    worker = Worker()
    assert await worker_protocol.generate_tokens(worker.ask, REQUEST) == WHOLE and worker.told == [0]
    monkeypatch.setattr("training.token_generation.SLICE_TOKENS_MAX", 3)
    worker = Worker()
    assert await worker_protocol.generate_tokens(worker.ask, REQUEST) == WHOLE and worker.told == [0, 4]


# Stops --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "sequences", "made", "is_over"),
    [
        ((), (), [1, 2, 3], False),
        ((), ([3],), [1, 2, 3], True),
        ((), ([3],), [3, 2], False),
        ((), ([2, 3], [9]), [1, 2, 3], True),
        ((), ([2, 3], [9]), [2, 1, 3], False),
        ((), ([0, 1, 2, 3],), [1, 2, 3], False),
        (("b",), (), [*b"ab"], True),
        (("b\n",), (), [*b"ab"], False),
        (("é",), (), [*"é".encode()[:1]], False),
        (("é",), (), [*b"aa", *"é".encode()], True),
        (("b",), ([7],), [7], True),
    ],
)
def test_a_sample_ends_with_the_token_that_completes_a_stop(
    texts: tuple[str, ...], sequences: tuple[list[int], ...], made: list[int], is_over: bool
) -> None:
    assert stop_condition(SPEC, ByteTokenizer(), texts, sequences)(made) is is_over


def test_stop_texts_need_tokens_with_text() -> None:
    spec = replace(SPEC, model=replace(SPEC.model, vocabulary=4_096))
    assert stop_condition(spec, ByteTokenizer(), (), ([4_000],))([4_000])
    with pytest.raises(UserError, match=r"stop 'end': the tokens of 't' have no text"):
        stop_condition(spec, ByteTokenizer(), ("end",), ())


# Checks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\1\0\2", "the prompt has 3 bytes, and a token has 2"),
        (encoded(*range(9)), "the prompt has 9 tokens, at most 8 are allowed: the model of 't' has a context of 8"),
        (encoded(1, 256), "the prompt contains token 256, but the model of 't' has 256 tokens"),
    ],
)
def test_tokens_that_the_model_cannot_read_are_named(data: bytes, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_tokens(data, SPEC, "the prompt", SPEC.model.context)


def test_tokens_are_sixteen_bit_numbers() -> None:
    assert parse_tokens(encoded(1, 255), SPEC, "the prompt", 8).tolist() == [1, 255]
