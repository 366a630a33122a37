"""Foreign models: a folder of transformers with a model in the shape of Llama, or of Mistral, a Llama with a sliding window.

`config.json` has the sizes, safetensors files have the tensors, and `tokenizer.json` has a byte-level BPE. An error names any
unsupported feature, and no code of the folder is executed.

Tensors and sizes have the names of Llama (Touvron 2023) in `transformers`. Our tensors are equal to those of Llama, bit for bit,
since our models have the same rotary halves, RMSNorm, SwiGLU and grouped queries.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from protocol.blob_digest import BlobHasher
from protocol.errors import RemoteProtocolError, UserError
from storage.regular_files import open_regular
from training.data.pretokenizers import parse_normalizer, parse_pre_tokenizer, splits_words
from training.data.tokenizer import BpeTokenizer, added_token_json, byte_alphabet
from training.formats import checkpoint, packed_model
from training.formats.checkpoint import StoredTensor
from training.formats.packed_model import PackedTensor, TernaryTensor
from training.job_spec import JobSpec
from training.replicated.tensor_layout import float32_bytes, layout_of
from training.transformer import (
    BYTES,
    BYTES_WITH_END,
    EMBEDDING,
    OUTPUT_MATRIX,
    VOCABULARY_MAX,
    DenseLinear,
    ModelSpec,
    ModelTensor,
    model_tensors,
)

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
SUMS: Final = "SHA256SUMS"  # file of digests in the format of `sha256sum`
JSON_BYTES_MAX: Final = 16 << 20  # bytes of a JSON file: a tokenizer of 65,536 tokens has 4 MB
ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}  # by model type
# Attention to a window of tokens is a Mistral, since a Llama of `transformers` ignores the field `sliding_window`.
MODEL_TYPES: Final = {"attention": "llama", "sliding-window": "mistral"}  # by our kind of attention
DERIVED: Final = re.compile(r"\.rotary_emb\.inv_freq$")  # name of a derived tensor that older files contain
_SUM: Final = re.compile(r"([0-9a-f]{64})[ ][ *](.+)")

# Features that our models lack. A configuration that sets one is refused with the name of the field.
_ABSENT: Final = ("attention_bias", "mlp_bias", "quantization_config", "use_sliding_window", "rope_scaling")
_SIZES: Final = {
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
LINEAR: Final = "folkmoot_linear"  # our field with the kind of linear layers, if they are not dense
ACTIVATION: Final = "silu"
SCORE: Final = "score.weight"  # tensor of shape (1, width) that computes the score of a text, in a model without other outputs
# Defaults of `transformers` for fields that a configuration omits.
_EPSILON, _ROPE_BASE, _MISTRAL_WINDOW = 1e-6, 10_000.0, 4_096


FileTensor = StoredTensor | TernaryTensor | PackedTensor


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    folder: Path
    model: ModelSpec
    tokenizer: bytes | None  # JSON of the tokenizer; None: the tokens are bytes
    tensors: Mapping[str, FileTensor]  # tensors by our names
    stop: int | None  # the token that ends a text; None: the folder names no such token

    def write_parameters(self, spec: JobSpec, file: BinaryIO) -> BlobHasher:
        """Write the parameters in layout order and return their hash. Raises `UserError` at the first non-finite number."""
        hashed, theirs = BlobHasher(), llama_tensor_names(spec.model)
        for tensor in layout_of(spec).tensors:
            for values in self.tensors[tensor.name].iter_blocks():
                if not np.isfinite(values).all():
                    where = f"{self.tensors[tensor.name].path}: tensor {theirs[tensor.name]!r}"
                    raise UserError(f"{where} has a non-finite number")
                file.write(float32_bytes(values))
                hashed.update(float32_bytes(values))
        return hashed


def is_model_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def open_huggingface_model(folder: Path, as_bytes: bool = False) -> HuggingFaceModel:
    """Read a folder with a model, except the numbers of the tensors.

    With `as_bytes` the tokens are bytes, and the tokenizer is ignored. Raises `UserError`.
    """
    config = _json(folder / CONFIG)
    known = [of for kind, of in ARCHITECTURES.items() if kind == config.get("model_type")] or [*ARCHITECTURES.values()]
    if (kinds := config.get("architectures") or known[:1]) not in [[name] for name in known]:
        raise UserError(f"{folder / CONFIG}: architectures {_shown(kinds)} are not supported, only {' and '.join(known)}")
    try:
        model = model_spec_from_config(config)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    if model.vocabulary > VOCABULARY_MAX:
        larger = f"vocab_size {model.vocabulary} is more than {VOCABULARY_MAX}, the limit of 16-bit token ids"
        raise UserError(f"{folder / CONFIG}: {larger}; use a model with a smaller vocabulary, such as SmolLM with 49152")
    is_packed = (folder / packed_model.PACKED).is_file()
    of_tensors = [folder / packed_model.PACKED] if is_packed else checkpoint.tensor_file_paths(folder)
    _check_sums(folder, [folder / CONFIG, folder / GENERATION, folder / TOKENIZER, *of_tensors])
    stop = _stop(folder, config, model.vocabulary)
    tokenizer = _tokenizer(folder, model.vocabulary, as_bytes, stop)
    names = llama_tensor_names(model)
    tensors: Mapping[str, FileTensor]
    tensors = packed_model.read_packed(of_tensors[0], model, names) if is_packed else _dense_tensors(folder, model, names)
    return HuggingFaceModel(folder, model, tokenizer, tensors, stop)


def _stop(folder: Path, config: dict[str, Any], vocabulary: int) -> int | None:
    """Return the token that ends a text: the first valid `eos_token_id` of `generation_config.json`, else of `config.json`."""
    generation = _json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    for found in (generation, config):
        ids = found.get("eos_token_id")
        for number in ids if isinstance(ids, list) else [ids]:
            if type(number) is int and 0 <= number < vocabulary:
                return number
    return None


def _dense_tensors(folder: Path, model: ModelSpec, names: Mapping[str, str]) -> Mapping[str, StoredTensor | TernaryTensor]:
    """Return the tensors of the model by our names. Raises `UserError` if one is missing or unknown."""
    stored, tensors = _stored_tensors(folder, model, names), model_tensors(model)
    return {
        name: TernaryTensor(values, names[name]) if tensors[name].parameter.is_ternary else values
        for name, values in stored.items()
    }


def _stored_tensors(folder: Path, model: ModelSpec, names: Mapping[str, str]) -> dict[str, StoredTensor]:
    found = checkpoint.read_tensor_index(folder)
    spec, named = JobSpec(name="own", data=bytes(32), model=model), dict[str, StoredTensor]()
    for tensor in layout_of(spec).tensors:
        theirs = names[tensor.name]
        stored = found.pop(theirs, None)
        if stored is None:
            raise UserError(f"{folder}: tensor {theirs!r} is missing")
        if stored.shape != tensor.shape:
            raise UserError(
                f"{stored.path}: tensor {theirs!r} has shape {list(stored.shape)}, but {CONFIG} requires {list(tensor.shape)}"
            )
        named[tensor.name] = stored
    twin, embedding = found.pop(OUTPUT_MATRIX, None), named[EMBEDDING]  # Some programs also write the embedding as output matrix.
    if twin is not None and (
        twin.shape != embedding.shape or not all(map(np.array_equal, twin.iter_blocks(), embedding.iter_blocks()))
    ):
        raise UserError(
            f"{twin.path}: tensor {OUTPUT_MATRIX!r} differs from the embedding, but {CONFIG} sets tie_word_embeddings"
        )
    others = [name for name in found if not DERIVED.search(name)]
    if others:
        raise UserError(f"{found[others[0]].path}: tensor {others[0]!r} is not part of the model that {CONFIG} describes")
    return named


# Names of Llama


def llama_tensor_names(model: ModelSpec) -> dict[str, str]:
    """Return Llama's name for each of our tensors, by our name. Raises `UserError` for a layer that a Llama does not have."""
    return {name: _llama_name(name, tensor) for name, tensor in model_tensors(model).items()}


def _llama_name(name: str, tensor: ModelTensor) -> str:
    theirs = tensor.parameter.transformers
    if not theirs:
        raise UserError(f"the Llama model of transformers has no tensor for {name!r}")
    return theirs if tensor.layer is None else f"model.layers.{tensor.layer}.{theirs}"


def llama_config(model: ModelSpec, stop: int | None) -> dict[str, Any]:
    """Return the content of `config.json`. `stop` is the token that ends a text.

    The rotary base and the number type are written under two names each: `transformers` before 5.0 reads other names.
    """
    kind = MODEL_TYPES.get(model.attention)
    if kind is None:
        taken = " or ".join(map(repr, MODEL_TYPES))
        raise UserError(f"--format transformers takes models with attention {taken}, not {model.attention!r}")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **({} if model.window is None else {"sliding_window": model.window}),
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": ACTIVATION,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        **({LINEAR: model.linear} if model.linear != DenseLinear.name else {}),
    }


def model_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model specification for a `config.json`.

    Raises `UserError`, which names the first field that our models do not support.
    """
    kind = config.get("model_type")
    if kind not in [*ARCHITECTURES]:  # A dictionary raises `TypeError` for a list of the file.
        raise UserError(f"model_type {kind!r} is not supported, only {' and '.join(map(repr, ARCHITECTURES))}")
    for name in _ABSENT:
        if config.get(name):
            raise UserError(f"{name} {config[name]!r} is not supported")
    if config.get("hidden_act", ACTIVATION) != ACTIVATION:
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported, only {ACTIVATION!r}")
    sizes: dict[str, Any] = {ours: _positive(config, theirs) for ours, theirs in _SIZES.items()}
    heads = sizes["heads"]
    kv_heads = heads if config.get("num_key_value_heads") is None else _positive(config, "num_key_value_heads")
    tied = config.get("tie_word_embeddings") or False
    if type(tied) is not bool:
        raise UserError(f"tie_word_embeddings must be true or false, not {tied!r}")
    rope = config.get("rope_parameters")
    if rope is not None and (
        not isinstance(rope, Mapping)
        or rope.get("rope_type", "default") != "default"
        or rope.keys() - {"rope_type", "rope_theta"}
    ):
        raise UserError(f"rope_parameters {rope!r} are not supported: only rope_theta is")
    if kind == "llama" and config.get("sliding_window"):
        raise UserError(
            f"sliding_window {config['sliding_window']!r} is not supported for model_type 'llama', only for 'mistral'"
        )
    rope_base = _number(rope or {}, "rope_theta", _number(config, "rope_theta", _ROPE_BASE))
    model = ModelSpec(
        **sizes,
        kv_heads=kv_heads,
        tied=tied,
        rope_base=rope_base,
        norm_epsilon=_number(config, "rms_norm_eps", _EPSILON),
        linear=str(config.get(LINEAR, DenseLinear.name)),
    ).with_window(_window(config) if kind == "mistral" else None)
    problem = model.problem()
    if problem:
        raise UserError(problem)
    if config.get("head_dim") not in (None, model.width // heads):
        raise UserError(
            f"head_dim must be hidden_size / num_attention_heads = {model.width // heads}, not {config['head_dim']!r}"
        )
    return model


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the window of a Mistral, which counts the token itself, as ours does. None: it attends to all tokens."""
    window = config.get("sliding_window", _MISTRAL_WINDOW)
    return None if window is None else _positive({"sliding_window": window}, "sliding_window")


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= 2**31:
        raise UserError(f"{name} must be a positive whole number, not {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, usual: float) -> float:
    value = usual if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{name} must be a number, not {value!r}")
    return float(value)


# Tokenizers


def _tokenizer(folder: Path, vocabulary: int, as_bytes: bool, stop: int | None) -> bytes | None:
    """Return the JSON of the folder's tokenizer for a job; None: the tokens are bytes.

    Raises `UserError` for an unsupported tokenizer. A special token that ends a text stays special.
    """
    path = folder / TOKENIZER
    if as_bytes or not path.is_file():
        if (vocabulary, stop) != (BYTES_WITH_END, BYTES) and vocabulary != BYTES:
            raise UserError(
                f"{folder}: a vocabulary of {vocabulary} is not that of bytes: add {TOKENIZER}, and leave out --vocabulary"
            )
        return None
    found = _json(path)
    try:
        problem = _other_tokenizer(found)
        blob = None if problem else _blob(found, vocabulary, stop)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer: {error!r}") from None
    if problem:
        raise UserError(f"{path}: {problem}; if the tokens of the model are bytes, use --vocabulary {BYTES}")
    if blob is None:
        return None
    try:
        made = BpeTokenizer(blob)
    except RemoteProtocolError as error:
        raise UserError(f"{path}: {error.detail}") from None
    if made.vocabulary != vocabulary:
        raise UserError(f"{path} has {made.vocabulary} tokens, but {CONFIG} sets vocab_size {vocabulary}")
    return blob


def _blob(found: dict[str, Any], vocabulary: int, stop: int | None) -> bytes | None:
    """Return the JSON of a tokenizer for a job; None: the tokens are bytes.

    Unused ids of the vocabulary become special tokens.
    """
    pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in found["model"]["merges"]]
    vocab = dict(found["model"]["vocab"])
    added = [dict(token) for token in found.get("added_tokens") or []]
    named = vocab | {str(token["content"]): int(token["id"]) for token in added}
    end = next((content for content, number in named.items() if number == stop), None)
    if not pairs and (
        named == byte_alphabet() or (stop == BYTES and end is not None and named == byte_alphabet() | {end: BYTES})
    ):
        return None
    if end is not None:  # The token that ends a text becomes special, even if the file lists it as an ordinary token.
        added = [token for token in added if token["id"] != stop] + [added_token_json(end, named[end])]
    free = sorted(set(range(min(vocabulary, VOCABULARY_MAX))) - set(named.values()))
    padding = [added_token_json(_unused(number, named), number) for number in free]
    kept = {
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs, "ignore_merges": bool(found["model"].get("ignore_merges"))},
        "normalizer": parse_normalizer(found.get("normalizer")),
        "pre_tokenizer": parse_pre_tokenizer(found["pre_tokenizer"]),
        "added_tokens": [*added, *padding],
        "end_of_text": end,
    }
    return json.dumps(kept, ensure_ascii=False).encode()


def _unused(number: int, named: Container[str]) -> str:
    """Return a name for an id that no token uses. A vocabulary that was padded to a round size has such ids."""
    name = f"[PAD{number}]"
    while name in named:
        name = f"[{name}]"
    return name


def _other_tokenizer(found: Any) -> str | None:
    """Return the part of a tokenizer's file that `BpeTokenizer` does not support, as text for people; None if there is none."""
    model, after = found["model"], found.get("post_processor")
    if model.get("type", "BPE") != "BPE":
        return f"model {model.get('type')!r} is not a byte-level BPE"
    try:
        parse_normalizer(found.get("normalizer"))
        before = parse_pre_tokenizer(found.get("pre_tokenizer"))
    except ValueError as error:
        return str(error)
    if model["merges"] and not splits_words(before):
        return f"pre_tokenizer {_shown(found['pre_tokenizer'])} does not split words"
    added = _added_by(after)
    if added:
        return f"post_processor {added}, which is not supported: remove this field from the file"
    for name in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"{name} {_shown(model[name])} is not supported"
    return None


def _added_by(processor: Any) -> str | None:
    """Return the tokens that a post-processor adds to a text, as text for an error; None if it adds none."""
    if processor is None or processor.get("type") == "ByteLevel":
        return None
    if processor.get("type") == "TemplateProcessing" and [list(part) for part in processor.get("single", ())] == [["Sequence"]]:
        return None  # The template has only the text: transformers 5 writes it for a tokenizer without special tokens.
    if processor.get("type") == "Sequence":
        return next(filter(None, map(_added_by, processor["processors"])), None)
    names = [str(part["SpecialToken"].get("id")) for part in processor.get("single", ()) if "SpecialToken" in part]
    return f"{processor.get('type')} adds {', '.join(map(repr, names)) or 'tokens'}"


# Digests that a folder may contain


def sha256_sums(folder: Path) -> str:
    """Return the SHA-256 of all files in the folder except `SHA256SUMS`, in the format of `sha256sum`."""
    return "".join(f"{_sum_of(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.name != SUMS)


def _sum_of(path: Path) -> str:
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_sums(folder: Path, paths: Iterable[Path]) -> None:
    """Check the SHA-256 of `paths` against `SHA256SUMS` or the record of a download, as far as known. Raises `UserError`."""
    listed = dict(_listed(folder / SUMS))
    for path in paths:
        wanted = listed.get(path.name) or _downloaded(path)
        if wanted is not None and path.is_file() and _sum_of(path) != wanted:
            raise UserError(f"{path} is damaged: its SHA-256 is not {wanted[:16]}…: download it again")


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs (file name, SHA-256) in a file of `sha256sum`."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        found = _SUM.fullmatch(line.strip())
        if found is None:
            raise UserError(f"{path}: {line[:80]!r} is not a line of `sha256sum`")
        yield found[2].removeprefix("./"), found[1]


def _downloaded(path: Path) -> str | None:
    """Return the SHA-256 of a file that huggingface_hub recorded at the download; None if there is none.

    In the cache of huggingface_hub, the SHA-256 is the name of a large file. A download into a folder stores it in a metadata
    file.
    """
    beside = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    lines = beside.read_text(errors="replace").splitlines() if beside.is_file() else []
    named = (path.resolve().name, *(line.strip() for line in lines[1:2]))
    return next((name for name in named if re.fullmatch("[0-9a-f]{64}", name)), None)


def _json(path: Path) -> Any:
    try:
        with open_regular(path) as stream:
            text = stream.read(JSON_BYTES_MAX + 1)
        checkpoint.require_downloaded(path, text)
        if len(text) > JSON_BYTES_MAX:
            raise ValueError(f"it has more than {JSON_BYTES_MAX} bytes")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON file of a model: {error}") from None
    return found


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]
