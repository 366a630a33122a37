from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import DATA_SHARD_BYTES
from training import corpus as data
from training.corpus import (
    DataManifest,
    assemble_text,
    open_tokens,
    require_enough_text,
    split_into_shards,
    text_bytes_min,
    tokens_digest,
)
from training.data import text_files, tokenizer
from training.data.default_text import default_text
from training.data.text_files import read_text
from training.data.token_sequences import TokenizedText, batch_offsets
from training.job_spec import JobSpec
from training.transformer import ModelSpec

SPEC = JobSpec(name="t", data=bytes(32))


def text_of(path: Path) -> bytes:
    return b"".join(read_text(path))


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class Blobs:
    """A content-addressed store in memory."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def keep(self, blob: bytes) -> None:
        self.held[hashlib.sha256(blob).digest()] = blob


# From users' files to bytes


def refused(why: str, path: Path) -> None:
    with pytest.raises(UserError, match=why):
        text_of(path)


def test_a_file_is_read_as_it_is_without_its_byte_order_mark(tmp_path: Path) -> None:
    assert text_of(write(tmp_path / "a.any", "\ufeffGrüße\r\n")) == "Grüße\r\n".encode()


def test_a_folder_is_read_recursively_in_sorted_order_and_other_files_are_left_out(tmp_path: Path) -> None:
    for name, content in (("b/c.md", "three\n"), ("a.txt", "one"), ("b/B.TXT", "two"), ("picture.png", b"\x89PNG\0")):
        write(tmp_path / name, content)
    assert text_of(tmp_path) == b"one\ntwo\nthree\n"


def test_jsonl_gives_the_text_of_each_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one\nmore", "zwö")]
    assert text_of(write(tmp_path / "a.jsonl", "\n\n".join(lines))) == "one\nmore\nzwö\n".encode()


@pytest.mark.parametrize("line", ["{", '"text"', '{"txt": "a"}', '{"text": 1}', '{"text": "\\ud800"}', "[" * 100_000])
def test_a_bad_jsonl_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n")
    refused(r"a\.jsonl line 2", path)


def test_jsonl_without_any_text_is_empty(tmp_path: Path) -> None:
    refused(r"a\.jsonl contains no text", write(tmp_path / "a.jsonl", '{"text": ""}\n' * 3))
    assert text_of(write(tmp_path / "a.jsonl", '{"text": ""}\n{"text": "a"}\n')) == b"a\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a\\u0000b"}', r"a\.jsonl line 2: the text contains a NUL character"),
        (
            '{"text": "Gr\xfc\xdfe"}'.encode("latin-1"),
            r"a\.jsonl .*\(not UTF-8 in line 2, it looks like Windows-1252\)",
        ),
        ('{"text": "a"}'.encode("utf-16"), r"a\.jsonl is not a text file \(NUL in line 2, as in UTF-16\): save it as UTF-8"),
        ('{"text": "a"}'.encode("utf-16-be"), r"a\.jsonl is not a text file \(NUL in line 2, as in UTF-16\)"),
    ],
    ids=["nul", "latin-1", "utf-16", "utf-16-be"],
)
def test_jsonl_that_is_no_text_is_told_what_it_is_and_where(tmp_path: Path, line: bytes, words: str) -> None:
    refused(words, write(tmp_path / "a.jsonl", b'{"text": "good"}\n' + line + b"\n"))


def test_a_file_name_with_a_line_break_makes_one_line_of_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\\nb\.txt' is not a text file") as caught:
        text_of(write(tmp_path / "a\nb.txt", b"\0"))
    assert "\n" not in str(caught.value)


def test_a_jsonl_line_that_is_too_long_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LINE_BYTES_MAX", 100)
    refused("line 1 is longer", write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 100})))


BINARY = {"nul": b"text\0text", "latin-1": "Grüße".encode("latin-1"), "utf-16": "text".encode("utf-16"), "cut": "ü".encode()[:1]}


@pytest.mark.parametrize("content", BINARY.values(), ids=BINARY)
@pytest.mark.parametrize("position", [0, text_files.READ_BYTES - 1])
def test_a_binary_file_is_refused_by_name(tmp_path: Path, content: bytes, position: int) -> None:
    path = write(tmp_path / "a.txt", b"x" * position + content)
    refused(r"a\.txt is not a text file", path)


def test_a_character_across_two_reads_is_text(tmp_path: Path) -> None:
    content = b"x" * (text_files.READ_BYTES - 1) + "ü".encode()
    assert text_of(write(tmp_path / "a.txt", content)).startswith(content)


@pytest.mark.parametrize("make", [lambda p: p / "none", lambda p: p, lambda p: write(p / "empty.txt", b"")])
def test_missing_and_empty_text_is_refused_by_name(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    refused(str(path), path)


def test_three_kilobytes_are_enough_for_the_default_job() -> None:
    require_enough_text(SPEC, 3_000, "a.txt")


@pytest.mark.parametrize("permille", [0, 1, 100, 500])
def test_one_byte_less_than_needed_is_refused_with_the_number(tmp_path: Path, permille: int) -> None:
    spec = replace(SPEC, held_out_permille=permille)
    needed = text_bytes_min(spec)
    tokens = open_tokens(spec, write(tmp_path / "a", b"x" * needed), tokenizer.ByteTokenizer())
    assert len(tokens.train) > spec.model.context and (len(tokens.held_out) > spec.model.context or not permille)
    with pytest.raises(UserError, match=f"{needed - 1} bytes.* at least {needed}"):
        open_tokens(spec, write(tmp_path / "a", b"x" * (needed - 1)), tokenizer.ByteTokenizer())


@pytest.mark.parametrize("permille", [0, 100, 490, 500])
def test_what_is_enough_stays_so_where_the_cut_moves_back_to_a_character(tmp_path: Path, permille: int) -> None:
    spec = replace(SPEC, held_out_permille=permille)
    for ahead in range(4):
        content = (b"x" * ahead + "🙂".encode() * 600)[: text_bytes_min(spec)]
        assert len(open_tokens(spec, write(tmp_path / "a", content), tokenizer.ByteTokenizer()).train) > spec.model.context


def test_the_default_text_is_large_enough_and_the_same_each_time() -> None:
    text = default_text()
    assert 300_000 < len(text) < 1_000_000 and default_text() == text
    assert text.decode().count("\n") > 5_000


# From bytes to shards and back


@given(st.lists(st.binary(max_size=40), max_size=20).filter(any))
def test_a_text_comes_back_whole_whatever_the_pieces_it_arrived_in(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    whole = b"".join(pieces)
    shards = [whole[start : start + 16] for start in range(0, len(whole), 16)]
    assume(len(set(shards)) == len(shards))  # a manifest must not name a shard twice
    path = tmp_path_factory.mktemp("assembled") / "text"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "DATA_SHARD_BYTES", 16)
        blobs = Blobs()
        manifest = DataManifest.decode(split_into_shards(pieces, blobs.keep).encode())
        assemble_text(manifest, blobs.held.__getitem__, path)
        assert split_into_shards([whole], lambda shard: None) == manifest
    assert path.read_bytes() == whole
    assert [len(blobs.held[digest]) for digest in manifest.shards[:-1]] == [16] * (len(manifest.shards) - 1)


def test_a_shard_with_other_bytes_is_noticed_and_leaves_no_file(tmp_path: Path) -> None:
    blobs = Blobs()
    manifest = split_into_shards([b"some text" * 100], blobs.keep)
    with pytest.raises(RemoteProtocolError, match="bad-manifest"):
        assemble_text(manifest, lambda digest: blobs.held[digest][:-1] + b"?", tmp_path / "text")
    assert not list(tmp_path.iterdir())


def test_a_manifest_whose_shards_do_not_fit_its_size_is_refused() -> None:
    manifest = DataManifest(DATA_SHARD_BYTES + 1, bytes(32), (bytes(32),))
    with pytest.raises(RemoteProtocolError, match="1 shards"):
        DataManifest.decode(manifest.encode())


def test_no_shard_may_be_named_twice() -> None:
    """A shard named many times is fetched once, and would fill the disk of every trainer."""
    twice = DataManifest(2 * DATA_SHARD_BYTES, bytes(32), (bytes(32),) * 2)
    with pytest.raises(RemoteProtocolError, match="lists a shard twice"):
        DataManifest.decode(twice.encode())
    with pytest.raises(UserError, match="the same 1 MiB twice"):
        split_into_shards([bytes(DATA_SHARD_BYTES)] * 2, lambda shard: None)


def test_an_empty_text_has_no_manifest() -> None:
    with pytest.raises(UserError, match="empty"):
        split_into_shards([b""], lambda shard: None)


# Tokens


def test_the_held_out_part_is_the_last_part_and_begins_at_a_character(tmp_path: Path) -> None:
    text = "ü".encode() * 5_001
    tokens = open_tokens(SPEC, write(tmp_path / "a", text), tokenizer.ByteTokenizer())
    assert bytes(tokens.train) + bytes(tokens.held_out) == text
    assert len(tokens.held_out) == 1_002  # 10 % would be 1000.2 bytes, in the middle of a character
    bytes(tokens.held_out).decode()


def bpe_of(text: bytes) -> tokenizer.BpeTokenizer:
    return tokenizer.BpeTokenizer(tokenizer.train_bpe([text], 400))


def test_a_bpe_holds_out_the_same_bytes_and_knows_how_many_each_token_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "TOKENIZE_BYTES", 5_000)  # several blocks
    text = default_text()[:60_000]
    path = write(tmp_path / "a", text)
    spec = replace(SPEC, model=ModelSpec(vocabulary=400))
    bpe = bpe_of(text)
    tokens = open_tokens(spec, path, bpe)
    as_bytes = open_tokens(SPEC, path, tokenizer.ByteTokenizer())
    assert bpe.decode(list(tokens.held_out)) == bytes(as_bytes.held_out)
    assert bpe.decode(list(tokens.train)) == bytes(as_bytes.train)
    assert tokens.token_bytes[tokens.held_out].sum() == len(as_bytes.held_out)
    assert len(tokens.train) < len(as_bytes.train) / 1.5


def test_tokens_of_a_bpe_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = default_text()[:30_000]
    path, bpe, spec = write(tmp_path / "a", text), bpe_of(text), replace(SPEC, model=ModelSpec(vocabulary=400))
    first = open_tokens(spec, path, bpe)
    monkeypatch.setattr(bpe, "encode", lambda block: pytest.fail("tokenized again"))
    assert np.array_equal(open_tokens(spec, path, bpe).train, first.train)


def test_a_package_that_cuts_the_text_otherwise_is_told_and_another_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every auditor, honest work on other tokens would be a false step."""
    text = default_text()[:30_000]
    bpe, spec = bpe_of(text), replace(SPEC, model=ModelSpec(vocabulary=400))
    (tmp_path / "author").mkdir()
    named = tokens_digest(open_tokens(spec, write(tmp_path / "author" / "a", text), bpe))
    path, as_released = write(tmp_path / "a", text), bpe.encode
    monkeypatch.setattr(bpe, "encode", lambda block: as_released(block)[::-1])
    for _ in range(2):
        with pytest.raises(UserError, match=r"tokenizers \d+\.\d.* does not make the job's tokens from .*: install"):
            open_tokens(spec, path, bpe, named=named)
    monkeypatch.setattr(bpe, "encode", as_released)
    assert tokens_digest(open_tokens(spec, path, bpe, named=named)) == named


def test_the_digest_of_tokens_is_over_all_of_them_and_no_other_bytes(tmp_path: Path) -> None:
    held_out = np.array([3], dtype=np.uint16)
    tokens = TokenizedText(np.array([1, 0x0203], dtype=np.uint16), held_out, np.ones(1024, dtype=np.int64))
    assert tokens_digest(tokens) == hashlib.sha256(bytes([1, 0, 3, 2, 3, 0])).digest()


def test_too_few_tokens_for_one_sequence_are_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, model=ModelSpec(vocabulary=400))
    path = write(tmp_path / "a", b"the same words again and again. " * 60)
    with pytest.raises(UserError, match=r"held-out part has .* tokens"):
        open_tokens(spec, path, bpe_of(b"the same words again and again. " * 60 + default_text()[:20_000]))


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, model=ModelSpec(vocabulary=400))
    with pytest.raises(UserError, match=r"256 tokens.*400"):
        open_tokens(spec, write(tmp_path / "a", b"x" * 5_000), tokenizer.ByteTokenizer())


# Choice of training sequences


def offsets(**changed: object) -> list[int]:
    assignment = {"job": b"j" * 32, "round_number": 1, "trainer": b"t" * 32, "step": 2}
    sizes = {"batch": 4, "tokens": 1_000, "context": 128, "seed": 0}
    return [int(offset) for offset in batch_offsets(**(assignment | sizes | changed))]  # type: ignore[arg-type]


def test_the_sampler_is_frozen() -> None:
    assert offsets() == [596, 584, 756, 99]


@pytest.mark.parametrize("changed", [{"job": b"k" * 32}, {"round_number": 2}, {"trainer": b"u" * 32}, {"step": 3}, {"seed": 1}])
def test_every_part_of_the_assignment_decides_the_batch(changed: dict[str, object]) -> None:
    assert offsets(**changed) != offsets()


def test_every_sequence_fits_the_text_and_all_offsets_are_reached() -> None:
    assert set(offsets(batch=2_000, tokens=140, context=128)) == set(range(140 - 128))
