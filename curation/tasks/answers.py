"""The four kinds of questions, and which arrays of integers answer them."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Annotated

from curation.limits import OPTIONS_MAX, RANKED_MAX, RANKED_MIN, SALT_BYTES
from protocol import codec
from protocol.codec import Length

Salt = Annotated[bytes, Length(SALT_BYTES, SALT_BYTES)]
Answer = tuple[int, ...]


class QuestionKind(enum.StrEnum):
    LABEL = "label"  # [option], or several ascending where a project says `many`
    RATING = "rating"  # [1..n], n options
    PAIR = "pair"  # [0 the first item, 1 the second, 2 a tie, 3 both bad]
    RANKING = "ranking"  # the items' numbers, the best first


ITEMS = tuple(f"item{place}" for place in range(1, RANKED_MAX + 1))  # of a task, in columns of a file
COLUMNS = ("text", "suggestion", "gold", *ITEMS)  # which a file may call otherwise
PAIR_ANSWERS = ("the first", "the second", "a tie", "both bad")
NONE_OF_THEM = "none of them"  # several options may be no option


def options_problem(kind: QuestionKind, options: tuple[str, ...], many: bool) -> str | None:
    """Why a project cannot have these options; None if it can."""
    if kind in (QuestionKind.PAIR, QuestionKind.RANKING):
        return f"a {kind} has no options of its own" if options or many else None
    if many and kind is not QuestionKind.LABEL:
        return f"a {kind} has one answer, not many"
    if not 2 <= len(options) <= OPTIONS_MAX:
        return f"a {kind} needs 2 to {OPTIONS_MAX} options, not {len(options)}"
    if len(set(options)) < len(options):
        return "two options are the same"
    return None


def items_problem(kind: QuestionKind, items: int) -> str | None:
    """Why a task with so many items, 0 for a text alone, cannot be asked; None if it can."""
    if kind is QuestionKind.PAIR and items != 2:
        return f"a pair has 2 `items`, not {items}"
    if kind is QuestionKind.RANKING and not RANKED_MIN <= items <= RANKED_MAX:
        return f"a ranking has {RANKED_MIN} to {RANKED_MAX} `items`, not {items}"
    if kind in (QuestionKind.LABEL, QuestionKind.RATING) and items:
        return f"a {kind} has a text and no items"
    return None


def answer_problem(kind: QuestionKind, options: int, many: bool, items: int, answer: Answer) -> str | None:
    """Why this is no answer to such a task; None if it is one."""
    match kind:
        case QuestionKind.LABEL:
            fits = all(0 <= choice < options for choice in answer) and list(answer) == sorted(set(answer))
            counts = len(answer) <= options if many else len(answer) == 1
            return None if fits and counts else f"one of 0..{options - 1}" + (", or several ascending" if many else "")
        case QuestionKind.RATING:
            return None if len(answer) == 1 and 1 <= answer[0] <= options else f"one of 1..{options}"
        case QuestionKind.PAIR:
            return None if len(answer) == 1 and 0 <= answer[0] < len(PAIR_ANSWERS) else f"one of 0..{len(PAIR_ANSWERS) - 1}"
        case QuestionKind.RANKING:
            return None if sorted(answer) == list(range(items)) else f"the numbers 0..{items - 1}, each once"


def answer_text(kind: QuestionKind, options: tuple[str, ...], answer: Answer) -> str:
    """An answer as people read it."""
    if kind is QuestionKind.RANKING:
        return " > ".join(map(str, answer))
    return ", ".join(answer_words(kind, options, answer)) or NONE_OF_THEM


def answer_words(kind: QuestionKind, options: Sequence[str], answer: Sequence[int]) -> list[str]:
    """The texts of an answer; of a ranking the numbers of its items, from 1 on."""
    match kind:
        case QuestionKind.LABEL:
            return [options[option] for option in answer]
        case QuestionKind.RATING:
            return [options[answer[0] - 1]]
        case QuestionKind.PAIR:
            return [PAIR_ANSWERS[answer[0]]]
        case QuestionKind.RANKING:
            return [str(item + 1) for item in answer]


def gold_leaf(salt: bytes, answer: Answer) -> bytes:
    return hashlib.sha256(b"folkmoot/gold\x00" + salt + codec.encode(list(answer))).digest()


def answer_commitment(assignment: bytes, salt: bytes, answer: Answer) -> bytes:
    """The annotator signs this before anybody sees the answer."""
    return hashlib.sha256(b"folkmoot/answer\x00" + assignment + salt + codec.encode(list(answer))).digest()
