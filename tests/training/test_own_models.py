"""Import of users' own models: they are read unchanged, or refused by name."""

from __future__ import annotations

import hashlib
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import Split

from protocol.errors import UserError
from tests.training import folders
from tests.training.folders import shapes, tensors, written
from training.data.pretokenizers import LLAMA_3, QWEN_2
from training.data.tokenizer import BpeTokenizer, byte_alphabet, load_vocabulary, tokenizer_json, train_bpe
from training.formats import gguf, huggingface_model
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import ModelSpec, tensor_shapes

OURS = {"self_attn.q_proj": "query", "mlp.down_proj": "down", "input_layernorm": "attention_norm"}


def read(folder: Path) -> tuple[dict[str, Float32Array], bytes]:
    """Return the tensors by our names, and the digest of the blob."""
    own, stream = huggingface_model.open_huggingface_model(folder), io.BytesIO()
    spec = JobSpec(name="own", data=bytes(32), model=own.model)
    digest = own.write_parameters(spec, stream).digest()
    assert hashlib.sha256(stream.getvalue()).digest() == digest
    return layout_of(spec).tensor_views(np.frombuffer(stream.getvalue(), "<f4")), digest


def refused(why: str, folder: Path) -> None:
    with pytest.raises(UserError, match=why):
        huggingface_model.open_huggingface_model(folder)


def test_every_number_comes_in_as_it_is(tmp_path: Path) -> None:
    values = tensors()
    own = huggingface_model.open_huggingface_model(written(tmp_path, values))
    model = ModelSpec(
        context=32, width=16, layers=2, heads=2, kv_heads=1, hidden=24, tied=False, rope_base=5e5, norm_epsilon=1e-5
    )
    assert (own.model, own.tokenizer) == (model, None)
    found, _ = read(tmp_path)
    assert np.array_equal(found["embedding.weight"], values["model.embed_tokens.weight"])
    assert np.array_equal(found["lm_head.weight"], values["lm_head.weight"])
    assert np.array_equal(found["final_norm.weight"], values["model.norm.weight"])
    for theirs, ours in OURS.items():
        assert np.array_equal(found[f"layers.1.{ours}.weight"], values[f"model.layers.1.{theirs}.weight"])
    assert len(found) == len(values) == len({array.tobytes() for array in values.values()})


def test_a_mistral_comes_in_with_its_window(tmp_path: Path) -> None:
    values, said = tensors(), {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    own = huggingface_model.open_huggingface_model(written(tmp_path, values, **said))
    assert (own.model.attention, own.model.window) == ("sliding-window", 8)
    found, _ = read(tmp_path)
    assert np.array_equal(found["layers.1.query.weight"], values["model.layers.1.self_attn.q_proj.weight"])


def cut_in_two(folder: Path, values: dict[str, Float32Array]) -> dict[str, dict[str, str]]:
    """Split a model into two files, and return their index."""
    (folder / "model.safetensors").unlink()
    names = list(values)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, of in parts.items():
        safetensors.save_file({name: values[name] for name in of}, folder / file)
    index = {"weight_map": {name: file for file, of in parts.items() for name in of}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_several_files_and_a_tied_head_give_the_same(tmp_path: Path) -> None:
    values = tensors(tied=True)
    written(tmp_path / "one", values, tie_word_embeddings=True)
    folder = written(tmp_path / "many", values, tie_word_embeddings=True)
    index = cut_in_two(folder, values)
    assert read(folder)[1] == read(tmp_path / "one")[1]
    index["weight_map"][next(iter(values))] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(r"'model\.embed_tokens\.weight' is not in b\.safetensors", folder)
    index["weight_map"][next(iter(values))] = "../one/model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("not a safetensors file in this folder", folder)


@pytest.mark.parametrize("missing", [["b.safetensors"], ["a.safetensors", "b.safetensors"]])
def test_missing_shards_are_named(tmp_path: Path, missing: list[str]) -> None:
    values = tensors()
    folder = written(tmp_path, values)
    cut_in_two(folder, values)
    assert read(folder)
    for file in missing:
        (folder / file).unlink()
    count = f"{len(missing)} of 2 files"
    refused(rf"{missing[0]} is missing.*{count} .*model\.safetensors\.index\.json", folder)
    (folder / missing[0]).symlink_to(tmp_path / "nowhere")  # as in a download cache that was cleaned
    refused(f"{missing[0]} is missing", folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, file: str) -> None:
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    refused(rf"{file} is a Git LFS pointer.*git lfs pull", folder)


def test_halves_are_the_same_numbers_as_float32(tmp_path: Path) -> None:
    halves = {name: array.astype(np.float16) for name, array in tensors().items()}
    found, digest = read(written(tmp_path / "half", halves))
    assert np.array_equal(found["embedding.weight"], halves["model.embed_tokens.weight"].astype(np.float32))
    cut = {name: ((array.view("<u4") >> 16) << 16).view("<f4") for name, array in tensors().items()}
    whole = read(written(tmp_path / "whole", cut))[1]
    folder = written(tmp_path / "brain", {name: (array.view("<u4") >> 16).astype("<u2") for name, array in cut.items()})
    file = folder / "model.safetensors"
    file.write_bytes(_with_header(file.read_bytes(), lambda header: header.replace('"U16"', '"BF16"')))
    assert read(folder)[1] == whole != digest


def _with_header(data: bytes, change: Any) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length].decode()).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures .*Mistral.* are not supported, only LlamaForCausalLM"),
        ({"model_type": "mistral"}, "architectures .*Llama.* are not supported, only MistralForCausalLM"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not supported, only 'llama' and 'mistral'"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported, only 'llama' and 'mistral'"),
        ({"architectures": ["Qwen2"], "model_type": "qwen2"}, "only LlamaForCausalLM and MistralForCausalLM"),
        ({"model_type": "qwen2", "architectures": None}, "model_type 'qwen2' is not supported, only 'llama' and 'mistral'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling .*linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_parameters .*yarn"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"head_dim": 16}, "head_dim must be .* not 16"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .*bits"),
        ({"hidden_size": 17, "head_dim": None}, "width 17 must be an even multiple of heads 2"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"hidden_size": 2**20, "head_dim": 2**19, "intermediate_size": 2**20}, "parameters are more than"),
        ({"rms_norm_eps": 0.0}, "norm_epsilon must be in .*, not 0"),
        ({"vocab_size": 300}, "a vocabulary of 300 is not that of bytes: add tokenizer.json"),
        ({"num_hidden_layers": 3}, r"'model\.layers\.2\.input_layernorm\.weight' is missing"),
        ({"num_hidden_layers": 1}, r"'model\.layers\.1\.\S+' is not part of the model"),
        ({"intermediate_size": 25}, r"gate_proj\.weight' has shape \[24, 16\], but config\.json requires \[25, 16\]"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' differs from the embedding"),
    ],
)
def test_what_this_program_lacks_is_refused_by_name(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    folder = written(tmp_path, tensors(), **said)
    with pytest.raises(UserError, match=why) as found:
        huggingface_model.open_huggingface_model(folder)
    assert "\n" not in str(found.value) and str(folder) in str(found.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, bad: float, name: str) -> None:
    values = tensors()
    values[name][-1, -1] = bad
    with pytest.raises(UserError, match=f"'{name}' has a non-finite number"):
        read(written(tmp_path, values))


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_flipped_byte_is_found_wherever_something_says_what_it_was(tmp_path: Path) -> None:
    """A flip in the header is always found. In a number it is found by the folder's digests, or as another digest of the job."""
    folder = written(tmp_path / "a", sums=True)
    _, digest = read(folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    file.write_bytes(_flipped(whole, len(whole) - 1))
    refused(r"model\.safetensors is damaged: its SHA-256 is not", folder)
    (folder / "SHA256SUMS").unlink()
    assert read(folder)[1] != digest
    for at in range(0, 8 + length, 13):
        file.write_bytes(_flipped(whole, at))
        with pytest.raises(UserError):
            huggingface_model.open_huggingface_model(folder)
    file.write_bytes(whole[:-1])
    refused("is damaged", folder)


def test_digests_of_downloads_are_known(folder: Path) -> None:
    file = folder / "model.safetensors"
    beside = folder / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    beside.parent.mkdir(parents=True)
    beside.write_text(f"{'0' * 40}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n1.0\n")
    huggingface_model.open_huggingface_model(folder)
    beside.write_text(f"{'0' * 40}\n{'1' * 64}\n1.0\n")
    refused(r"its SHA-256 is not 1111111111111111…", folder)


def test_pickles_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(r"pytorch_model\.bin is a pickle, which can run code when it is opened", folder)
    (folder / "pytorch_model.bin").unlink()
    refused(r"has neither model\.safetensors nor", folder)


def tensors_of(vocabulary: int) -> dict[str, Float32Array]:
    return tensors() | {name: np.zeros((vocabulary, 16), "<f4") for name in ("model.embed_tokens.weight", "lm_head.weight")}


def _bpe() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(train_bpe([b"in the beginning was the word, and the word was here\n" * 50], 270))
    return made


def tokenizer_from(folder: Path, found: dict[str, Any]) -> bytes:
    (folder / "tokenizer.json").write_text(json.dumps(found))
    blob = huggingface_model.open_huggingface_model(folder).tokenizer
    assert blob is not None
    return blob


def test_a_byte_level_bpe_makes_the_same_tokens(tmp_path: Path) -> None:
    found = _bpe()
    folder = written(tmp_path, tensors_of(270), vocab_size=270)
    text = "the word, äöü".encode()
    for merges in (found["model"]["merges"], [" ".join(pair) for pair in found["model"]["merges"]]):
        found["model"]["merges"] = merges
        blob = tokenizer_from(folder, found)
        assert BpeTokenizer(blob).encode(text).tolist() == BpeTokenizer(json.dumps(_bpe()).encode()).encode(text).tolist()


def test_the_tokens_of_bytes_need_no_tokenizer(folder: Path) -> None:
    for cuts_words in (True, False):  # without merges, inside words or across them
        before = {"type": "ByteLevel", "use_regex": cuts_words}
        found = {"model": {"type": "BPE", "vocab": byte_alphabet(), "merges": []}, "pre_tokenizer": before}
        (folder / "tokenizer.json").write_text(json.dumps(found))
        assert huggingface_model.open_huggingface_model(folder).tokenizer is None


def test_a_template_of_the_text_alone_changes_no_tokenizer(folder: Path) -> None:
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}
    model = {"type": "BPE", "vocab": byte_alphabet(), "merges": []}
    found = {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "post_processor": template}
    (folder / "tokenizer.json").write_text(json.dumps(found))
    assert huggingface_model.open_huggingface_model(folder).tokenizer is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, 'normalizer "Lowercase" is not supported, only NFC, NFD, NFKC, NFKD'),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}}, 'normalizer "Strip"'),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
            r'pre_tokenizer .*"\(a\+\)\+\$"',
        ),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Removed", "invert": False}},
            'pre_tokenizer .*"Removed"',
        ),
        *(
            ({"added_tokens": [{"content": " <s>", "id": 270, more: True}]}, f"added token ' <s>' sets {more}")
            for more in ("single_word", "lstrip", "rstrip")
        ),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer .*Metaspace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
            "use_regex.* does not split words; if the tokens of the model are bytes, use --vocabulary 256",
        ),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {}}]}},
            "post_processor TemplateProcessing adds '<s>'.*remove this field from the file",
        ),
        ({"model": {"type": "Unigram", "vocab": [], "merges": []}}, "model 'Unigram'"),
        *(
            ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], name: value}}, f"{name} {json.dumps(value)}")
            for name, value in (
                ("dropout", 0.1),
                ("byte_fallback", True),
                ("continuing_subword_prefix", "##"),
                ("end_of_word_suffix", "</w>"),
            )
        ),
        ({"added_tokens": [{"content": "<s>", "id": 256}]}, "two tokens have the same id"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}, "a byte has no token"),
        ({"model": "none"}, "is not a tokenizer"),
    ],
)
def test_another_tokenizer_is_refused_by_name_unless_bytes_are_meant(folder: Path, change: dict[str, Any], why: str) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(_bpe() | change))
    refused(why, folder)
    assert huggingface_model.open_huggingface_model(folder, as_bytes=True).tokenizer is None


CORPUS = ["in the beginning was the word, and the WORD's 2026 times here: 世界! Grüße\n\n  I'm 100 %"] * 50
SPLITS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-3": [Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    "qwen": [Split(Regex(QWEN_2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
}
ADDED = ["<tool_call>", "größer als"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of_kind(kind: str) -> Any:
    """Return a tokenizer like those projects' own: SmolLM has special tokens in its vocabulary, the others behind it."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-3"))
    made.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[kind])
    made.decoder = decoders.ByteLevel()
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
    inside = SPECIAL if kind == "smollm" else []
    alphabet_of_bytes = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet_of_bytes, special_tokens=inside, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    if kind != "smollm":
        made.add_special_tokens(SPECIAL)
    if kind == "qwen":
        made.add_tokens([*ADDED, f"[PAD{made.get_vocab_size() + 4}]"])
    if kind == "llama-3":
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False)])
    return made


@pytest.mark.parametrize("padding", [0, 13], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", SPLITS)
def test_tokenizers_of_known_kinds_make_the_same_tokens(tmp_path: Path, kind: str, padding: int) -> None:
    theirs = tokenizer_of_kind(kind)
    vocabulary = theirs.get_vocab_size() + padding
    folder = written(tmp_path, tensors_of(vocabulary), vocab_size=vocabulary, eos_token_id=theirs.token_to_id("<|im_end|>"))
    theirs.save(str(folder / "tokenizer.json"))
    blob = huggingface_model.open_huggingface_model(folder).tokenizer
    assert blob is not None
    ours = BpeTokenizer(blob)
    assert (ours.vocabulary, ours.end_of_text) == (vocabulary, theirs.token_to_id("<|im_end|>"))
    exported = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(load_vocabulary(blob, vocabulary))))
    exported.encode_special_tokens = theirs.encode_special_tokens = True
    assert exported.get_vocab_size() == vocabulary

    @given(
        st.text()
        | st.lists(st.sampled_from([*CORPUS[0].split(" "), " ", "  ", "e\u0301", *SPECIAL, *ADDED, "gro\u0308ßer als"])).map(
            "".join
        )
    )
    def same(text: str) -> None:
        ids = ours.encode(text.encode()).tolist()
        assert ids == exported.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids).decode() == (unicodedata.normalize("NFC", text) if kind == "qwen" else text)
        assert sum(ours.token_bytes[ids]) == len(ours.decode(ids))

    same()
    assert ours.decode(range(vocabulary - padding, vocabulary)) == b""
    if kind == "qwen":
        assert ours.encode(b"a<tool_call>b").tolist()[1] == theirs.token_to_id("<tool_call>")
    fields = gguf.gguf_metadata(ModelSpec(vocabulary=vocabulary), load_vocabulary(blob, vocabulary), kind, None, True)
    assert fields["tokenizer.ggml.pre"][1] == {"smollm": "smollm", "llama-3": "llama-bpe", "qwen": "qwen2"}[kind]


def test_a_word_of_the_vocabulary_that_no_merges_make_is_one_token_where_merges_are_ignored(tmp_path: Path) -> None:
    found = json.loads(tokenizer_of_kind("llama-3").to_str())
    number = len(found["model"]["vocab"]) + len(found["added_tokens"])
    found["model"]["vocab"]["unmerged"] = number
    folder = written(tmp_path, tensors_of(number + 1), vocab_size=number + 1)
    for ignores in (True, False):
        found["model"]["ignore_merges"] = ignores
        blob = tokenizer_from(folder, found)
        exported = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(load_vocabulary(blob, number + 1))))
        ids = BpeTokenizer(blob).encode(b"unmerged").tolist()
        assert ids == exported.encode("unmerged").ids and (ids == [number]) is ignores


@pytest.mark.parametrize(
    ("config", "generation", "stop"),
    [
        (5, None, 5),
        ([900, 5, 6], None, 5),
        (5, [7], 7),
        (5, 900, 5),
        (None, None, None),
        ("5", True, None),
    ],
)
def test_the_first_end_of_text_that_the_vocabulary_has_is_that_of_the_model(
    tmp_path: Path, config: Any, generation: Any, stop: int | None
) -> None:
    folder = written(tmp_path, eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert huggingface_model.open_huggingface_model(folder).stop == stop


def test_the_end_of_text_is_special_also_where_the_file_has_a_plain_token(tmp_path: Path) -> None:
    found = json.loads(tokenizer_of_kind("smollm").to_str())
    end = found["model"]["vocab"]["<|im_end|>"]
    found["added_tokens"] = [token for token in found["added_tokens"] if token["id"] != end]
    vocabulary = len(found["model"]["vocab"])
    folder = written(tmp_path, tensors_of(vocabulary), vocab_size=vocabulary, eos_token_id=end)
    blob = tokenizer_from(folder, found)
    ours = BpeTokenizer(blob)
    assert ours.end_of_text == end and end not in ours.encode(b"<|im_end|>").tolist() and ours.decode([end]) == b""


def test_a_vocabulary_beyond_16_bits_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, vocab_size=128_256)
    refused(r"config\.json: .*128256.*65536", tmp_path)


def test_a_tokenizer_of_another_size_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(_bpe()))
    refused(r"has 270 tokens, but config\.json sets vocab_size 256", folder)


def test_the_folders_of_these_tests_have_the_tensors_of_transformers() -> None:
    assert set(shapes()) - set(shapes(tied=True)) == {"lm_head.weight"} and len(shapes()) == 2 + 9 * folders.LAYERS + 1


# Names of transformers ------------------------------------------------------------------------------------------------


MODELS = (ModelSpec(), ModelSpec(tied=False, rope_base=500_000.0, norm_epsilon=1e-5, kv_heads=4, layers=12, vocabulary=1_000))
# The state of transformers' own LlamaForCausalLM for these sizes, by `benchmarks.interop`.
OF_TRANSFORMERS = {
    "model.embed_tokens.weight": (256, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.mlp.gate_proj.weight": (192, 64),
    "model.layers.0.mlp.up_proj.weight": (192, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 192),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.norm.weight": (64,),
    "lm_head.weight": (256, 64),
}


def test_names_and_shapes_are_those_of_transformers() -> None:
    model = ModelSpec(layers=1, tied=False)
    names = huggingface_model.llama_tensor_names(model)
    assert {names[name]: shape for name, shape in tensor_shapes(model)} == OF_TRANSFORMERS


@pytest.mark.parametrize("model", MODELS)
def test_each_tensor_has_a_name_of_its_own(model: ModelSpec) -> None:
    names = huggingface_model.llama_tensor_names(model)
    assert list(names) == [name for name, _ in tensor_shapes(model)] and len(set(names.values())) == len(names)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_come_back(model: ModelSpec) -> None:
    assert huggingface_model.model_spec_from_config(json.loads(json.dumps(huggingface_model.llama_config(model, None)))) == model


def test_a_configuration_of_an_older_transformers_says_the_rotary_base_alone() -> None:
    config = huggingface_model.llama_config(MODELS[1], None)
    del config["rope_parameters"]
    assert huggingface_model.model_spec_from_config(config | {"rope_scaling": None}) == MODELS[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("head_dim", 32),
        ("hidden_size", "64"),
        ("num_key_value_heads", 0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_our_models_lack_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field):
        huggingface_model.model_spec_from_config(huggingface_model.llama_config(ModelSpec(), None) | {field: value})
