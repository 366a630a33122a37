"""HTTP calls for operators about projects, with a token of `peer web token`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import trio

from curation.import_export.task_import import InvalidTasks, ParsedTasks, TaskWithGold, parse_tasks, read_tasks
from curation.ledger.curation_state import CurationState, Project, ProjectPhase, ProjectSpec, TextFormat
from curation.service.access_control import DECISION_WAIT_SECONDS, Operators, wait_for_decision
from curation.service.project_author import ProjectAuthor, already_imported_note, require_equal_item_counts
from curation.service.project_tasks import require_project
from curation.tasks.answers import AnswerSchema, QuestionKind, options_problem
from features.services import ServiceContext
from features.text_tables import pluralize
from ledger.members import MembersState
from protocol.errors import UserError
from storage.foreign_text import ENDINGS
from web.calls import HttpProblem, Json

TASKS_MAX: Final = 100_000  # tasks per file: they are in memory until all are decided
FILE_NAME_CHARACTERS_MAX: Final = 64  # characters of a file's name in replies and in the log
PREVIEW_TASKS_MAX: Final = 5  # tasks of a file in its preview
ACTIONS: Final = {ProjectPhase.PAUSED: "pause", ProjectPhase.OPEN: "open", ProjectPhase.CLOSED: "close"}


class ImportQueue:
    """Queue of imports of files: one file at a time, page by page.

    An import continues when the client has closed its connection.
    """

    def __init__(self, desk: ServiceContext, operators: Operators) -> None:
        self._desk, self._operators = desk, operators
        self._nursery: trio.Nursery | None = None
        self._is_busy = False

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    async def import_tasks(self, operator: str, project: bytes, tasks: list[TaskWithGold], about: str) -> bool:
        """Import tasks. Return True if the import is complete, or False if it continues after DECISION_WAIT_SECONDS.

        Raises `HttpProblem` if the import fails, or if another import runs.

        """
        if self._is_busy or self._nursery is None:
            async with self._operators.log_action(operator, "import", about):
                raise HttpProblem("too-many", "another file is being imported: try again when it is done", 10)
        self._is_busy, done, problems = True, trio.Event(), list[HttpProblem]()
        self._nursery.start_soon(self._add, operator, project, tasks, about, done, problems)
        with trio.move_on_after(DECISION_WAIT_SECONDS):
            await done.wait()
        if problems:
            raise problems[0]
        return done.is_set()

    async def _add(
        self,
        operator: str,
        project: bytes,
        tasks: list[TaskWithGold],
        about: str,
        done: trio.Event,
        problems: list[HttpProblem],
    ) -> None:
        try:
            async with self._operators.log_action(operator, "import", about):
                try:
                    await ProjectAuthor(self._desk).add_tasks(project, tasks)
                except UserError as error:
                    raise HttpProblem("refused", str(error)) from None
        except HttpProblem as problem:
            problems.append(problem)
            self._desk.log_event(f"the import of {about} stopped early: {problem.detail}")
        finally:
            self._is_busy = False
            done.set()


class ProjectApi:
    def __init__(self, desk: ServiceContext, operators: Operators, imports: ImportQueue) -> None:
        self._desk, self._operators, self._imports = desk, operators, imports
        self._founding = ProjectAuthor(desk)

    async def list_projects(self, operator: str) -> Json:
        return {"projects": [self._view(bytes.fromhex(row.project)) for row in self._founding.project_views()]}

    async def show_project(self, operator: str, project: bytes) -> Json:
        return self._view(project)

    async def create_project(
        self,
        operator: str,
        name: str,
        kind: str,
        options: tuple[str, ...],
        many: bool,
        votes: int,
        price: int,
        guidelines: str,
        suggests_first: bool,
        display: str,
        items: int,
        gold_from: str,
        tasks: Sequence[Json],
    ) -> Json:
        asked_kind = QuestionKind(kind)
        about = f"project {name!r}" + (f", {pluralize(len(tasks), 'task')}" if tasks else "")
        async with self._operators.log_action(operator, "make", about):
            if problem := options_problem(asked_kind, options, many):
                raise HttpProblem("misfit", problem)
            # Only an omitted array creates a project without tasks. An empty array is an error.
            read = ParsedTasks([], ()) if tasks == () else _read(tasks, asked_kind, options, many, gold_from)
            items = len(read.tasks[0].task.items) if read.tasks else items
            asked = ProjectSpec(name, asked_kind, options, many, items, None, votes, price, suggests_first, TextFormat(display))
            made = await wait_for_decision(self._founding.create_project(asked, guidelines.encode(), read.tasks))
            return self._view(made) | _notes(read.notes)

    async def add_tasks(
        self,
        operator: str,
        project: bytes,
        format: str,
        check: int,
        name: str,
        gold_from: str,
        again: int,
        tasks: Sequence[Json] = (),
        file: bytes = b"",
    ) -> Json | tuple[int, Json]:
        asked = self._row(project).spec
        if format:
            shown = _file_name(name, format)
            question = AnswerSchema(asked.kind, tuple(asked.options), asked.many)
            if check:
                return 200, await self._checked(shown, file, question, gold_from, project)
            return await self._import(operator, project, question, shown, file, gold_from, bool(again))
        async with self._operators.log_action(operator, "add tasks", f"{len(tasks)} to project {asked.name!r}"):
            read = _read(tasks, asked.kind, tuple(asked.options), asked.many, gold_from)
            await self._founding.forget_import(project, read.tasks)
            await wait_for_decision(self._founding.add_tasks(project, read.tasks))
        return self._view(project) | _notes(read.notes)

    async def _import(
        self, operator: str, project: bytes, question: AnswerSchema, name: str, file: bytes, gold_from: str, again: bool
    ) -> tuple[int, Json]:
        asked, founding = self._row(project).spec, self._founding
        try:
            read = await trio.to_thread.run_sync(_read_file, name, file, question, gold_from)
            require_equal_item_counts(read.tasks, asked.items)
        except UserError as error:
            async with self._operators.log_action(operator, "import", f"{name} into project {asked.name!r}"):
                raise HttpProblem("misfit", str(error)) from None
        if again:
            await founding.forget_import(project, read.tasks)
        before, count = await founding.count_added_tasks(project, read.tasks), len(read.tasks)
        notes = [already_imported_note(name, asked.name, before, count, "again=1")] if before else list(read.notes)
        if before == count:
            raise HttpProblem("already-imported", notes[0])
        about = f"{pluralize(count, 'task')} into project {asked.name!r}"
        is_done = await self._imports.import_tasks(operator, project, read.tasks, about)
        return 201 if is_done else 202, self._view(project) | _notes(notes)

    async def preview_import(
        self, operator: str, format: str, kind: str, options: str, many: int, name: str, gold_from: str, file: bytes
    ) -> Json:
        question = AnswerSchema(QuestionKind(kind), tuple(options.split("\n")) if options else (), bool(many))
        if problem := options_problem(*question):
            raise HttpProblem("misfit", problem)
        return await self._checked(_file_name(name, format), file, question, gold_from, None)

    async def _checked(self, name: str, file: bytes, question: AnswerSchema, gold_from: str, project: bytes | None) -> Json:
        """Return the result that an import of this file would have. `project` is None if the import would create a project."""
        given: list[TaskWithGold] = []
        problems: list[str] = []
        notes: list[str] = []
        try:
            read = await trio.to_thread.run_sync(_read_file, name, file, question, gold_from)
            given, notes = read.tasks, list(read.notes)
            require_equal_item_counts(given, self._row(project).spec.items if project else len(given[0].task.items))
        except InvalidTasks as error:
            problems = error.problems
        except UserError as error:
            problems = [str(error)]
        before = await self._founding.count_added_tasks(project, given) if project and not problems else 0
        if project and before:
            notes = [already_imported_note(name, self._row(project).spec.name, before, len(given), "again=1")]
        elif not problems:
            others = await self._founding.find_projects_with(given)
            notes += [f"project {asked.name!r} already has these tasks" for asked in others.values()]
        shown = [
            {"text": task.text, "items": list(task.items), "suggestion": task.suggestion, "gold": gold}
            for task, gold in given[:PREVIEW_TASKS_MAX]
        ]
        found = {
            "count": 0 if problems else len(given),
            "items": len(given[0].task.items) if given else 0,
            "preview": shown,
            "problems": problems,
        }
        return found | ({"already": before} if before else {}) | _notes(notes)

    async def redact_task(self, operator: str, project: bytes, task: int, reason: str) -> Json:
        row = self._row(project)
        if task >= row.tasks:
            has = f"project {row.spec.name!r} has {pluralize(row.tasks, 'task')}, numbered from 0"
            raise HttpProblem("not-found", f"unknown task {task}: {has}")
        about = f"task {task} of {row.spec.name!r}" + (f": {reason}" if reason else "")
        async with self._operators.log_action(operator, "redact", about):
            return {"said": await wait_for_decision(self._founding.redact_task(project, task))}

    async def pause_project(self, operator: str, project: bytes) -> Json:
        return await self._move(operator, project, ProjectPhase.PAUSED)

    async def open_project(self, operator: str, project: bytes) -> Json:
        return await self._move(operator, project, ProjectPhase.OPEN)

    async def close_project(self, operator: str, project: bytes) -> Json:
        return await self._move(operator, project, ProjectPhase.CLOSED)

    async def _move(self, operator: str, project: bytes, phase: ProjectPhase) -> Json:
        asked = self._row(project).spec
        async with self._operators.log_action(operator, ACTIONS[phase], f"project {asked.name!r}"):
            await wait_for_decision(self._founding.set_phase(project, phase))
        return self._view(project)

    def _row(self, project: bytes) -> Project:
        return require_project(self._desk.state.module_state(CurationState), project)

    def _view(self, project: bytes) -> Json:
        row = self._row(project)
        asked, members = row.spec, self._desk.state.module_state(MembersState)
        return asdict(self._founding.project_view(project)) | {
            "options": list(asked.options),
            "many": asked.many,
            "items": asked.items,
            "price": asked.price,
            "is_mine": members.current_key(row.author) == self._desk.me,
        }


def _notes(notes: Sequence[str]) -> Json:
    return {"notes": list(notes)} if notes else {}


def _file_name(name: str, format: str) -> str:
    """Return the client's name for a file, or `tasks.FORMAT` if the name's extension contradicts the format."""
    is_apt = name and name.lower().endswith(ENDINGS) == (format == "csv")
    return name[-FILE_NAME_CHARACTERS_MAX:] if is_apt else f"tasks.{format}"


def _read_file(name: str, file: bytes, question: AnswerSchema, gold_from: str) -> ParsedTasks:
    return read_tasks(name, file, *question, TASKS_MAX, gold_from=gold_from)


def _read(tasks: Sequence[Json], kind: QuestionKind, options: tuple[str, ...], many: bool, gold_from: str) -> ParsedTasks:
    rows = ((f"task {number}", row) for number, row in enumerate(tasks, 1))
    try:
        return parse_tasks("tasks", rows, kind, options, many, gold_from=gold_from)
    except UserError as error:
        raise HttpProblem("misfit", str(error)) from None
