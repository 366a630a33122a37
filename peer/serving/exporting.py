"""Settled tasks of a project, each with its label and every vote: what the HTTP API and `tasks export` write alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from curation.lines import line_of
from curation.state import CurationState, Project, TaskPage, page_key
from curation.tasks import Page, assignment_id, read_page, task_id
from protocol.errors import FolkmootError

Read = Callable[[bytes], bytes]  # a blob by its digest; raises `FolkmootError` if it is not here


def pages(state: CurationState, key: bytes, project: Project) -> Iterator[TaskPage]:
    """A project's pages, in the order of their tasks."""
    for number in range(project.pages):
        page = state.pages.get(page_key(key, number))
        assert page is not None
        yield page


def page_of(project: Project, page: TaskPage, read: Read) -> Page | None:
    """The page's tasks; None if they are not here, or are none."""
    try:
        return read_page(read(page.digest), project.asked.kind, page.root, page.count)
    except FolkmootError:
        return None


def settled(state: CurationState, key: bytes, project: Project, read: Read) -> Iterator[dict[str, Any]]:
    """One line a task, ascending. A task whose text is not here has its label all the same."""
    for page in pages(state, key, project):
        shown = page_of(project, page, read)
        for index in range(page.count):
            task = task_id(key, page.first + index)
            row = state.tasks.get(task)
            if row is None or row.label is None:
                continue
            votes = (state.assignments.get(assignment_id(task, who)) for who in row.annotators)
            yield line_of(row, shown.entries[index].task if shown else None, votes)
