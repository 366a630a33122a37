"""Answers as files and people write them: the text of an option first, then its number."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

from curation.tasks.answers import NONE_OF_THEM, PAIR_ANSWERS, Answer, QuestionKind, answer_problem
from protocol.errors import UserError

SHOWN_CHARACTERS_MAX: Final = 64  # of an answer in an error, which a file may make as long as it likes
NUMBER_CHARACTERS_MAX: Final = 64  # an option has no more
POSITION_DIGITS_MAX: Final = 3  # of an option or item: Python makes no number of thousands of digits
READINGS_SHOWN: Final = 3  # of an answer; the first two show the problem
PARTS_MAX: Final = 64  # of a text with several options: the ways to split it grow with their square
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
_TRUTHS: Final = {"true": 1, "yes": 1, "false": 0, "no": 0}
_PAIR_NAMES: Final = {name.split()[1]: name for name in PAIR_ANSWERS}  # first, second, tie, bad
_SEPARATORS: Final = (";", ",", "|", "\n")  # between several options in one text


class OptionText(str):
    """The text of an option, from a format that never numbers options."""


class AnswerSchema(NamedTuple):
    """The form of the answers in a project."""

    kind: QuestionKind
    options: tuple[str, ...]
    many: bool

    def parse_answer(self, where: str, what: str, said: Any, items: int) -> Answer | None:
        return parse_answer(where, what, said, *self, items)


def parse_answer(
    where: str, what: str, said: Any, kind: QuestionKind, options: Sequence[str], many: bool, items: int
) -> tuple[int, ...] | None:
    """An answer of a file or a person; None for None. Raises `UserError` for no answer, and for two readings."""
    if said is None:
        return None
    try:
        answer = _answer(said, kind, tuple(options), many)
    except UserError as error:
        raise UserError(f"{where}: {what} {quote_answer(said)} {error}") from None
    if problem := answer_problem(kind, len(options), many, items, answer):
        raise UserError(f"{where}: {what} {quote_answer(said)} is no answer: {problem}")
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
    """The numbers of items, each once. They may count from 0 or from 1: no order fits both."""
    parts = re.split(r"[\s;,>|]+", said.strip()) if isinstance(said, str) else said if isinstance(said, list) else [said]
    places = [_position(part) for part in parts]
    if any(place is None for place in places):
        raise UserError("is no list of item numbers, the best first")
    low = int(bool(parts) and 0 not in places)
    return tuple(place - low for place in places if place is not None)


def _several(said: str, options: tuple[str, ...]) -> Answer:
    """Options in one text. An option may hold a separator, so every way to split the text is tried."""
    found: set[Answer] = {()} if said == NONE_OF_THEM else set()
    problem: UserError | None = None
    for separator in _SEPARATORS:
        parts = said.split(separator, PARTS_MAX)
        answers: list[set[frozenset[int]]] = [{frozenset()}]  # to the parts before each one
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
    """The place of an option. `first`: the number of the first one."""
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
    """Options of the same value in another form: ` sad`, TRUE for true, 1.0 and 01 for 1."""
    stripped = text.strip()
    if stripped in options:
        return [options.index(stripped)]
    if stripped.casefold() in ("true", "false"):  # JSON, Python and spreadsheets write them each in another case
        return [place for place, option in enumerate(options) if option.casefold() == stripped.casefold()]
    number = _number(stripped)
    return [] if number is None else [place for place, option in enumerate(options) if _number(option) == number]


def _number(text: str) -> Decimal | None:
    return Decimal(text) if len(text) <= NUMBER_CHARACTERS_MAX and _NUMBER.fullmatch(text) else None


def _position(part: Any) -> int | None:
    """A whole number from 0 on, as a number or as its digits."""
    if isinstance(part, str) and part.isascii() and part.isdecimal() and len(part) <= POSITION_DIGITS_MAX:
        return int(part)
    return part if type(part) is int and part >= 0 else None


def _two_readings(readings: list[str]) -> UserError:
    shown = [*readings[:READINGS_SHOWN], *(["others"] if len(readings) > READINGS_SHOWN else [])]
    return UserError(f"has {len(readings)} readings: {', or '.join(shown)}; write the option's exact text")


def _none_of(options: tuple[str, ...]) -> str:
    return f"is none of the options: {', '.join(options)}"
