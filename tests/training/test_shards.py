from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import RemoteProtocolError, UserError
from training import corpus as data
from training.data import token_shards
from training.data.tokenizer import ByteTokenizer, train_bpe
from training.job_spec import JobSpec
from training.transformer import ModelSpec

TOKENS = np.arange(3_000) * 7 % 256
SPEC = JobSpec(name="t", data=bytes(32), model=ModelSpec(context=32))


def write(folder: Path, name: str, tokens: Any) -> None:
    (folder / name).write_bytes(np.asarray(tokens, dtype="<u2").tobytes())


def has_no_manifest(why: str, folder: Path) -> None:
    with pytest.raises(UserError, match=why):
        token_shards.make_manifest(folder)


def refused(why: str, folder: Path) -> None:
    with pytest.raises(UserError, match=why):
        token_shards.open_token_folder(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of bytes as tokens, with the manifest that `peer shards` prints."""
    made = tmp_path / "tokens"
    made.mkdir()
    write(made, "000.bin", TOKENS[:2_000])
    write(made, "001.bin", TOKENS[2_000:])
    (made / "manifest.json").write_text(token_shards.make_manifest(made))
    return made


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_manifest_names_every_shard_by_hash_and_size(folder: Path) -> None:
    assert json.loads(token_shards.make_manifest(folder)) == {
        "format": "folkmoot-tokens/1",
        "vocabulary": 257,  # the bytes, and the end of a text
        "tokenizer": None,
        "shards": [
            {"file": name, "tokens": count, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
            for name, count in (("000.bin", 2_000), ("001.bin", 1_000))
        ],
    }


def test_shards_travel_as_blobs_and_are_mapped_as_the_tokens_they_were(folder: Path, tmp_path: Path) -> None:
    opened, blobs = token_shards.open_token_folder(folder), {}

    def keep(shard: bytes) -> None:
        blobs[hashlib.sha256(shard).digest()] = shard

    manifest = data.split_into_shards(opened.iter_shard_bytes(), keep, tokenized=True)
    assert manifest.tokenized and data.DataManifest.decode(manifest.encode()) == manifest
    data.assemble_text(manifest, blobs.__getitem__, tmp_path / "assembled")
    tokens = data.open_tokens(SPEC, tmp_path / "assembled", ByteTokenizer(), tokenized=True)
    assert tokens.train.tolist() == TOKENS[:2_700].tolist() and tokens.held_out.tolist() == TOKENS[2_700:].tolist()
    assert isinstance(tokens.train, np.memmap)


def test_a_tokenizer_beside_the_shards_gives_the_vocabulary(folder: Path) -> None:
    tokenizer = train_bpe([b"some text, some more text, and text again " * 20], 270)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "manifest.json").write_text(token_shards.make_manifest(folder))
    opened = token_shards.open_token_folder(folder)
    assert opened.tokenizer == tokenizer and opened.vocabulary == 270
    (folder / "tokenizer.json").write_bytes(tokenizer + b" ")
    refused(r"is not the tokenizer that manifest.json names", folder)
    (folder / "tokenizer.json").unlink()
    refused(r"tokenizer.json cannot be read .* put it there", folder)


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "words"),
    [
        (b"{}", 300, r"tokenizer.json is not a byte-level BPE \(.*\): put the JSON of the tokenizers package there"),
        (b"[" * 100_000, 300, "tokenizer.json is not a byte-level BPE"),
        (
            train_bpe([b"some text, some more text " * 20], 260),
            300,
            "has 260 tokens, but manifest.json sets vocabulary 300: make a new manifest",
        ),
    ],
    ids=["no model", "nested", "another vocabulary"],
)
def test_a_tokenizer_that_no_peer_could_use_is_told_before_the_job_starts(
    folder: Path, tokenizer: bytes, vocabulary: int, words: str
) -> None:
    (folder / "tokenizer.json").write_bytes(tokenizer)
    changed(folder, vocabulary=vocabulary, tokenizer=hashlib.sha256(tokenizer).hexdigest())
    refused(words, folder)


def read(folder: Path) -> int:
    return sum(map(len, token_shards.open_token_folder(folder).iter_shard_bytes()))


def test_a_shard_with_another_hash_is_named_with_what_to_do(folder: Path) -> None:
    write(folder, "001.bin", TOKENS[1_000:2_000])
    with pytest.raises(UserError, match=r"001.bin has 1000 tokens with SHA-256 .* get the shard again, or make a new manifest"):
        read(folder)


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / "001.bin").unlink()
    with pytest.raises(UserError, match=r"001.bin is missing, but manifest.json lists it"):
        read(folder)


def test_half_a_token_is_named(folder: Path) -> None:
    with (folder / "000.bin").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(UserError, match=r"000.bin has an odd number of bytes"):
        read(folder)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(folder: Path, tmp_path: Path) -> None:
    write(folder, "001.bin", [5, 257, 7])
    has_no_manifest(r"token 257 at position 1 of .*001.bin is outside vocabulary 257", folder)
    with pytest.raises(UserError, match=r"token 257 at position 1 of .*001.bin"):
        read(folder)
    with pytest.raises(UserError, match=r"token 257 at position 1 of .*001.bin"):
        data.open_tokens(SPEC, folder / "001.bin", ByteTokenizer(), tokenized=True)


def test_every_id_of_sixteen_bits_may_be_a_token(tmp_path: Path) -> None:
    write(tmp_path, "all.bin", [65_535] * 2_000)
    token_shards.require_known_tokens(tmp_path / "all.bin", 65_536, lambda: None)
    with pytest.raises(UserError, match="token 65535 at position 0"):
        token_shards.require_known_tokens(tmp_path / "all.bin", 65_535, lambda: None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "other"}, 'has no "format": "folkmoot-tokens/1"'),
        ({"vocabulary": 0}, r"vocabulary must be a whole number in 1..65536, not 0"),
        ({"vocabulary": 300}, "without a tokenizer the vocabulary must be 256 or 257, not 300"),
        ({"shards": []}, "lists no shards"),
        ({"shards": ["000.bin"]}, "every shard must be like"),
        (
            {"shards": [{"file": "../000.bin", "tokens": 1, "sha256": "0" * 64}]},
            "'../000.bin' is not the name of a file in this folder",
        ),
        (
            {"shards": [{"file": "a\0.bin", "tokens": 1, "sha256": "0" * 64}]},
            r"'a\\x00.bin' is not the name of a file in this folder",
        ),
        ({"shards": [{"file": "\ud800.bin", "tokens": 1, "sha256": "0" * 64}]}, "is not the name of a file in this folder"),
        ({"shards": [{"file": "000.bin", "tokens": 1, "sha256": "xyz"}]}, "not 64 hexadecimal digits"),
        ({"shards": [{"file": "000.bin", "tokens": True, "sha256": "0" * 64}]}, "tokens must be a whole number"),
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_is_told_with_its_value(folder: Path, fields: dict[str, Any], words: str) -> None:
    changed(folder, **fields)
    refused(words, folder)


def test_what_is_no_manifest_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").write_text("{")
    refused("cannot be read as JSON", folder)
    has_no_manifest(r"no .bin file in folder", tmp_path)
    assert not token_shards.is_token_folder(tmp_path) and token_shards.is_token_folder(folder)


def test_a_folder_that_can_have_no_manifest_is_told_why(folder: Path, tmp_path: Path) -> None:
    has_no_manifest(r"^no such folder: .*none \(give one with .bin files", tmp_path / "none")
    (folder / "tokenizer.json").write_bytes(b"{}")
    has_no_manifest(r"tokenizer.json is not a byte-level BPE", folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    has_no_manifest(r"tokenizer.json is a folder: give a file", folder)
    (folder / "tokenizer.json").rmdir()
    write(folder, "002.bin", [])
    has_no_manifest(r"002.bin is empty: put token ids into it, or take it out of the folder", folder)


def test_too_few_tokens_and_half_a_token_from_strangers_are_refused(folder: Path) -> None:
    write(folder, "few.bin", [1] * 30)
    with pytest.raises(UserError, match="the training part has 27 tokens, but context 32 needs at least 33"):
        data.open_tokens(SPEC, folder / "few.bin", ByteTokenizer(), tokenized=True)
    with pytest.raises(RemoteProtocolError, match="odd number of bytes for 16-bit tokens: 3"):
        data.DataManifest.decode(replace(data.DataManifest(2, bytes(32), (bytes(32),), True), size=3).encode())
