"""The four kinds of questions, their answers as arrays of integers, and written answers in files and commands. A written answer
is read as the text of an option first, then as an option's number.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Final, NamedTuple

from curation.limits import OPTIONS_MAX, RANKED_MAX, RANKED_MIN, SALT_BYTES
from protocol import codec
from protocol.codec import Length
from protocol.errors import UserError

Salt = Annotated[bytes, Length(SALT_BYTES, SALT_BYTES)]
Answer = tuple[int, ...]
ITEMS = tuple(f"item{place}" for place in range(1, RANKED_MAX + 1))  # names of a file's columns with the items of a task
COLUMNS = ("text", "suggestion", "gold", *ITEMS)  # names of columns; a file may have other names for them, see `--columns`
PAIR_ANSWERS = ("the first", "the second", "a tie", "both bad")
NONE_OF_THEM = "none of them"  # text of an empty answer to a question with `many`
SHOWN_CHARACTERS_MAX: Final = 64  # characters of an answer in an error message: an answer in a file may have any length
NUMBER_CHARACTERS_MAX: Final = 64  # characters of a number: the longest option has 64
POSITION_DIGITS_MAX: Final = 3  # digits of an option's or item's number: Python refuses numbers of thousands of digits
READINGS_SHOWN: Final = 3  # readings of an ambiguous answer in an error message: the first two show the problem
PARTS_MAX: Final = 64  # parts of a text with several options: the number of ways to join parts grows with the square
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
_TRUTHS: Final = {"true": 1, "yes": 1, "false": 0, "no": 0}
# answers to a pair by their words `first`, `second`, `tie` and `bad`
_PAIR_NAMES: Final = {name.split()[1]: name for name in PAIR_ANSWERS}
_SEPARATORS: Final = (";", ",", "|", "\n")  # characters that separate several options in one text


class QuestionKind(enum.StrEnum):
    LABEL = "label"  # answer [option]; with `many`, all chosen options in ascending order
    RATING = "rating"  # answer [rating], from 1 to n for n options
    PAIR = "pair"  # answer [0] the first item is better, [1] the second item is better, [2] a tie, or [3] both items are bad
    RANKING = "ranking"  # answer: numbers of all items, the best item first


def options_problem(kind: QuestionKind, options: tuple[str, ...], many: bool) -> str | None:
    """Return why a project cannot have these options, or None if it can."""
    if kind in (QuestionKind.PAIR, QuestionKind.RANKING):
        return f"a {kind} takes no options" if options or many else None
    if many and kind is not QuestionKind.LABEL:
        return f"a {kind} has one answer, not several"
    if not 2 <= len(options) <= OPTIONS_MAX:
        return f"a {kind} needs 2 to {OPTIONS_MAX} options, not {len(options)}"
    if len(set(options)) < len(options):
        return "two options are the same"
    return None


def items_problem(kind: QuestionKind, items: int) -> str | None:
    """Return why a task of this kind cannot have this number of items, or None if it can.

    A task with a text alone has 0 items.
    """
    if kind is QuestionKind.PAIR and items != 2:
        return f"a pair has 2 `items`, not {items}"
    if kind is QuestionKind.RANKING and not RANKED_MIN <= items <= RANKED_MAX:
        return f"a ranking has {RANKED_MIN} to {RANKED_MAX} `items`, not {items}"
    if kind in (QuestionKind.LABEL, QuestionKind.RATING) and items:
        return f"a {kind} has a text and no items"
    return None


def answer_problem(kind: QuestionKind, options: int, many: bool, items: int, answer: Answer) -> str | None:
    """Return None for a valid answer to a task of this kind, or else the valid answers, such as “expected one of 0..3”."""
    match kind:
        case QuestionKind.LABEL:
            fits = all(0 <= choice < options for choice in answer) and list(answer) == sorted(set(answer))
            counts = len(answer) <= options if many else len(answer) == 1
            return None if fits and counts else f"expected one of 0..{options - 1}" + (", or several ascending" if many else "")
        case QuestionKind.RATING:
            return None if len(answer) == 1 and 1 <= answer[0] <= options else f"expected one of 1..{options}"
        case QuestionKind.PAIR:
            return (
                None if len(answer) == 1 and 0 <= answer[0] < len(PAIR_ANSWERS) else f"expected one of 0..{len(PAIR_ANSWERS) - 1}"
            )
        case QuestionKind.RANKING:
            return None if sorted(answer) == list(range(items)) else f"expected the numbers 0..{items - 1}, each once"


def answer_text(kind: QuestionKind, options: tuple[str, ...], answer: Answer) -> str:
    """Return an answer in words, for people."""
    if kind is QuestionKind.RANKING:
        return " > ".join(map(str, answer))
    return ", ".join(answer_words(kind, options, answer)) or NONE_OF_THEM


def answer_words(kind: QuestionKind, options: Sequence[str], answer: Sequence[int]) -> list[str]:
    """Return the texts of the options in an answer. For a ranking they are the numbers of its items, from 1 on."""
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
    """Return the commitment to an answer: a hash with a salt, which the annotator signs before others see the answer."""
    return hashlib.sha256(b"folkmoot/answer\x00" + assignment + salt + codec.encode(list(answer))).digest()


# Written answers -------------------------------------------------------------------------------------------------------


class OptionText(str):
    """Text of an option, from a file format in which answers are never option numbers."""


class AnswerSchema(NamedTuple):
    """Form of a project's answers: its kind of question, its options, and whether an answer may have many options."""

    kind: QuestionKind
    options: tuple[str, ...]
    many: bool

    def parse_answer(self, where: str, what: str, said: Any, items: int) -> Answer | None:
        """Return a written answer as integers; None if `said` is None.

        Raises `UserError` if it has no valid reading, or more than one.
        """
        if said is None:
            return None
        try:
            answer = _answer(said, self.kind, self.options, self.many)
        except UserError as error:
            raise UserError(f"{where}: {what} {quote_answer(said)} {error}") from None
        if problem := answer_problem(self.kind, len(self.options), self.many, items, answer):
            raise UserError(f"{where}: {what} {quote_answer(said)} is not a valid answer: {problem}")
        return answer


def quote_answer(said: Any) -> str:
    parts = said if isinstance(said, list) else [said]
    return repr(",".join(map(_text, parts))[:SHOWN_CHARACTERS_MAX])


def _text(part: Any) -> str:
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)


def _answer(said: Any, kind: QuestionKind, options: tuple[str, ...], many: bool) -> Answer:
    if kind is QuestionKind.RANKING:
        return _ranking(said)
    if many and isinstance(said, str):
        return _several(said, options)
    parts = said if isinstance(said, list) else [said]
    if kind is QuestionKind.PAIR:
        options = PAIR_ANSWERS
        parts = [_PAIR_NAMES.get(part, part) if isinstance(part, str) else part for part in parts]
    first = int(kind is QuestionKind.RATING)  # ratings are numbered from 1, all others from 0
    answer = [_option(part, options, first) + first for part in parts]
    return tuple(sorted(answer)) if many else tuple(answer)


def _ranking(said: Any) -> Answer:
    """Return the numbers of items in a ranking, from 0 on.

    They may be written from 0 or from 1 on: no ranking is valid as both.
    """
    parts = re.split(r"[\s;,>|]+", said.strip()) if isinstance(said, str) else said if isinstance(said, list) else [said]
    places = [_position(part) for part in parts]
    if any(place is None for place in places):
        raise UserError("must be a list of item numbers, best first")
    low = int(bool(parts) and 0 not in places)
    return tuple(place - low for place in places if place is not None)


def _several(said: str, options: tuple[str, ...]) -> Answer:
    """Return the options in one text. An option may contain a separator, so the parser tries every way to split the text."""
    found: set[Answer] = {()} if said == NONE_OF_THEM else set()
    problem: UserError | None = None
    for separator in _SEPARATORS:
        parts = said.split(separator, PARTS_MAX)
        answers: list[set[frozenset[int]]] = [{frozenset()}]  # answers[n]: all readings of the first n parts
        for end in range(1, len(parts) + 1):
            answers.append(set())
            for start in range(end):
                text = separator.join(parts[start:end])
                try:
                    option = _option(type(said)(text if len(parts) == 1 else text.strip()), options)
                except UserError as error:
                    problem = problem or error
                    continue
                answers[end] |= {before | {option} for before in answers[start] if option not in before}
        found |= {tuple(sorted(answer)) for answer in answers[-1]}
    if len(found) > 1:
        raise _two_readings([" and ".join(repr(options[one]) for one in answer) or "no option" for answer in sorted(found)])
    if not found:
        raise problem or UserError(_none_of(options))
    return found.pop()


def _option(part: Any, options: tuple[str, ...], first: int = 0) -> int:
    """Return the index of the option that a text or a number names. `first` is the number of the first option."""
    text = _text(part)
    if text in options:
        return options.index(text)
    readings = {place: f"the option {options[place]!r} by its value" for place in _by_value(text, options)}
    number = None if isinstance(part, OptionText) else _position(part)
    if number is not None and first <= number < first + len(options):
        position = number - first
        if not readings and any(_number(option) is not None for option in options):
            raise UserError(f"{_none_of(options)}; by its position it would be {options[position]!r}")
        truths = [place for place, option in enumerate(options) if _TRUTHS.get(option.casefold()) == number]
        readings |= {place: f"the option {options[place]!r} by its meaning" for place in truths}
        readings.setdefault(position, f"the option {options[position]!r} by its position")
    if len(readings) > 1:
        raise _two_readings(list(readings.values()))
    if not readings:
        raise UserError(_none_of(options))
    return next(iter(readings))


def _by_value(text: str, options: tuple[str, ...]) -> list[int]:
    """Return the indexes of options with the same value in another spelling: ` sad` for sad, TRUE for true, 1.0 and 01 for 1."""
    stripped = text.strip()
    if stripped in options:
        return [options.index(stripped)]
    if stripped.casefold() in ("true", "false"):  # JSON, Python and spreadsheets write truth values in different letter cases
        return [place for place, option in enumerate(options) if option.casefold() == stripped.casefold()]
    number = _number(stripped)
    return [] if number is None else [place for place, option in enumerate(options) if _number(option) == number]


def _number(text: str) -> Decimal | None:
    return Decimal(text) if len(text) <= NUMBER_CHARACTERS_MAX and _NUMBER.fullmatch(text) else None


def _position(part: Any) -> int | None:
    """Return the whole number from 0 on that is written as a number or as digits; None for any other value."""
    if isinstance(part, str) and part.isascii() and part.isdecimal() and len(part) <= POSITION_DIGITS_MAX:
        return int(part)
    return part if type(part) is int and part >= 0 else None


def _two_readings(readings: list[str]) -> UserError:
    shown = [*readings[:READINGS_SHOWN], *(["others"] if len(readings) > READINGS_SHOWN else [])]
    return UserError(f"is ambiguous: {', or '.join(shown)}; write the option's exact text")


def _none_of(options: tuple[str, ...]) -> str:
    return f"is not one of the options: {', '.join(options)}"
