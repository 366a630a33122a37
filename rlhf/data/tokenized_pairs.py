"""A set of preferences as token ids, and the rows that a step of a reward model is made of. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from rlhf.data.preference_set_statistics import PreferenceSetStatistics
from rlhf.data.preference_sets import PERMILLE, PreferencePair, PromptRecord, R, decode_records, encode_records, split_held_out
from training.corpus import DataManifest, split_into_shards, tokens_digest
from training.data.token_sequences import TokenArray, TokenizedText
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec

PAIRS_A_BEAT: Final = 256  # tokenized between two signs of progress: some milliseconds
T = TypeVar("T", bound=TokenizedText)


@dataclass(frozen=True, slots=True)
class PairSplit:
    """Which tokens are whose: text 2i is the prompt of pair i with its first response, text 2i + 1 with the second."""

    starts: npt.NDArray[np.int64]  # (2N + 1,): of each text; the last is the end
    p: npt.NDArray[np.float32]  # (N,): that the first response is the better one

    def __len__(self) -> int:
        return len(self.p)


@dataclass(frozen=True, slots=True)
class TokenizedPairs(TokenizedText):
    """`train` and `held_out` hold the tokens of all texts, one after another, and `train` behind them those of `prompts`."""

    train_split: PairSplit
    held_out_split: PairSplit  # held out: by the prompt, so that no prompt is on both sides
    prompts: npt.NDArray[np.int64]  # (M + 1,): where each starts in `train`; the last is the end
    statistics: PreferenceSetStatistics


def preference_set_manifest(
    records: Iterable[PromptRecord], tokens: bytes | None = None, keep: Callable[[bytes], object] = lambda blob: None
) -> DataManifest:
    """What names a set, as `training.corpus` names a text; `keep` gets its shards and then the manifest itself."""
    manifest = replace(split_into_shards(encode_records(records), keep), tokens=tokens)
    keep(manifest.encode())
    return manifest


def open_pairs(
    spec: JobSpec,
    path: Path,
    tokenizer: Tokenizer,
    on_block: Callable[[], None] = lambda: None,
    tokenized: bool = False,
    named: bytes | None = None,
) -> TokenizedPairs:
    """The pairs of a file with a set; as `training.corpus.open_tokens`. `UserError` for pairs that the job cannot use."""
    return open_preference_set(
        path, PreferencePair, lambda pairs: tokenize_pairs(spec, pairs, tokenizer, on_block), tokenized, named
    )


def open_preference_set(path: Path, kind: type[R], encode: Callable[[list[R]], T], tokenized: bool, named: bytes | None) -> T:
    """A file with a set of these records, as tokens whose digest is `named`, if that is said."""
    if tokenized:
        raise UserError(f"{path} holds tokens, and this job learns from a set of prompts and responses")
    with path.open("rb") as stream:
        records = decode_records(stream, kind)
    found = encode(records)
    if named is not None and tokens_digest(found) != named:
        raise UserError(
            f"{path}: this tokenizer makes other tokens of it than the job was made with: install the others' release"
        )
    return found


def tokenize_pairs(
    spec: JobSpec, pairs: Sequence[PreferencePair], tokenizer: Tokenizer, on_block: Callable[[], None] = lambda: None
) -> TokenizedPairs:
    train, held_out = split_held_out(pairs, spec.held_out_permille)
    (trained, of_train), (measured, of_held_out) = (tokenize_all(spec, side, tokenizer, on_block) for side in (train, held_out))
    prompts = [trained]
    for number, text in enumerate(prompt_texts(train)):
        prompts.append(tokenizer.encode(text.encode()))
        if number % PAIRS_A_BEAT == 0:
            on_block()
    starts = np.cumsum([*map(len, prompts)], dtype=np.int64)
    of_set = PreferenceSetStatistics(train, held_out)
    return TokenizedPairs(np.concatenate(prompts), measured, tokenizer.token_bytes, of_train, of_held_out, starts, of_set)


def prompt_texts(pairs: Iterable[PreferencePair]) -> list[str]:
    """The prompts of some pairs, each once. Without one that is empty: a model goes on from something."""
    return list(dict.fromkeys(pair.prompt for pair in pairs if pair.prompt))


def tokenize_all(
    spec: JobSpec, pairs: Sequence[PreferencePair], tokenizer: Tokenizer, on_block: Callable[[], None] = lambda: None
) -> tuple[TokenArray, PairSplit]:
    """All of these pairs. `UserError` for the first one that is longer than the context."""
    texts: list[TokenArray] = []
    for number, pair in enumerate(pairs):
        both = [tokenizer.encode((pair.prompt + response).encode()) for response in (pair.first, pair.second)]
        longest = max(map(len, both))
        if longest > spec.model.context:
            much = f"prompt and response are {longest} tokens, more than the context of {spec.model.context}: shorten them"
            raise UserError(f"{record_label(pair)}: {much}")
        texts += both
        if number % PAIRS_A_BEAT == 0:
            on_block()
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    tokens = np.concatenate(texts) if texts else np.empty(0, dtype=np.uint8)
    return tokens, PairSplit(starts, np.array([pair.p / PERMILLE for pair in pairs], dtype=np.float32))


def record_label(record: PromptRecord) -> str:
    """For people; of a file, its line."""
    return f"line {int.from_bytes(record.id, 'big')}" if len(record.id) == 8 else f"task {record.id.hex()[:16]}"


def pair_batch(tokens: TokenArray, side: PairSplit, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """Of some pairs, N of them: (ids of both texts, padded behind with zeros to the longest: (N, 2, S); where the last token of
    each is: (N, 2); p: (N,)).
    """
    texts = (2 * numbers[:, None] + np.arange(2)).ravel()
    starts, ends = side.starts[texts], side.starts[texts + 1]
    x = np.zeros((len(texts), int((ends - starts).max())), dtype=np.int64)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        x[row, : end - start] = tokens[start:end]
    return x.reshape(len(numbers), 2, -1), (ends - starts - 1).reshape(-1, 2), side.p[numbers]
