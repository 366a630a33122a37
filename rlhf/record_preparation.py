"""A set of people's file as a job can learn it: records that no job learns are named, long ones are shortened to the context."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from protocol.errors import UserError
from rlhf.data.jsonl import InvalidLines
from rlhf.data.preference_sets import PreferencePair, PromptRecord, R
from rlhf.data.tokenized_pairs import record_label
from rlhf.data.tokenized_responses import append_stop_token
from rlhf.objectives.supervised_objectives import SupervisedObjective
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec, PreparationCounts


class TruncationSide(enum.StrEnum):
    """Which end of a text that is longer than the context is cut off."""

    NOTHING = ""  # the text is a misfit
    LEFT = "left"  # the beginning of the prompt
    RIGHT = "right"  # the end of each response


def prepare_records(
    file: str, spec: JobSpec, records: Sequence[R], tokenizer: Tokenizer, misfits: InvalidLines, truncate: TruncationSide
) -> tuple[list[R], PreparationCounts]:
    """The records that the job can learn, and counts of the others. Raises `UserError`."""
    found: list[R] = []
    shortened = 0
    for record in records:
        try:
            made = _fitted(spec, record, tokenizer, truncate)
        except UserError as error:
            misfits.add_line(UserError(f"{file}: {record_label(record)}: {error}"))
            continue
        found.append(made)
        shortened += made is not record
    misfits.raise_if_any()
    if not found:
        raise UserError(f"{file}: none of its lines can be used")
    return found, PreparationCounts(left_out=misfits.left_out, shortened=shortened)


def count_stop_texts(records: Sequence[PromptRecord], tokenizer: Tokenizer, stop: int | None) -> int:
    """Responses with the stop text before their end, where answers of the model will be cut."""
    text = b"" if stop is None else tokenizer.decode([stop])
    responses = (response.encode().removesuffix(text) for record in records for response in record.responses)
    return sum(text in response for response in responses) if text else 0


def _fitted(spec: JobSpec, record: R, tokenizer: Tokenizer, truncate: TruncationSide) -> R:
    if isinstance(spec.resolved_objective, SupervisedObjective) and not record.prompt:
        raise UserError("its prompt is empty, so the first token of a response would follow nothing")
    made = record
    while (excess := max(_lengths(spec, made, tokenizer)) - spec.model.context) > 0:
        shorter = _shortened(spec, made, tokenizer, truncate, excess)
        if shorter is None:
            long = f"prompt and response are {excess + spec.model.context} tokens, more than the context of {spec.model.context}"
            way_out = "" if truncate else "; --truncate left or right shortens them"
            raise UserError(f"{long}{way_out}")
        made = shorter
    if isinstance(made, PreferencePair) and made.first == made.second:
        raise UserError("both responses are the same, so none is the better one")
    return made


def _lengths(spec: JobSpec, record: R, tokenizer: Tokenizer) -> list[int]:
    """Tokens of the prompt with each response."""
    if not isinstance(spec.resolved_objective, SupervisedObjective):
        return [len(tokenizer.encode((record.prompt + response).encode())) for response in record.responses]
    prompt = len(tokenizer.encode(record.prompt.encode()))
    return [
        prompt + len(append_stop_token(tokenizer.encode(response.encode()), spec.decoded_settings.stop_token))
        for response in record.responses
    ]


def _shortened(spec: JobSpec, record: R, tokenizer: Tokenizer, truncate: TruncationSide, excess: int) -> R | None:
    """The record with fewer characters; None where nothing is left to cut off."""
    changed: dict[str, Any] = {}
    if truncate is TruncationSide.LEFT:
        changed["prompt"] = _cut(tokenizer, record.prompt, slice(excess, None))
    elif truncate is TruncationSide.RIGHT:
        fields = ("first", "second") if isinstance(record, PreferencePair) else ("response",)
        lengths = _lengths(spec, record, tokenizer)
        for field, text, length in zip(fields, record.responses, lengths, strict=True):
            if length > spec.model.context:
                changed[field] = _cut(tokenizer, text, slice(spec.model.context - length))
    return replace(record, **changed) if changed and all(changed.values()) else None  # type: ignore[type-var]


def _cut(tokenizer: Tokenizer, text: str, kept: slice) -> str:
    """Some of its tokens, as whole characters."""
    return tokenizer.decode(tokenizer.encode(text.encode())[kept].tolist()).decode(errors="ignore")
