"""A model as files for other programs (`transformers` or GGUF), with a model card that names its origin."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from peer.export.model_provenance import ExportableModel, required_model
from peer.export.run_export import require_new_folder
from protocol.api import ModelFilesView
from protocol.errors import UserError
from storage.durable_files import sync_directory
from training.api.job_notes import preparation_notes
from training.data.tokenizer import END_OF_TEXT, BpeVocabulary, load_vocabulary, tokenizer_config, tokenizer_json
from training.formats import checkpoint, gguf, huggingface_model, packed_model
from training.job_spec import AggregationRule, AuditMode, JobSpec
from training.replicated.tensor_layout import layout_of
from training.transformer import FIRST_TOKEN_VECTOR, HEAD, BlockKind, DenseLinear, model_tensors

TRANSFORMERS, PACKED, GGUF = "transformers", "packed", "gguf"
FOLDERS: Final = (TRANSFORMERS, PACKED)  # formats that transformers opens
NOT_NAMED: Final = "not named"

FULL_AUDIT_TEXT: Final = (
    "k voters re-executed each update before the vote and signed for it, and the others relied on these signatures (k is the "
    "number of faulty voters that the votes tolerate, one more for a trainer without a vote)"
)
_SNIPPET: Final = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForCausalLM.from_pretrained("DIR")
prompt = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```"""
_SCORING: Final = """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForSequenceClassification.from_pretrained("DIR")
print(model(**tokenizer("a prompt and a response", return_tensors="pt")).logits)
```"""
_LLAMA_CPP: Final = """    llama-cli --model model.gguf --prompt "The " --n-predict 64 --no-conversation"""


def export_model(
    source: Callable[[Path, str], ExportableModel], place: Path, job: str, folder: Path, format: str
) -> ModelFilesView:
    """Write a model without a running peer.

    The function `source` (`model_from_data_directory` or `model_from_export`) reads the model. Raises `UserError` as `source` and
    `write_model_files` do.
    """
    require_new_folder(folder)
    return write_model_files(source(place, job), folder, format)


def write_model_files(found: ExportableModel, folder: Path, format: str) -> ModelFilesView:
    """Write the files of a model atomically, by renaming a temporary folder beside `folder`.

    Raises `UserError` if `folder` is not new or empty, cannot be written, or the format does not fit the model.
    """
    require_new_folder(folder)
    vocabulary = _vocabulary(found, format)
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        try:
            if format in FOLDERS:
                _write_transformers(found, vocabulary, part, is_packed=format == PACKED)
            else:
                _write_gguf(found, vocabulary, part, is_half=format == GGUF)
            left_out = _left_out(found, keeps_score=not found.makes_text)
            _put(part / "README.md", model_card(found, vocabulary, format, left_out).encode())
            _put(part / huggingface_model.SUMS, huggingface_model.sha256_sums(part).encode())
            sizes = [path.stat().st_size for path in part.iterdir()]
            sync_directory(part)
            part.rename(folder)  # replaces an empty folder, too
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    return ModelFilesView(
        path=str(folder),
        job=found.job.hex(),
        name=found.spec.name,
        round=found.round,
        model_root=found.root.hex(),
        format=format,
        files=len(sizes),
        bytes=sum(sizes),
        omitted_tensors=left_out,
        newer_round=found.newer_round,
    )


def _vocabulary(found: ExportableModel, format: str) -> BpeVocabulary:
    spec = found.spec
    if not spec.resolved_objective.needs_worker:
        raise UserError(f"job {spec.name!r} trains no model: `peer jobs` lists the jobs with their objectives")
    if not found.makes_text and format != TRANSFORMERS:
        scores = f"job {spec.name!r} produces scores, which format {format!r} cannot store"
        raise UserError(f"{scores}: use --format {TRANSFORMERS}")
    for kind in found.model.layer_kinds:
        known = kind.parameters(found.model, DenseLinear()) if isinstance(kind, BlockKind) else ()
        if any(not parameter.transformers and not parameter.gguf for parameter in known):
            has = f"job {spec.name!r} has {kind.place} {kind.name!r}, which no --format has"
            raise UserError(f"{has}: ask the model with `peer sample`, or train it further with `peer train --from`")
    if format == PACKED and not any(tensor.parameter.is_ternary for tensor in model_tensors(found.model).values()):
        dense = f"job {spec.name!r} has linear {found.model.linear!r}, and only ternary matrices are packed"
        raise UserError(f"{dense}: use --format {TRANSFORMERS}")
    vocabulary = load_vocabulary(found.tokenizer, spec.model.vocabulary)
    if len(vocabulary.ids) > spec.model.vocabulary:
        raise UserError(f"job {spec.name!r} has {spec.model.vocabulary} tokens without texts: its vocabulary has no tokenizer")
    return vocabulary


def _left_out(found: ExportableModel, keeps_score: bool) -> tuple[str, ...]:
    names = [tensor.name for tensor in layout_of(found.spec).tensors if tensor.name.startswith(HEAD)]
    return tuple(name for name in names if not (keeps_score and name == found.spec.resolved_objective.score_head))


def _write_transformers(found: ExportableModel, vocabulary: BpeVocabulary, folder: Path, is_packed: bool) -> None:
    spec, weights = found.spec, found.tensors
    names = huggingface_model.llama_tensor_names(found.model)
    tensors = {names[name]: values for name, values in weights.items()}
    stop = stop_token(spec, vocabulary)
    config = huggingface_model.llama_config(found.model, stop)
    if not found.makes_text:
        # A reward model computes its score from the features of the last token.
        scoring = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        config |= {"architectures": [scoring], "num_labels": 1}
        tensors[huggingface_model.SCORE] = (
            layout_of(spec).tensor_views(found.parameters)[spec.resolved_objective.score_head].reshape(1, -1)
        )
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", {"bos_token_id": None, "eos_token_id": stop, "pad_token_id": stop})
    _json(folder / "tokenizer.json", tokenizer_json(vocabulary))
    _json(folder / "tokenizer_config.json", tokenizer_config(vocabulary, spec.model.context))
    with _file(folder / "model.safetensors") as stream:
        checkpoint.write_safetensors(stream, tensors.items())
    if is_packed:
        with _file(folder / packed_model.PACKED) as stream:
            packed_model.write_packed(stream, found.model, names, weights)


def _write_gguf(found: ExportableModel, vocabulary: BpeVocabulary, folder: Path, is_half: bool) -> None:
    model = found.model
    fields = gguf.gguf_metadata(model, vocabulary, found.spec.name, stop_token(found.spec, vocabulary), is_half)
    with _file(folder / "model.gguf") as stream:
        gguf.write_gguf(stream, fields, model, list(found.tensors.items()), is_half)


@contextlib.contextmanager
def _file(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def _json(path: Path, content: Mapping[str, Any]) -> None:
    _put(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def _put(path: Path, data: bytes) -> None:
    with _file(path) as stream:
        stream.write(data)


def model_card(found: ExportableModel, vocabulary: BpeVocabulary, format: str, left_out: tuple[str, ...]) -> str:
    """Return the model card in Markdown. `left_out` names the job's tensors that the files lack."""
    spec = found.spec
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _rows(found, vocabulary, left_out))
    how = _LLAMA_CPP if format not in FOLDERS else _SNIPPET if found.makes_text else _SCORING
    licence = [f"license: {json.dumps(spec.licence)}"] if spec.licence else []
    kind = "text-generation" if found.makes_text else "text-classification"
    library = "transformers" if format in FOLDERS else "gguf"
    front = "\n".join([*licence, f"library_name: {library}", f"pipeline_tag: {kind}", "tags: [folkmoot]"])
    where = "" if format not in FOLDERS else ", where `DIR` is this folder"
    return f"""---
{front}
---

# {_cell(spec.name)}, round {found.round}

Trained with Folkmoot by people who need not trust each other: a quorum of two thirds of the voters decided every round.

| | |
|---|---|
{rows}

Open it{where}:

{how}
"""


def _rows(found: ExportableModel, vocabulary: BpeVocabulary, left_out: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    spec = found.spec
    yield from (
        ("job", f"{spec.name}, `{found.job.hex()}`"),
        ("objective", f"{spec.objective}: {spec.resolved_objective.description}"),
        ("round", f"{found.round if found.rounds_in_model is None else found.rounds_in_model} of {spec.rounds}"),
        ("model root", f"`{found.root.hex()}`"),
        ("network", f"{found.network}, chain id `{found.chain_id}`"),
        ("taken from", found.source_text),
        *_base_row(spec),
        ("parameters", f"{found.model.parameters:,}"),
        *_linear_row(found),
        ("tokens", _tokens(spec, vocabulary)),
        ("data", _data(found)),
        ("licence", spec.licence or NOT_NAMED),
    )
    if found.accepted is not None:
        yield "proposals", f"{found.accepted} accepted, {found.rejected} rejected, {found.absent} absent"
    yield "audit", _audit(spec)
    missing = "not measured by this peer" if found.accepted is not None else "exports contain no measurements"
    yield from spec.resolved_objective.metric_rows(found.figures, missing)
    stop = stop_token(spec, vocabulary)
    if stop is not None:
        yield "a text ends with", f"token {stop}{f', `{END_OF_TEXT}`' if stop == vocabulary.end_of_text else ''}"
    for note in preparation_notes(spec):
        yield "set", note
    if left_out:
        added = "the job added it to the embedding of the first token, so these files have other logits than the job's model"
        first = f"; {FIRST_TOKEN_VECTOR} changes the output: {added}" if FIRST_TOKEN_VECTOR in left_out else ""
        yield "left out", f"{', '.join(left_out)}: vectors of the objective beside the transformer{first}"


def _base_row(spec: JobSpec) -> Iterator[tuple[str, str]]:
    required = required_model(spec)
    if required is not None:
        yield "adapters", f"merged into the model of job `{required.job.hex()}`"


def _linear_row(found: ExportableModel) -> Iterator[tuple[str, str]]:
    if any(tensor.parameter.is_ternary for tensor in model_tensors(found.model).values()):
        yield "matrices of the layers", "ternary: one scale each, and elements −1, 0 or 1; the files have no latent weights"


def stop_token(spec: JobSpec, vocabulary: BpeVocabulary) -> int | None:
    """Return the token that ends a text: the stop token of the job, otherwise that of the tokenizer, otherwise None."""
    stop = spec.resolved_objective.stop_token(spec)
    return vocabulary.end_of_text if stop is None else stop


def _tokens(spec: JobSpec, vocabulary: BpeVocabulary) -> str:
    if spec.tokenizer is not None:
        return f"{spec.model.vocabulary}, tokenizer `{spec.tokenizer.hex()}`"
    return "the 256 bytes" if vocabulary.end_of_text is None else "the 256 bytes and an end-of-text token"


def _data(found: ExportableModel) -> str:
    spec = found.spec
    if spec.data is None:
        return "each trainer's own text" if spec.resolved_objective.reads_text else spec.resolved_objective.data_without_text
    return f"`{spec.data.hex()}` (SHA-256 of its manifest){f', {found.data_origin}' if found.data_origin else ''}"


def _audit(spec: JobSpec) -> str:
    against = "" if spec.rule is AggregationRule.MEAN else f" against {spec.byzantine_max} faulty trainers"
    rule = f"updates were aggregated by {spec.rule.value}{against}"
    match spec.audit:
        case AuditMode.FULL:
            return f"full: {FULL_AUDIT_TEXT}; {rule}"
        case AuditMode.SAMPLED:
            replays = spec.audit_rate * spec.auditors
            closing = (
                f"; in the last {spec.final_full_audit_rounds} rounds as in full audits" if spec.final_full_audit_rounds else ""
            )
            return f"sampled: {replays:g} re-executions of each accepted proposal on average{closing}; {rule}"
        case _:
            return f"off: no update was re-executed; {rule}"


def _cell(text: str) -> str:
    """Return the text as one line of Markdown, with its special characters escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
