"""The token that ends a text: tokenizers that have it, texts that never encode to it, and files for other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from peer import features
from peer.export.model_export import write_model_files
from peer.export.model_provenance import ExportableModel
from protocol import codec
from protocol.errors import RemoteProtocolError
from rlhf.objectives.supervised_objectives import DpoTerms, InstructTerms
from tests.training.formats.test_formats import Reader
from training.data.tokenizer import END_OF_TEXT, load_tokenizer, train_bpe
from training.formats import huggingface_model
from training.job_spec import JobSpec
from training.replicated.tensor_layout import layout_of
from training.transformer import ModelSpec

BLOB = train_bpe(["the cat sat on the mat, don't they?  Grüße, 世界! 🙂\n".encode() * 9], 280)
KINDS = {"bytes": (None, 257), "bpe": (BLOB, 280)}
LITERAL = f"a{END_OF_TEXT} b {END_OF_TEXT}\n{END_OF_TEXT}"


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_token_ends_a_text_and_no_text_becomes_it(kind: str) -> None:
    blob, vocabulary = KINDS[kind]
    known = load_tokenizer(blob, vocabulary)
    assert (known.vocabulary, known.end_of_text, len(known.token_bytes)) == (vocabulary, vocabulary - 1, vocabulary)
    assert known.token_bytes[vocabulary - 1] == 0 and known.token_bytes[: vocabulary - 1].all()
    ids = known.encode(LITERAL.encode()).tolist()
    assert vocabulary - 1 not in ids and known.decode(ids).decode() == LITERAL
    assert known.decode([*ids, vocabulary - 1]).decode() == LITERAL, "the token is no text"


def test_bytes_alone_and_older_tokenizers_have_no_such_token() -> None:
    plain = json.loads(BLOB)
    plain["added_tokens"] = []
    assert load_tokenizer(None, 256).end_of_text is None
    assert load_tokenizer(json.dumps(plain).encode(), 280).end_of_text is None
    two = [{"id": number, "content": content, "special": True} for number, content in ((279, END_OF_TEXT), (280, "<s>"))]
    named = plain | {"added_tokens": two, "end_of_text": END_OF_TEXT}
    assert load_tokenizer(json.dumps(named).encode(), 281).end_of_text == 279
    assert load_tokenizer(json.dumps(plain | {"added_tokens": two}).encode(), 281).end_of_text is None, "neither is named"


def test_a_special_token_that_texts_could_become_is_refused() -> None:
    plain = json.loads(BLOB)
    for content in ("a", "".join(plain["model"]["merges"][0])):
        number = plain["model"]["vocab"][content]
        blob = json.dumps(plain | {"added_tokens": [{"id": number, "content": content, "special": True}]}).encode()
        with pytest.raises(RemoteProtocolError, match="is also an ordinary token"):
            load_tokenizer(blob, 280)


# Files for other programs --------------------------------------------------------------------------------------------


def found_of(kind: str, objective: str = "language", settings: bytes = b"") -> ExportableModel:
    blob, vocabulary = KINDS[kind]
    model = ModelSpec(vocabulary=vocabulary, context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
    spec = JobSpec(name=kind, objective=objective, data=bytes(32), model=model, objective_settings=settings)
    values = np.arange(layout_of(spec).size, dtype=np.float32) / 1e4
    return ExportableModel("lab", "", bytes(32), spec, 1, bytes(32), values, blob, "a test")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", ["language", "instruct", "dpo"])
def test_every_exported_file_names_the_end_of_text_alike(tmp_path: Path, kind: str, objective: str) -> None:
    end = KINDS[kind][1] - 1
    terms = {"instruct": InstructTerms(stop_token=end), "dpo": DpoTerms(stop_token=end)}.get(objective)
    found = found_of(kind, objective, codec.encode(terms) if terms else b"")
    folder = tmp_path / "out"
    write_model_files(found, folder, "transformers")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == end
    config = json.loads((folder / "tokenizer_config.json").read_text())
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.get_vocab_size() == end + 1 and theirs.token_to_id(config["eos_token"]) == end
    assert theirs.get_added_tokens_decoder()[end].special and theirs.decode([97, end]) == theirs.decode([97])
    assert config["split_special_tokens"], "transformers reads the name of the token in a text as text"
    theirs.encode_special_tokens = True  # the library's setting for this
    assert theirs.encode(LITERAL).ids == load_tokenizer(*KINDS[kind]).encode(LITERAL.encode()).tolist()
    assert f"| a text ends with | token {end}, `&lt;|endoftext" in (folder / "README.md").read_text().replace("\\|", "|")
    write_model_files(found, tmp_path / "gguf", "gguf")
    fields = Reader((tmp_path / "gguf" / "model.gguf").read_bytes()).fields
    assert fields["tokenizer.ggml.eos_token_id"] == end and fields["tokenizer.ggml.tokens"][end] == END_OF_TEXT
    assert [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3] == [end]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_comes_back_with_its_end_of_text(tmp_path: Path, kind: str) -> None:
    write_model_files(found_of(kind), tmp_path / "out", "transformers")
    own = huggingface_model.open_huggingface_model(tmp_path / "out")
    blob, vocabulary = KINDS[kind]
    assert (own.stop, own.model.vocabulary, own.tokenizer is None) == (vocabulary - 1, vocabulary, blob is None)
    assert load_tokenizer(own.tokenizer, vocabulary).end_of_text == vocabulary - 1
    (tmp_path / "out" / "tokenizer.json").unlink()
    if kind == "bytes":
        assert huggingface_model.open_huggingface_model(tmp_path / "out").tokenizer is None


def test_a_job_with_another_stop_exports_that_one(tmp_path: Path) -> None:
    write_model_files(found_of("bytes", "instruct", codec.encode(InstructTerms(stop_token=10))), tmp_path / "out", "transformers")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 10
    old = replace(found_of("bytes").spec, model=replace(found_of("bytes").spec.model, vocabulary=256))
    values = np.zeros(layout_of(old).size, dtype=np.float32)
    write_model_files(replace(found_of("bytes"), spec=old, parameters=values), tmp_path / "old", "transformers")
    assert json.loads((tmp_path / "old" / "config.json").read_text())["eos_token_id"] is None
    assert "eos_token" not in json.loads((tmp_path / "old" / "tokenizer_config.json").read_text())
