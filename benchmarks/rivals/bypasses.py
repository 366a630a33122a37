"""Disguised words from other authors. Arguments: a file with JSON of the words, a seed, and the number of words of each kind.

AugLy (github.com/facebookresearch/AugLy, MIT) imitates people's ways past filters. The Unicode Consortium's list of lookalike
characters comes with confusable-homoglyphs (MIT). Half of that list and half of AugLy's own table, by a hash of each character,
were known when our table was written. The other halves and AugLy's other methods were not. It runs in an environment of its own,
see `environment.BYPASSES`.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from augly import text
from augly.utils import UNICODE_MAPPING_PATH
from confusable_homoglyphs import categories, confusables

# Unicode Standard Annex 31, table 5, and its Common characters. Fonts for all other scripts are rare.
RECOMMENDED = {
    *(
        "COMMON",
        "INHERITED",
        "ARABIC",
        "ARMENIAN",
        "BENGALI",
        "BOPOMOFO",
        "CYRILLIC",
        "DEVANAGARI",
        "ETHIOPIC",
        "GEORGIAN",
        "GREEK",
    ),
    *("GUJARATI", "GURMUKHI", "HAN", "HANGUL", "HEBREW", "HIRAGANA", "KANNADA", "KATAKANA", "KHMER", "LAO", "LATIN", "MALAYALAM"),
    *("MYANMAR", "ORIYA", "SINHALA", "TAMIL", "TELUGU", "THAANA", "THAI", "TIBETAN"),
}
LOOKED_AT, HELD_OUT = "looked at", "held out"


def half_of(character: str) -> str:
    return HELD_OUT if hashlib.sha256(character.encode()).digest()[0] % 2 else LOOKED_AT


def lookalikes(half: str, is_recommended: bool) -> dict[str, list[str]]:
    """Return letter -> the lookalike characters of that half."""
    found: dict[str, list[str]] = {}
    for letter in string.ascii_letters:
        for entry in confusables.confusables_data.get(letter, ()):
            character = entry["c"]
            if len(character) > 1 or character.isascii():
                continue
            if half_of(character) == half and (categories.alias(character) in RECOMMENDED) == is_recommended:
                found.setdefault(letter.lower(), []).append(character)
    return {letter: sorted(set(characters)) for letter, characters in sorted(found.items())}


def with_lookalikes(half: str, is_recommended: bool) -> Callable[[str, random.Random], str | None]:
    table = lookalikes(half, is_recommended)

    def disguise(word: str, draw: random.Random) -> str | None:
        """Replace at least one of the letters, or return None if no letter has a lookalike."""
        places = [place for place, letter in enumerate(word) if letter.lower() in table]
        chosen = set(draw.sample(places, draw.randint(1, len(places)))) if places else set()
        made = (draw.choice(table[letter.lower()]) if place in chosen else letter for place, letter in enumerate(word))
        return "".join(made) if chosen else None

    return disguise


def by_augly(function: Callable[..., Any], **options: Any) -> Callable[[str, random.Random], str | None]:
    def disguise(word: str, draw: random.Random) -> str | None:
        made = function([word], **options)
        return made if isinstance(made, str) else made[0]

    return disguise


def unseen_table() -> str:
    """Write the held-out half of AugLy's lookalikes to a file, and return its name."""
    table = json.loads(Path(UNICODE_MAPPING_PATH).read_text())
    unseen = {letter: [character for character in of if half_of(character) == HELD_OUT] for letter, of in table.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({letter: of for letter, of in unseen.items() if of}, file)
    return file.name


UNSEEN = unseen_table()
KINDS: dict[str, Callable[[str, random.Random], str | None]] = {
    "Unicode's list, half that was looked at": with_lookalikes(LOOKED_AT, True),
    "Unicode's list, half that was held out": with_lookalikes(HELD_OUT, True),
    "Unicode's list, rare scripts, held out": with_lookalikes(HELD_OUT, False),
    "AugLy: change_case": by_augly(text.change_case, granularity="char", cadence=1.0, case="random", seed=None),
    "AugLy: replace_similar_unicode_chars, half that was held out": by_augly(
        text.replace_similar_unicode_chars, aug_char_p=0.5, aug_word_p=1.0, mapping_path=UNSEEN
    ),
    "AugLy: replace_fun_fonts": by_augly(text.replace_fun_fonts, aug_p=1.0, granularity="all"),
    "AugLy: insert_zero_width_chars": by_augly(text.insert_zero_width_chars, granularity="all", cadence=1.0),
    "AugLy: insert_punctuation_chars": by_augly(text.insert_punctuation_chars, granularity="all", cadence=1.0, vary_chars=True),
    "AugLy: insert_whitespace_chars": by_augly(text.insert_whitespace_chars, granularity="all", cadence=1.0),
    "AugLy: split_words": by_augly(text.split_words, aug_word_p=1.0, min_char=4),
    "AugLy: replace_similar_chars": by_augly(text.replace_similar_chars, aug_char_p=0.5, aug_word_p=1.0),
    "AugLy: replace_upside_down": by_augly(text.replace_upside_down, aug_p=1.0, granularity="all"),
}


def main() -> None:
    file, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    words = json.loads(file.read_text())
    made: dict[str, list[tuple[str, str]]] = {}
    for kind, disguise in KINDS.items():
        random.seed(f"{seed} {kind}")  # AugLy draws from it
        draw, pairs = random.Random(f"{seed} {kind}"), list[tuple[str, str]]()
        for number in range(count):
            word = words[number % len(words)]
            found = disguise(word, draw)
            if found is not None and found != word:
                pairs.append((word, found))
        made[kind] = pairs
    Path(UNSEEN).unlink()
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
