"""Rollouts of one trainer in one round: prompts, responses, their encoding and their statistics. numpy only.

Token t of response i is the argmax of logit_v + g_v over all tokens v. This samples softmax(logits) with the Gumbel noise
g_v = −ln(−ln u_v) (Gumbel 1954; Maddison et al. 2014). No trainer can choose u, a hash of (job, round, trainer, i, t).

The blob has one canonical form. All numbers are unsigned, 16 bits, little-endian:

    length of response 0, 1, … | tokens of response 0, 1, …

A response ends with its first stop token, or at the maximum length.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError
from rlhf.data.tokenized_records import TokenizedPairs
from rlhf.objectives.ppo import MILLIONTHS, TOKEN_BYTES, RolloutLimits, in_millionths
from training import random_stream
from training.data.token_sequences import TokenArray

TokenIds = npt.NDArray[np.int64]
NOISE_BYTES: Final = 4  # bytes of the integer x in u = (x + ½) / 2³²; ½ keeps both logarithms of the noise finite
_PLACE = struct.Struct(">III")  # numbers of the round, of the response and of the token


class RolloutId(NamedTuple):
    """Identity of a trainer's rollouts in a round: job, round and trainer."""

    job: bytes
    round: int
    trainer: bytes


def gumbel_noise(place: RolloutId, tokens: Iterable[tuple[int, int]], vocabulary: int) -> npt.NDArray[np.float32]:
    """Return the Gumbel noise (tokens, vocabulary) of tokens.

    A token is given as (number of its response, position in the response).
    """
    drawn = b"".join(noise_bytes(place, response, token, NOISE_BYTES * vocabulary) for response, token in tokens)
    noise = np.frombuffer(drawn, dtype="<u4").reshape(-1, vocabulary) + 0.5
    noise /= 2.0**32
    for _ in range(2):  # computed in place, since allocations would take most of the time
        np.negative(np.log(noise, out=noise), out=noise)
    return noise.astype(np.float32)


def noise_bytes(place: RolloutId, response: int, token: int, length: int) -> bytes:
    """Return the first `length` bytes of the hash from which a token's noise is computed."""
    whose = b"folkmoot/rollout/1" + place.job + place.trainer + _PLACE.pack(place.round, response, token)
    return hashlib.shake_128(whose).digest(length)


def prompt_numbers(place: RolloutId, draw: int, responses: int, prompts: int) -> TokenIds:
    """Return for each response the number of its prompt, in 0 .. prompts − 1, in the draw number `draw`."""
    drawn = np.frombuffer(random_stream.random_bytes(8 * responses, "rollout-prompts", *place, draw), dtype="<u8")
    return (drawn % np.uint64(prompts)).astype(np.int64)


def epoch_order(place: RolloutId, responses: int, epoch: int) -> TokenIds:
    """Return the order in which the inner steps of an epoch use the responses."""
    drawn = np.frombuffer(random_stream.random_bytes(8 * responses, "rollout-order", *place, epoch), dtype="<u8")
    return np.argsort(drawn, kind="stable")


def encode_rollouts(responses: Sequence[Sequence[int]]) -> bytes:
    """Return the blob with the encoded responses."""
    lengths, tokens = [len(response) for response in responses], [token for response in responses for token in response]
    return np.array([*lengths, *tokens], dtype="<u2").tobytes()


def decode_rollouts(blob: bytes, bounds: RolloutLimits) -> list[TokenIds]:
    """Return the responses in a blob.

    Raises `RemoteProtocolError` unless the blob is canonical and within the limits of the job.
    """
    if len(blob) % TOKEN_BYTES or len(blob) > bounds.bytes_max:
        raise _no_rollouts(f"{len(blob)} bytes")
    numbers = np.frombuffer(blob, dtype="<u2").astype(np.int64)
    lengths, tokens = numbers[: bounds.responses], numbers[bounds.responses :]
    if len(lengths) != bounds.responses or lengths.min() < 1 or lengths.max() > bounds.tokens_max:
        raise _no_rollouts(f"{bounds.responses} responses of 1 to {bounds.tokens_max} tokens are expected")
    if lengths.sum() != len(tokens) or tokens.max() >= bounds.vocabulary:
        raise _no_rollouts(f"{len(tokens)} tokens, expected are {lengths.sum()} below {bounds.vocabulary}")
    responses = np.split(tokens, np.cumsum(lengths)[:-1])
    for response in responses:
        stops = np.flatnonzero(response == bounds.stop) if bounds.stop is not None else np.empty(0, dtype=np.int64)
        ends = int(stops[0]) + 1 if len(stops) else bounds.tokens_max
        if len(response) != ends:
            raise _no_rollouts(f"a response of {len(response)} tokens ends after {ends}")
    return responses


def is_finished(response: TokenIds, stop: int | None) -> bool:
    """Return True if a response ends with the stop token, or if the job has no stop token."""
    return stop is None or int(response[-1]) == stop


def read_rollouts(path: Path, bounds: RolloutLimits) -> list[TokenIds]:
    """Return the responses in a file, see `decode_rollouts`. An oversized file is not read into memory."""
    with path.open("rb") as file:
        return decode_rollouts(file.read(bounds.bytes_max + 1), bounds)


def _no_rollouts(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("bad-rollouts", detail)


# Prompts ----------------------------------------------------------------------------------------------------------------

DRAWS_MAX: Final = 16  # draws of a prompt per response: all draws fail only if nearly every prompt is blocked
NO_PROMPT: Final = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TextWindows:
    """Prompts that are windows of a text. Window i has `length` tokens from token i on."""

    text: TokenArray
    length: int

    def __len__(self) -> int:
        return len(self.text) - self.length + 1

    def prompt_at(self, number: int) -> TokenArray:
        return self.text[number : number + self.length]


@dataclass(frozen=True, slots=True)
class PreferenceSetPrompts:
    """Distinct prompts of the training pairs of a preference set.

    `draw_prompts` uses the last `length` tokens of longer prompts.
    """

    pairs: TokenizedPairs
    length: int

    def __len__(self) -> int:
        return len(self.pairs.prompts) - 1

    def prompt_at(self, number: int) -> TokenArray:
        start, end = self.pairs.prompts[number : number + 2]
        return self.pairs.train[start:end]


def draw_prompts(
    place: RolloutId,
    count: int,
    source: TextWindows | PreferenceSetPrompts,
    blocks: Callable[[TokenIds], bool] = lambda tokens: False,
) -> list[TokenIds]:
    """Draw the prompts of `count` responses by a hash, which everybody can verify, and return the prompts.

    A prompt is drawn again if `blocks` is true for the prompt, whole or truncated. After `DRAWS_MAX` draws the prompt is token 0.
    """
    found: dict[int, TokenIds] = {}
    for draw in range(DRAWS_MAX if len(source) else 0):
        numbers = prompt_numbers(place, draw, count, len(source))
        for response in range(count):
            if response not in found:
                whole = source.prompt_at(int(numbers[response])).astype(np.int64)
                taken = whole[-source.length :]
                if not blocks(taken) and (len(taken) == len(whole) or not blocks(whole)):
                    found[response] = taken
        if len(found) == count:
            break
    return [found.get(response, NO_PROMPT) for response in range(count)]


# Statistics -------------------------------------------------------------------------------------------------------------

# added to the variance of scores: scores that differ by 1e-4 then give the same correlation within 0.01
SCORE_VARIANCE: Final = 1e-4
Floats = npt.NDArray[np.float64]


def distinct_2(responses: Sequence[npt.NDArray[np.int64]], vocabulary: int) -> int:
    """Return distinct-2 in millionths, rounded down, or `MILLIONTHS` if no response has two tokens."""
    pairs = np.concatenate([response[:-1] * vocabulary + response[1:] for response in responses])
    return MILLIONTHS * len(np.unique(pairs)) // len(pairs) if len(pairs) else MILLIONTHS


def length_score_correlation(lengths: Floats, scores: Floats) -> int:
    """Return Pearson's correlation of length and score in millionths, or 0 if all lengths are equal."""
    lengths, scores = lengths - lengths.mean(), scores - scores.mean()
    spread = np.sqrt(np.square(lengths).mean() * (np.square(scores).mean() + SCORE_VARIANCE))
    found = in_millionths(float((lengths * scores).mean() / spread)) if spread else 0
    return max(-MILLIONTHS, min(MILLIONTHS, found))  # clamped, because `in_millionths` returns FIGURE_MAX for NaN
