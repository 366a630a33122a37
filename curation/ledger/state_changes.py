"""Changes of a transaction to the tables of curation.

They are collected in dictionaries, and each table is updated once, at the end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, Generic, TypeVar, cast

from curation.ledger.curation_state import (
    AgreementCounts,
    Annotator,
    AnnotatorSkill,
    Assignment,
    AssignmentState,
    CurationState,
    ExpiryEntry,
    ExpiryQueue,
    GoldRow,
    IndexSlot,
    PeerAnnotators,
    Project,
    ProjectCloseProgress,
    ProjectPhase,
    Redaction,
    TaskPageRow,
    TaskRow,
    TaskStage,
)
from curation.ledger.transaction_types import LeaseRequest
from curation.limits import ASSIGNED_MAX, DRAW_CANDIDATES_MAX, DRAW_PROJECTS_MAX, SKIPS_MAX
from curation.tasks.task_pages import assignment_id, task_id
from ledger.tables import Table

R = TypeVar("R")
# Each project has two lists of task numbers, from which tasks are drawn. Adding or removing an element changes two rows. The list
# of fresh tasks has element n at each index n from `Project.fresh_drawn` on, unless a row has another number: the first element
# replaces the drawn one. In the list of begun tasks with a free place, the last element replaces a removed one.
FRESH_LIST: Final = b"f"
BEGUN_LIST: Final = b"b"


def index_slot_key(project: bytes, which: bytes, place: int) -> bytes:
    return project + which + place.to_bytes(4, "big")


class TableChanges(Generic[R]):
    """Table of the state, seen with the changes of the current transaction."""

    def __init__(self, table: Table[R]) -> None:
        self._table = table
        self.changes: dict[bytes, R | None] = {}

    def get_record(self, key: bytes) -> R | None:
        return self.changes[key] if key in self.changes else self._table.get_record(key)

    def __getitem__(self, key: bytes) -> R:
        found = self.get_record(key)
        assert found is not None
        return found

    def __setitem__(self, key: bytes, row: R) -> None:
        self.changes[key] = row

    def delete_row(self, key: bytes) -> None:
        self.changes[key] = None


@dataclass
class CurationChanges:
    """State while a transaction is applied: the state before it, and its changes. `new_state` returns the state after it."""

    state: CurationState
    root: bytes  # recent state root, which seeds the draws of tasks
    looks_left: float = math.inf  # number of begun tasks that this batch's draws may still try
    changed_fields: dict[str, Any] = field(default_factory=dict)  # new values of changed fields that are no tables

    def __post_init__(self) -> None:
        state = self.state
        self.projects: TableChanges[Project] = TableChanges(state.projects)
        self.pages: TableChanges[TaskPageRow] = TableChanges(state.pages)
        self.tasks: TableChanges[TaskRow] = TableChanges(state.tasks)
        self.places: TableChanges[IndexSlot] = TableChanges(state.places)
        self.annotators: TableChanges[Annotator] = TableChanges(state.annotators)
        self.assignments: TableChanges[Assignment] = TableChanges(state.assignments)
        self.skills: TableChanges[AnnotatorSkill] = TableChanges(state.skills)
        self.shares: TableChanges[PeerAnnotators] = TableChanges(state.shares)
        self.due: TableChanges[ExpiryEntry] = TableChanges(state.due)
        self.closings: TableChanges[ProjectCloseProgress] = TableChanges(state.closings)
        self.agreements: TableChanges[AgreementCounts] = TableChanges(state.agreements)
        self.golds: TableChanges[GoldRow] = TableChanges(state.golds)
        self.redactions: TableChanges[Redaction] = TableChanges(state.redactions)
        self.wishes: TableChanges[Redaction] = TableChanges(state.wishes)

    def new_state(self) -> CurationState:
        changed = {name: rows for name, rows in vars(self).items() if isinstance(rows, TableChanges) and rows.changes}
        tables = {name: getattr(self.state, name).with_rows(rows.changes) for name, rows in changed.items()}
        return replace(self.state, **tables, **self.changed_fields)

    def add_to_field(self, name: str, more: int = 1) -> None:
        self.changed_fields[name] = self.changed_fields.get(name, getattr(self.state, name)) + more

    @property
    def open(self) -> tuple[bytes, ...]:
        return cast(tuple[bytes, ...], self.changed_fields.get("open", self.state.open))

    @property
    def closing(self) -> tuple[bytes, ...]:
        return cast(tuple[bytes, ...], self.changed_fields.get("closing", self.state.closing))

    # Queues ----------------------------------------------------------------------------------------------------------

    def expiry_queue(self, name: str) -> ExpiryQueue:
        return cast(ExpiryQueue, self.changed_fields.get(name, getattr(self.state, name)))

    def enqueue_expiry(self, name: str, assignment: bytes, at_ms: int) -> None:
        queue = self.expiry_queue(name)
        self.due[_due_key(name, queue.last)] = ExpiryEntry(assignment, at_ms)
        self.changed_fields[name] = replace(queue, last=queue.last + 1)

    def pop_expired(self, name: str, now_ms: int, most: int) -> Iterator[bytes]:
        """Remove at most `most` expired entries from a queue, and yield their ids.

        An id names an annotator in the queue `enrolments`, and an assignment in the other queues.
        """
        for _ in range(most):
            queue = self.expiry_queue(name)
            if queue.first == queue.last:
                return
            key = _due_key(name, queue.first)
            entry = self.due[key]
            if entry.due_ms > now_ms:
                return
            self.due.delete_row(key)
            self.changed_fields[name] = replace(queue, first=queue.first + 1)
            yield entry.assignment

    def queue_entries(self, name: str, first: int) -> Iterator[ExpiryEntry]:
        """Return the entries of a queue from number `first` on."""
        queue = self.expiry_queue(name)
        return (self.due[_due_key(name, place)] for place in range(max(first, queue.first), queue.last))

    def next_expiry_ms(self) -> int | None:
        """Return the time from which even an empty batch changes the state.

        None: no entry can expire, and no project is closing.
        """
        entries = [
            entry.due_ms for name in ("leases", "openings", "enrolments") for entry in islice(self.queue_entries(name, 0), 1)
        ]
        return min([*entries, *(self.closings[project].start_ms for project in self.closing[:1])], default=None)

    # Lists of tasks --------------------------------------------------------------------------------------------------

    def _number_at(self, project: bytes, which: bytes, place: int) -> int:
        row = self.places.get_record(index_slot_key(project, which, place))
        if row is None:
            assert which == FRESH_LIST, "the list of begun tasks has a row for each place"
            return place
        return row.number

    def _put_begun(self, project: bytes, number: int, place: int) -> None:
        self.places[index_slot_key(project, BEGUN_LIST, place)] = IndexSlot(number)
        task = task_id(project, number)
        self.tasks[task] = replace(self.tasks[task], index_slot=place)

    def update_task_index(self, task: bytes) -> None:
        """Add the task to the list of begun tasks if it can be drawn, or remove it from the list if not.

        A task that lacks votes after SKIPS_MAX skips or ASSIGNED_MAX annotators goes to its author for review.
        """
        row = self.tasks[task]
        is_full = len(row.annotators) >= ASSIGNED_MAX
        if row.stage is TaskStage.BEGUN and row.places_taken < row.votes_asked and (is_full or row.skipped >= SKIPS_MAX):
            self.send_to_review(task)
            row = self.tasks[task]
        wanted = row.stage is TaskStage.BEGUN and row.places_taken < row.votes_asked
        if wanted and row.index_slot is None:
            project = self.projects[row.project]
            self._put_begun(row.project, row.number, project.begun)
            self.projects[row.project] = replace(project, begun=project.begun + 1)
        elif not wanted and row.index_slot is not None:
            self._unlist(task)

    def _unlist(self, task: bytes) -> None:
        row = self.tasks[task]
        project = self.projects[row.project]
        assert row.index_slot is not None
        last = project.begun - 1
        moved = self._number_at(row.project, BEGUN_LIST, last)
        self.places.delete_row(index_slot_key(row.project, BEGUN_LIST, last))
        if row.index_slot != last:
            self._put_begun(row.project, moved, row.index_slot)
        self.tasks[task] = replace(self.tasks[task], index_slot=None)
        self.projects[row.project] = replace(project, begun=last)

    def send_to_review(self, task: bytes) -> None:
        """Send the task to its author for review. Its unopened votes are forfeited."""
        self.tasks[task] = row = replace(self.tasks[task], stage=TaskStage.REVIEW)
        for annotator in row.annotators:
            assignment = assignment_id(task, annotator)
            if self.assignments[assignment].state is AssignmentState.COMMITTED:
                self.forfeit_vote(assignment)
        project = self.projects[row.project]
        self.projects[row.project] = replace(project, review=project.review + 1)

    def redact_task(self, project: bytes, number: int) -> None:
        """Mark a task as redacted. If it is not settled, its leases expire, and its committed votes are forfeited."""
        task = task_id(project, number)
        row = self.tasks.get_record(task) or self.new_task_row(project, number)
        if row.stage is TaskStage.SETTLED:
            self.tasks[task] = replace(row, is_redacted=True)
            return
        if row.stage is TaskStage.REVIEW:
            self.projects[project] = replace(self.projects[project], review=self.projects[project].review - 1)
        self.tasks[task] = replace(row, stage=TaskStage.REDACTED, is_redacted=True)
        self.update_task_index(task)
        for annotator in row.annotators:
            assignment = assignment_id(task, annotator)
            match self.assignments[assignment].state:
                case AssignmentState.LEASED:
                    self.release_place(assignment, AssignmentState.EXPIRED)
                case AssignmentState.COMMITTED:
                    self.forfeit_vote(assignment)

    # Draws -----------------------------------------------------------------------------------------------------------

    def draw_task(
        self, annotator: bytes, without: Sequence[bytes] = (), project: bytes | None = None
    ) -> tuple[bytes, bytes] | None:
        """Draw a task that this annotator never had or has released. Return (project, task), or None if no tried task fits.

        `without`: excluded projects. `project`: the only project to draw from; None: all open projects.
        """
        keys = self._looked_at(annotator) if project is None else (project,) if project in self.open else ()
        rows = [(key, self.projects[key]) for key in keys if key not in without]
        rows = [(key, row) for key, row in rows if row.phase is ProjectPhase.OPEN]
        begun = [key for key, row in rows if row.begun]
        fresh = [key for key, row in rows if row.fresh_drawn < row.tasks]
        for draw, projects in ((self._draw_begun, begun), (self._draw_fresh, fresh)):
            for key in sorted(projects, key=lambda key: _hash(self.root, annotator, key)):
                task = draw(key, annotator)
                if task is not None:
                    return key, task
        return None

    def _looked_at(self, annotator: bytes) -> tuple[bytes, ...]:
        """Return at most DRAW_PROJECTS_MAX open projects for a draw.

        The first of them depends on the annotator and the state root.
        """
        keys = self.open
        if len(keys) <= DRAW_PROJECTS_MAX:
            return keys
        start = int.from_bytes(_hash(self.root, annotator)[:8], "big") % len(keys)
        return (*keys[start:], *keys[:start])[:DRAW_PROJECTS_MAX]

    def _draw_begun(self, project: bytes, annotator: bytes) -> bytes | None:
        count = self.projects[project].begun
        start = int.from_bytes(_hash(self.root, annotator, project)[:8], "big") % count if count else 0
        for place in ((start + number) % count for number in range(min(count, DRAW_CANDIDATES_MAX))):
            if self.looks_left <= 0:
                return None
            self.looks_left -= 1
            task = task_id(project, self._number_at(project, BEGUN_LIST, place))
            if annotator not in self.tasks[task].annotators or self._is_released(task, annotator):
                return task
        return None

    def _is_released(self, task: bytes, annotator: bytes) -> bool:
        assignment = self.assignments.get_record(assignment_id(task, annotator))
        return assignment is not None and assignment.state is AssignmentState.RELEASED

    def _draw_fresh(self, project: bytes, annotator: bytes) -> bytes | None:
        """Remove and return a fresh task of the list.

        Redacted tasks before it are removed, too. None: at most DRAW_CANDIDATES_MAX tries found only redacted tasks.
        """
        for _ in range(DRAW_CANDIDATES_MAX):
            row = self.projects[project]
            if row.fresh_drawn == row.tasks:
                return None
            number = self._fresh(project, row, annotator)
            task = task_id(project, number)
            if self.tasks.get_record(task) is None:  # a fresh task with a row was redacted
                self.tasks[task] = self.new_task_row(project, number)
                return task
        return None

    def has_task_to_draw(self, annotator: bytes, without: Sequence[bytes] = (), project: bytes | None = None) -> bool:
        """Return whether a lease request would lease a task, or remove redacted tasks from a list of fresh tasks."""
        return self.draw_task(annotator, without, project) is not None or bool(self.projects.changes)

    def new_task_row(self, project: bytes, number: int) -> TaskRow:
        asked = 1 if self.projects[project].spec.votes == 1 else 2
        return TaskRow(project, number, TaskStage.BEGUN, asked, 0, 0, 0, 0, None, ())

    def _fresh(self, project: bytes, row: Project, annotator: bytes) -> int:
        """Draw a task of the list of fresh tasks, remove it from the list and return its number."""
        drawn = int.from_bytes(_hash(self.root, project, annotator, row.fresh_drawn.to_bytes(8, "big"))[:8], "big")
        place = row.fresh_drawn + drawn % (row.tasks - row.fresh_drawn)
        number, first = self._number_at(project, FRESH_LIST, place), self._number_at(project, FRESH_LIST, row.fresh_drawn)
        if place != row.fresh_drawn:
            self.places[index_slot_key(project, FRESH_LIST, place)] = IndexSlot(first)
        self.places.delete_row(index_slot_key(project, FRESH_LIST, row.fresh_drawn))
        self.projects[project] = replace(row, fresh_drawn=row.fresh_drawn + 1)
        return number

    # Places in a task ------------------------------------------------------------------------------------------------

    def lease_task(self, peer: bytes, until_ms: int, wish: LeaseRequest) -> bool:
        """Draw a task and lease it to the annotator of the request. Return False if no task was drawn."""
        annotator = wish.annotator
        drawn = self.draw_task(annotator, wish.excluded_projects, wish.project)
        if drawn is None:
            return False
        project, task = drawn
        row, assignment = self.tasks[task], assignment_id(task, annotator)
        annotators = row.annotators if annotator in row.annotators else (*row.annotators, annotator)
        self.tasks[task] = replace(row, places_taken=row.places_taken + 1, annotators=annotators)
        self.update_task_index(task)
        self.assignments[assignment] = Assignment(project, row.number, annotator, peer, until_ms, AssignmentState.LEASED)
        self.enqueue_expiry("leases", assignment, until_ms)
        person = self.annotators[annotator]
        self.annotators[annotator] = replace(person, leases=(*person.leases, assignment))
        return True

    def release_place(self, assignment: bytes, state: AssignmentState) -> None:
        """End a lease or a vote with the state `state`, and free its place in the task."""
        row = self.assignments[assignment]
        task = task_id(row.project, row.number)
        assert row.state in (AssignmentState.LEASED, AssignmentState.COMMITTED)
        self.assignments[assignment] = replace(row, state=state, seals=())
        now = self.tasks[task]
        self.tasks[task] = replace(now, places_taken=now.places_taken - 1)
        self.update_task_index(task)
        self.remove_lease(row.annotator, assignment)

    def forfeit_vote(self, assignment: bytes) -> None:
        """Cancel a committed vote that was not opened: its state becomes FORFEITED, and its place is free."""
        row = self.assignments[assignment]
        task = task_id(row.project, row.number)
        now = self.tasks[task]
        self.tasks[task] = replace(now, committed=now.committed - 1)
        self.release_place(assignment, AssignmentState.FORFEITED)

    def remove_lease(self, annotator: bytes, assignment: bytes, committed: int = 0) -> None:
        person = self.annotators[annotator]
        self.annotators[annotator] = replace(
            person,
            leases=tuple(key for key in person.leases if key != assignment),
            annotations=person.annotations + committed,
        )


def _due_key(queue: str, place: int) -> bytes:
    return queue.encode() + place.to_bytes(8, "big")


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/draw\x00" + b"".join(parts)).digest()
