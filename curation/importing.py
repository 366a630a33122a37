"""Tasks from files of people: JSONL, CSV, or Label Studio's JSON. A line that is none is named, and then nothing is imported."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from curation.answers import Kind, answer_problem, items_problem
from curation.limits import PAGE_BYTES_MAX, PAGE_TASKS_MAX, PAGES_MAX, TEXT_CHARACTERS_MAX
from curation.tasks import Task
from protocol import codec
from protocol.errors import UserError

SPARE_BYTES = 64  # of an entry beside its task
NUMBER_DIGITS_MAX = 3  # of an option or item: Python makes no number of thousands of digits


class Given(NamedTuple):
    task: Task
    gold: tuple[int, ...] | None  # the right answer, where it is known


def read_tasks(name: str, data: bytes, kind: Kind, options: tuple[str, ...], many: bool) -> list[Given]:
    """Raises `UserError` that names the line, or the number of the task in Label Studio's JSON, counted from 1."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{name}:{line}: this is no text in UTF-8") from None
    return tasks_of(name, _csv(name, text) if name.lower().endswith(".csv") else _json(name, text), kind, options, many)


def tasks_of(
    name: str, rows: Iterable[tuple[str, dict[str, Any]]], kind: Kind, options: tuple[str, ...], many: bool
) -> list[Given]:
    """`rows`: where each stands, and what stands there, as in a line of JSONL. Raises `UserError`."""
    tasks = [_checked(where, row, kind, options, many) for where, row in rows]
    if not tasks:
        raise UserError(f"{name}: there is no task in it")
    if len(tasks) > PAGES_MAX * PAGE_TASKS_MAX:
        raise UserError(f"{name}: {len(tasks)} tasks, a project has at most {PAGES_MAX * PAGE_TASKS_MAX}")
    return tasks


def _csv(name: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = reader.fieldnames or []
    items = sorted(column for column in names if column.startswith("item"))
    if "text" not in names and not items:
        raise UserError(f"{name}:1: the first line of a CSV names its columns: `text`, or `item1`, `item2` and so on")
    try:
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"{name}:{reader.line_num}: this line has other columns than the first one names")
            found: dict[str, Any] = {"text": row.get("text", ""), "items": [row[column] for column in items]}
            yield f"{name}:{reader.line_num}", found | {known: row[known] for known in ("suggestion", "gold") if row.get(known)}
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num}: {error}") from None


def _json(name: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UserError(f"{name}: no JSON: {error}") from None
        for number, row in enumerate(found, 1):
            yield f"{name}: task {number}", _of_label_studio(f"{name}: task {number}", row)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{name}:{number}: no JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f'{name}:{number}: a task is a JSON object, such as {{"text": "…"}}')
            yield f"{name}:{number}", row


def _of_label_studio(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or not isinstance(row.get("data", row), dict):
        raise UserError(f"{where} is no JSON object with `data`")
    data = row.get("data", row)
    found = {name: data[name] for name in ("text", "items", "suggestion", "gold") if name in data}
    for prediction in row.get("predictions") or []:
        for result in prediction.get("result") or [] if isinstance(prediction, dict) else []:
            value = result.get("value", {}) if isinstance(result, dict) else {}
            choices = value.get("choices") if isinstance(value, dict) else None
            if choices:
                found["suggestion"] = choices
    return found


def _checked(where: str, row: dict[str, Any], kind: Kind, options: tuple[str, ...], many: bool) -> Given:
    text, items = row.get("text", ""), row.get("items", [])
    if not isinstance(text, str) or not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise UserError(f"{where}: `text` is text, `items` a list of texts")
    if any("\ud800" <= character <= "\udfff" for part in (text, *items) for character in part):
        raise UserError(f"{where}: half of a character, which is no text")
    if any(len(part) > TEXT_CHARACTERS_MAX for part in (text, *items)):
        raise UserError(f"{where}: a text has at most {TEXT_CHARACTERS_MAX} characters")
    problem = items_problem(kind, len(items))
    if problem:
        raise UserError(f"{where}: {problem}")
    if not items and not text.strip():
        raise UserError(f"{where}: the text is empty")
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
        expected = f"none of the options: {', '.join(options)}" if options else "no number"
        raise UserError(f"{where}: {what} {shown} is {expected}")
    answer = tuple(sorted(parts)) if many else tuple(parts)
    problem = answer_problem(kind, len(options), many, items, answer)
    if problem:
        raise UserError(f"{where}: {what} {shown} is no answer: {problem}")
    return answer


def _number(part: Any, kind: Kind, options: tuple[str, ...]) -> Any:
    if part in options:
        return options.index(part) + (kind is Kind.RATING)
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
