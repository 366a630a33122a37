"""How a settled task is written down, with every vote: one line of JSON, alike at every peer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from curation.ledger.curation_state import Assignment, ProjectSpec, TaskRow
from curation.tasks.answers import answer_words
from curation.tasks.task_pages import AnnotationTask, task_id


def label_record(
    asked: ProjectSpec, row: TaskRow, text: AnnotationTask | None, votes: Iterable[Assignment | None]
) -> dict[str, Any]:
    """A settled task. `text` is None where the page is not here. `votes` are the assignments of all that ever had the task."""
    assert row.label is not None
    task = task_id(row.project, row.number)
    label = {"label": list(row.label), "label_text": answer_words(asked.kind, asked.options, row.label)}
    line: dict[str, Any] = {"task": task.hex(), "number": row.number, **label, "height": row.height, "time_ms": row.time_ms}
    if row.is_redacted:
        line["redacted"] = True
    elif text is not None:
        line |= {"text": text.text, "items": list(text.items)}
    opened = (vote for vote in votes if vote is not None and vote.answer is not None)
    return line | {"votes": [_vote(vote) for vote in opened]}


def _vote(vote: Assignment) -> dict[str, Any]:
    assert vote.answer is not None
    said = {"annotator": vote.annotator.hex(), "answer": list(vote.answer)}
    return said | {"height": vote.height, "time_ms": vote.time_ms}


def to_json_line(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"
