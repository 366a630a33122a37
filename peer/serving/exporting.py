"""Settled tasks of a project, each with its label and every vote: what the HTTP API and `tasks export` write alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
            line: dict[str, Any] = {"task": task.hex(), "number": row.number, "label": list(row.label), "height": row.height}
            text = shown.entries[index].task if shown else None
            if text is not None:
                line |= {"text": text.text, "items": list(text.items)}
            votes = ((who, state.assignments.get(assignment_id(task, who))) for who in row.annotators)
            named = [
                {"annotator": who.hex(), "answer": list(vote.answer), "height": vote.height}
                for who, vote in votes
                if vote is not None and vote.answer is not None
            ]
            yield line | {"votes": named}
