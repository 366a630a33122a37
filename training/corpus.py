"""The way of a training text: files of people, bytes, shards for other peers, then one text file and tokens on every peer.

    files --text_files--> pieces of bytes --split--> Manifest and shards ~~> --assemble--> one text file --open_tokens--> Tokens

Token shards of `training.data.token_shards` go the same way without the last step, since they contain tokens.

All steps are streams: a peer has only a few shards of text in memory, at any size of the text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from protocol import codec
from protocol.codec import Between, Digest, Length
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import DATA_BYTES_MAX, DATA_SHARD_BYTES, MESSAGE_BYTES_MAX
from storage import durable_files
from training.data.text_files import printable_path
from training.data.token_sequences import TokenArray, TokenizedText
from training.data.token_shards import require_known_tokens
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec

# Bytes of text that are tokenized at once: the package `tokenizers` needs a hundred times as much memory.
TOKENIZE_BYTES = 128 << 10
CUT_BACK_MAX = 3  # most bytes by which the end of the training part moves back to the start of a UTF-8 character
SHARDS_MAX = DATA_BYTES_MAX // DATA_SHARD_BYTES


def text_bytes_min(spec: JobSpec) -> int:
    """Return the least size of a text in bytes: the training and the held-out part each need one sequence and one more byte."""
    sequence = spec.model.context + 1
    parts = ((sequence, spec.held_out_permille), (sequence + CUT_BACK_MAX, 1000 - spec.held_out_permille))
    return max(-(-least * 1000 // part) for least, part in parts if part)


def require_enough_text(spec: JobSpec, size: int, source: str) -> None:
    needed = text_bytes_min(spec)
    if size < needed:
        few = f"{printable_path(source)} is too small: {size} bytes"
        raise UserError(f"{few}, but context {spec.model.context} needs at least {needed}; give more text")


# From bytes to shards and back ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataManifest:
    """The hashes of a job's text or token ids, and of each shard. A job names the digest of this manifest as `data`."""

    size: Annotated[int, Between(1, DATA_BYTES_MAX)]  # bytes of the whole text
    text: Digest  # SHA-256 of the whole text
    # SHA-256 of the shards in order; a shard has DATA_SHARD_BYTES, the last one at most.
    shards: Annotated[tuple[Digest, ...], Length(1, SHARDS_MAX)]
    tokenized: bool = False  # True if the shards contain 16-bit little-endian token ids instead of text.
    tokens: Digest | None = None  # `tokens_digest` of this text with the job's BPE; None: not checked

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> DataManifest:
        """Return the manifest. Raises `RemoteProtocolError` if it is malformed or inconsistent."""
        manifest = codec.decode(cls, data)
        if len(manifest.shards) != -(-manifest.size // DATA_SHARD_BYTES):
            raise RemoteProtocolError(
                "bad-manifest", f"the manifest lists {len(manifest.shards)} shards for {manifest.size} bytes"
            )
        if len(set(manifest.shards)) < len(manifest.shards):
            raise RemoteProtocolError("bad-manifest", "the manifest lists a shard twice")
        if manifest.tokenized and manifest.size % 2:
            raise RemoteProtocolError(
                "bad-manifest", f"the manifest has an odd number of bytes for 16-bit tokens: {manifest.size}"
            )
        return manifest

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()


def read_manifest(digest: bytes, read: Callable[[bytes, int], bytes]) -> DataManifest:
    """Return the manifest with this digest. `read` returns the blob with a digest, of at most the given number of bytes."""
    return DataManifest.decode(read(digest, MESSAGE_BYTES_MAX))


def split_into_shards(pieces: Iterable[bytes], keep: Callable[[bytes], object], tokenized: bool = False) -> DataManifest:
    """Cut a text, or tokens, into shards. Pass each shard to `keep` and return the manifest.

    Raises `UserError` for an empty text, a text that is too large, or one with a repeated shard.
    """
    whole, size, shards, pending = hashlib.sha256(), 0, [], bytearray()

    def put(shard: bytes) -> None:
        shards.append(hashlib.sha256(shard).digest())
        keep(shard)

    for piece in pieces:
        whole.update(piece)
        size += len(piece)
        if size > DATA_BYTES_MAX:
            raise UserError(f"the text is larger than {DATA_BYTES_MAX >> 30} GiB: train on a part of it")
        pending += piece
        while len(pending) >= DATA_SHARD_BYTES:
            put(bytes(pending[:DATA_SHARD_BYTES]))
            del pending[:DATA_SHARD_BYTES]
    if pending:
        put(bytes(pending))
    if not size:
        raise UserError("the text is empty: give a file or folder with at least a few kB of text")
    if len(set(shards)) < len(shards):
        raise UserError(f"the text contains the same {DATA_SHARD_BYTES >> 20} MiB twice: remove the copy")
    return DataManifest(size, whole.digest(), tuple(shards), tokenized)


def assemble_text(manifest: DataManifest, read: Callable[[bytes], bytes], path: Path) -> None:
    """Write the text of `manifest` to `path`, completely or not at all.

    `read` returns a shard's bytes by digest. Raises `RemoteProtocolError` if the shards do not have the hash of the text.
    """
    whole, size = hashlib.sha256(), 0
    with durable_files.atomic_write(path) as stream:
        for digest in manifest.shards:
            shard = read(digest)
            whole.update(shard)
            size += len(shard)
            stream.write(shard)
        if (size, whole.digest()) != (manifest.size, manifest.text):
            raise RemoteProtocolError(
                "bad-manifest", f"the shards have {size} bytes, expected {manifest.size} with SHA-256 {manifest.text.hex()[:16]}…"
            )


def text_path(folder: Path, manifest: DataManifest) -> Path:
    """Return the path of a manifest's text in a folder of texts."""
    return folder / f"{manifest.text.hex()[:32]}{'.tokens' if manifest.tokenized else '.txt'}"


# From the text file to tokens ----------------------------------------------------------------------------------------


HASHED_AT_ONCE = 1 << 20  # number of tokens that are hashed at once: 8-bit tokens are copied to 16 bits before


def tokens_digest(tokens: TokenizedText) -> bytes:
    """Return the SHA-256 of the training ids followed by the held-out ids, 16-bit little-endian."""
    digest = hashlib.sha256()
    for part in (tokens.train, tokens.held_out):
        for start in range(0, len(part), HASHED_AT_ONCE):
            digest.update(part[start : start + HASHED_AT_ONCE].astype("<u2", copy=False).data)
    return digest.digest()


def open_tokens(
    spec: JobSpec,
    text: Path,
    tokenizer: Tokenizer,
    on_block: Callable[[], None] = lambda: None,
    tokenized: bool = False,
    named: bytes | None = None,
) -> TokenizedText:
    """Map the tokens of `text` into memory. Tokens of a BPE are made once and stored beside the text.

    The text is cut before it is tokenized, so that the held-out bytes are the same for every tokenizer. `on_block` is called
    between blocks, since a BPE takes about half a second for a megabyte. If the text is `tokenized`, the file is mapped directly
    after all ids were found in the vocabulary.

    Raises `UserError` if the job needs more tokens, or if the digest of a BPE's tokens is not `named`. Releases of the package
    `tokenizers` may split a text differently, and auditors reject an update from other tokens.
    """
    if tokenizer.vocabulary != spec.model.vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, but the job's model has vocabulary {spec.model.vocabulary}"
        )
    if tokenized:
        require_known_tokens(text, spec.model.vocabulary, on_block)
        mapped = np.memmap(text, dtype="<u2", mode="r")
        train, held_out = np.split(mapped, [len(mapped) * (1000 - spec.held_out_permille) // 1000])
    else:
        train, held_out = _tokens_of_text(spec, text, tokenizer, on_block)
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= spec.model.context and (name == "training" or spec.held_out_permille):
            few = f"{text}: the {name} part has {len(part)} tokens"
            raise UserError(f"{few}, but context {spec.model.context} needs at least {spec.model.context + 1}")
    tokens = TokenizedText(train, held_out, tokenizer.token_bytes)
    if named is not None and tokens_digest(tokens) != named:
        prefix = _token_prefix(text, tokenizer)
        for made in [path for path in text.parent.iterdir() if path.name.startswith(prefix)]:
            made.unlink()  # The correct release of `tokenizers` has to make these files again.
        release = f"tokenizers {importlib.metadata.version('tokenizers')}"
        raise UserError(
            f"{release} does not make the job's tokens from {text}: install the release of the peer that started the job"
        )
    return tokens


def _tokens_of_text(
    spec: JobSpec, text: Path, tokenizer: Tokenizer, on_block: Callable[[], None]
) -> tuple[TokenArray, TokenArray]:
    size = text.stat().st_size
    require_enough_text(spec, size, str(text))
    held_out_from = _held_out_start(text, size, spec.held_out_permille)
    if tokenizer.is_bytes:
        mapped = np.memmap(text, dtype=np.uint8, mode="r")
        return mapped[:held_out_from], mapped[held_out_from:]
    train = _tokenized(text, 0, held_out_from, tokenizer, on_block)
    return train, _tokenized(text, held_out_from, size, tokenizer, on_block)


def _held_out_start(text: Path, size: int, permille: int) -> int:
    """Return the offset of the held-out part in the text. It is the start of a UTF-8 character."""
    start = size * (1000 - permille) // 1000
    with text.open("rb") as stream:
        stream.seek(max(0, start - 3))
        around = stream.read(start - max(0, start - 3) + 1)
    while start and len(around) > 1 and around[-1] & 0xC0 == 0x80:  # The last byte continues a character.
        start, around = start - 1, around[:-1]
    return start


def _tokenized(text: Path, start: int, stop: int, tokenizer: Tokenizer, on_block: Callable[[], None]) -> TokenArray:
    path = text.with_name(f"{_token_prefix(text, tokenizer)}{start}-{stop}.tokens")
    if not path.exists():
        with durable_files.atomic_write(path) as stream:
            for block in _blocks(text, start, stop):
                stream.write(tokenizer.encode(block).tobytes())
                on_block()
    if not path.stat().st_size:
        return np.zeros(0, dtype=np.uint16)
    return np.memmap(path, dtype=np.uint16, mode="r")


def _token_prefix(text: Path, tokenizer: Tokenizer) -> str:
    return f"{text.name}.{tokenizer.digest.hex()[:16]}."


def _blocks(text: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the text in blocks of about TOKENIZE_BYTES.

    A block ends at the end of a line, so that every peer gets the same tokens.
    """
    with text.open("rb") as stream:
        stream.seek(start)
        rest = b""
        while start < stop:
            block = rest + stream.read(min(TOKENIZE_BYTES, stop - start))
            start += len(block) - len(rest)
            cut = len(block) if start >= stop else (block.rfind(b"\n") + 1 or _whole_characters(block))
            yield block[:cut]
            rest = block[cut:]


def _whole_characters(block: bytes) -> int:
    cut = len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
