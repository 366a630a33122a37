"""Rollouts as bytes, and the noise that nobody chooses."""

from __future__ import annotations

import itertools
import struct
from random import Random

import numpy as np
import pytest

from protocol.errors import RemoteProtocolError, UserError
from rlhf.api.supervised_jobs import find_newline_token
from rlhf.objectives.ppo import PpoSettings, RolloutLimits
from rlhf.objectives.rollouts import (
    RolloutId,
    TextWindows,
    decode_rollouts,
    encode_rollouts,
    epoch_order,
    gumbel_noise,
    prompt_numbers,
)
from training.data.default_text import default_text
from training.data.tokenizer import BpeTokenizer, ByteTokenizer, train_bpe

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
        blob([4, 2, 1], [97, 98, 99, 100, 97, 98, 10]),  # it ends before it has to
        blob([4, 2, 1], [97, 10, 99, 100, 97, 10, 10]),  # and it goes on behind the stop token
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
    starts = prompt_numbers(PLACE, 0, 10_000, len(TextWindows(np.arange(20, dtype=np.uint8), 16)))
    assert set(starts) == {0, 1, 2, 3, 4}


def test_a_response_ends_with_the_newline_of_its_tokenizer() -> None:
    bpe = BpeTokenizer(train_bpe(iter([default_text()[:20_000]]), 300))
    assert bpe.decode([find_newline_token("base", bpe)]) == b"\n"
    assert find_newline_token("base", ByteTokenizer()) == PpoSettings(reward="rule:vowels").stop_token


def test_where_several_tokens_have_a_newline_a_person_says_which_one_ends_a_response() -> None:
    bpe = BpeTokenizer(train_bpe(iter([b"    \n\n   \n" * 50]), 259))
    with pytest.raises(UserError, match=r"its tokenizer has 2 tokens with a newline.*--set stop_token=TOKEN \(\d+ is a newline"):
        find_newline_token("base", bpe)
