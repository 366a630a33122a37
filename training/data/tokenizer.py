"""Text to token ids: the 256 bytes, or a byte-level BPE (Sennrich 2016, Radford 2019) trained with the `tokenizers` package."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError, UserError
from training.transformer import BYTES

VOCABULARY_MAX = 1 << 16  # token ids are kept as uint16
TOKENIZER_BYTES_MAX = 16 << 20  # a tokenizer of VOCABULARY_MAX tokens is about 4 MB of JSON


class Tokenizer(Protocol):
    is_bytes: bool
    vocabulary: int
    digest: bytes  # of the blob it was made from
    token_bytes: npt.NDArray[np.int64]  # bytes of text per token id

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]: ...

    def decode(self, ids: Sequence[int]) -> bytes: ...


class ByteTokenizer:
    is_bytes = True
    vocabulary = BYTES
    digest = hashlib.sha256(b"bytes").digest()
    token_bytes = np.ones(BYTES, dtype=np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)


class BpeTokenizer:
    """Only vocabulary and merges are taken from the blob: nothing else in a stranger's JSON can change what text becomes."""

    is_bytes = False

    def __init__(self, blob: bytes) -> None:
        vocabulary, merges = model_of(blob)
        package = _package()
        try:
            model = package.models.BPE(vocab=vocabulary, merges=merges)
        except Exception as error:  # the package raises bare `Exception` for merges outside the vocabulary
            raise RemoteProtocolError("bad-tokenizer", str(error)[:200]) from None
        self._tokenizer = package.Tokenizer(model)
        self._tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bytes_of_id = _bytes_of_id(vocabulary)
        self.vocabulary = len(vocabulary)
        self.digest = hashlib.sha256(blob).digest()
        self.token_bytes = np.array([len(token) for token in self._bytes_of_id], dtype=np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.array(self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids, dtype=np.uint16)

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes_of_id[token] for token in ids)


def load_tokenizer(blob: bytes | None) -> Tokenizer:
    """The tokenizer a job names, or the bytes. Raises `RemoteProtocolError` if the blob is no byte-level BPE."""
    return ByteTokenizer() if blob is None else BpeTokenizer(blob)


def train_bpe(pieces: Iterable[bytes], vocabulary: int) -> bytes:
    """A byte-level BPE of `vocabulary` tokens as a JSON blob. Raises `UserError` for an impossible vocabulary."""
    if not BYTES < vocabulary <= VOCABULARY_MAX:
        raise UserError(f"a BPE vocabulary must lie in {BYTES + 1}..{VOCABULARY_MAX}, not {vocabulary}")
    package = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(pieces), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise UserError(
            f"the text is too small for {vocabulary} tokens: it gives {tokenizer.get_vocab_size()}; ask for at most that many"
        )
    blob: bytes = tokenizer.to_str().encode()
    return blob


def _package() -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it warns, on stderr, wherever a process starts another one otherwise
    import tokenizers  # here, because a byte-level job does without its 15 MB

    return tokenizers


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Whole lines, whatever the pieces: how the text arrived must not decide what is merged."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode("utf-8", errors="replace") + "\n" for line in lines)
    if rest:
        yield rest.decode("utf-8", errors="replace")


def model_of(blob: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges. `RemoteProtocolError` if it is no byte-level BPE."""
    try:
        if len(blob) > TOKENIZER_BYTES_MAX:
            raise ValueError(f"{len(blob)} bytes, at most {TOKENIZER_BYTES_MAX} are allowed")
        model = json.loads(blob)["model"]
        vocabulary: dict[str, int] = dict(model["vocab"])
        ids = sorted(vocabulary.values())
        merges = [(str(left), str(right)) for left, right in model["merges"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RemoteProtocolError("bad-tokenizer", str(error)[:200]) from None
    if not BYTES <= len(vocabulary) <= VOCABULARY_MAX or ids != list(range(len(vocabulary))):
        raise RemoteProtocolError("bad-tokenizer", f"{len(vocabulary)} tokens without ids 0..n-1, or too few, or too many")
    if not set(alphabet()) <= set(vocabulary):
        raise RemoteProtocolError("bad-tokenizer", "a byte has no token of its own")
    return vocabulary, merges


def _bytes_of_id(vocabulary: dict[str, int]) -> list[bytes]:
    byte_of = alphabet()
    try:
        tokens = {number: bytes(byte_of[character] for character in token) for token, number in vocabulary.items()}
    except KeyError as error:
        raise RemoteProtocolError("bad-tokenizer", f"{str(error)[:20]} stands for no byte") from None
    return [tokens[number] for number in range(len(vocabulary))]


def alphabet() -> dict[str, int]:
    """The printable character that stands for each byte inside a byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(BYTES + index): byte for index, byte in enumerate(others)}
