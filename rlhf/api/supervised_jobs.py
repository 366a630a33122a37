"""Construction of jobs that learn from a set of responses: the job's specification, and the records of its set.

Unusable records are reported. Records longer than the model's context can be shortened.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol import codec
from protocol.api import TrainRequest
from protocol.errors import UserError
from rlhf.data import preference_sets, tokenized_records
from rlhf.data.dataset_files import InvalidLines
from rlhf.data.preference_sets import PreferencePair, PromptRecord, R
from rlhf.data.tokenized_records import TokenizedPairs, TokenizedResponses, append_stop_token, record_label
from rlhf.objectives import job_presets
from rlhf.objectives.supervised_objectives import INSTRUCT, SupervisedObjective
from training import corpus
from training.api.initial_model import InitialModel, resolve_initial_model
from training.api.job_builder import (
    add_final_full_audit_rounds,
    byzantine_trainers_max,
    count_trainers,
    fetch_job_blob,
    parse_field,
    parse_overrides,
    require_safe_settings,
)
from training.data import text_files
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.job_spec import JobSpec, PreparationCounts, complete_fields
from training.objectives.objective import Objective
from training.round_context import TrainingPeer
from training.transformer import BYTE_VOCABULARIES

TokenizedSet = TokenizedPairs | TokenizedResponses
EPOCHS_DEFAULT = 3  # passes over the set if the number of rounds is not given


def build_instruct_spec(peer: TrainingPeer, request: TrainRequest) -> JobSpec:
    """Build the job of `train --from MODEL FILE`, and store its set as blobs. Raises `UserError` for an invalid file or value."""
    shown = text_files.printable_path(request.examples)
    if not request.initial_model:
        Path(request.examples).stat()  # A missing file is the first error to name.
        raise UserError(f"{shown}: prompts and responses need an existing model: give --from JOB or --from FOLDER")
    for argument, value in (("--data", request.data), ("--vocabulary", request.vocabulary)):
        if value and value not in BYTE_VOCABULARIES:
            raise UserError(f"{argument} {value}: the job learns the responses of {shown}: leave it out")
    start = resolve_initial_model(peer, request)
    if request.vocabulary and start.tokenizer is not None:
        raise UserError(f"--vocabulary {request.vocabulary}: the vocabulary is that of {start.name}: leave it out")
    truncate = parse_field(TruncationSide, "--truncate", request.truncate)
    spec, said = build_supervised_spec(
        peer, INSTRUCT, start, request.name or INSTRUCT.name, request.overrides, job_presets.INSTRUCT_JOB
    )
    require_safe_settings(peer, spec, request)
    file, misfits = Path(request.examples).name, InvalidLines(request.skip_bad)
    with text_files.open_unpacked(Path(request.examples)) as stream:
        read = preference_sets.read_examples(file, stream, misfits)
    tokenizer = load_job_tokenizer(peer, spec)
    found, preparation = prepare_records(file, spec, read, tokenizer, misfits, truncate)
    spec = replace(spec, preparation=preparation)
    tokens = tokenize_set(peer, spec, found, file)
    spec, _ = attach_set(peer, spec, found, tokens, request.rounds or said.get("rounds"), EPOCHS_DEFAULT)
    return start.publish_parameters(peer, spec)


def build_supervised_spec(
    peer: TrainingPeer,
    kind: Objective,
    start: InitialModel,
    name: str,
    overrides: dict[str, str],
    preset: dict[str, Any],
    field: str = "",
) -> tuple[JobSpec, dict[str, Any]]:
    """Build a specification, still without its set. Return it with the parsed overrides of the fields that all jobs have.

    `field` is the prefix of overrides in error messages. Raises `UserError` for invalid overrides.
    """
    own, said = (
        parse_objective_overrides(overrides, kind.settings_type, frozenset())
        if kind.settings_type
        else ({}, parse_overrides(overrides))
    )
    if "model" in said:
        raise UserError(f"--set {field}model.…: the model is that of {start.name}: leave it out")
    if isinstance(kind, SupervisedObjective) and "stop_token" not in own:
        own["stop_token"] = default_stop_token(peer, start, learns_to_end=kind is INSTRUCT)
    spec = JobSpec(
        name=name,
        objective=kind.name,
        data=bytes(32),
        byzantine_max=byzantine_trainers_max(peer, kind.role),
        objective_settings=codec.encode(kind.settings_type(**own)) if kind.settings_type else b"",
    )
    spec = add_final_full_audit_rounds(replace(start.apply_to_spec(spec, start.model), **complete_fields(preset | said)), said)
    return spec.validated(), said


def load_job_tokenizer(peer: TrainingPeer, model: JobSpec | InitialModel) -> Tokenizer:
    """Load the tokenizer of a job. Raises `UserError` if no peer serves it."""
    return load_tokenizer(fetch_job_blob(peer, model.tokenizer) if model.tokenizer else None, model.model.vocabulary)


def tokenize_set(peer: TrainingPeer, spec: JobSpec, records: Sequence[PromptRecord], file: str) -> Any:
    """Tokenize a set as the trainers of the job will. Raises `UserError`, with the name of the file, for unusable records."""
    encode: Any = (
        tokenized_records.tokenize_responses
        if isinstance(spec.resolved_objective, SupervisedObjective)
        else tokenized_records.tokenize_pairs
    )
    try:
        return encode(spec, records, load_job_tokenizer(peer, spec))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def attach_set(
    peer: TrainingPeer, spec: JobSpec, records: Sequence[PromptRecord], tokens: TokenizedSet, rounds: int | None, epochs: int
) -> tuple[JobSpec, corpus.DataManifest]:
    """Store a set as blobs, and return the specification with the set's digest.

    Without `rounds` the job has `epochs` passes over the set.
    """
    digest = None if spec.tokenizer is None else corpus.tokens_digest(tokens)
    manifest = tokenized_records.preference_set_manifest(records, digest, peer.blobs.add_bytes)
    at_once = {"trainers": count_trainers(peer, spec.resolved_objective.role), "steps": spec.local_steps, "batch": spec.batch}
    rounds = rounds or preference_sets.rounds_for_epochs(epochs, len(tokens.train_split), **at_once)
    return replace(spec, rounds=rounds, data=manifest.digest).validated(), manifest


def parse_objective_overrides(
    overrides: dict[str, str], terms: type, apart: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse overrides into a pair: settings of the objective, and fields of the job.

    Settings in `apart` cannot be overridden. Raises `UserError` for an invalid override.
    """
    kinds = typing.get_type_hints(terms)
    names = {field.name for field in dataclasses.fields(terms)} - apart
    own = {key: parse_field(kinds[key], key, text) for key, text in overrides.items() if key in names}
    return own, parse_overrides({key: text for key, text in overrides.items() if key not in names}, names)


def default_stop_token(peer: TrainingPeer, start: InitialModel, learns_to_end: bool) -> int:
    """Return the default stop token of a job.

    | if the initial model | the stop token is |
    |---|---|
    | was trained with a stop token | that token |
    | has an end-of-text token, which the job teaches (`learns_to_end`) | the end-of-text token |
    | otherwise | a newline |

    Raises `UserError` if the newline is needed, but more than one token contains a newline.
    """
    if start.stop is not None:
        return start.stop
    tokenizer = load_job_tokenizer(peer, start)
    if learns_to_end and tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    return find_newline_token(start.name, tokenizer)


def find_newline_token(base: str, pieces: Tokenizer) -> int:
    """Return the only token that contains a newline.

    Raises `UserError` if more tokens contain one, since then no token ends every line.
    """
    found = [token for token in range(pieces.vocabulary) if b"\n" in pieces.decode([token])]
    (alone,) = pieces.encode(b"\n")
    if len(found) > 1:
        many = f"{base}: its tokenizer has {len(found)} tokens with a newline"
        raise UserError(
            f"{many}: choose the end of responses with --set stop_token=TOKEN ({alone} is a newline alone), or stop_token=none"
        )
    return int(alone)


class TruncationSide(enum.StrEnum):
    """The end at which a record's text is cut if it is longer than the model's context."""

    NOTHING = ""  # No text is cut, and a record that is too long is invalid.
    LEFT = "left"  # The prompt loses tokens at its beginning.
    RIGHT = "right"  # Each response loses tokens at its end.


def prepare_records(
    file: str, spec: JobSpec, records: Sequence[R], tokenizer: Tokenizer, misfits: InvalidLines, truncate: TruncationSide
) -> tuple[list[R], PreparationCounts]:
    """Return the usable records, shortened if necessary, and counts of the changes. Raises `UserError` if none is usable."""
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
        raise UserError(f"{file}: no line is usable")
    stopping = count_stop_texts(found, tokenizer, spec.resolved_objective.stop_token(spec))
    return found, PreparationCounts(left_out=misfits.left_out, shortened=shortened, holding_stop=stopping)


def count_stop_texts(records: Sequence[PromptRecord], tokenizer: Tokenizer, stop: int | None) -> int:
    """Count responses that contain the stop token's text before their end.

    A trained model will end its responses at that text.
    """
    text = b"" if stop is None else tokenizer.decode([stop])
    responses = (response.encode().removesuffix(text) for record in records for response in record.responses)
    return sum(text in response for response in responses) if text else 0


def _fitted(spec: JobSpec, record: R, tokenizer: Tokenizer, truncate: TruncationSide) -> R:
    if isinstance(spec.resolved_objective, SupervisedObjective) and not record.prompt:
        raise UserError("the prompt is empty: a response needs at least one token before it")
    made = record
    while (excess := max(_lengths(spec, made, tokenizer)) - spec.model.context) > 0:
        shorter = _shortened(spec, made, tokenizer, truncate, excess)
        if shorter is None:
            long = f"prompt and response are {excess + spec.model.context} tokens, more than the context of {spec.model.context}"
            way_out = "" if truncate else "; --truncate left or right shortens them"
            raise UserError(f"{long}{way_out}")
        made = shorter
    if isinstance(made, PreferencePair) and made.first == made.second:
        raise UserError("both responses are the same")
    return made


def _lengths(spec: JobSpec, record: R, tokenizer: Tokenizer) -> list[int]:
    """Return, for each response, the number of tokens of the prompt followed by the response."""
    if not isinstance(spec.resolved_objective, SupervisedObjective):
        return [len(tokenizer.encode((record.prompt + response).encode())) for response in record.responses]
    prompt = len(tokenizer.encode(record.prompt.encode()))
    return [
        prompt + len(append_stop_token(tokenizer.encode(response.encode()), spec.decoded_settings.stop_token))
        for response in record.responses
    ]


def _shortened(spec: JobSpec, record: R, tokenizer: Tokenizer, truncate: TruncationSide, excess: int) -> R | None:
    """Return the record with fewer characters, or None if a text would become empty or `truncate` allows no cut."""
    changed: dict[str, Any] = {}
    if truncate is TruncationSide.LEFT:
        changed["prompt"] = _cut(tokenizer, record.prompt, slice(excess, None))
    elif truncate is TruncationSide.RIGHT:
        fields = ("first", "second") if isinstance(record, PreferencePair) else ("response",)
        lengths = _lengths(spec, record, tokenizer)
        for field, text, length in zip(fields, record.responses, lengths, strict=True):
            if length > spec.model.context:
                changed[field] = _cut(tokenizer, text, slice(spec.model.context - length))
    return replace(record, **changed) if changed and all(changed.values()) else None


def _cut(tokenizer: Tokenizer, text: str, kept: slice) -> str:
    """Return the part of a text that consists of the tokens `kept`, without incomplete characters."""
    return tokenizer.decode(tokenizer.encode(text.encode())[kept].tolist()).decode(errors="ignore")
