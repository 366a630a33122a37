"""Sets of prompts and responses as token ids, the draw of records for a training step, and the arrays of a batch.

Uses only numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from rlhf.data.preference_set_statistics import PreferenceSetStatistics
from rlhf.data.preference_sets import (
    PERMILLE,
    InstructionExample,
    PreferencePair,
    PromptRecord,
    R,
    decode_records,
    encode_records,
    split_held_out,
)
from training import random_stream
from training.corpus import DataManifest, split_into_shards, tokens_digest
from training.data.token_sequences import TokenArray, TokenizedText
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec

PAIRS_A_BEAT: Final = 256  # pairs tokenized between two heartbeats of the worker: some milliseconds
T = TypeVar("T", bound=TokenizedText)


@dataclass(frozen=True, slots=True)
class PairSplit:
    """Positions of the texts of records in an array of tokens. A text is a prompt followed by one response.

    Text 2i is the prompt of pair i with the first response. Text 2i + 1 is the prompt with the second response.
    """

    starts: npt.NDArray[np.int64]  # (texts + 1,): start of each text, and last the end of the last text
    p: npt.NDArray[np.float32]  # (records,): probability that the first response is better; 1 for instruction examples

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.p)


@dataclass(frozen=True, slots=True)
class TokenizedPairs(TokenizedText):
    """Tokenized pairs. `train` and `held_out` are concatenated texts. In `train`, the distinct prompts follow the texts."""

    train_split: PairSplit
    held_out_split: PairSplit
    prompts: npt.NDArray[np.int64]  # (prompts + 1,): start of each prompt in `train`, and last the end of the last prompt
    statistics: PreferenceSetStatistics


def preference_set_manifest(
    records: Iterable[PromptRecord], tokens: bytes | None = None, keep: Callable[[bytes], object] = lambda blob: None
) -> DataManifest:
    """Return the manifest of a set. `keep` receives each shard, and then the encoded manifest."""
    manifest = replace(split_into_shards(encode_records(records), keep), tokens=tokens)
    keep(manifest.encode())
    return manifest


def tokenize_pairs(
    spec: JobSpec, pairs: Sequence[PreferencePair], tokenizer: Tokenizer, on_block: Callable[[], None] = lambda: None
) -> TokenizedPairs:
    train, held_out = split_held_out(pairs, spec.held_out_permille)
    (trained, of_train), (measured, of_held_out) = (tokenize_all(spec, side, tokenizer, on_block) for side in (train, held_out))
    prompts = [trained]
    for number, text in enumerate(prompt_texts(train)):
        prompts.append(tokenizer.encode(text.encode()))
        if number % PAIRS_A_BEAT == 0:
            on_block()
    return TokenizedPairs(
        np.concatenate(prompts),
        measured,
        tokenizer.token_bytes,
        of_train,
        of_held_out,
        prompts=np.cumsum([*map(len, prompts)], dtype=np.int64),
        statistics=PreferenceSetStatistics(train, held_out),
    )


def prompt_texts(pairs: Iterable[PreferencePair]) -> list[str]:
    """Return the distinct prompts of pairs. The empty prompt is left out, because a model needs a first token."""
    return list(dict.fromkeys(pair.prompt for pair in pairs if pair.prompt))


def tokenize_all(
    spec: JobSpec, pairs: Sequence[PreferencePair], tokenizer: Tokenizer, on_block: Callable[[], None] = lambda: None
) -> tuple[TokenArray, PairSplit]:
    """Tokenize pairs, without splitting off held-out ones.

    Raises `UserError` for the first pair that is longer than the model's context.
    """
    texts: list[TokenArray] = []
    for number, pair in enumerate(pairs):
        both = [tokenizer.encode((pair.prompt + response).encode()) for response in (pair.first, pair.second)]
        longest = max(map(len, both))
        if longest > spec.model.context:
            much = f"prompt and response are {longest} tokens, more than the context of {spec.model.context}: shorten them"
            raise UserError(f"{record_label(pair)}: {much}")
        texts += both
        if number % PAIRS_A_BEAT == 0:
            on_block()
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    tokens = np.concatenate(texts) if texts else np.empty(0, dtype=np.uint8)
    return tokens, PairSplit(starts, np.array([pair.p / PERMILLE for pair in pairs], dtype=np.float32))


def record_label(record: PromptRecord) -> str:
    """Name a record for people, by its line in a file or by its task."""
    return f"line {int.from_bytes(record.id, 'big')}" if len(record.id) == 8 else f"task {record.id.hex()[:16]}"


def pair_batch(tokens: TokenArray, side: PairSplit, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """Return the arrays of N pairs: token ids (N, 2, S), positions of the last tokens (N, 2), and p (N,).

    S is the length of the longest text. Shorter texts are padded at the end with zeros.
    """
    texts = text_numbers(numbers)
    starts, ends = side.starts[texts], side.starts[texts + 1]
    x = np.zeros((len(texts), int((ends - starts).max())), dtype=np.int64)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        x[row, : end - start] = tokens[start:end]
    return x.reshape(len(numbers), 2, -1), (ends - starts - 1).reshape(-1, 2), side.p[numbers]


@dataclass(frozen=True, slots=True)
class ResponseSplit(PairSplit):
    """A `PairSplit` of pairs or of single responses, with the start and the log-probability of each response."""

    responses: npt.NDArray[np.int64]  # (texts,): start of the response of each text
    reference: npt.NDArray[np.float32]  # (texts,): log-probability of the response under the reference; NaN: not computed yet

    @property
    def tokens_mean(self) -> float:
        """Mean number of tokens per response."""
        return float((self.starts[1:] - self.responses).mean())


@dataclass(frozen=True, slots=True)
class TokenizedResponses(TokenizedText):
    """Tokenized prompts with responses. `train` and `held_out` are concatenated texts."""

    train_split: ResponseSplit
    held_out_split: ResponseSplit
    statistics: PreferenceSetStatistics | None  # None: a set without pairs


def tokenize_responses(
    spec: JobSpec, records: Sequence[R], tokenizer: Tokenizer, on_block: Callable[[], None] = lambda: None
) -> TokenizedResponses:
    """Tokenize and split a set. Raises `UserError` for the first record with an empty prompt or longer than the context."""
    train, held_out = split_held_out(records, spec.held_out_permille)
    (trained, of_train), (measured, of_held_out) = (_whole(spec, side, tokenizer, on_block) for side in (train, held_out))
    pairs = [[record for record in side if isinstance(record, PreferencePair)] for side in (train, held_out)]
    of_set = PreferenceSetStatistics(*pairs) if any(pairs) else None
    return TokenizedResponses(trained, measured, tokenizer.token_bytes, of_train, of_held_out, of_set)


def _whole(
    spec: JobSpec, records: Sequence[R], tokenizer: Tokenizer, on_block: Callable[[], None]
) -> tuple[TokenArray, ResponseSplit]:
    texts: list[TokenArray] = []
    begins: list[int] = []  # start of each response in its text
    for number, record in enumerate(records):
        prompt = tokenizer.encode(record.prompt.encode())
        if not len(prompt):
            raise UserError(f"{record_label(record)}: the prompt is empty: a response needs at least one token before it")
        for response in record.responses:
            text = np.concatenate(
                [prompt, append_stop_token(tokenizer.encode(response.encode()), spec.decoded_settings.stop_token)]
            )
            if len(text) > spec.model.context:
                much = f"prompt and response are {len(text)} tokens, more than the context of {spec.model.context}"
                raise UserError(f"{record_label(record)}: {much}")
            texts.append(text)
            begins.append(len(prompt))
        if number % PAIRS_A_BEAT == 0:
            on_block()
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    tokens = np.concatenate(texts) if texts else np.empty(0, dtype=np.uint8)
    p = np.array([record.p / PERMILLE if isinstance(record, PreferencePair) else 1.0 for record in records], dtype=np.float32)
    return tokens, ResponseSplit(
        starts, p, starts[:-1] + np.array(begins, dtype=np.int64), np.full(len(texts), np.nan, dtype=np.float32)
    )


def append_stop_token(response: TokenArray, stop: int | None) -> TokenArray:
    """Append the stop token, unless the response ends with it."""
    return response if stop is None or response[-1] == stop else np.append(response, np.uint16(stop))


def response_batch(tokens: TokenArray, side: ResponseSplit, texts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """Return inputs, next tokens, and the mask of the next tokens that belong to the response.

    Each has the shape (B, S) for B texts, padded at the end.
    """
    starts, ends = side.starts[texts], side.starts[texts + 1]
    shape = (len(texts), int((ends - starts).max()) - 1)
    x, y, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for row, (start, response, end) in enumerate(zip(starts, side.responses[texts], ends, strict=True)):
        x[row, : end - start - 1], y[row, : end - start - 1] = tokens[start : end - 1], tokens[start + 1 : end]
        mask[row, response - start - 1 : end - start - 1] = True
    return x, y, mask


def dpo_batch(data: TokenizedResponses, drawn: npt.NDArray[np.int64], *, is_held_out: bool) -> tuple[npt.NDArray[Any], ...]:
    """Return the arrays of `response_batch` (N, 2, S), reference log-probabilities (N, 2) and p (N,) for N pairs."""
    tokens, side = (data.held_out, data.held_out_split) if is_held_out else (data.train, data.train_split)
    texts = text_numbers(drawn)
    shaped = (array.reshape(len(drawn), 2, -1) for array in response_batch(tokens, side, texts))
    return (*shaped, side.reference[texts].reshape(-1, 2), side.p[drawn])


def text_numbers(pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    texts: npt.NDArray[np.int64] = (2 * pairs[:, None] + np.arange(2)).ravel()
    return texts


def draw_pairs(job: bytes, round: int, trainer: bytes, step: int, *, count: int, pairs: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw the `count` pairs of one step, as numbers in 0 .. pairs − 1, by a hash that everybody can verify.

    A pair may be drawn twice, like a window of a text (`training.data.token_sequences.batch_offsets`).
    """
    draw = hashlib.sha256(b"folkmoot/pairs/1" + job + trainer)
    draw.update(b"".join(number.to_bytes(8, "big") for number in (round, step, seed)))
    key = draw.digest()
    drawn = (hashlib.sha256(key + index.to_bytes(4, "big")).digest() for index in range(count))
    # 64 drawn bits over at most 2^20 pairs: the modulo bias is below 2^-44
    return np.array([int.from_bytes(digest[:8], "big") % pairs for digest in drawn], dtype=np.int64)


def draw_pairs_by_epoch(
    job: bytes, round: int, trainer: bytes, step: int, *, steps: int, count: int, pairs: int, seed: int
) -> npt.NDArray[np.int64]:
    """Draw the `count` pairs of one step without repetition: each pass of a trainer over the pairs has its own order.

    `steps` is the number of steps per round.
    """
    first = (round * steps + step) * count
    places = np.arange(first, first + count, dtype=np.int64)
    passes: npt.NDArray[np.int64] = places // pairs
    orders = {number: _order_of_pairs(job, trainer, int(number), pairs, seed) for number in np.unique(passes)}
    return np.array([orders[number][place % pairs] for number, place in zip(passes, places, strict=True)], dtype=np.int64)


@lru_cache(maxsize=8)  # one entry per trainer and pass, at most 8 MB each
def _order_of_pairs(job: bytes, trainer: bytes, number_of_pass: int, pairs: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the order of the pairs in one pass of a trainer."""
    drawn = np.frombuffer(random_stream.random_bytes(8 * pairs, "pairs-in-turn", job, trainer, number_of_pass, seed), dtype="<u8")
    return np.argsort(drawn, kind="stable")


def _open_set(
    kind: type[R],
    tokenize: Callable[[JobSpec, Sequence[R], Tokenizer, Callable[[], None]], T],
    spec: JobSpec,
    path: Path,
    tokenizer: Tokenizer,
    on_block: Callable[[], None] = lambda: None,
    tokenized: bool = False,
    named: bytes | None = None,
) -> T:
    """Return a stored set, tokenized for a job. `training.corpus.open_tokens` does the same with a text.

    Raises `UserError` for records that the job cannot use, or for tokens with another digest than `named`.
    """
    if tokenized:
        raise UserError(f"{path} contains tokens, but this job learns from prompts and responses")
    with path.open("rb") as stream:
        records = decode_records(stream, kind)
    found = tokenize(spec, records, tokenizer, on_block)
    if named is not None and tokens_digest(found) != named:
        raise UserError(
            f"{path}: this tokenizer produces other tokens than at the job's creation: install the release that other peers run"
        )
    return found


open_pairs: Final = partial(_open_set, PreferencePair, tokenize_pairs)
open_examples: Final = partial(_open_set, InstructionExample, tokenize_responses)
open_preferred_responses: Final = partial(_open_set, PreferencePair, tokenize_responses)
