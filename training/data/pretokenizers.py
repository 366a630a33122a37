"""Normalizers and pre-tokenizers of the package `tokenizers` that a job's tokenizer may have.

A regular expression is accepted only if all its alternatives are known here. Other expressions may need exponential time in the
length of a text, on every peer that makes tokens.
"""

from __future__ import annotations

import json
from typing import Any, Final

NORMALIZERS: Final = ("NFC", "NFD", "NFKC", "NFKD")
PATTERN_CHARACTERS_MAX: Final = 400  # characters of a regular expression: known tokenizers have expressions of 120
STEPS_MAX: Final = 8  # steps of a pre-tokenizer: known tokenizers have at most four
BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2: Final = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# Alternatives that a regular expression may have. Each takes time linear in the length of its match.
ALTERNATIVES: Final = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *(r"\p{L}+", r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
        *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,2}", r"\p{N}{1,3}", r"\d", r"\d+", r"\d{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]+", r"[\r\n]", r"\s+(?!\S)", r"\s+", r"\s+$"),
    }
)


def parse_normalizer(said: Any) -> dict[str, Any] | None:
    """Return the normalizer as the JSON of the package `tokenizers`. Raises `ValueError`, which names an unsupported one."""
    steps = said.get("normalizers") if isinstance(said, dict) and said.get("type") == "Sequence" else [said]
    if not isinstance(steps, list) or len(steps) > STEPS_MAX:
        raise ValueError(f"normalizer {_shown(said)} is not supported")
    forms = [step["type"] for step in steps if step is not None]
    unknown = [form for form in forms if form not in NORMALIZERS]
    if unknown:
        raise ValueError(f"normalizer {_shown(unknown[0])} is not supported, only {', '.join(NORMALIZERS)}")
    made = [{"type": form} for form in forms]
    return {"type": "Sequence", "normalizers": made} if len(made) > 1 else made[0] if made else None


def parse_pre_tokenizer(said: Any) -> dict[str, Any]:
    """Return the pre-tokenizer as the JSON of the package `tokenizers`. Raises `ValueError`, which names an unsupported step."""
    steps = said.get("pretokenizers") if isinstance(said, dict) and said.get("type") == "Sequence" else [said]
    if not isinstance(steps, list) or not 1 <= len(steps) <= STEPS_MAX:
        raise ValueError(f"pre_tokenizer {_shown(said)} is not supported")
    made = [_step(step) for step in steps]
    if [step["type"] for step in made].count("ByteLevel") != 1 or made[-1]["type"] != "ByteLevel":
        raise ValueError(f"pre_tokenizer {_shown(said)} does not end in ByteLevel")
    return made[0] if len(made) == 1 else {"type": "Sequence", "pretokenizers": made}


def splits_words(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether the pre-tokenizer splits a text into words. A BPE needs time quadratic in the length of a word."""
    return any(step["type"] == "Split" or step.get("use_regex") for step in pre_tokenizer_steps(pre_tokenizer))


def pre_tokenizer_steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    return list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))


def llama_cpp_name(pre_tokenizer: dict[str, Any], ignores_merges: bool) -> str | None:
    """Return the name of these pre-tokenizer steps in GGUF; None if GGUF has no name for them."""
    steps = pre_tokenizer_steps(pre_tokenizer)
    patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
    digits = [step["individual_digits"] for step in steps if step["type"] == "Digits"]
    known = {
        ((), (), True, False): "gpt-2",
        ((), (True,), True, False): "smollm",
        ((LLAMA_3,), (), False, True): "llama-bpe",
        ((QWEN_2,), (), False, False): "qwen2",
    }
    return known.get((tuple(patterns), tuple(digits), steps[-1]["use_regex"], ignores_merges))


def _step(step: Any) -> dict[str, Any]:
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return BYTE_LEVEL | {"use_regex": bool(step.get("use_regex", True))}
    if kind == "Digits":
        return {"type": "Digits", "individual_digits": bool(step.get("individual_digits"))}
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step["pattern"].get("Regex")
        if isinstance(pattern, str) and _is_known(pattern):
            return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    raise ValueError(f"pre_tokenizer {_shown(step)} is not supported")


def _is_known(pattern: str) -> bool:
    while len(pattern) <= PATTERN_CHARACTERS_MAX:
        begun = [one for one in ALTERNATIVES if pattern == one or pattern.startswith(f"{one}|")]
        if not begun:
            return False
        longest = max(begun, key=len)
        if pattern == longest:
            return True
        pattern = pattern[len(longest) + 1 :]
    return False


def _shown(value: Any) -> str:
    return json.dumps(value)[:120]
