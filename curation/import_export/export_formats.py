"""Formats of exports. Each format is derived from the lines of `jsonl`, so that all peers at one height write the same file.

A line is a settled task with all its votes.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, Final

from curation.estimation.rank_aggregation import FIRST, SECOND, STRENGTH_ONE, TIE, bradley_terry
from curation.import_export.csv_injection import quote_cell
from curation.ledger.curation_state import Assignment, ProjectSpec, TaskRow
from curation.limits import SCORED_MAX
from curation.tasks.answers import NONE_OF_THEM, PAIR_ANSWERS, QuestionKind, answer_words
from curation.tasks.task_pages import AnnotationTask, task_id
from protocol.errors import UserError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# latest time in milliseconds: the end of the year 9999, since ISO 8601 has four digits for a year
ISO_MS_MAX: Final = 253_402_300_799_999
Line = dict[str, Any]
Lines = Callable[[], Iterable[Line]]  # function that iterates over all lines at each call: the lines may not fit into memory


@dataclass(frozen=True, slots=True)
class ExportFormat:
    content_type: str
    write: Callable[[ProjectSpec, Lines], Iterator[str]]  # raises `UserError` if the format does not support the kind of project


def label_record(asked: ProjectSpec, row: TaskRow, text: AnnotationTask | None, votes: Iterable[Assignment | None]) -> Line:
    """Return the exported line of a settled task: its label, its text and its opened answers.

    `text` is None if this peer lacks the page of the task. `votes` are all assignments of the task, also those without an answer.
    """
    assert row.label is not None
    line: Line = {
        "task": task_id(row.project, row.number).hex(),
        "number": row.number,
        "label": list(row.label),
        "label_text": answer_words(asked.kind, asked.options, row.label),
        "height": row.height,
        "time_ms": row.time_ms,
    }
    if row.is_redacted:
        line["redacted"] = True
    elif text is not None:
        line |= {"text": text.text, "items": list(text.items)}
    opened = [
        {"annotator": vote.annotator.hex(), "answer": list(vote.answer), "height": vote.height, "time_ms": vote.time_ms}
        for vote in votes
        if vote is not None and vote.answer is not None
    ]
    return line | {"votes": opened}


def to_json_line(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def _jsonl(asked: ProjectSpec, lines: Lines) -> Iterator[str]:
    return map(to_json_line, lines())


# CSV ---------------------------------------------------------------------------------------------------------------------


def _csv(asked: ProjectSpec, lines: Lines) -> Iterator[str]:
    """Yield CSV: a row for each task with its label in words, its number of votes and the number of votes for the label."""
    places = range(1, 1 + max((len(line["items"]) for line in lines() if "text" in line), default=0))
    yield _row(["number", "text", *(f"item{place}" for place in places), "label", "votes", "agree", "height", "task", "time"])
    for line in lines():
        items, answers = line.get("items", []), [vote["answer"] for vote in line["votes"]]
        label = answer_words(asked.kind, asked.options, line["label"])
        shown = [line.get("text", ""), *items, *[""] * (len(places) - len(items)), "; ".join(label) or NONE_OF_THEM]
        counts = [len(answers), answers.count(line["label"])]
        yield _row([line["number"], *shown, *counts, line["height"], line["task"], _as_iso(line["time_ms"])])


def _as_iso(time_ms: int) -> str:
    """Return a time in the form that spreadsheets and Label Studio read, such as 2026-11-28T13:06:25.000Z."""
    time = EPOCH + timedelta(milliseconds=min(time_ms, ISO_MS_MAX))
    return time.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def _row(cells: list[Any]) -> str:
    # The CSV writer quotes a cell that contains a character of the line end. With the line end CRLF, it also quotes cells with a
    # carriage return.
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\r\n").writerow(quote_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    return written.getvalue().removesuffix("\r\n") + "\n"


# Label Studio ------------------------------------------------------------------------------------------------------------


def _label_studio(asked: ProjectSpec, lines: Lines) -> Iterator[str]:
    """Yield Label Studio's JSON: each task with its label as an annotation. Tasks without text are left out."""
    number = -1
    for number, line in enumerate(line for line in lines() if "text" in line):
        names = ("task", "number", "height", "time_ms", "text", "items")
        data = {name: line[name] for name in names} | {f"item{place}": item for place, item in enumerate(line["items"], 1)}
        if asked.kind is QuestionKind.RANKING:
            data["list"] = [{"id": str(place), "title": item, "body": ""} for place, item in enumerate(line["items"])]
        task = {"data": data, "annotations": [{"result": _result(asked, line["label"]), "created_at": _as_iso(line["time_ms"])}]}
        yield ("," if number else "[") + "\n" + json.dumps(task, ensure_ascii=False)
    yield "[]\n" if number < 0 else "\n]\n"


def _result(asked: ProjectSpec, label: list[int]) -> list[Line]:
    match asked.kind:
        case QuestionKind.LABEL:
            return [_tag("label", "text", "choices", [asked.options[option] for option in label])]
        case QuestionKind.RATING:
            return [_tag("rating", "text", "rating", label[0])]
        case QuestionKind.RANKING:
            return [_tag("rank", "list", "ranker", {"rank": [str(item) for item in label]})]
        case QuestionKind.PAIR if label[0] in (FIRST, SECOND):
            return [_tag("pair", "item1,item2", "pairwise", "left" if label[0] == FIRST else "right", "selected")]
        case QuestionKind.PAIR:
            return [_tag("neither", "item1", "choices", [PAIR_ANSWERS[label[0]]])]


def _tag(name: str, to: str, kind: str, value: Any, field: str = "") -> Line:
    return {"from_name": name, "to_name": to, "type": kind, "value": {field or kind: value}}


# Preferences -------------------------------------------------------------------------------------------------------------


def _preferences(asked: ProjectSpec, lines: Lines) -> Iterator[str]:
    """Yield a line for each pair, except pairs with the label "both bad" and pairs without text."""
    if asked.kind is not QuestionKind.PAIR:
        raise UserError(
            f"preferences need a project of pairs, and this project has tasks of type {asked.kind}: export it as jsonl"
        )

    def shown() -> Iterator[Line]:
        return (line for line in lines() if "text" in line and line["label"][0] in (FIRST, SECOND, TIE))

    scores = _scores(shown)
    for line in shown():
        said, items = line["label"][0], line["items"]
        chosen = SECOND if said == SECOND else FIRST
        p = Fraction(1, 2) if said == TIE else preference_share(chosen, [vote["answer"][0] for vote in line["votes"]])
        row = {"id": line["task"], "prompt": line["text"], "chosen": items[chosen], "rejected": items[1 - chosen]}
        row |= {"p": round(float(p), 4), "time_ms": line["time_ms"]}
        for name in ("chosen", "rejected"):
            score = scores.get((line["text"], row[name]))
            if score is not None:
                row[f"{name}_score"] = score
        yield to_json_line(row)


def preference_share(chosen: int, votes: Sequence[int]) -> Fraction:
    """Return the share of votes for `chosen`, where a tie is half a vote.

    It is at least 1/2, since the weighted votes chose the label.
    """
    compared = [vote for vote in votes if vote in (FIRST, SECOND, TIE)]
    if not compared:
        return Fraction(1)  # the author chose the label, and no vote compares the items
    return max(Fraction(1, 2), Fraction(2 * compared.count(chosen) + compared.count(TIE), 2 * len(compared)))


def _scores(lines: Lines) -> dict[tuple[str, str], float]:
    """Return Bradley–Terry strengths by prompt and item, of items that are in two or more pairs.

    Without evidence, an item has strength 1.
    """
    met = Counter((line["text"], item) for line in lines() for item in line["items"])
    games = [
        ((line["text"], line["items"][0]), (line["text"], line["items"][1]), line["label"][0])
        for line in lines()
        if any(met[line["text"], item] > 1 for item in line["items"])
    ]
    if len(games) > SCORED_MAX:
        return {}
    return {item: round(strength / STRENGTH_ONE, 4) for item, strength in bradley_terry(games).items() if met[item] > 1}


FORMATS: Final = {
    "jsonl": ExportFormat("application/jsonl", _jsonl),
    "csv": ExportFormat("text/csv", _csv),
    "label-studio": ExportFormat("application/json", _label_studio),
    "preferences": ExportFormat("application/jsonl", _preferences),
}
