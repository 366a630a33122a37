from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError, UserError
from training.data.default_text import default_text
from training.data.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer, train_bpe

TEXT = default_text()[:40_000] + "Grüße, 世界! 🙂\n".encode() * 3
BLOB = train_bpe([TEXT], 500)
BPE = BpeTokenizer(BLOB)


@given(st.text())
def test_every_text_survives_encoding_and_decoding(text: str) -> None:
    for tokenizer in (BPE, ByteTokenizer()):
        assert tokenizer.decode(list(tokenizer.encode(text.encode()))) == text.encode()


def test_a_bpe_has_the_vocabulary_that_was_asked_for_and_shortens_text() -> None:
    assert BPE.vocabulary == 500 and len(BPE.token_bytes) == 500
    assert len(BPE.encode(TEXT)) < len(TEXT) / 2
    assert BPE.token_bytes[BPE.encode(TEXT)].sum() == len(TEXT)


@pytest.mark.real("processes")
def test_training_is_deterministic_in_pieces_processes_and_threads() -> None:
    assert train_bpe([TEXT[start : start + 777] for start in range(0, len(TEXT), 777)], 500) == BLOB
    made = "train_bpe([sys.stdin.buffer.read()], 500)"
    script = f"import sys; from training.data.tokenizer import train_bpe; sys.stdout.buffer.write({made})"
    environment = {**os.environ, "RAYON_NUM_THREADS": "2", "PYTHONHASHSEED": "7"}
    again = subprocess.run([sys.executable, "-c", script], input=TEXT, capture_output=True, check=True, env=environment)
    assert again.stdout == BLOB


def test_without_a_blob_tokens_are_bytes() -> None:
    tokenizer = load_tokenizer(None, 256)
    assert tokenizer.is_bytes and tokenizer.vocabulary == 256 and list(tokenizer.encode(b"a\xff")) == [97, 255]


@pytest.mark.parametrize("vocabulary", [256, 70_000])
def test_an_impossible_vocabulary_is_refused(vocabulary: int) -> None:
    with pytest.raises(UserError, match=str(vocabulary)):
        train_bpe([TEXT], vocabulary)


def test_a_text_too_small_for_the_vocabulary_says_what_it_gives() -> None:
    with pytest.raises(UserError, match="it gives 2"):
        train_bpe([b"abc abc abc"], 5_000)


def broken(**changed: object) -> bytes:
    whole = json.loads(BLOB)
    whole["model"] |= changed
    return json.dumps(whole).encode()


def beside(**fields: object) -> bytes:
    return json.dumps(json.loads(BLOB) | fields).encode()


def cut_by(pattern: str) -> bytes:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return beside(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]})


MERGED = "".join(json.loads(BLOB)["model"]["merges"][-1])
VOCABULARY = json.loads(BLOB)["model"]["vocab"]
BAD = {
    "not json": b"{",
    "a list": b"[]",
    "no model": b"{}",
    "vocabulary too small": broken(vocab={"a": 0}, merges=[]),
    "ids with a gap": broken(vocab=VOCABULARY | {"ab": 9_999}),
    "ids of another type": broken(vocab=VOCABULARY | {"ab": "x"}),
    "a byte without token": broken(vocab={token * 2 if token == "!" else token: number for token, number in VOCABULARY.items()}),
    "a token of no bytes": broken(vocab=VOCABULARY | {"世": 500}),
    "merge of unknown tokens": broken(merges=[["世", "世"]]),
    "merge of three": broken(merges=[["a", "b", "c"]]),
    "another normalizer": beside(normalizer={"type": "Lowercase"}),
    "a pattern that may take for ever": cut_by("(a+)+$"),
    "a pattern without end": cut_by(r"\p{N}|" * 999 + r"\d"),
    "an end that is no special token": beside(end_of_text="a"),
    **{
        f"an added token {content!r}": beside(added_tokens=[{"id": 280, "content": content}])
        for content in ("\ud800", "", 7, None)
    },
    "a merge of a special token": beside(added_tokens=[{"id": 279, "content": MERGED, "special": True}]),
    "two tokens with one id": broken(vocab=VOCABULARY | {"ab": 5}),
    "nested deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("blob", BAD.values(), ids=BAD)
def test_a_blob_that_is_no_byte_level_bpe_is_refused(blob: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="bad-tokenizer"):
        BpeTokenizer(blob)


def test_what_else_is_in_a_blob_changes_nothing() -> None:
    whole = json.loads(BLOB)
    whole["decoder"] = {"type": "Metaspace"}
    whole["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 0]}
    assert list(BpeTokenizer(json.dumps(whole).encode()).encode(b"LOUD")) == list(BPE.encode(b"LOUD"))


def test_a_blob_may_cut_words_by_a_known_pattern() -> None:
    numbers = BpeTokenizer(cut_by(r"\p{N}{1,2}|\s+"))
    assert numbers.decode(numbers.encode(b"12345 of them")) == b"12345 of them"
