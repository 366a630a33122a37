"""Tasks from files of people: JSONL, CSV, or Label Studio's JSON. Lines that are none are named, and then nothing is imported."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from curation.answers import ITEMS, PAIR_ANSWERS, Kind, answer_problem, items_problem
from curation.limits import PAGE_BYTES_MAX, PAGE_TASKS_MAX, PAGES_MAX, TEXT_CHARACTERS_MAX
from curation.tasks import Task
from protocol import codec
from protocol.errors import UserError

SPARE_BYTES = 64  # of an entry beside its task
MISFITS_MAX = 20  # lines of a file that are named; then nobody reads on
TASKS_MAX = PAGES_MAX * PAGE_TASKS_MAX
NAMES = ("text", "items", "suggestion", "gold")  # of what a task may have
NAMES_SHOWN = 200  # characters of the names that a row has
SHOWN = 64  # characters of a name that is none of these
NUMBER_DIGITS_MAX = 3  # of an option or item: Python makes no number of thousands of digits


class Given(NamedTuple):
    task: Task
    gold: tuple[int, ...] | None  # the right answer, where it is known


class Misfits(UserError):
    """Each problem names its line, or the number of the task in Label Studio's JSON, counted from 1."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


Row = dict[str, Any] | UserError  # what stands in a line, or why that is no task


def read_tasks(
    name: str,
    data: bytes,
    kind: Kind,
    options: tuple[str, ...],
    many: bool,
    tasks_max: int = TASKS_MAX,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> list[Given]:
    """`columns`: what the file calls some of `COLUMNS`.

    Raises `Misfits` for lines that are no task, and `UserError` for what is no such file at all.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{name}:{line}: this is no text in UTF-8") from None
    rows = _csv(name, text, columns) if name.lower().endswith(".csv") else _json(name, text)
    if columns:
        rows = ((where, _renamed(where, row, columns)) for where, row in rows)
    return tasks_of(name, rows, kind, options, many, tasks_max)


def tasks_of(
    name: str, rows: Iterable[tuple[str, Row]], kind: Kind, options: tuple[str, ...], many: bool, tasks_max: int = TASKS_MAX
) -> list[Given]:
    """`rows`: where each stands, and what stands there, as in a line of JSONL. Raises as `read_tasks`."""
    tasks: list[Given] = []
    problems: list[str] = []
    for where, row in rows:
        if len(tasks) == tasks_max:
            raise UserError(f"{name}: more than {tasks_max} tasks")
        try:
            tasks.append(_checked(where, row, kind, options, many))
        except UserError as error:
            problems.append(str(error))
            if len(problems) == MISFITS_MAX:
                break
    if problems:
        raise Misfits(problems)
    if not tasks:
        raise UserError(f"{name}: there is no task in it")
    return tasks


def _renamed(where: str, row: Row, columns: Mapping[str, str]) -> Row:
    """As if the file had our names. A part that the row does not have stays out."""
    if isinstance(row, UserError):
        return row
    try:
        _require(where, row, columns)
    except UserError as error:
        return error
    found = {ours: row[theirs] for ours, theirs in columns.items() if row[theirs] not in ("", None)}
    items = [found.pop(item) for item in ITEMS if item in found]
    return row | ({"items": items} if items else {}) | found


def _require(where: str, names: Iterable[str], columns: Mapping[str, str]) -> None:
    """`UserError` unless all that the columns are called is there."""
    known = list(names)
    missing = [theirs for theirs in columns.values() if theirs not in known]
    if missing:
        raise UserError(f"{where}: there is no {missing[0]!r}; it has {', '.join(known)[:NAMES_SHOWN]}")


def _csv(name: str, text: str, columns: Mapping[str, str]) -> Iterator[tuple[str, Row]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = reader.fieldnames or []
    items = [item for item in ITEMS if item in names]
    if "text" not in names and not items and not columns:
        raise UserError(
            f"{name}:1: the first line of a CSV names its columns: `text`, or `item1`, `item2` and so on; "
            "`--columns text=NAME` says what this file calls them"
        )
    _require(f"{name}:1", names, columns)
    try:
        for row in reader:
            where = f"{name}:{reader.line_num}"
            if None in row or None in row.values():
                yield where, UserError(f"{where}: this line has other columns than the first one names")
                continue
            found: dict[str, Any] = {"text": "", "items": [row[column] for column in items]}
            found |= {part: row[part] for part in ("text", "suggestion", "gold") if row.get(part)}
            yield where, found | {theirs: row[theirs] for theirs in columns.values() if theirs in row}
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num}: {error}") from None


def _json(name: str, text: str) -> Iterator[tuple[str, Row]]:
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: no JSON: {error}") from None
        for number, row in enumerate(found, 1):
            yield f"{name}: task {number}", _of_label_studio(f"{name}: task {number}", row)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, UserError(f"{where}: no JSON: {error}")
                continue
            yield where, row if isinstance(row, dict) else UserError(f'{where}: a task is a JSON object, such as {{"text": "…"}}')


def _of_label_studio(where: str, row: Any) -> Row:
    if not isinstance(row, dict) or not isinstance(row.get("data", row), dict):
        return UserError(f"{where} is no JSON object with `data`")
    data = row.get("data", row)
    found = dict(data)
    for prediction in _list(row, "predictions"):
        for result in _list(prediction, "result"):
            value = result.get("value", {}) if isinstance(result, dict) else {}
            choices = value.get("choices") if isinstance(value, dict) else None
            if choices:
                found["suggestion"] = choices
    return found


def _list(row: Any, name: str) -> list[Any]:
    found = row.get(name) if isinstance(row, dict) else None
    return found if isinstance(found, list) else []


def _checked(where: str, row: Row, kind: Kind, options: tuple[str, ...], many: bool) -> Given:
    if isinstance(row, UserError):
        raise row
    text, items = row.get("text", ""), row.get("items", [])
    if not isinstance(text, str) or not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise UserError(f"{where}: `text` is text, `items` a list of texts")
    if any("\ud800" <= character <= "\udfff" for part in (text, *items) for character in part):
        raise UserError(f"{where}: half of a character, which is no text")
    if any(len(part) > TEXT_CHARACTERS_MAX for part in (text, *items)):
        raise UserError(f"{where}: a text has at most {TEXT_CHARACTERS_MAX} characters")
    problem = items_problem(kind, len(items)) or ("" if items or text.strip() else "the text is empty")
    if problem:
        unknown = "".join(f"; {name[:SHOWN]!r} is none of {', '.join(NAMES)}" for name in sorted(row.keys() - set(NAMES))[:1])
        raise UserError(f"{where}: {problem}{unknown}")
    suggestion, gold = (
        read_answer(where, what, row.get(what), kind, options, many, len(items)) for what in ("suggestion", "gold")
    )
    return Given(Task(text, tuple(items), suggestion), gold)


def read_answer(
    where: str, what: str, said: Any, kind: Kind, options: tuple[str, ...], many: bool, items: int
) -> tuple[int, ...] | None:
    """An answer by the names of options, or as it is numbered. `what` it is: a suggestion, or a label."""
    if said is None:
        return None
    given = said if isinstance(said, list) else [said]
    parts, shown = [_number(part, kind, options) for part in given], repr(",".join(map(str, given)))
    if not all(type(part) is int for part in parts):
        known = PAIR_ANSWERS if kind is Kind.PAIR else options
        expected = f"none of the options: {', '.join(known)}" if known else "no number"
        raise UserError(f"{where}: {what} {shown} is {expected}")
    answer = tuple(sorted(parts)) if many else tuple(parts)
    problem = answer_problem(kind, len(options), many, items, answer)
    if problem:
        raise UserError(f"{where}: {what} {shown} is no answer: {problem}")
    return answer


def _number(part: Any, kind: Kind, options: tuple[str, ...]) -> Any:
    if part in options:
        return options.index(part) + (kind is Kind.RATING)
    if kind is Kind.PAIR and part in (names := [*PAIR_ANSWERS, *(name.split()[1] for name in PAIR_ANSWERS)]):
        return names.index(part) % len(PAIR_ANSWERS)
    return int(part) if isinstance(part, str) and part.isdecimal() and len(part) <= NUMBER_DIGITS_MAX else part


def in_pages(tasks: list[Given]) -> Iterator[list[Given]]:
    """As many to a page as it holds."""
    page: list[Given] = []
    size = 0
    for task in tasks:
        more = len(codec.encode(task.task)) + SPARE_BYTES
        if page and (len(page) == PAGE_TASKS_MAX or size + more > PAGE_BYTES_MAX - SPARE_BYTES):
            yield page
            page, size = [], 0
        page.append(task)
        size += more
    if page:
        yield page
