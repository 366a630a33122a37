"""A job's tokenizer as `tokenizer.json` of the package `tokenizers`, which `transformers` opens: every text has the same ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.data.pretokenizers import BYTE_LEVEL
from training.data.tokenizer import END_OF_TEXT, added_token_json, byte_alphabet, parse_bpe
from training.transformer import BYTES, BYTES_WITH_END


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """Of a byte-level BPE, in which a printable character stands for each byte."""

    ids: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    end_of_text: int | None = None
    special: frozenset[str] = frozenset()  # tokens that no text becomes
    added: tuple[dict[str, Any], ...] = ()  # the other added tokens, as the package writes them
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] = field(default_factory=lambda: BYTE_LEVEL)
    ignores_merges: bool = False

    @property
    def tokens(self) -> list[str]:
        """By their ids."""
        return sorted(self.ids, key=self.ids.__getitem__)


def load_vocabulary(blob: bytes | None, tokens: int) -> BpeVocabulary:
    """The vocabulary of `load_tokenizer`, which raises alike. Bytes have no merges."""
    if blob is not None:
        model = parse_bpe(blob)
        return BpeVocabulary(
            ids=model.vocabulary,
            merges=tuple(model.merges),
            end_of_text=model.end_of_text,
            special=model.special,
            added=tuple(model.added),
            normalizer=model.normalizer,
            pre_tokenizer=model.pre_tokenizer,
            ignores_merges=model.ignores_merges,
        )
    if tokens == BYTES_WITH_END:
        return BpeVocabulary(byte_alphabet() | {END_OF_TEXT: BYTES}, (), BYTES, frozenset({END_OF_TEXT}))
    return BpeVocabulary(byte_alphabet(), ())


def tokenizer_json(vocabulary: BpeVocabulary) -> dict[str, Any]:
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
    """`tokenizer_config.json` of `transformers`. With `split_special_tokens` the name of a special token in a text is text."""
    end = vocabulary.end_of_text
    return {
        **({} if end is None else {"eos_token": vocabulary.tokens[end]}),
        **({"split_special_tokens": True} if vocabulary.special else {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
