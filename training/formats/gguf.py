"""GGUF, the format of llama.cpp (github.com/ggml-org/ggml, docs/gguf.md, version 3): a model with its tokenizer in one file.

Rotary positions of GGUF turn pairs of neighbouring features of a head. Our rotary positions turn pairs that are half a head
apart. The rows of query and key are therefore reordered.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from training.data.pretokenizers import llama_cpp_name
from training.data.tokenizer import BpeVocabulary, byte_alphabet
from training.replicated.tensor_layout import Float32Array
from training.transformer import ModelSpec, ModelTensor, model_tensors

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
ROWS_AT_ONCE: Final = 1 << 20  # number of elements that are converted at once
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # GGUF's codes for types of values
_PLAIN: Final = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # GGUF's types of tokens: text, control, and text that is matched before words are split

Field = tuple[int, Any]  # a metadata value: (type code, value); the value of an array is (type code of its elements, elements)


def gguf_name(name: str, tensor: ModelTensor) -> str:
    """Return GGUF's name of one of our tensors. Raises `UserError` for a tensor that GGUF's Llama does not have."""
    theirs = tensor.parameter.gguf
    if not theirs:
        raise UserError(f"GGUF does not support the tensor {name!r}: it takes models with feed_forward 'swiglu'")
    return theirs if tensor.layer is None else f"blk.{tensor.layer}.{theirs}"


def gguf_metadata(model: ModelSpec, vocabulary: BpeVocabulary, name: str, stop: int | None, is_half: bool) -> dict[str, Field]:
    """Return the metadata of the file. `stop` is the token that ends a text, if any.

    Without a named token llama.cpp ends texts at token 11. Without `stop` the metadata therefore name the byte 0, which no text
    has.
    """
    if model.window is not None:  # llama.cpp would let a Llama attend to all tokens.
        windows = f"GGUF does not support attention {model.attention!r}: it takes models with attention 'attention'"
        raise UserError(f"{windows}; use --format transformers")
    nothing = next(character for character, byte in byte_alphabet().items() if byte == 0)
    end = vocabulary.ids[nothing] if stop is None else stop
    added = {token["content"] for token in vocabulary.added}
    types = [CONTROL if one in vocabulary.special else USER_DEFINED if one in added else NORMAL for one in vocabulary.tokens]
    words = llama_cpp_name(vocabulary.pre_tokenizer, vocabulary.ignores_merges)
    if words is None:
        raise UserError("GGUF has no name for the pre-tokenizer of this model: use --format transformers")
    return {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, name),
        "general.file_type": (UINT32, int(is_half)),
        "llama.vocab_size": (UINT32, model.vocabulary),
        "llama.context_length": (UINT32, model.context),
        "llama.embedding_length": (UINT32, model.width),
        "llama.block_count": (UINT32, model.layers),
        "llama.feed_forward_length": (UINT32, model.hidden),
        "llama.rope.dimension_count": (UINT32, model.width // model.heads),
        "llama.rope.freq_base": (FLOAT32, model.rope_base),
        "llama.attention.head_count": (UINT32, model.heads),
        "llama.attention.head_count_kv": (UINT32, model.kv_heads),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, model.norm_epsilon),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, words),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, vocabulary.tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [f"{left} {right}" for left, right in vocabulary.merges])),
        "tokenizer.ggml.bos_token_id": (UINT32, end),
        "tokenizer.ggml.eos_token_id": (UINT32, end),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
    }


def write_gguf(
    stream: BinaryIO, fields: Mapping[str, Field], model: ModelSpec, tensors: Sequence[tuple[str, Float32Array]], is_half: bool
) -> None:
    """Write a GGUF file. `tensors` are pairs of our name and values, and must be tensors of the model. Raises `UserError`.

    Matrices are float16 if `is_half`; norms are always float32.
    """
    header = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(fields))
    known = model_tensors(model)
    header += b"".join(_string(key) + struct.pack("<I", code) + _value(code, value) for key, (code, value) in fields.items())
    offset = 0
    for name, values in tensors:
        theirs, dtype = gguf_name(name, known[name]), _dtype(values, is_half)
        sizes = values.shape[::-1]  # In GGUF the fastest dimension is first.
        header += _string(theirs) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, int(dtype == np.float16), offset)
        offset += _padded(values.size * dtype.itemsize)
    stream.write(header.ljust(_padded(len(header)), b"\0"))
    for name, values in tensors:
        heads = known[name].parameter.rotary_heads
        if heads:  # The D rows of each head get the order 0, D/2, 1, D/2 + 1, …, as GGUF requires.
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        flat, dtype = values.reshape(-1), _dtype(values, is_half)
        for start in range(0, len(flat), ROWS_AT_ONCE):
            with np.errstate(over="ignore"):
                part = flat[start : start + ROWS_AT_ONCE].astype(dtype)
            if not np.isfinite(part).all():
                raise UserError(f"{name} has a number outside the range of float16: use --format gguf-f32")
            stream.write(part.data)
        size = len(flat) * dtype.itemsize
        stream.write(bytes(_padded(size) - size))


def _dtype(values: npt.NDArray[Any], is_half: bool) -> np.dtype[Any]:
    return np.dtype("<f2" if is_half and values.ndim > 1 else "<f4")


def _value(code: int, value: Any) -> bytes:
    if code == STRING:
        return _string(value)
    if code == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_value(of, item) for item in items)
    return struct.pack(_PLAIN[code], value)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT
