"""Comparisons of responses that people decided in a project of curation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from curation.estimation.rank_aggregation import FIRST, SECOND, TIE
from curation.ledger.curation_state import CurationState, TaskPageRow, TaskRow, page_key
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import task_id
from protocol.errors import UserError

Row = tuple[int, bytes, TaskRow]  # of a pair: its place in its page, its task, its row
NO_PROJECT: Final = "{} is no project of pairs: preferences come of those alone"


def decided_pages(state: CurationState, project: bytes, height: int) -> Iterator[tuple[bytes, TaskPageRow, list[Row]]]:
    """Pages with pairs that were decided up to a height, by their keys.

    `UserError`: it is no project that compares responses.
    """
    row = state.projects.get_record(project)
    if row is None or row.spec.kind is not QuestionKind.PAIR:
        raise UserError(NO_PROJECT.format(project.hex()[:16]))
    for number in range(row.pages):
        key = page_key(project, number)
        entry = state.pages.get_record(key)
        assert entry is not None, "a project has the rows of its pages"
        tasks = ((index, task_id(project, entry.first + index)) for index in range(entry.count))
        rows = [(index, task, found) for index, task in tasks if (found := state.tasks.get_record(task)) is not None]
        settled = [item for item in rows if not item[2].is_redacted and is_decided_comparison(item[2], height)]
        if settled:
            yield key, entry, settled


def is_decided_comparison(row: TaskRow, height: int) -> bool:
    """It was decided up to this height which response is the better one, or that none is."""
    return row.label is not None and row.label[0] in (FIRST, SECOND, TIE) and row.height <= height
