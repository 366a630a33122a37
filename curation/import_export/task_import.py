"""Tasks from people's files: JSONL, CSV, or Label Studio's JSON.

A file with invalid lines is not imported; an error names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from curation.import_export.foreign_labels import EXPORTED_COLUMNS, LABEL_FIELDS, Fields, ForeignLabels, standard_fields
from curation.limits import PAGE_BYTES_MAX, PAGE_TASKS_MAX, PAGES_MAX, TEXT_CHARACTERS_MAX
from curation.tasks.answers import COLUMNS, ITEMS, AnswerSchema, QuestionKind, items_problem
from curation.tasks.task_pages import AnnotationTask
from features.text_tables import pluralize
from protocol import codec
from protocol.errors import UserError
from storage.foreign_text import ENDINGS, decode_text, describe_columns, open_csv

SPARE_BYTES: Final = 64  # bytes of a page's entry in addition to its task
MISFITS_MAX: Final = 20  # invalid lines in an error message: reading ends after them
TASKS_MAX: Final = PAGES_MAX * PAGE_TASKS_MAX
NAMES: Final = ("text", "items", "suggestion", "gold")  # fields of a task
SHOWN: Final = 64  # characters of an unknown field name in an error message
NAMES_SHOWN: Final = 200  # characters of a row's field names in an error message
JSON_ENDINGS: Final = (".json", ".jsonl", ".ndjson")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Field names that are recognized in any letter case.
_KNOWN: Final = frozenset((*NAMES, *COLUMNS, *LABEL_FIELDS, *EXPORTED_COLUMNS, "data", "prompt", "chosen", "rejected"))


class TaskWithGold(NamedTuple):
    task: AnnotationTask
    gold: tuple[int, ...] | None  # the right answer; None: unknown


class ParsedTasks(NamedTuple):
    tasks: list[TaskWithGold]
    notes: tuple[str, ...]  # sentences for the person who imports, such as about labels that were left out


class InvalidTasks(UserError):
    """Problems of a file with tasks. Each problem names its line, or its task in Label Studio's JSON, counted from 1."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


Row = Fields | UserError  # fields of a line, or the reason why the line is no task


class FieldNameMap(NamedTuple):
    """Field names of a file and their meanings. They are recognized in any letter case and with spaces around them."""

    columns: Mapping[str, str]  # the file's field name by our name, from `--columns`
    gold_from: str
    known: Mapping[str, str]  # recognized field names, by their lower-case form

    @classmethod
    def from_columns(cls, columns: Mapping[str, str], gold_from: str) -> FieldNameMap:
        ours = {name.casefold(): name for name in _KNOWN}
        given = {part: ours.get(name.casefold(), name) for part, name in columns.items()}
        gold = ours.get(gold_from.casefold(), gold_from)
        return cls(given, gold, ours | {name.casefold(): name for name in (*given.values(), gold) if name})

    def to_our_names(self, where: str, theirs: list[str]) -> list[str]:
        """Return the file's field names, with recognized names in our spelling.

        Raises `UserError` if two names mean the same field.
        """
        meant = [self.known.get(name.strip().casefold(), name) for name in theirs]
        for name in meant:
            if meant.count(name) == 1 or self.known.get(name.casefold()) != name:
                continue
            # Our spelling of a name has priority over its other spellings, unless `columns` or `gold_from` has the name.
            if theirs.count(name) != 1 or name in (*self.columns.values(), self.gold_from):
                twice = ", ".join(repr(other) for other, one in zip(theirs, meant, strict=True) if one == name)
                raise UserError(f"{where}: {meant.count(name)} fields mean {name!r}: {twice[:NAMES_SHOWN]}")
        return [other if one in theirs else one for other, one in zip(theirs, meant, strict=True)]


def read_tasks(
    name: str,
    data: bytes,
    kind: QuestionKind,
    options: tuple[str, ...],
    many: bool,
    tasks_max: int = TASKS_MAX,
    columns: Mapping[str, str] = MappingProxyType({}),
    gold_from: str = "",
) -> ParsedTasks:
    """Return the tasks of a file.

    `columns`: the file's field names by names in `COLUMNS`. `gold_from`: the file's field with right answers. Raises
    `InvalidTasks` for lines that are no tasks, and `UserError` for a file of another format.
    """
    text, note = decode_text(name, data)
    names = FieldNameMap.from_columns(columns, gold_from)
    rows = _csv(name, text, names) if is_table(name, text) else _json(name, text)
    found = parse_tasks(name, rows, kind, options, many, tasks_max, columns, gold_from)
    return found._replace(notes=(*([note] if note else ()), *found.notes))


def is_table(name: str, text: str) -> bool:
    """Return whether a file is CSV, by its extension. With an unknown extension, the beginning of the text decides."""
    ending = name.lower()
    return ending.endswith(ENDINGS) or not (ending.endswith(JSON_ENDINGS) or re.match(r"\s*([\[{]|$)", text))


def parse_tasks(
    name: str,
    rows: Iterable[tuple[str, Row]],
    kind: QuestionKind,
    options: tuple[str, ...],
    many: bool,
    tasks_max: int = TASKS_MAX,
    columns: Mapping[str, str] = MappingProxyType({}),
    gold_from: str = "",
) -> ParsedTasks:
    """Return the tasks of rows. A row has its position, such as `tasks.csv:3`, and its fields. Otherwise like `read_tasks`."""
    question, names = AnswerSchema(kind, tuple(options), many), FieldNameMap.from_columns(columns, gold_from)
    labels = ForeignLabels(question, names.gold_from, names.columns.values())
    tasks: list[TaskWithGold] = []
    offered: list[tuple[str, str, tuple[int, ...]] | None] = []  # label of each task: its position in the file, field and answer
    problems: list[str] = []
    seen, without_text = set[str](), 0
    for where, row in rows:
        if len(tasks) == tasks_max:
            raise UserError(f"{name}: more than {tasks_max} tasks: split the file")
        try:
            if isinstance(row, UserError):
                raise row
            fields = standard_fields(_named(where, row, names), question)
            if fields is None:
                without_text += 1
                continue
            seen |= fields.keys()
            fields = _renamed(where, fields, names.columns)
            text, items = _asked(where, fields, kind)
            suggestion = labels.parse_label(where, "suggestion", fields.get("suggestion"), len(items))
            tasks.append(TaskWithGold(AnnotationTask(text, items, suggestion), labels.gold_answer(where, fields, len(items))))
            label = labels.find_suggestion(where, fields, len(items))
            offered.append((where, *label) if label else None)
        except UserError as error:
            problems.append(str(error))
            if len(problems) == MISFITS_MAX:
                break
    if problems:
        raise InvalidTasks(problems)
    if names.gold_from and tasks and names.gold_from not in seen:
        raise UserError(f"{name}: the field {gold_from!r} is missing; the file has {', '.join(sorted(seen))[:NAMES_SHOWN]}")
    if not tasks:
        raise UserError(f"{name}: the file has no tasks")
    tasks = _with_suggestions(tasks, offered, labels)
    gone = f"{pluralize(without_text, 'line')} left out: the text is redacted, or was missing at the exporting peer"
    return ParsedTasks(tasks, (*labels.notes, *([gone] if without_text else ())))


def _with_suggestions(
    tasks: list[TaskWithGold], offered: list[tuple[str, str, tuple[int, ...]] | None], labels: ForeignLabels
) -> list[TaskWithGold]:
    """Return the tasks with their labels as suggestions.

    With gold in the file, labels are skipped: suggestions could reveal the gold.
    """
    has_gold = any(given.gold is not None for given in tasks)
    found = []
    for given, label in zip(tasks, offered, strict=True):
        if label is not None:
            where, name, answer = label
            if has_gold:
                labels.count_skipped(where, name, "suggestions beside gold could reveal it")
            elif given.task.suggestion is not None:
                labels.count_skipped(where, name, "are beside 'suggestion'")
            else:
                labels.suggested[name] += 1
                given = TaskWithGold(replace(given.task, suggestion=answer), None)
        found.append(given)
    return found


def _named(where: str, row: Fields, names: FieldNameMap) -> Fields:
    """Return the row with our field names. The fields `item1`, `item2` and so on become the list `items`."""
    found = dict(zip(names.to_our_names(where, list(row)), row.values(), strict=True))
    items = [found[item] for item in ITEMS if item in found]
    return {"items": items, **found} if items else found


def _renamed(where: str, row: Fields, columns: Mapping[str, str]) -> Fields:
    """Return the row with the file's field names in `columns` replaced by our names. Empty fields among them are left out."""
    if not columns:
        return row
    _require(where, row, columns)
    found = {ours: row[theirs] for ours, theirs in columns.items() if row[theirs] not in ("", None)}
    items = [found.pop(item) for item in ITEMS if item in found]
    return row | ({"items": items} if items else {}) | found


def _require(where: str, names: Iterable[str], columns: Mapping[str, str]) -> None:
    """Raise `UserError` if the file lacks a field of `columns`."""
    known = list(names)
    missing = [theirs for theirs in columns.values() if theirs not in known]
    if missing:
        raise UserError(f"{where}: the field {missing[0]!r} is missing; the file has {', '.join(known)[:NAMES_SHOWN]}")


def _csv(name: str, text: str, known: FieldNameMap) -> Iterator[tuple[str, Row]]:
    theirs, rows = open_csv(name, text, known.known)
    names = known.to_our_names(f"{name}:1", theirs)
    if not known.columns and not {"text", ITEMS[0]} & set(names) and not {"chosen", "rejected"} <= set(names):
        raise UserError(
            f"{name}:1: no column is named `text`, or `item1`, `item2` and so on; {describe_columns(theirs)}; "
            "`--columns text=NAME` names the column of the texts"
        )
    _require(f"{name}:1", names, known.columns)
    for line, cells in rows:
        where = f"{name}:{line}"
        if len(cells) < len(names) or any(cells[len(names) :]):
            yield where, UserError(f"{where}: this line does not have the columns of the first line")
            continue
        found: Fields = dict(zip(names, cells, strict=False))
        yield where, found | {part: None for part in ("suggestion", "gold") if found.get(part) == ""}


def _json(name: str, text: str) -> Iterator[tuple[str, Row]]:
    if text.lstrip().startswith("["):
        try:
            found = _from_json(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: invalid JSON: {error}") from None
        for number, row in enumerate(found, 1):
            where = f"{name}: task {number}"
            is_task = isinstance(row, dict) and isinstance(row.get("data", row), dict)
            yield where, row if is_task else UserError(f"{where} must be a JSON object with `data`")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                row = _from_json(line)
            except (ValueError, RecursionError) as error:
                yield where, UserError(f"{where}: invalid JSON: {error}")
                continue
            yield (
                where,
                row if isinstance(row, dict) else UserError(f'{where}: a task must be a JSON object, such as {{"text": "…"}}'),
            )


def _from_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once_each)


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid in JSON: write null for a missing value")


def _once_each(pairs: list[tuple[str, Any]]) -> Fields:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:SHOWN]!r} is present twice")
    return found


def _asked(where: str, row: Fields, kind: QuestionKind) -> tuple[str, tuple[str, ...]]:
    """Return the text and the items of a task. Raises `UserError` if the row is no task of this kind."""
    text, items = row.get("text", ""), row.get("items", [])
    if not isinstance(text, str) or not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise UserError(f"{where}: `text` must be a text, and `items` a list of texts")
    if any(map(_SURROGATE.search, (text, *items))):
        raise UserError(f"{where}: the text has half a surrogate pair, which is not a character")
    if any(len(part) > TEXT_CHARACTERS_MAX for part in (text, *items)):
        raise UserError(f"{where}: a text is longer than {TEXT_CHARACTERS_MAX} characters")
    problem = items_problem(kind, len(items)) or ("" if items or text.strip() else "the text is empty")
    if problem:
        unknown = "".join(f"; {name[:SHOWN]!r} is not one of {', '.join(NAMES)}" for name in sorted(row.keys() - set(NAMES))[:1])
        raise UserError(f"{where}: {problem}{unknown}")
    return text, tuple(items)


def split_into_pages(tasks: list[TaskWithGold]) -> Iterator[list[TaskWithGold]]:
    """Yield the tasks of each page. A page has as many tasks as fit into PAGE_TASKS_MAX and PAGE_BYTES_MAX."""
    page: list[TaskWithGold] = []
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
