"""A job's tokenizer as `tokenizer.json` of the package `tokenizers`, which `transformers` opens: every text has the same ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from training.data.tokenizer import END_OF_TEXT, added_token, alphabet, model_of
from training.transformer import BYTES, BYTES_WITH_END

BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Of a byte-level BPE, in which a printable character stands for each byte."""

    ids: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    end_of_text: int | None = None

    @property
    def tokens(self) -> list[str]:
        """By their ids."""
        return sorted(self.ids, key=self.ids.__getitem__)


def vocabulary_of(blob: bytes | None, tokens: int) -> Vocabulary:
    """The vocabulary of `load_tokenizer`, which raises alike. Bytes have no merges."""
    if blob is not None:
        model = model_of(blob)
        return Vocabulary(model.vocabulary, tuple(model.merges), model.end_of_text)
    if tokens == BYTES_WITH_END:
        return Vocabulary(alphabet() | {END_OF_TEXT: BYTES}, (), BYTES)
    return Vocabulary(alphabet(), ())


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    end = vocabulary.end_of_text
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [] if end is None else [added_token(vocabulary.tokens[end], end)],
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


def tokenizer_config(vocabulary: Vocabulary, context: int) -> dict[str, Any]:
    """`tokenizer_config.json` of `transformers`. With `split_special_tokens` the name of a special token in a text is text."""
    end = vocabulary.end_of_text
    special = {} if end is None else {"eos_token": vocabulary.tokens[end], "split_special_tokens": True}
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
