"""Handler of the calls in `curation.rpc`: import and export of tasks, reviews, phases of projects, tokens."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import trio

from consensus.voter_set import VoterSet
from curation.import_export.task_import import TASKS_MAX, ParsedTasks, read_tasks
from curation.ledger.curation_module import reviews_left, runs_curation
from curation.ledger.curation_state import (
    AssignmentState,
    CurationState,
    Project,
    ProjectPhase,
    ProjectSpec,
    TaskStage,
    TextFormat,
)
from curation.ledger.transaction_types import ReviewTask, VoteToStopProject
from curation.limits import NAME_CHARACTERS_MAX
from curation.rpc import AgreementView, CurationRpc, ImportRequest, ImportView, ProjectView, TaskExportView, TaskInReviewView
from curation.service.access_control import NO_INVITATION_NEEDED, AccessControl
from curation.service.project_author import ProjectAuthor, already_imported_note
from curation.service.project_tasks import (
    compute_agreement,
    project_pages,
    read_task_page,
    write_export,
    write_label_proofs,
)
from curation.tasks.answers import AnswerSchema, QuestionKind, answer_text, options_problem
from curation.tasks.task_pages import assignment_id, task_id
from features.services import PeerContext
from features.text_tables import pluralize
from protocol.errors import UserError
from storage.regular_files import read_regular
from web.web_service import ADDRESS_FILE

SERVICE_NAME = "serve"


@dataclass(frozen=True)
class CurationRpcHandler(CurationRpc):
    peer: PeerContext

    @property
    def _state(self) -> CurationState:
        self._require_run()
        return self.peer.state.module_state(CurationState)

    def _require_run(self) -> None:
        if not runs_curation(self.peer.state):
            raise UserError("this network does not run the module curation: a quorum of voters must run `upgrade curation 1`")

    @property
    def _founding(self) -> ProjectAuthor:
        self._require_run()
        return ProjectAuthor(self.peer.service_context(SERVICE_NAME))

    async def projects(self) -> tuple[ProjectView, ...]:
        return self._founding.project_views()

    async def agreement(self, project: str) -> AgreementView:
        return await trio.to_thread.run_sync(compute_agreement, self._state, *self._find(project))

    def _find(self, text: str) -> tuple[bytes, Project]:
        return resolve_project(text, self._state)

    async def import_tasks(self, request: ImportRequest) -> ImportView:
        self.peer.require_member()
        founding, path = self._founding, Path(request.file)
        data = await _read(path)
        if request.project:
            key, row = self._find(request.project)
            file = await _tasks(request, data, row.spec.kind, row.spec.options, row.spec.many)
            return await self._import(founding, key, file, request)
        kind = QuestionKind(request.kind)
        if problem := options_problem(kind, request.options, request.many):
            raise UserError(f"{problem}: give them with --options A,B")
        file = await _tasks(request, data, kind, request.options, request.many)
        asked = ProjectSpec(
            name=(request.name or path.stem)[: 2 * NAME_CHARACTERS_MAX],
            kind=kind,
            options=request.options,
            many=request.many,
            items=len(file.tasks[0].task.items),
            guidelines=None,
            votes=request.votes,
            price=request.price,
            suggests_first=request.suggests_first,
            display=TextFormat(request.display),
        )
        for key, other in ({} if request.again else await founding.find_projects_with(file.tasks)).items():
            if _question(other) == _question(asked):
                return await self._import(founding, key, file, request)
        guidelines = await _read(Path(request.guidelines)) if request.guidelines else b""
        return _import_view(founding.project_view(await founding.create_project(asked, guidelines, file.tasks)), file.notes)

    async def _import(self, founding: ProjectAuthor, key: bytes, file: ParsedTasks, request: ImportRequest) -> ImportView:
        if request.again:
            await founding.forget_import(key, file.tasks)
        before = await founding.count_added_tasks(key, file.tasks)
        await founding.add_tasks(key, file.tasks)
        view, notes = founding.project_view(key), file.notes
        if before:
            notes = (already_imported_note(Path(request.file).name, view.name, before, len(file.tasks), "--again"),)
        return _import_view(view, notes)

    async def set_project_phase(self, project: str, phase: str) -> ProjectView:
        self.peer.require_member()
        key, _ = self._find(project)
        await self._founding.set_phase(key, ProjectPhase(phase))
        return self._founding.project_view(key)

    async def vote_to_stop_project(self, project: str) -> str:
        self.peer.require_member()
        key, _ = self._find(project)
        await self.peer.submit_transaction("curation/vote-to-stop", VoteToStopProject(key))
        _, after = self._find(key.hex())
        if after.phase is ProjectPhase.CLOSED:
            return f"project {after.spec.name!r} is closed"
        quorum = VoterSet(self.peer.state.members.voters).quorum
        votes = f"{len(after.stop_requests)} of {quorum} needed votes to close project {after.spec.name!r}"
        return f"{votes}; run this command at other voters, too"

    async def tasks_in_review(self, project: str) -> tuple[TaskInReviewView, ...]:
        key, row = self._find(project)
        return tuple(self._waiting(self._state, key, row))

    def _waiting(self, state: CurationState, key: bytes, row: Project) -> Iterator[TaskInReviewView]:
        left = reviews_left(state, key, self.peer.state.time_ms)
        for page in project_pages(state, key, row):
            shown = None
            for index in range(page.count if left else 0):
                task = task_id(key, page.first + index)
                found = state.tasks.get_record(task)
                if found is None or found.stage is not TaskStage.REVIEW:
                    continue
                left -= 1
                shown = shown or read_task_page(row, page, self.peer.blobs.read_blob)
                text = shown.entries[index].task if shown else None
                votes = [state.assignments.get_record(assignment_id(task, who)) for who in found.annotators]
                said = Counter(_named(row.spec, vote.answer) for vote in votes if vote and vote.answer is not None)
                reasons = Counter(vote.reason for vote in votes if vote and vote.state is AssignmentState.SKIPPED)
                words, items = (text.text, tuple(text.items)) if text else ("", ())
                yield TaskInReviewView(task.hex(), found.number, words, items, dict(said), dict(reasons))

    async def review_task(self, task: str, number: int | None, label: tuple[str, ...]) -> str:
        self.peer.require_member()
        project, number = self._find_task(task, number)
        asked = self._state.projects[project].spec
        answer = AnswerSchema(asked.kind, asked.options, asked.many).parse_answer(task, "label", list(label), asked.items)
        assert answer is not None
        found = self._state.tasks.get_record(task_id(project, number))
        if found is None or found.stage is not TaskStage.REVIEW:
            raise UserError(f"task {number} does not wait for its author: `tasks review {asked.name}` lists the tasks that do")
        await self.peer.submit_transaction("curation/review-task", ReviewTask(task_id(project, number), answer))
        return f"task {number} of {asked.name!r}: {_named(asked, answer)}"

    async def redact_task(self, task: str, number: int | None) -> str:
        self.peer.require_member()
        project, number = self._find_task(task, number)
        return await self._founding.redact_task(project, number)

    def _find_task(self, text: str, number: int | None) -> tuple[bytes, int]:
        """Return the project and the number of a task, given as in `CurationRpc.review_task`.

        Raises `UserError` if it does not exist.
        """
        if number is not None:
            key, row = self._find(text)
            if number >= row.tasks:
                raise UserError(
                    f"unknown task {number}: project {row.spec.name!r} has {pluralize(row.tasks, 'task')}, numbered from 0"
                )
            return key, number
        found = self._state.tasks.get_record(bytes.fromhex(text)) if re.fullmatch("[0-9a-f]{64}", text) else None
        if found is None:
            raise UserError(f"unknown or unassigned task {text!r}: give its project and number, or its id of 64 digits")
        return found.project, found.number

    async def create_web_token(self) -> str:
        with self._doors() as doors:
            return doors.create_operator_token()

    async def web_address(self) -> str:
        file = self.peer.service_context(SERVICE_NAME).folder / ADDRESS_FILE
        return file.read_text() if file.exists() else ""

    async def revoke_operator_tokens(self) -> int:
        with self._doors() as doors:
            return doors.revoke_operators()

    async def create_annotator_invitation(self) -> str:
        with self._doors() as doors:
            if self.peer.service_context(SERVICE_NAME).get_setting("sign_up") == "open":
                raise UserError(NO_INVITATION_NEEDED)
            return doors.create_invitation()

    def _doors(self) -> closing[AccessControl]:
        if not self.peer.runs_service(SERVICE_NAME):
            raise UserError(
                f"this peer serves no annotators, since its role is {self.peer.role}: run it with --role annotator or full"
            )
        return closing(AccessControl(self.peer.service_context(SERVICE_NAME).folder))

    async def export_tasks(self, project: str, path: str, format: str = "jsonl") -> TaskExportView:
        key, row = self._find(project)
        if not row.settled:
            raise UserError(
                f"no task of {row.spec.name!r} is settled yet, so there is nothing to export: `projects` shows its progress"
            )
        state, read = self._state, self.peer.blobs.read_blob

        def write() -> None:
            with open(path, "xb") as file:
                try:
                    write_export(file, state, key, row, read, format)
                except BaseException:
                    os.unlink(path)
                    raise

        try:
            await trio.to_thread.run_sync(write)
        except FileExistsError:
            raise UserError(f"{path} already exists: choose another file with -o") from None
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        return TaskExportView(path, row.settled)

    async def export_task_proofs(self, project: str, directory: str) -> TaskExportView:
        key, _ = self._find(project)
        proven = await self.peer.newest_certified_state()
        if proven is None:
            raise UserError("no state is certified yet: the next decided block certifies the one before it")
        state, links = proven
        read = self.peer.blobs.read_blob
        count = await trio.to_thread.run_sync(write_label_proofs, Path(directory), self.peer.genesis, state, links, key, read)
        return TaskExportView(directory, count)


def resolve_project(text: str, state: CurationState) -> tuple[bytes, Project]:
    """Return the project whose name is `text`, or whose id begins with `text`.

    Raises `UserError` unless exactly one project matches.
    """
    wanted = text.lower()
    found = [(key, row) for key, row in state.projects.items() if key.hex().startswith(wanted) or row.spec.name == text]
    if not wanted or len(found) != 1:
        raise UserError(f"{text!r} matches {len(found) or 'no'} projects: `projects` lists them")
    return found[0]


def _question(asked: ProjectSpec) -> tuple[object, ...]:
    return asked.name, asked.kind, tuple(asked.options), asked.many


def _import_view(view: ProjectView, notes: tuple[str, ...]) -> ImportView:
    return ImportView(view.project, view.name, view.state, view.tasks, notes)


def _named(asked: ProjectSpec, answer: tuple[int, ...]) -> str:
    return answer_text(asked.kind, tuple(asked.options), answer)


async def _read(path: Path) -> bytes:
    try:
        return await trio.to_thread.run_sync(read_regular, path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


async def _tasks(request: ImportRequest, data: bytes, kind: QuestionKind, options: tuple[str, ...], many: bool) -> ParsedTasks:
    name, columns, gold_from = Path(request.file).name, request.columns, request.gold_from
    return await trio.to_thread.run_sync(read_tasks, name, data, kind, options, many, TASKS_MAX, columns, gold_from)
