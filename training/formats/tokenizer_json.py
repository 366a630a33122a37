"""A job's tokenizer as `tokenizer.json` of the package `tokenizers`, which `transformers` opens: every text has the same ids."""

from __future__ import annotations

from typing import Any

from training.data.pretokenizers import BYTE_LEVEL
from training.data.tokenizer import END_OF_TEXT, BpeVocabulary, added_token_json, byte_alphabet, parse_bpe
from training.transformer import BYTES, BYTES_WITH_END


def load_vocabulary(blob: bytes | None, tokens: int) -> BpeVocabulary:
    """The vocabulary of `load_tokenizer`, which raises alike. Bytes have no merges."""
    if blob is not None:
        return parse_bpe(blob)
    if tokens == BYTES_WITH_END:
        return BpeVocabulary(byte_alphabet() | {END_OF_TEXT: BYTES}, end_of_text=BYTES, special=frozenset({END_OF_TEXT}))
    return BpeVocabulary(byte_alphabet())


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
