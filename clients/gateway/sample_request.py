"""A client's request for samples: its JSON, checked and converted.

Its values may be large, so their numbers are compared with the limits before each of them is checked, and texts of errors show
their beginnings alone.
"""

from __future__ import annotations

import reprlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from clients.records import TOKEN_BYTES
from protocol.errors import UserError
from protocol.sampling import (
    SAMPLES_MAX,
    STOP_CHARACTERS_MAX,
    STOP_SEQUENCES_MAX,
    STOPS_MAX,
    TOKENS_MAX,
    TOP_K_MAX,
    SamplingOptions,
)
from web.calls import TEXT, Json

SEEDS: Final = 1 << 53  # number of different seeds: a client may give any integer, which is reduced
# Results that a client may request and that are not computed, with the value that requests nothing.
NOT_COMPUTED: Final[Json] = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
    "target_prompt_logprobs": None,
}


@dataclass(frozen=True, slots=True)
class SampleRequest:
    prompt: bytes  # token ids of two bytes, little-endian
    samples: int
    options: SamplingOptions
    stop_tokens: tuple[int, ...]
    stops_at_end: bool  # True if the token that ends a text also ends a sample
    scores_prompt: bool  # True if the client wants the log-probabilities of the prompt
    scored_last: int | None  # number of the prompt's last tokens whose log-probabilities are wanted; None: all

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def tokens_max(self) -> int:
        """Largest number of tokens that the model reads or makes."""
        return self.prompt_tokens + self.samples * self.options.max_tokens


def parse_sample_request(given: Json, context: int, vocabulary: int) -> SampleRequest:
    """Return a checked request to a model with these sizes. Raises `UserError` with the invalid value."""
    for name, nothing in NOT_COMPUTED.items():
        if given.get(name, nothing) not in (nothing, None):
            raise UserError(f"{name} {reprlib.repr(given[name])} is not supported: leave it out")
    prompt, said = _parse_prompt(given.get("prompt"), context, vocabulary), given.get("sampling_params") or {}
    if not isinstance(said, dict):
        raise UserError(f"sampling_params must be an object, not {reprlib.repr(said)}")
    room = min(TOKENS_MAX, context + 1 - len(prompt))
    texts, tokens, stops_at_end = _parse_stops(said.get("stop"), vocabulary)
    top_k = _parse_integer(said, "top_k", -1, -1, TOP_K_MAX)
    seed = said.get("seed")
    if seed is not None and type(seed) is not int:
        raise UserError(f"seed must be a whole number, not {reprlib.repr(seed)}")
    options = SamplingOptions(
        max_tokens=min(room, _parse_integer(said, "max_tokens", room, 1, 1 << 31)),
        temperature=_parse_number(said, "temperature", 1.0),
        top_k=max(0, top_k),
        top_p=_parse_number(said, "top_p", 1.0),
        stop=texts,
        seed=secrets.randbelow(SEEDS) if seed is None else seed % SEEDS,
    )
    return SampleRequest(
        pack_tokens(prompt),
        _parse_integer(given, "num_samples", 1, 1, SAMPLES_MAX),
        options.validated(),
        tokens,
        stops_at_end,
        given.get("prompt_logprobs") is True,
        None if given.get("prompt_logprobs_last_n") is None else _parse_integer(given, "prompt_logprobs_last_n", 0, 0, 1 << 31),
    )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}H", *tokens)


def _parse_prompt(prompt: Any, context: int, vocabulary: int) -> list[int]:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise UserError("prompt must be an object with chunks")
    tokens = list[Any]()
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else chunk
            raise UserError(f"a chunk of type {reprlib.repr(kind)} is not supported: use encoded_text")
        tokens += _require_list("tokens of the prompt", chunk.get("tokens"))
    if not tokens:
        raise UserError("the prompt has no tokens")
    if len(tokens) > context:
        raise UserError(f"the prompt has {len(tokens)} tokens, and the model's context is {context}")
    return _require_tokens("tokens of the prompt", tokens, vocabulary)


def _require_list(what: str, given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise UserError(f"{what} must be a list of token ids, not {reprlib.repr(given)}")
    return given


def _require_tokens(what: str, given: list[Any], vocabulary: int) -> list[int]:
    for token in given:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise UserError(f"{what} contain {reprlib.repr(token)}, but the vocabulary has the tokens 0 to {vocabulary - 1}")
    return given


def _parse_stops(given: Any, vocabulary: int) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Return stop texts, stop tokens, and whether the end of a text stops, which it does if the client names no stop."""
    if given is None:
        return (), (), True
    stops = _require_list("stop tokens", [given] if isinstance(given, str) else given)
    if len(stops) >= STOP_SEQUENCES_MAX:
        limits = f"at most {STOPS_MAX} texts, or {STOP_SEQUENCES_MAX - 1} tokens, are allowed"
        raise UserError(f"{len(stops)} stops are too many: {limits}")
    if all(isinstance(stop, str) for stop in stops):
        if len(stops) > STOPS_MAX:
            raise UserError(f"{len(stops)} stop texts are too many: at most {STOPS_MAX} are allowed")
        for stop in stops:
            if not TEXT.is_valid(stop):
                raise UserError(f"stop {stop[:50]!r} has an unpaired surrogate, which is no character")
            if not 0 < len(stop) <= STOP_CHARACTERS_MAX:
                raise UserError(f"stop {stop[:50]!r} has {len(stop)} characters, 1 to {STOP_CHARACTERS_MAX} are allowed")
        return tuple(stops), (), False
    return (), tuple(_require_tokens("stop tokens", stops, vocabulary)), False


def _parse_integer(given: Json, name: str, default: int, low: int, high: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"{name} must be a whole number from {low} to {high}, not {reprlib.repr(value)}")
    return value


def _parse_number(given: Json, name: str, default: float) -> float:
    value = given.get(name, default)
    if type(value) not in (int, float) or not abs(value) <= 1e6:  # also refuses NaN
        raise UserError(f"{name} must be a number of at most 1e6, not {reprlib.repr(value)}")
    return float(value)
