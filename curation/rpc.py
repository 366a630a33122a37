"""Calls of curation that people send to their own peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Request for a new project with tasks, or for more tasks in an existing project."""

    file: str  # path on the peer's machine of a file in JSONL, CSV or Label Studio's JSON
    name: str  # name of a new project; empty: the name of the file
    project: str  # project that gets the tasks, by its name or the first digits of its id; empty: a new project
    kind: str  # kind of question: label, rating, pair or ranking
    options: tuple[str, ...]
    many: bool
    votes: int
    price: int
    guidelines: str  # path of a file with the guidelines; empty: no guidelines
    suggests_first: bool
    columns: dict[str, str] = field(default_factory=dict)  # the file's column names, by names in `answers.COLUMNS`
    gold_from: str = ""  # the file's field with the right answers; empty: the field `gold`
    display: str = "plain"  # text format of a new project: a value of `curation.ledger.curation_state.TextFormat`
    again: bool = False  # True: also add the tasks that an earlier import of the same file has added


@dataclass(frozen=True, slots=True)
class ImportView:
    project: str
    name: str
    state: str
    tasks: int  # number of tasks in the project
    notes: tuple[str, ...]  # sentences for the person who imports, such as about labels that were left out


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
    """Task that waits for its author's review."""

    task: str
    number: int
    text: str
    items: tuple[str, ...]
    votes: dict[str, int]  # number of votes by answer in words
    skips: dict[str, int] = field(default_factory=dict)  # number of skips by reason


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
    common: int  # number of units that both annotators have answered, see `annotator_agreement`
    kappa: str  # κ as a fraction; empty: all answers of the two annotators are the same


@dataclass(frozen=True, slots=True)
class AgreementView:
    project: str
    name: str
    alpha: str  # Krippendorff's α as a fraction; empty: no task has two votes, or all votes are the same
    pairs: tuple[KappaView, ...]


class CurationRpc(Protocol):
    async def projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, closed ones last."""

    async def agreement(self, project: str) -> AgreementView:
        """Return measures of the agreement of a project's annotators: α, and κ of pairs."""

    async def import_tasks(self, request: ImportRequest) -> ImportView:
        """Import tasks and return their project, once the network has decided all of them."""

    async def set_project_phase(self, project: str, phase: str) -> ProjectView:
        """Open, pause or close a project, and return it."""

    async def vote_to_stop_project(self, project: str) -> str:
        """Vote to close a project, as a voter. Returns a sentence with the result."""

    async def tasks_in_review(self, project: str) -> tuple[TaskInReviewView, ...]:
        """Return the tasks of a project that wait for its author's review."""

    async def review_task(self, task: str, number: int | None, label: tuple[str, ...]) -> str:
        """Set the label of a task that waits for its author's review.

        `task`: the task's id; with `number`, the project of the task.
        """

    async def redact_task(self, task: str, number: int | None) -> str:
        """Redact a task of an own project, or vote as a voter to redact it. Returns a sentence with the result.

        The arguments are those of `review_task`.

        """

    async def export_tasks(self, project: str, path: str, format: str = "jsonl") -> TaskExportView:
        """Write all settled tasks of a project to a new file."""

    async def create_web_token(self) -> str:
        """Return a new token for an operator of this peer's HTTP API."""

    async def web_address(self) -> str:
        """Return the address of this peer's web pages, or an empty string if it serves none."""

    async def revoke_operator_tokens(self) -> int:
        """Revoke all tokens of operators and return their number."""

    async def create_annotator_invitation(self) -> str:
        """Return a new code that enrols one annotator at this peer."""

    async def export_task_proofs(self, project: str, directory: str) -> TaskExportView:
        """Write all settled tasks of a project to a new folder, with a proof of each line, for `peer tasks verify`."""
