"""Calls of curation: what people ask their own peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """A project and its tasks, or more tasks for one."""

    file: str  # a path on the peer's machine: JSONL, CSV or Label Studio's JSON
    name: str  # of a new project; empty: the file's name
    project: str  # beginning of the id of a project that gets more tasks; empty: a new one
    kind: str  # label, rating, pair or ranking
    options: tuple[str, ...]
    many: bool
    votes: int
    price: int
    guidelines: str  # a path; empty: none
    suggests_first: bool
    columns: dict[str, str] = field(default_factory=dict)  # what the file calls some of `COLUMNS`
    gold_from: str = ""  # the file's field with the right answers; empty: `gold`
    display: str = "plain"  # of a new project, see `curation.ledger.curation_state.TextFormat`
    again: bool = False  # adds tasks that an earlier import of the same file has added, too


@dataclass(frozen=True, slots=True)
class ImportView:
    project: str
    name: str
    state: str
    tasks: int  # of the project
    notes: tuple[str, ...]  # a sentence each, for the person who imports


@dataclass(frozen=True, slots=True)
class ProjectView:
    project: str
    name: str
    kind: str
    state: str
    author: str
    votes: int
    tasks: int
    begun: int
    settled: int
    review: int
    display: str = "plain"


@dataclass(frozen=True, slots=True)
class TaskInReviewView:
    """A task that waits for its author."""

    task: str
    number: int
    text: str
    items: tuple[str, ...]
    votes: dict[str, int]  # how many said which answer
    skips: dict[str, int] = field(default_factory=dict)  # how many skipped it for which reason


@dataclass(frozen=True, slots=True)
class TaskExportView:
    path: str
    tasks: int


@dataclass(frozen=True, slots=True)
class KappaView:
    """Cohen's κ of two annotators."""

    first: str
    first_name: str
    second: str
    second_name: str
    common: int  # answers to the same tasks
    kappa: str  # a fraction; empty: both always said the same one thing


@dataclass(frozen=True, slots=True)
class AgreementView:
    project: str
    name: str
    alpha: str  # Krippendorff's, a fraction; empty: nothing was said twice, or all is one answer
    pairs: tuple[KappaView, ...]


class CurationRpc(Protocol):
    async def projects(self) -> tuple[ProjectView, ...]:
        """All projects, open ones first."""

    async def agreement(self, project: str) -> AgreementView:
        """How far a project's annotators agree."""

    async def import_tasks(self, request: ImportRequest) -> ImportView:
        """The project with its new tasks, once they are decided."""

    async def set_project_phase(self, project: str, phase: str) -> ProjectView:
        """Opens, pauses or closes it."""

    async def vote_to_stop_project(self, project: str) -> str:
        """Says as a voter that it be closed; what came of it."""

    async def tasks_in_review(self, project: str) -> tuple[TaskInReviewView, ...]:
        """The tasks of a project that wait for its author."""

    async def review_task(self, task: str, number: int | None, label: tuple[str, ...]) -> str:
        """The author's label of such a task: its id, or its project and number."""

    async def redact_task(self, task: str, number: int | None) -> str:
        """Takes a task's text out, as its author or as a voter; what came of it. The task is named as for `review_task`."""

    async def export_tasks(self, project: str, path: str, format: str = "jsonl") -> TaskExportView:
        """Every settled task, in a file."""

    async def create_web_token(self) -> str:
        """A token for an operator of this peer's HTTP API."""

    async def web_address(self) -> str:
        """Where this peer serves people; empty where it does not."""

    async def revoke_operator_tokens(self) -> int:
        """Takes back all such tokens; says how many there were."""

    async def create_annotator_invitation(self) -> str:
        """A code that enrols one annotator at this peer."""

    async def export_task_proofs(self, project: str, directory: str) -> TaskExportView:
        """The same in a new folder, with a proof of each line, for `tasks verify`."""
