"""Prompts and responses that are given, as token ids of which only those of responses are learned. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from curation.tasks.task_pages import Text
from protocol.codec import Length
from protocol.errors import UserError
from rlhf.data.dataset_formats import is_positive_example, to_plain_texts
from rlhf.data.jsonl import InvalidLines
from rlhf.data.jsonl import read_records as records_of
from rlhf.data.preference_set_statistics import PreferenceSetStatistics
from rlhf.data.preference_sets import PAIRS_MAX, PERMILLE, PreferencePair, R, checked_text, split_held_out
from rlhf.data.tokenized_pairs import PAIRS_A_BEAT, record_label
from training.data.token_sequences import TokenArray, TokenizedText
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec

EXAMPLE: Final = '{"prompt": "…", "response": "…"}'


@dataclass(frozen=True, slots=True)
class InstructionExample:
    id: Annotated[bytes, Length(1, 32)]  # the number of the line as u64, big-endian
    prompt: Text
    response: Text

    @property
    def responses(self) -> tuple[str, ...]:
        return (self.response,)


@dataclass(frozen=True, slots=True)
class ResponseSplit:
    """Which tokens are whose. A record has as many texts as responses, one after another: its prompt and one of them."""

    starts: npt.NDArray[np.int64]  # (texts + 1,): of each text; the last is the end
    responses: npt.NDArray[np.int64]  # (texts,): where the response of each text begins
    p: npt.NDArray[np.float32]  # (records,): of pairs, that the first response is the better one
    reference: npt.NDArray[np.float32]  # (texts,): what the reference gives the response, log-probability; NaN: not known yet

    def __len__(self) -> int:
        """Records."""
        return len(self.p)

    @property
    def tokens_mean(self) -> float:
        """Of a response."""
        return float((self.starts[1:] - self.responses).mean())


@dataclass(frozen=True, slots=True)
class TokenizedResponses(TokenizedText):
    """`train` and `held_out` hold the tokens of all texts, one after another."""

    train_split: ResponseSplit
    held_out_split: ResponseSplit  # held out: by the prompt, so that no prompt is on both sides
    statistics: PreferenceSetStatistics | None  # of pairs


def read_examples(name: str, stream: BinaryIO, misfits: InvalidLines | None = None) -> list[InstructionExample]:
    """Of JSONL with `prompt` and `response`, or as `forms` has it.

    `UserError` names the first lines that are none, unless `misfits` leaves them out. Responses that are labelled as bad are left
    out in any case.
    """

    def make(number: int, row: dict[str, Any]) -> InstructionExample | None:
        where = f"{name}:{number}"
        if not is_positive_example(where, row):
            return None
        row = to_plain_texts(where, row)
        return InstructionExample(
            number.to_bytes(8, "big"), checked_text(where, row, "prompt"), checked_text(where, row, "response")
        )

    examples = records_of(name, stream, EXAMPLE, PAIRS_MAX, make, misfits or InvalidLines())
    if not examples:
        raise UserError(f"{name}: there is no response in it: every line must be like {EXAMPLE}")
    return examples


def tokenize_responses(
    spec: JobSpec, records: Sequence[R], tokenizer: Tokenizer, on_block: Callable[[], None] = lambda: None
) -> TokenizedResponses:
    """`UserError` for the first record that the job cannot use."""
    train, held_out = split_held_out(records, spec.held_out_permille)
    (trained, of_train), (measured, of_held_out) = (_whole(spec, side, tokenizer, on_block) for side in (train, held_out))
    pairs = [[record for record in side if isinstance(record, PreferencePair)] for side in (train, held_out)]
    of_set = PreferenceSetStatistics(*pairs) if any(pairs) else None
    return TokenizedResponses(trained, measured, tokenizer.token_bytes, of_train, of_held_out, of_set)


def _whole(
    spec: JobSpec, records: Sequence[R], tokenizer: Tokenizer, on_block: Callable[[], None]
) -> tuple[TokenArray, ResponseSplit]:
    texts: list[TokenArray] = []
    begins: list[int] = []  # of each response, in its text
    for number, record in enumerate(records):
        prompt = tokenizer.encode(record.prompt.encode())
        if not len(prompt):
            raise UserError(f"{record_label(record)}: its prompt is empty, so the first token of a response would follow nothing")
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
        starts, starts[:-1] + np.array(begins, dtype=np.int64), p, np.full(len(texts), np.nan, dtype=np.float32)
    )


def append_stop_token(response: TokenArray, stop: int | None) -> TokenArray:
    """As the model is to end it."""
    return response if stop is None or response[-1] == stop else np.append(response, np.uint16(stop))


def response_batch(tokens: TokenArray, side: ResponseSplit, texts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """Of some texts, B of them: (inputs, next tokens, whether these are of the response), each (B, S), padded behind."""
    starts, ends = side.starts[texts], side.starts[texts + 1]
    shape = (len(texts), int((ends - starts).max()) - 1)
    x, y, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for row, (start, response, end) in enumerate(zip(starts, side.responses[texts], ends, strict=True)):
        x[row, : end - start - 1], y[row, : end - start - 1] = tokens[start : end - 1], tokens[start + 1 : end]
        mask[row, response - start - 1 : end - start - 1] = True
    return x, y, mask


def dpo_batch(data: TokenizedResponses, drawn: npt.NDArray[np.int64], *, is_held_out: bool) -> tuple[npt.NDArray[Any], ...]:
    """Of N pairs: `response_batch` of both texts of each, (N, 2, S); what the reference gives them, (N, 2); p, (N,)."""
    tokens, side = (data.held_out, data.held_out_split) if is_held_out else (data.train, data.train_split)
    texts = text_numbers(drawn)
    shaped = (array.reshape(len(drawn), 2, -1) for array in response_batch(tokens, side, texts))
    return (*shaped, side.reference[texts].reshape(-1, 2), side.p[drawn])


def text_numbers(pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    texts: npt.NDArray[np.int64] = (2 * pairs[:, None] + np.arange(2)).ravel()
    return texts
