"""Requests for samples: their JSON becomes options, and a fault names its value."""

from __future__ import annotations

from typing import Any

import pytest

from clients.gateway.sample_request import SEEDS, SampleRequest, parse_sample_request
from protocol.errors import UserError
from protocol.sampling import SamplingOptions

pytestmark = pytest.mark.pure
CONTEXT, VOCABULARY = 8, 256
PROMPT = {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}, {"tokens": [7]}]}


def parse(**given: Any) -> SampleRequest:
    return parse_sample_request({"prompt": PROMPT, "sampling_params": {"seed": 1}} | given, CONTEXT, VOCABULARY)


def with_options(**options: Any) -> SampleRequest:
    return parse(sampling_params={"seed": 1} | options)


def test_a_request_without_options_draws_one_sample_up_to_the_end_of_the_context() -> None:
    wanted = SamplingOptions(max_tokens=6, temperature=1.0, top_k=0, top_p=1.0, seed=1)
    assert parse() == SampleRequest(b"\5\0\6\0\7\0", 1, wanted, (), stops_at_end=True, scores_prompt=False, scored_last=None)


def test_options_of_the_sdk_become_options_of_the_worker() -> None:
    request = parse(
        num_samples=3,
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        sampling_params={"max_tokens": 4, "temperature": 0, "top_k": -1, "top_p": 0.5, "seed": -1, "stop": ["a", "b"]},
    )
    assert request.options == SamplingOptions(4, 0.0, 0, 0.5, ("a", "b"), SEEDS - 1)
    assert (request.samples, request.scores_prompt, request.scored_last, request.stops_at_end) == (3, True, 2, False)
    assert request.tokens_max == 3 + 3 * 4
    assert with_options(top_k=4, seed=2**70 + 5).options.seed == 5 and with_options(top_k=4).options.top_k == 4


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "stops_at_end"),
    [
        (None, (), (), True),
        ("x", ("x",), (), False),
        ([], (), (), False),
        (["x"], ("x",), (), False),
        ([3, 4], (), (3, 4), False),
    ],
)
def test_a_client_that_names_no_stop_gets_the_end_of_a_text(
    stop: Any, texts: tuple[str, ...], tokens: tuple[int, ...], stops_at_end: bool
) -> None:
    request = with_options(stop=stop)
    assert (request.options.stop, request.stop_tokens, request.stops_at_end) == (texts, tokens, stops_at_end)


def test_a_request_without_a_seed_gets_another_one_each_time() -> None:
    assert len({parse(sampling_params={}).options.seed for _ in range(4)}) == 4


def test_no_sample_is_longer_than_the_context() -> None:
    assert with_options(max_tokens=10**6).options.max_tokens == CONTEXT + 1 - 3
    full = {"chunks": [{"tokens": [1] * CONTEXT}]}
    assert parse(prompt=full).options.max_tokens == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"prompt": None}, "prompt must be an object with chunks"),
        ({"prompt": {"chunks": []}}, "the prompt has no tokens"),
        ({"prompt": {"chunks": ["x"]}}, "a chunk of type 'x'"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "a chunk of type 'image'"),
        ({"prompt": {"chunks": [{"tokens": "ab"}]}}, "must be a list of token ids"),
        ({"prompt": {"chunks": [{"tokens": [1, 256]}]}}, "contain 256, but the vocabulary has the tokens 0 to 255"),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, "contain True, but"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "contain -1, but"),
        ({"prompt": {"chunks": [{"tokens": [1.0]}]}}, "contain 1.0, but"),
        ({"prompt": {"chunks": [{"tokens": [1] * 9}]}}, "9 tokens, and the model's context is 8"),
        ({"num_samples": 0}, "num_samples must be a whole number from 1 to 64, not 0"),
        ({"num_samples": 65}, "not 65"),
        ({"num_samples": "2"}, "not '2'"),
        ({"sampling_params": 3}, "sampling_params must be an object, not 3"),
        ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs 2 is not supported"),
        ({"topk_sample_logprobs": 1}, "topk_sample_logprobs 1 is not supported"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k 1 is not supported"),
        ({"record_stability_info": True}, "record_stability_info True is not supported"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs {'data': [1]} is not supported"),
        ({"prompt_logprobs_last_n": -1}, "prompt_logprobs_last_n must be"),
    ],
)
def test_a_fault_names_its_value(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as fault:
        parse(**given)
    assert problem in str(fault.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 2147483648, not 0"),
        ({"temperature": None}, "temperature must be a number of at most 1e6, not None"),
        ({"temperature": float("nan")}, "not nan"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"temperature": -1.0}, "temperature -1 is negative"),
        ({"top_p": 0}, "top_p 0 is not a probability"),
        ({"top_k": -2}, "top_k must be a whole number from -1 to 65536, not -2"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"stop": ""}, "stop '' has 0 characters"),
        ({"stop": "\ud800"}, "has an unpaired surrogate"),
        ({"stop": ["x"] * 9}, "9 stop texts are too many"),
        ({"stop": [1] * 64}, "64 stops are too many: at most 8 texts, or 63 tokens, are allowed"),
        ({"stop": ["x", 1]}, "contain 'x', but"),
        ({"stop": 5}, "stop tokens must be a list"),
    ],
)
def test_a_fault_of_an_option_names_its_value(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as fault:
        with_options(**options)
    assert problem in str(fault.value)


MANY = 50_000


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"prompt": {"chunks": [{"tokens": ["x"] * 5}] * 2}}, "the prompt has 10 tokens, and the model's context is 8"),
        ({"sampling_params": {"stop": [-1] * MANY}}, "50000 stops are too many"),
        ({"sampling_params": {"stop": [""] * MANY}}, "50000 stops are too many"),
        ({"target_prompt_logprobs": {"data": [1] * MANY}}, "target_prompt_logprobs {'data': [1, 1, 1, 1, 1, 1, ...]} is not"),
        ({"num_samples": [1] * MANY}, "not [1, 1, 1, 1, 1, 1, ...]"),
        ({"sampling_params": [1] * MANY}, "must be an object, not [1, 1"),
        ({"sampling_params": {"seed": "1" * MANY}}, "must be a whole number, not '111111111111...1111111111111'"),
        ({"sampling_params": {"temperature": {"a": [0] * MANY}}}, "must be a number of at most 1e6, not {'a': [0, 0"),
        ({"prompt": {"chunks": [{"type": "x" * MANY}]}}, "a chunk of type 'xxxx"),
        ({"prompt": {"chunks": [{"tokens": {"a": [0] * MANY}}]}}, "must be a list of token ids, not {'a'"),
        ({"prompt": {"chunks": [{"tokens": [[0] * MANY]}]}}, "contain [0, 0, 0, 0, 0, 0, ...], but"),
    ],
)
def test_numbers_of_values_are_checked_before_values_and_texts_are_short(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as fault:
        parse(**given)
    assert problem in str(fault.value) and len(str(fault.value)) < 200
