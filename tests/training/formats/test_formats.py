"""Models and tokenizers as other programs read them. `python -m benchmarks.interop` does it with those programs."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from protocol.errors import UserError
from training.data.tokenizer import BpeTokenizer, ByteTokenizer, load_vocabulary, tokenizer_json, train_bpe
from training.formats import checkpoint, gguf
from training.transformer import ModelSpec, tensor_shapes

BLOB = train_bpe(["the cat sat on the mat, don't they?  Grüße, 世界! 🙂\n".encode() * 9], 280)
MODEL = ModelSpec(width=16, heads=4, kv_heads=2, hidden=24, layers=2, vocabulary=280, context=8, tied=False)


def values_of(model: ModelSpec, seed: int = 0) -> list[tuple[str, Any]]:
    generator = np.random.default_rng(seed)
    return [(name, generator.standard_normal(shape, dtype=np.float32)) for name, shape in tensor_shapes(model)]


# safetensors ---------------------------------------------------------------------------------------------------------


def test_the_bytes_are_those_of_the_library() -> None:
    tensors, stream = values_of(MODEL), io.BytesIO()
    checkpoint.write_safetensors(stream, tensors)
    assert stream.getvalue() == safetensors.save(dict(tensors), checkpoint.WRITTEN_METADATA)


# Tokenizers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blob", "ours"), [(None, ByteTokenizer()), (BLOB, BpeTokenizer(BLOB))])
def test_every_text_has_the_ids_that_it_has_here_and_comes_back(blob: bytes | None, ours: Any) -> None:
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(load_vocabulary(blob, ours.vocabulary))))
    assert theirs.get_vocab_size() == ours.vocabulary

    @given(st.text())
    def same(text: str) -> None:
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text.encode()).tolist()
        assert theirs.decode(ids, skip_special_tokens=False) == text

    same()
    for text in ("don't  they\n\n 'll", "\0\x7f\u00ad\ufeff", " ", ""):
        assert theirs.decode(theirs.encode(text).ids, skip_special_tokens=False) == text


# GGUF ----------------------------------------------------------------------------------------------------------------


class Reader:
    """A reader of the parts of docs/gguf.md that the file needs."""

    def __init__(self, data: bytes) -> None:
        self.stream = io.BytesIO(data)
        magic, version, tensors, fields = struct.unpack("<4sIQQ", self.stream.read(24))
        assert (magic, version) == (b"GGUF", 3)
        self.fields = {self.text(): self.value(self.number("I")) for _ in range(fields)}
        places = [
            (self.text(), [self.number("Q") for _ in range(self.number("I"))], self.number("I"), self.number("Q"))
            for _ in range(tensors)
        ]
        start = -(-self.stream.tell() // 32) * 32
        self.tensors = {}
        for name, sizes, code, offset in places:
            assert offset % 32 == 0
            dtype = np.dtype({0: "<f4", 1: "<f2"}[code])
            self.tensors[name] = np.frombuffer(data, dtype, int(np.prod(sizes)), start + offset).reshape(sizes[::-1])

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.stream.read(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        return self.stream.read(self.number("Q")).decode()

    def value(self, code: int) -> Any:
        if code == 9:
            of = self.number("I")
            return [self.value(of) for _ in range(self.number("Q"))]
        return self.text() if code == 8 else self.number({4: "I", 5: "i", 6: "f", 7: "?"}[code])


def written(is_half: bool, stop: int | None = None, tensors: list[tuple[str, Any]] | None = None) -> Reader:
    stream = io.BytesIO()
    fields = gguf.gguf_metadata(MODEL, load_vocabulary(BLOB, MODEL.vocabulary), "tiny", stop, is_half)
    gguf.write_gguf(stream, fields, MODEL, tensors or values_of(MODEL), is_half)
    return Reader(stream.getvalue())


def test_a_gguf_file_has_every_tensor_under_the_name_that_llama_cpp_looks_for() -> None:
    read = written(is_half=True)
    of_layers = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    assert set(read.tensors) == {
        *("token_embd.weight", "output_norm.weight", "output.weight"),
        *(f"blk.{layer}.{name}.weight" for layer in range(2) for name in of_layers),
    }
    ours = dict(values_of(MODEL))
    assert np.array_equal(read.tensors["blk.1.ffn_down.weight"], ours["layers.1.down.weight"].astype(np.float16))
    assert np.array_equal(read.tensors["blk.1.ffn_norm.weight"], ours["layers.1.mlp_norm.weight"])  # float32
    assert np.array_equal(written(is_half=False).tensors["output.weight"], ours["lm_head.weight"])


def test_neighbouring_rows_of_query_and_key_are_turned_as_halves_are_here() -> None:
    read, ours = written(is_half=False).tensors, dict(values_of(MODEL))
    width = MODEL.width // MODEL.heads
    angles = np.arange(width // 2) + 0.3
    for theirs, name, heads in (("attn_q", "query", MODEL.heads), ("attn_k", "key", MODEL.kv_heads)):
        mine = ours[f"layers.0.{name}.weight"].reshape(heads, width, -1)
        first, second = mine[:, : width // 2], mine[:, width // 2 :]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned = first * cos - second * sin, first * sin + second * cos
        pairs = read[f"blk.0.{theirs}.weight"].reshape(heads, width // 2, 2, -1)
        assert np.allclose(pairs[:, :, 0] * cos - pairs[:, :, 1] * sin, turned[0])
        assert np.allclose(pairs[:, :, 0] * sin + pairs[:, :, 1] * cos, turned[1])


def test_a_gguf_file_brings_its_tokenizer() -> None:
    fields, vocabulary = written(is_half=True).fields, load_vocabulary(BLOB, MODEL.vocabulary)
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    tokens = fields["tokenizer.ggml.tokens"]
    assert {token: number for number, token in enumerate(tokens)} == vocabulary.ids
    assert [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]] == list(vocabulary.merges)
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == "Ā"  # the byte 0, which occurs in no text
    assert written(is_half=True, stop=7).fields["tokenizer.ggml.eos_token_id"] == 7
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (4, 2)


def test_what_float16_cannot_hold_is_refused_by_name() -> None:
    tensors = values_of(MODEL)
    dict(tensors)["layers.0.up.weight"][0, 0] = 7e4
    with pytest.raises(UserError, match=r"layers\.0\.up\.weight"):
        written(is_half=True, tensors=tensors)
    assert written(is_half=False, tensors=tensors).tensors["blk.0.ffn_up.weight"][0, 0] == 7e4
