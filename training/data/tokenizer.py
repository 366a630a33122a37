"""Tokenizers: one with the 256 bytes as tokens, and byte-level BPE (Sennrich 2016, Radford 2019) of the package `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError, UserError
from training.data.pretokenizers import BYTE_LEVEL, parse_normalizer, parse_pre_tokenizer, splits_words
from training.transformer import BYTES, BYTES_WITH_END, VOCABULARY_MAX

TOKENIZER_BYTES_MAX = 16 << 20  # bytes of a tokenizer: with VOCABULARY_MAX tokens it is about 4 MB of JSON
# GPT-2's name of the token that ends a text; these characters in a text never become the token.
END_OF_TEXT: Final = "<|endoftext|>"


class ByteTokenizer:
    """A tokenizer with the 256 bytes as tokens; with a vocabulary of `BYTES_WITH_END` also the end of a text."""

    is_bytes = True
    digest = hashlib.sha256(b"bytes").digest()

    def __init__(self, vocabulary: int = BYTES) -> None:
        self.vocabulary = vocabulary
        self.end_of_text: int | None = BYTES if vocabulary == BYTES_WITH_END else None
        self.token_bytes = (np.arange(vocabulary) < BYTES).astype(np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(token for token in ids if token < BYTES)


class BpeTokenizer:
    """A byte-level BPE with the vocabulary, merges, word splitting and added tokens of a blob.

    No text becomes a special token. Any other added token replaces its content wherever a text contains it.
    """

    is_bytes = False

    def __init__(self, blob: bytes) -> None:
        found = parse_bpe(blob)
        package = _package()
        try:
            whole = {
                "model": {
                    "type": "BPE",
                    # Special tokens are left out. With them, the package would turn the name of a special token in a text into
                    # that token.
                    "vocab": {token: number for token, number in found.ids.items() if token not in found.special},
                    "merges": found.merges,
                    "ignore_merges": found.ignores_merges,
                },
                "normalizer": found.normalizer,
                "pre_tokenizer": found.pre_tokenizer,
                "added_tokens": found.added,
            }
            self._tokenizer = package.Tokenizer.from_str(json.dumps(whole))
        except Exception as error:  # The package raises a bare `Exception` for merges outside the vocabulary.
            raise RemoteProtocolError("bad-tokenizer", str(error)[:200]) from None
        self._bytes_of_id = _bytes_of_id(found)
        self.vocabulary = len(found.ids)
        self.end_of_text = found.end_of_text
        self.digest = hashlib.sha256(blob).digest()
        self.token_bytes = np.array([len(token) for token in self._bytes_of_id], dtype=np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.array(self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids, dtype=np.uint16)

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes_of_id[token] for token in ids)


# Attributes of every tokenizer: `digest` is the digest of its blob. `token_bytes` has the number of bytes of text for each token
# id. `end_of_text` is the token that ends a text and stands for no bytes; None: there is none.
Tokenizer = ByteTokenizer | BpeTokenizer


def load_tokenizer(blob: bytes | None, vocabulary: int) -> Tokenizer:
    """Return the tokenizer that a job names, or the byte tokenizer for this vocabulary.

    Raises `RemoteProtocolError` if the blob is not a byte-level BPE.
    """
    return ByteTokenizer(BYTES_WITH_END if vocabulary == BYTES_WITH_END else BYTES) if blob is None else BpeTokenizer(blob)


def train_bpe(pieces: Iterable[bytes], vocabulary: int) -> bytes:
    """Train a byte-level BPE of `vocabulary` tokens and return its JSON. The last token is the end of a text.

    Raises `UserError` for an impossible vocabulary.
    """
    if not BYTES_WITH_END < vocabulary <= VOCABULARY_MAX:
        raise UserError(f"a BPE vocabulary must be in {BYTES_WITH_END + 1}..{VOCABULARY_MAX}, not {vocabulary}")
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(pieces), trainer)
    known = tokenizer.get_vocab_size() + 1
    if known != vocabulary:
        raise UserError(f"the text is too small for {vocabulary} tokens: it gives {known}; use at most that many")
    made = json.loads(tokenizer.to_str())
    made["model"]["vocab"][END_OF_TEXT] = vocabulary - 1
    made["added_tokens"] = [added_token_json(END_OF_TEXT, vocabulary - 1)]
    return json.dumps(made, ensure_ascii=False).encode()


def added_token_json(content: str, number: int) -> dict[str, Any]:
    """Return a special token as the JSON of the package `tokenizers`."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **plain, "special": True}


def _package() -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # With threads, the package warns on stderr whenever this process forks.
    try:
        import tokenizers  # imported late, since byte-level jobs do not need the 15 MB of this package
    except ModuleNotFoundError:
        raise UserError("the package tokenizers is not installed: run `pip install tokenizers`, or train on bytes") from None
    return tokenizers


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a text that is given in pieces.

    A line is never split, so the pieces' boundaries do not influence the merges.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode("utf-8", errors="replace") + "\n" for line in lines)
    if rest:
        yield rest.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """The vocabulary of a byte-level BPE, in which a printable character stands for each byte."""

    ids: Mapping[str, int]  # id of each token, also of added tokens
    merges: tuple[tuple[str, str], ...] = ()
    end_of_text: int | None = None
    special: frozenset[str] = frozenset()  # special tokens: no text becomes one of these
    added: tuple[dict[str, Any], ...] = ()  # added tokens that are not special, as the JSON of the package `tokenizers`
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] = field(default_factory=lambda: BYTE_LEVEL)
    ignores_merges: bool = False  # True if a word that is a token of the vocabulary becomes that token without merges.

    @property
    def tokens(self) -> list[str]:
        """All tokens as text, in the order of their ids."""
        return sorted(self.ids, key=self.ids.__getitem__)


def parse_bpe(blob: bytes) -> BpeVocabulary:
    """Parse a tokenizer. Raises `RemoteProtocolError` if it is not a byte-level BPE.

    The JSON field `end_of_text` names the token that ends a text. Without that field it is the only special token, if there is
    just one.
    """
    try:
        if len(blob) > TOKENIZER_BYTES_MAX:
            raise ValueError(f"it has {len(blob)} bytes, at most {TOKENIZER_BYTES_MAX} are allowed")
        plain = json.loads(blob)
        model = plain["model"]
        listed = {str(token["content"]): token for token in plain.get("added_tokens") or []}
        vocabulary: dict[str, int] = dict(model["vocab"]) | {content: token["id"] for content, token in listed.items()}
        ids = sorted(vocabulary.values())
        merges = tuple((str(left), str(right)) for left, right in model["merges"])
        special = [content for content, token in listed.items() if token.get("special")]
        end = plain.get("end_of_text", special[0] if len(special) == 1 else None)
        added = tuple(_added_text(token) for token in listed.values() if not token.get("special"))
        normalizer = parse_normalizer(plain.get("normalizer"))
        pre_tokenizer = parse_pre_tokenizer(plain.get("pre_tokenizer") or BYTE_LEVEL)
        if merges and not splits_words(pre_tokenizer):
            raise ValueError("its pre_tokenizer does not split words (use_regex false)")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RemoteProtocolError("bad-tokenizer", problem[:200]) from None
    if len(set(ids)) < len(ids):
        raise RemoteProtocolError("bad-tokenizer", "two tokens have the same id")
    if not BYTES <= len(vocabulary) <= VOCABULARY_MAX or ids != list(range(len(vocabulary))):
        raise RemoteProtocolError(
            "bad-tokenizer", f"{len(vocabulary)} tokens, expected {BYTES}..{VOCABULARY_MAX} with ids from 0 without gaps"
        )
    if not set(byte_alphabet()) <= set(vocabulary):
        raise RemoteProtocolError("bad-tokenizer", "a byte has no token")
    made = byte_alphabet().keys() | {left + right for left, right in merges}
    for token in special:
        if token in made or not token:
            raise RemoteProtocolError("bad-tokenizer", f"the special token {token[:20]!r} is also an ordinary token")
    if end is not None and end not in special:
        raise RemoteProtocolError("bad-tokenizer", f"the end of text {str(end)[:20]!r} is not a special token")
    return BpeVocabulary(
        ids=vocabulary,
        merges=merges,
        end_of_text=None if end is None else vocabulary[end],
        special=frozenset(special),
        added=added,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        ignores_merges=bool(model.get("ignore_merges")),
    )


def _added_text(token: dict[str, Any]) -> dict[str, Any]:
    """Return an added token of a tokenizer. Raises `ValueError` for a token that matches more than its content."""
    if not isinstance(token["content"], str) or not token["content"]:
        raise ValueError("an added token has no content")
    token["content"].encode()  # Half a surrogate pair raises `UnicodeEncodeError`, a `ValueError`.
    for name in ("single_word", "lstrip", "rstrip"):
        if token.get(name):
            raise ValueError(f"added token {token['content'][:20]!r} sets {name}, which is not supported")
    return added_token_json(token["content"], token["id"]) | {"normalized": bool(token.get("normalized")), "special": False}


def _bytes_of_id(model: BpeVocabulary) -> list[bytes]:
    byte_of = byte_alphabet()
    without_words = dict.fromkeys(model.special, b"") | {token["content"]: token["content"].encode() for token in model.added}
    try:
        tokens = {
            number: without_words[token] if token in without_words else bytes(byte_of[character] for character in token)
            for token, number in model.ids.items()
        }
    except KeyError as error:
        raise RemoteProtocolError("bad-tokenizer", f"the character {str(error)[:20]} does not represent a byte") from None
    return [tokens[number] for number in range(len(tokens))]


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character in a byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(BYTES + index): byte for index, byte in enumerate(others)}


# Files of other programs, with the same ids for every text ------------------------------------------------------------


def load_vocabulary(blob: bytes | None, tokens: int) -> BpeVocabulary:
    """Return the vocabulary of the tokenizer that `load_tokenizer` returns, with the same errors.

    A vocabulary of bytes has no merges.
    """
    if blob is not None:
        return parse_bpe(blob)
    if tokens == BYTES_WITH_END:
        return BpeVocabulary(byte_alphabet() | {END_OF_TEXT: BYTES}, end_of_text=BYTES, special=frozenset({END_OF_TEXT}))
    return BpeVocabulary(byte_alphabet())


def tokenizer_json(vocabulary: BpeVocabulary) -> dict[str, Any]:
    """Return the `tokenizer.json` of the package `tokenizers`, which `transformers` can open."""
    special = [added_token_json(token, number) for token, number in vocabulary.ids.items() if token in vocabulary.special]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted([*special, *vocabulary.added], key=lambda token: token["id"]),
        "normalizer": vocabulary.normalizer,
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.ignores_merges,
            "vocab": dict(vocabulary.ids),
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def tokenizer_config(vocabulary: BpeVocabulary, context: int) -> dict[str, Any]:
    """Return the `tokenizer_config.json` of `transformers`.

    Its field `split_special_tokens` ensures that the name of a special token in a text does not become that token.
    """
    end = vocabulary.end_of_text
    return {
        **({} if end is None else {"eos_token": vocabulary.tokens[end]}),
        **({"split_special_tokens": True} if vocabulary.special else {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
