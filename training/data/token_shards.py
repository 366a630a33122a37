"""Training data that are tokenized already: a folder of token shards with a manifest of their hashes.

| file | content |
|---|---|
| `manifest.json` | `{"format": "folkmoot-tokens/1", "vocabulary": N, "tokenizer": HEX or null, "shards": […]}` |
| an element of `shards` | `{"file": NAME, "tokens": N, "sha256": HEX}` |
| NAME | token ids, unsigned, 16 bits, little-endian, one after another |
| `tokenizer.json` | a byte-level BPE; absent if the tokens are bytes, with an optional end of text (256) |

The bytes of all shards in order are cut into blobs like a text. Every peer checks hashes and token ids again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from protocol.errors import RemoteProtocolError, UserError
from storage.regular_files import open_regular, read_regular
from training.transformer import BYTE_VOCABULARIES, BYTES_WITH_END, VOCABULARY_MAX

FORMAT: Final = "folkmoot-tokens/1"
MANIFEST: Final = "manifest.json"
TOKENIZER: Final = "tokenizer.json"
SUFFIX: Final = ".bin"  # ending of the names of shards
MANIFEST_BYTES_MAX: Final = 16 << 20
READ_BYTES: Final = 1 << 20  # bytes of one read: an even number, so that no token is split


@dataclass(frozen=True, slots=True)
class TokenShard:
    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TokenFolder:
    folder: Path
    vocabulary: int
    tokenizer: bytes | None  # JSON of the tokenizer; None: the tokens are bytes
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def iter_shard_bytes(self) -> Iterator[bytes]:
        """Yield all shards' bytes in order. Raises `UserError` at the first file that differs from the manifest."""
        for shard in self.shards:
            path, hashed, tokens = self.folder / shard.file, hashlib.sha256(), 0
            for piece in _read_known(path, self.vocabulary):
                hashed.update(piece)
                tokens += len(piece) // 2
                yield piece
            if (tokens, hashed.hexdigest()) != (shard.tokens, shard.sha256):
                found = f"{tokens} tokens with SHA-256 {hashed.hexdigest()[:16]}…"
                said = f"but {MANIFEST} lists {shard.tokens} with {shard.sha256[:16]}…"
                raise UserError(f"{path} has {found}, {said}: get the shard again, or make a new manifest with `peer shards`")


def is_token_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_token_folder(folder: Path) -> TokenFolder:
    """Read and check the manifest in `folder`. Raises `UserError`. Only `iter_shard_bytes` reads the shards."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            raise UserError(f"{path} is larger than {MANIFEST_BYTES_MAX >> 20} MB: it is not a manifest of token shards")
        plain = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): make one with `peer shards`") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise UserError(f'{path} has no "format": "{FORMAT}": make one with `peer shards`')
    vocabulary = _number(plain, "vocabulary", path, VOCABULARY_MAX)
    entries = plain.get("shards")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} lists no shards: make one with `peer shards`")
    shards = tuple(_shard(entry, path) for entry in entries)
    return TokenFolder(folder, vocabulary, _tokenizer(folder, plain.get("tokenizer"), vocabulary), shards)


def make_manifest(folder: Path) -> str:
    """Return a manifest as JSON. It lists the .bin files in `folder` in the order of their names, and `tokenizer.json`.

    Raises `UserError`.
    """
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder} (give one with {SUFFIX} files of 16-bit little-endian token ids)")
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise UserError(f"no {SUFFIX} file in folder {folder}: put shards of 16-bit little-endian token ids there")
    tokenizer = folder / TOKENIZER
    try:
        text = read_regular(tokenizer) if tokenizer.exists() else None
    except OSError as error:
        raise UserError(f"{tokenizer} cannot be read ({error.strerror}): put the tokenizer of the shards there") from None
    vocabulary = BYTES_WITH_END if text is None else _vocabulary_of(text, tokenizer)
    plain = {
        "format": FORMAT,
        "vocabulary": vocabulary,
        "tokenizer": None if text is None else hashlib.sha256(text).hexdigest(),
        "shards": [_described(file, vocabulary) for file in files],
    }
    return json.dumps(plain, indent=1)


def require_known_tokens(path: Path, vocabulary: int, on_piece: Callable[[], None]) -> None:
    """Raise `UserError` at the first token of a file that is outside the vocabulary."""
    for _ in _read_known(path, vocabulary):
        on_piece()


def _described(file: Path, vocabulary: int) -> dict[str, Any]:
    hashed, tokens = hashlib.sha256(), 0
    for piece in _read_known(file, vocabulary):
        hashed.update(piece)
        tokens += len(piece) // 2
    if not tokens:
        raise UserError(f"{file} is empty: put token ids into it, or take it out of the folder")
    return {"file": file.name, "tokens": tokens, "sha256": hashed.hexdigest()}


def _read_known(path: Path, vocabulary: int) -> Iterator[bytes]:
    """Yield the file in pieces of whole tokens. Raises `UserError` at the first token that is outside the vocabulary."""
    position = 0
    try:
        with open_regular(path) as stream:
            while piece := stream.read(READ_BYTES):
                if len(piece) % 2:
                    raise UserError(f"{path} has an odd number of bytes: token ids are 16 bits each")
                tokens = np.frombuffer(piece, dtype="<u2")
                if tokens.max() >= vocabulary:
                    first = int(np.argmax(tokens >= vocabulary))
                    where = f"token {int(tokens[first])} at position {position + first} of {path}"
                    raise UserError(f"{where} is outside vocabulary {vocabulary}: these shards have another tokenizer")
                position += len(tokens)
                yield piece
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing, but {MANIFEST} lists it: get the file, or make a new manifest with `peer shards`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _shard(entry: Any, path: Path) -> TokenShard:
    if not isinstance(entry, dict) or not isinstance(file := entry.get("file"), str):
        raise UserError(f'{path}: every shard must be like {{"file": "0.bin", "tokens": 1000, "sha256": "…"}}')
    if not file.isprintable() or not file or Path(file).name != file:  # A file name cannot contain NUL or half a surrogate pair.
        raise UserError(f"{path}: {file!r} is not the name of a file in this folder")
    digest = entry.get("sha256")
    if not isinstance(digest, str) or len(digest) != 64 or digest.strip("0123456789abcdef"):
        raise UserError(f"{path}: the sha256 of {file} is not 64 hexadecimal digits")
    return TokenShard(file, _number(entry, "tokens", path, 1 << 40), digest)


def _number(plain: dict[str, Any], name: str, path: Path, high: int) -> int:
    value = plain.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise UserError(f"{path}: {name} must be a whole number in 1..{high}, not {value!r}")
    return value


def _tokenizer(folder: Path, digest: Any, vocabulary: int) -> bytes | None:
    path = folder / TOKENIZER
    if digest is None:
        if vocabulary not in BYTE_VOCABULARIES:
            allowed = " or ".join(map(str, BYTE_VOCABULARIES))
            raise UserError(f"{folder / MANIFEST}: without a tokenizer the vocabulary must be {allowed}, not {vocabulary}")
        return None
    try:
        text = read_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}), but {MANIFEST} names it: put it there") from None
    if hashlib.sha256(text).hexdigest() != digest:
        raise UserError(f"{path} is not the tokenizer that {MANIFEST} names: put the tokenizer of the shards there")
    if (found := _vocabulary_of(text, path)) != vocabulary:
        raise UserError(
            f"{path} has {found} tokens, but {MANIFEST} sets vocabulary {vocabulary}: make a new manifest with `peer shards`"
        )
    return text


def _vocabulary_of(tokenizer: bytes, path: Path) -> int:
    from training.data.tokenizer import BpeTokenizer

    try:
        return BpeTokenizer(tokenizer).vocabulary
    except RemoteProtocolError as error:
        raise UserError(
            f"{path} is not a byte-level BPE ({error.detail}): put the JSON of the tokenizers package there"
        ) from None
