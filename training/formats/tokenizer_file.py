"""A job's tokenizer as `tokenizer.json` of the package `tokenizers`, which `transformers` opens: every text has the same ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from training.data.tokenizer import alphabet, model_of

BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Of a byte-level BPE, in which a printable character stands for each byte."""

    ids: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]

    @property
    def tokens(self) -> list[str]:
        """By their ids."""
        return sorted(self.ids, key=self.ids.__getitem__)


def vocabulary_of(blob: bytes | None) -> Vocabulary:
    """Of the tokenizer that a job names; without one, of the bytes, of which nothing is merged. Raises as `load_tokenizer`."""
    if blob is None:
        return Vocabulary(alphabet(), ())
    ids, merges = model_of(blob)
    return Vocabulary(ids, tuple(merges))


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
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
            "ignore_merges": False,
            "vocab": dict(vocabulary.ids),
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """`tokenizer_config.json`: the file beside it is all that there is to the tokenizer. No token means more than its bytes."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
