"""Text to token ids: the 256 bytes, or a byte-level BPE (Sennrich 2016, Radford 2019) trained with the `tokenizers` package."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import RemoteProtocolError, UserError
from training.transformer import BYTES, BYTES_WITH_END

VOCABULARY_MAX = 1 << 16  # token ids are kept as uint16
TOKENIZER_BYTES_MAX = 16 << 20  # a tokenizer of VOCABULARY_MAX tokens is about 4 MB of JSON
END_OF_TEXT: Final = "<|endoftext|>"  # GPT-2's name; a text that holds these characters never becomes the token


class Tokenizer(Protocol):
    is_bytes: bool
    vocabulary: int
    digest: bytes  # of the blob it was made from
    token_bytes: npt.NDArray[np.int64]  # bytes of text per token id
    end_of_text: int | None  # the token that ends a text and stands for no bytes; None: there is none

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]: ...

    def decode(self, ids: Sequence[int]) -> bytes: ...


class ByteTokenizer:
    """The 256 bytes, and with `BYTES_WITH_END` tokens the end of a text."""

    is_bytes = True
    digest = hashlib.sha256(b"bytes").digest()

    def __init__(self, vocabulary: int = BYTES) -> None:
        self.vocabulary = vocabulary
        self.end_of_text = BYTES if vocabulary == BYTES_WITH_END else None
        self.token_bytes = (np.arange(vocabulary) < BYTES).astype(np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(token for token in ids if token < BYTES)


class BpeTokenizer:
    """A byte-level BPE with the vocabulary, the merges and the end of text of a blob.

    Nothing else in a stranger's JSON can change the tokens of a text.
    """

    is_bytes = False

    def __init__(self, blob: bytes) -> None:
        found = model_of(blob)
        package = _package()
        try:
            model = package.models.BPE(vocab=found.vocabulary, merges=found.merges)
        except Exception as error:  # the package raises bare `Exception` for merges outside the vocabulary
            raise RemoteProtocolError("bad-tokenizer", str(error)[:200]) from None
        self._tokenizer = package.Tokenizer(model)
        self._tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bytes_of_id = _bytes_of_id(found)
        self.vocabulary = len(found.vocabulary)
        self.end_of_text = found.end_of_text
        self.digest = hashlib.sha256(blob).digest()
        self.token_bytes = np.array([len(token) for token in self._bytes_of_id], dtype=np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.array(self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids, dtype=np.uint16)

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes_of_id[token] for token in ids)


def load_tokenizer(blob: bytes | None, vocabulary: int) -> Tokenizer:
    """The tokenizer that a job names, or the bytes of a model with this vocabulary.

    Raises `RemoteProtocolError` if the blob is no byte-level BPE.
    """
    return ByteTokenizer(BYTES_WITH_END if vocabulary == BYTES_WITH_END else BYTES) if blob is None else BpeTokenizer(blob)


def train_bpe(pieces: Iterable[bytes], vocabulary: int) -> bytes:
    """A byte-level BPE of `vocabulary` tokens as a JSON blob; the last token is the end of a text.

    Raises `UserError` for an impossible vocabulary.
    """
    if not BYTES_WITH_END < vocabulary <= VOCABULARY_MAX:
        raise UserError(f"a BPE vocabulary must lie in {BYTES_WITH_END + 1}..{VOCABULARY_MAX}, not {vocabulary}")
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
        raise UserError(f"the text is too small for {vocabulary} tokens: it gives {known}; ask for at most that many")
    made = json.loads(tokenizer.to_str())
    made["model"]["vocab"][END_OF_TEXT] = vocabulary - 1
    made["added_tokens"] = [added_token(END_OF_TEXT, vocabulary - 1)]
    return json.dumps(made, ensure_ascii=False).encode()


def added_token(content: str, number: int) -> dict[str, Any]:
    """A special token as the package writes one."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **plain, "special": True}


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


@dataclass(frozen=True, slots=True)
class BpeModel:
    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]
    end_of_text: int | None


def model_of(blob: bytes) -> BpeModel:
    """`RemoteProtocolError` if it is no byte-level BPE. The end of text is the special token that was added, if there is one."""
    try:
        if len(blob) > TOKENIZER_BYTES_MAX:
            raise ValueError(f"{len(blob)} bytes, at most {TOKENIZER_BYTES_MAX} are allowed")
        plain = json.loads(blob)
        model = plain["model"]
        vocabulary: dict[str, int] = dict(model["vocab"])
        ids = sorted(vocabulary.values())
        merges = [(str(left), str(right)) for left, right in model["merges"]]
        special = [str(token["content"]) for token in plain.get("added_tokens") or [] if token.get("special")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RemoteProtocolError("bad-tokenizer", str(error)[:200]) from None
    if not BYTES <= len(vocabulary) <= VOCABULARY_MAX or ids != list(range(len(vocabulary))):
        raise RemoteProtocolError("bad-tokenizer", f"{len(vocabulary)} tokens without ids 0..n-1, or too few, or too many")
    if not set(alphabet()) <= set(vocabulary):
        raise RemoteProtocolError("bad-tokenizer", "a byte has no token of its own")
    end = special[0] if len(special) == 1 else None
    if end is not None and (end not in vocabulary or end in alphabet() or any(left + right == end for left, right in merges)):
        raise RemoteProtocolError("bad-tokenizer", f"the special token {end[:20]!r} is text too, or not in the vocabulary")
    return BpeModel(vocabulary, merges, None if end is None else vocabulary[end])


def _bytes_of_id(model: BpeModel) -> list[bytes]:
    byte_of = alphabet()
    try:
        tokens = {
            number: b"" if number == model.end_of_text else bytes(byte_of[character] for character in token)
            for token, number in model.vocabulary.items()
        }
    except KeyError as error:
        raise RemoteProtocolError("bad-tokenizer", f"{str(error)[:20]} stands for no byte") from None
    return [tokens[number] for number in range(len(tokens))]


def alphabet() -> dict[str, int]:
    """The printable character that stands for each byte inside a byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(BYTES + index): byte for index, byte in enumerate(others)}
