"""Rollouts as bytes, and the sampling noise, which no trainer can choose."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from protocol.errors import RemoteProtocolError, UserError
from rlhf.api.supervised_jobs import find_newline_token
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import VALUE_HEAD, PpoSettings, RolloutLimits
from rlhf.objectives.rollouts import (
    RolloutId,
    TextWindows,
    decode_rollouts,
    encode_rollouts,
    epoch_order,
    gumbel_noise,
    prompt_numbers,
)
from rlhf.pytorch import rollout_passes
from rlhf.pytorch.ppo import EPSILON
from tests.rlhf.test_ppo import SPEC
from training.data.default_text import default_text
from training.data.tokenizer import BpeTokenizer, ByteTokenizer, train_bpe
from training.engines.pytorch.model import GPT

PLACE = RolloutId(bytes([1]) * 32, 3, bytes([2]) * 32)
BOUNDS = RolloutLimits(responses=3, tokens_max=4, vocabulary=256, stop=10)
SOUND = [[97, 98, 99, 100], [97, 10], [10]]


def blob(lengths: list[int], tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(lengths) + len(tokens)}H", *lengths, *tokens)


def test_a_blob_is_what_it_was_made_of() -> None:
    made = encode_rollouts(SOUND)
    assert made == blob([4, 2, 1], [97, 98, 99, 100, 97, 10, 10])
    assert [response.tolist() for response in decode_rollouts(made, BOUNDS)] == SOUND
    assert len(made) <= BOUNDS.bytes_max


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        encode_rollouts(SOUND)[:-1],
        encode_rollouts(SOUND)[:-2],
        encode_rollouts(SOUND) + b"\0\0",
        encode_rollouts(SOUND[:2]),
        blob([4, 2, 0], [97, 98, 99, 100, 97, 10]),
        blob([5, 2, 1], [97, 98, 99, 100, 101, 97, 10, 10]),
        blob([4, 2, 1], [97, 98, 99, 256, 97, 10, 10]),
        blob([4, 2, 1], [97, 98, 99, 100, 97, 98, 10]),  # it ends too early
        blob([4, 2, 1], [97, 10, 99, 100, 97, 10, 10]),  # it continues after the stop token
        encode_rollouts([[97] * 4] * 200),
    ],
)
def test_other_bytes_are_no_rollouts(wrong: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_rollouts(wrong, BOUNDS)


def test_whatever_the_bytes_are_they_are_the_one_blob_of_their_responses_or_none() -> None:
    random, sound, read = Random(0), encode_rollouts(SOUND), 0
    for _ in range(3_000):
        changed = bytearray(sound)
        for _ in range(random.randrange(1, 4)):
            changed[random.randrange(len(changed))] = random.choice((0, 1, 2, 3, 4, 10, 97, 255))
        try:
            responses = decode_rollouts(bytes(changed), BOUNDS)
        except RemoteProtocolError:
            continue
        read += 1
        assert encode_rollouts([response.tolist() for response in responses]) == changed
    assert read > 100, "some are responses that the job may have"


def test_without_a_stop_token_every_response_is_as_long_as_the_job_says() -> None:
    bounds = RolloutLimits(responses=1, tokens_max=2, vocabulary=6, stop=None)
    assert decode_rollouts(encode_rollouts([[5, 0]]), bounds)[0].tolist() == [5, 0]
    with pytest.raises(RemoteProtocolError):
        decode_rollouts(encode_rollouts([[5]]), bounds)


def test_the_noise_is_known_by_its_place_alone() -> None:
    tokens = [(1, token) for token in range(4)]
    whole = gumbel_noise(PLACE, tokens, 6)
    assert (whole[2:] == gumbel_noise(PLACE, tokens[2:], 6)).all()
    others = [
        RolloutId(bytes(32), 3, bytes([2]) * 32),
        RolloutId(bytes([1]) * 32, 4, bytes([2]) * 32),
        RolloutId(bytes([1]) * 32, 3, bytes(32)),
    ]
    assert all((gumbel_noise(other, tokens, 6) != whole).all() for other in others)
    assert (gumbel_noise(PLACE, [(2, 0)], 6) != whole[0]).all() and (whole[0] != whole[1]).all()
    assert gumbel_noise(PLACE, [(0, 0)], 1)[0, 0] == pytest.approx(0.4989004, abs=1e-6), (
        "auditors of another release find the same"
    )


def test_the_largest_sum_is_a_sample_of_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], dtype=np.float32)
    noise = gumbel_noise(PLACE, itertools.product(range(200), range(100)), 4)
    drawn = np.bincount((logits + noise).argmax(axis=1), minlength=4) / len(noise)
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(drawn - expected).max() < 0.012, "four deviations of 20,000 draws"


def test_each_epoch_takes_each_response_once_in_an_order_of_its_own() -> None:
    first, second = epoch_order(PLACE, 64, 0), epoch_order(PLACE, 64, 1)
    assert sorted(first) == sorted(second) == list(range(64))
    assert (first != second).any()


def test_prompts_are_windows_of_the_whole_text() -> None:
    assert set(prompt_numbers(PLACE, 0, 10_000, len(TextWindows(np.arange(20, dtype=np.uint8), 16)))) == {0, 1, 2, 3, 4}


def test_a_response_ends_with_the_newline_of_its_tokenizer() -> None:
    bpe = BpeTokenizer(train_bpe(iter([default_text()[:20_000]]), 300))
    assert bpe.decode([find_newline_token("base", bpe)]) == b"\n"
    assert find_newline_token("base", ByteTokenizer()) == PpoSettings(reward="rule:vowels").stop_token


def test_where_several_tokens_have_a_newline_a_person_says_which_one_ends_a_response() -> None:
    bpe = BpeTokenizer(train_bpe(iter([b"    \n\n   \n" * 50]), 259))
    with pytest.raises(UserError, match=r"its tokenizer has 2 tokens with a newline.*--set stop_token=TOKEN \(\d+ is a newline"):
        find_newline_token("base", bpe)


FEW = replace(SPEC, model=replace(SPEC.model, vocabulary=8, layers=2))  # so that many responses end early
MANY = RolloutLimits(responses=rollout_passes.SAMPLED_AT_ONCE + 6, tokens_max=9, vocabulary=8, stop=0)


def test_responses_of_many_lengths_are_what_each_would_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_passes, "NUMBERS_AT_ONCE", 600)  # a few at a time, some with their noise in parts
    model, random = GPT(FEW), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.parameters.normal_(0, 0.3, generator=random)
    noise = partial(rollouts.gumbel_noise, RolloutId(bytes(32), 0, bytes(32)), vocabulary=MANY.vocabulary)
    prompts = [torch.randint(0, 8, (2 + row % 3,), generator=random).numpy() for row in range(MANY.responses)]
    responses = rollout_passes.sample_responses(model, prompts, noise, MANY, lambda: None)
    lengths, begins = [len(response) for response in responses], [len(prompt) for prompt in prompts]
    assert set(lengths) == set(range(1, MANY.tokens_max + 1)), "all there are"
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]
    padded_BT = torch.stack([F.pad(torch.tensor(response), (0, 9 - len(response))) for response in responses])
    x_BS = torch.stack([F.pad(row, (0, 13 - len(row))) for row in rows])[:, :-1]
    passed = rollout_passes.forward_pass(model, x_BS, padded_BT, lengths, VALUE_HEAD, lambda: None, noise, torch.tensor(begins))
    assert passed.excess_BT is not None
    for row, response in enumerate(responses):
        length = lengths[row]
        with torch.no_grad():
            features_TC = model.features(rows[row][None, :-1])[0, -length:]
        logits_TV = model.logits(features_TC)
        sums_TV = logits_TV + torch.from_numpy(noise((row, t) for t in range(length)))
        excess_T = sums_TV.amax(1) - sums_TV[range(length), response]
        assert excess_T.max() <= EPSILON, "each token is the one that its noise chooses"
        assert torch.allclose(passed.excess_BT[row, :length], excess_T, atol=1e-4)
        assert torch.allclose(passed.logp_BT[row, :length], logits_TV.log_softmax(1)[range(length), response], atol=1e-5)
        assert torch.allclose(passed.value_BT[row, :length], features_TC @ model.heads[VALUE_HEAD], atol=1e-5)
