"""Files of tasks on their way onto the log: one at a time, page after page, also when whoever sent the file has left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import trio

from curation.import_export.task_import import TaskWithGold
from curation.service.operators.operator_log import DECISION_WAIT_SECONDS, Operators
from curation.service.projects.project_author import ProjectAuthor
from features.services import ServiceContext
from protocol.errors import UserError
from web.replies import HttpProblem

TASKS_MAX: Final = 100_000  # of one file: it is in memory until all is decided


@dataclass
class _Import:
    done: trio.Event = field(default_factory=trio.Event)
    problem: HttpProblem | None = None


class ImportQueue:
    def __init__(self, desk: ServiceContext, operators: Operators) -> None:
        self._desk, self._operators = desk, operators
        self._nursery: trio.Nursery | None = None
        self._is_busy = False

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    async def import_tasks(self, operator: str, project: bytes, tasks: list[TaskWithGold], about: str) -> bool:
        """Whether all is decided; if not, it goes on. Raises `HttpProblem`, also while another file is on its way."""
        if self._is_busy or self._nursery is None:
            async with self._operators.log_action(operator, "import", about):
                raise HttpProblem("too-many", "another file is being imported: wait until its tasks are there", 10)
        self._is_busy, of = True, _Import()
        self._nursery.start_soon(self._add, of, operator, project, tasks, about)
        with trio.move_on_after(DECISION_WAIT_SECONDS):
            await of.done.wait()
        if of.problem is not None:
            raise of.problem
        return of.done.is_set()

    async def _add(self, of: _Import, operator: str, project: bytes, tasks: list[TaskWithGold], about: str) -> None:
        try:
            async with self._operators.log_action(operator, "import", about):
                try:
                    await ProjectAuthor(self._desk).add_tasks(project, tasks)
                except UserError as error:
                    raise HttpProblem("refused", str(error)) from None
        except HttpProblem as problem:
            of.problem = problem
            self._desk.log_event(f"the import of {about} ended early: {problem.detail}")
        finally:
            self._is_busy = False
            of.done.set()
