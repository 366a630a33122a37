"""Calls of curation that people send to their own peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Request for a new project with tasks, or for more tasks in an existing project."""

    file: str  # a path on the peer's machine: JSONL, CSV or Label Studio's JSON
    name: str  # name of a new project; empty: the file's name
    project: str  # name or first digits of the id of a project that gets the tasks; empty: a new one
    kind: str  # label, rating, pair or ranking
    options: tuple[str, ...]
    many: bool
    votes: int
    price: int
    guidelines: str  # a path; empty: none
    suggests_first: bool
    columns: dict[str, str] = field(default_factory=dict)  # the file's names of some of `COLUMNS`
    gold_from: str = ""  # the file's field with the right answers; empty: `gold`
    display: str = "plain"  # text format of a new project: `curation.ledger.curation_state.TextFormat`
    again: bool = False  # also adds tasks that an earlier import of the same file has added


@dataclass(frozen=True, slots=True)
class ImportView:
    project: str
    name: str
    state: str
    tasks: int  # number of tasks in the project
    notes: tuple[str, ...]  # one sentence each, for the person who imports


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
    votes: dict[str, int]  # number of votes by answer
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
    common: int  # units that both have answered, see `annotator_agreement`
    kappa: str  # a fraction; empty: all answers of both are the same


@dataclass(frozen=True, slots=True)
class AgreementView:
    project: str
    name: str
    alpha: str  # Krippendorff's α, a fraction; empty: no task has two votes, or all votes are the same
    pairs: tuple[KappaView, ...]


class CurationRpc(Protocol):
    async def projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, closed ones last."""

    async def agreement(self, project: str) -> AgreementView:
        """Return the agreement of a project's annotators."""

    async def import_tasks(self, request: ImportRequest) -> ImportView:
        """Import tasks and return their project, once the network has decided all of them."""

    async def set_project_phase(self, project: str, phase: str) -> ProjectView:
        """Open, pause or close a project."""

    async def vote_to_stop_project(self, project: str) -> str:
        """Vote to close a project, as a voter. Returns a sentence with the result."""

    async def tasks_in_review(self, project: str) -> tuple[TaskInReviewView, ...]:
        """Return the tasks of a project that wait for its author."""

    async def review_task(self, task: str, number: int | None, label: tuple[str, ...]) -> str:
        """Set the label of a task that waits for its author. `task` is its id, or the project of the task with this number."""

    async def redact_task(self, task: str, number: int | None) -> str:
        """Redact a task, given as in `review_task`, as its author, or vote for that as a voter.

        Returns a sentence with the result.
        """

    async def export_tasks(self, project: str, path: str, format: str = "jsonl") -> TaskExportView:
        """Write all settled tasks to a new file."""

    async def create_web_token(self) -> str:
        """Return a new token for an operator of this peer's HTTP API."""

    async def web_address(self) -> str:
        """Return the address of this peer's web pages, or an empty string if it serves none."""

    async def revoke_operator_tokens(self) -> int:
        """Revoke all tokens of operators and return their number."""

    async def create_annotator_invitation(self) -> str:
        """Return a new code that enrols one annotator at this peer."""

    async def export_task_proofs(self, project: str, directory: str) -> TaskExportView:
        """Write all settled tasks to a new folder, with a proof of each line, for `tasks verify`."""
