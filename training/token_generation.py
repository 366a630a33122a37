"""Samples of a prompt by token ids in short slices, and the checks of requests that contain token ids.

A slice is an ordinary request with a reply, as for texts (`training.text_generation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.sampling import EndReason
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec
from training.text_generation import SLICE_SECONDS, UnfinishedGenerations
from training.transformer import BYTE_VOCABULARIES
from training.worker_protocol import (
    SLICE_TOKENS_MAX,
    TOKEN_BYTES,
    GenerateTokensReply,
    GenerateTokensRequest,
    TokenSample,
)

TOKEN_TYPE, LOGPROB_TYPE = np.dtype("<u2"), np.dtype("<f4")  # types of token ids and log-probabilities in requests and replies


@dataclass(frozen=True, slots=True)
class SampledToken:
    sample: int  # number of the sample that the token continues
    token: int
    logprob: float  # log-probability of the token under the model, in nats, before temperature, top-k and top-p
    end: EndReason | None  # None: the sample goes on after the token


class TokenGenerations(UnfinishedGenerations["TokenGeneration"]):
    def next_slice(self, request: GenerateTokensRequest, begin: Callable[[], TokenGeneration]) -> GenerateTokensReply:
        """Return the next slice of the requested samples."""
        with self.resume_generation(request.number, request.told_tokens, begin) as samples:
            return GenerateTokensReply(samples.make_slice(time.monotonic() + SLICE_SECONDS))


class TokenGeneration:
    """The state of the unfinished samples of one request."""

    def __init__(self, drawn: Iterator[Sequence[SampledToken]], samples: int, told: int) -> None:
        """`drawn` are the tokens of each pass over the model. The first `told` tokens were returned before."""
        self.told = told
        self._drawn, self._known = drawn, told
        self._ends: list[EndReason | None] = [None] * samples

    @property
    def is_over(self) -> bool:
        return None not in self._ends

    def make_slice(self, until: float) -> tuple[TokenSample, ...]:
        """Return the next tokens of each sample: those of one pass over the model, and of more passes until a limit.

        The limits are the end of all samples, `until` on the clock `time.monotonic`, and `SLICE_TOKENS_MAX` tokens.
        """
        parts: list[list[SampledToken]] = [[] for _ in self._ends]
        first = self.told
        while True:
            for token in next(self._drawn):
                self._ends[token.sample] = token.end
                if self._known:
                    self._known -= 1
                else:
                    parts[token.sample].append(token)
                    self.told += 1
            if self.is_over or time.monotonic() >= until or self.told - first >= SLICE_TOKENS_MAX:
                break
        return tuple(
            TokenSample(
                np.array([token.token for token in part], TOKEN_TYPE).tobytes(),
                np.array([token.logprob for token in part], LOGPROB_TYPE).tobytes(),
                end,
            )
            for part, end in zip(parts, self._ends, strict=True)
        )


def parse_tokens(data: bytes, spec: JobSpec, what: str, tokens_max: int) -> npt.NDArray[np.int64]:
    """Return the token ids of a request. Raises `UserError` if there are too many, or one is not in the job's vocabulary."""
    if len(data) % TOKEN_BYTES:
        raise UserError(f"{what} has {len(data)} bytes, and a token has {TOKEN_BYTES}")
    tokens = np.frombuffer(data, TOKEN_TYPE).astype(np.int64)
    if len(tokens) > tokens_max:
        raise UserError(
            f"{what} has {len(tokens)} tokens, at most {tokens_max} are allowed: "
            f"the model of {spec.name!r} has a context of {spec.model.context}"
        )
    if (largest := int(tokens.max())) >= spec.model.vocabulary:
        raise UserError(f"{what} contains token {largest}, but the model of {spec.name!r} has {spec.model.vocabulary} tokens")
    return tokens


def stop_condition(
    spec: JobSpec, tokenizer: Tokenizer, texts: Sequence[str], sequences: Sequence[Sequence[int]]
) -> Callable[[Sequence[int]], bool]:
    """Return a function of the tokens of a sample. It is true if the last token completes a stop text or a stop sequence.

    Raises `UserError` for stop texts if the job's tokens have no known text.
    """
    if texts and spec.tokenizer is None and spec.model.vocabulary not in BYTE_VOCABULARIES:
        raise UserError(f"stop {texts[0]!r}: the tokens of {spec.name!r} have no text, so give token sequences instead")
    tails, stops = [list(sequence) for sequence in sequences], [text.encode() for text in texts]
    longest = max(map(len, stops), default=0)

    def ends(made: Sequence[int]) -> bool:
        if any(list(made[-len(tail) :]) == tail for tail in tails):
            return True
        # Every token except special ones has at least one byte, so a bounded number of tokens is checked.
        text = tokenizer.decode(made[-longest:]) if stops else b""
        return any(stop in text for stop in stops)

    return ends
