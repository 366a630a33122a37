"""Which tasks were imported into which project: the same file adds nothing twice, and one that was cut off goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from curation.import_export.task_import import TaskWithGold
from curation.service.sqlite_database import open_database
from curation.tasks.task_pages import AnnotationTask
from features.text_tables import pluralize
from protocol import codec

_SCHEMA = """CREATE TABLE IF NOT EXISTS imported
(project BLOB, tasks BLOB, first INTEGER, count INTEGER, root BLOB, PRIMARY KEY (project, tasks, first)) WITHOUT ROWID"""


def digest_tasks(tasks: Iterable[TaskWithGold]) -> bytes:
    """A digest over texts and items. Labels do not count: they may be used in another way the second time."""
    found = hashlib.sha256()
    for task, _ in tasks:
        found.update(codec.encode(AnnotationTask(task.text, task.items)))
    return found.digest()


def already_imported_note(file: str, project: str, before: int, count: int, way_out: str) -> str:
    if before < count:
        return f"project {project!r} already had {before} of the {count} tasks of {file}; the others are added"
    there = f"project {project!r} already has the {pluralize(count, 'task')} of {file}"
    return f"{there}, so nothing changed; {way_out} adds {'it' if count == 1 else 'them'} once more"


class ImportRecords:
    """Pages by the project and the digest of all tasks that were imported together."""

    def __init__(self, path: Path) -> None:
        self._database = open_database(path, _SCHEMA)

    def record_page(self, project: bytes, tasks: bytes, first: int, count: int, root: bytes) -> None:
        """Waits for the disk."""
        self._database.execute("INSERT OR REPLACE INTO imported VALUES (?, ?, ?, ?, ?)", (project, tasks, first, count, root))

    def delete_import(self, project: bytes, tasks: bytes) -> None:
        self._database.execute("DELETE FROM imported WHERE project = ? AND tasks = ?", (project, tasks))

    def imported_pages(self, project: bytes, tasks: bytes) -> list[tuple[int, int, bytes]]:
        """Place of the first task, count and Merkle root of each page, in order."""
        found = self._database.execute(
            "SELECT first, count, root FROM imported WHERE project = ? AND tasks = ? ORDER BY first", (project, tasks)
        )
        return found.fetchall()

    def projects_with_import(self, tasks: bytes) -> list[bytes]:
        found = self._database.execute("SELECT DISTINCT project FROM imported WHERE tasks = ?", (tasks,))
        return [project for (project,) in found]

    def close(self) -> None:
        self._database.close()
