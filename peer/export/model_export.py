"""A model as files that other programs open: those of `transformers`, or GGUF, with a card that says where it comes from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from peer.export.model_card import GGUF, TRANSFORMERS, model_card, stop_token
from peer.export.model_provenance import ExportableModel
from protocol.api import ModelFilesView
from protocol.errors import UserError
from storage.durable_files import sync_directory
from training.data.tokenizer import BpeVocabulary, load_vocabulary, tokenizer_config, tokenizer_json
from training.formats import checkpoint, gguf, huggingface_model
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import HEAD, tensor_shapes


def export_model(
    source: Callable[[Path, str], ExportableModel], place: Path, job: str, folder: Path, format: str
) -> ModelFilesView:
    """Where no running peer is asked: `model_from_data_directory` or `model_from_export`, as `source`, finds the model."""
    require_new_folder(folder)
    return write_model_files(source(place, job), folder, format)


def require_new_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: name a new one")


def write_model_files(found: ExportableModel, folder: Path, format: str) -> ModelFilesView:
    """Into a folder beside it, which then gets its name. `folder` is new or empty. Raises `UserError`."""
    require_new_folder(folder)
    vocabulary, own = _vocabulary(found, format), found.spec.resolved_objective.makes_text
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        try:
            if format == TRANSFORMERS:
                _write_transformers(found, vocabulary, part)
            else:
                _write_gguf(found, vocabulary, part, is_half=format == GGUF)
            left_out = _left_out(found, keeps_score=not own)
            _put(part / "README.md", model_card(found, vocabulary, format, left_out).encode())
            _put(part / huggingface_model.SUMS, huggingface_model.sha256_sums(part).encode())
            sizes = [path.stat().st_size for path in part.iterdir()]
            sync_directory(part)
            part.rename(folder)  # over an empty folder, too
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    spec = found.spec
    return ModelFilesView(
        path=str(folder),
        job=found.job.hex(),
        name=spec.name,
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
        raise UserError(f"job {spec.name!r} trains no model: `jobs` lists those that do")
    if not spec.resolved_objective.makes_text and format != TRANSFORMERS:
        raise UserError(f"job {spec.name!r} gives scores and no text, which GGUF has no place for: take --format {TRANSFORMERS}")
    vocabulary = load_vocabulary(found.tokenizer, spec.model.vocabulary)
    if len(vocabulary.ids) > spec.model.vocabulary:
        raise UserError(f"the {spec.model.vocabulary} tokens of job {spec.name!r} stand for no text: no tokenizer says them")
    return vocabulary


def _left_out(found: ExportableModel, keeps_score: bool) -> tuple[str, ...]:
    names = [tensor.name for tensor in layout_of(found.spec).tensors if tensor.name.startswith(HEAD)]
    return tuple(name for name in names if not (keeps_score and name == found.spec.resolved_objective.score_head))


def _tensors(found: ExportableModel) -> dict[str, Float32Array]:
    """Those of the transformer, without what an objective has added."""
    views = layout_of(found.spec).tensor_views(found.parameters)
    return {name: views[name] for name, _ in tensor_shapes(found.spec.model)}


def _write_transformers(found: ExportableModel, vocabulary: BpeVocabulary, folder: Path) -> None:
    spec = found.spec
    names = huggingface_model.llama_tensor_names(spec.model)
    tensors = {names[name]: values for name, values in _tensors(found).items()}
    stop = stop_token(spec, vocabulary)
    config = huggingface_model.llama_config(spec.model, stop)
    if not spec.resolved_objective.makes_text:
        config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}  # a score, of the last token's features
        tensors[huggingface_model.SCORE] = (
            layout_of(spec).tensor_views(found.parameters)[spec.resolved_objective.score_head].reshape(1, -1)
        )
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", {"bos_token_id": None, "eos_token_id": stop, "pad_token_id": stop})
    _json(folder / "tokenizer.json", tokenizer_json(vocabulary))
    _json(folder / "tokenizer_config.json", tokenizer_config(vocabulary, spec.model.context))
    with _file(folder / "model.safetensors") as stream:
        checkpoint.write_safetensors(stream, tensors.items())


def _write_gguf(found: ExportableModel, vocabulary: BpeVocabulary, folder: Path, is_half: bool) -> None:
    model = found.spec.model
    fields = gguf.gguf_metadata(model, vocabulary, found.spec.name, stop_token(found.spec, vocabulary), is_half)
    with _file(folder / "model.gguf") as stream:
        gguf.write_gguf(stream, fields, model, list(_tensors(found).items()), is_half)


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
