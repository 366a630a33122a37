"""A transaction's changes to the tables of curation, gathered in dictionaries: each table takes them once, at the end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from curation.contents import LeaseWish
from curation.limits import ASSIGNED_MAX, CANDIDATES, DRAW_PROJECTS_MAX, SKIPS_MAX
from curation.lists import BEGUN, FRESH, place_key
from curation.state import (
    Agreed,
    Annotator,
    Assignment,
    Closing,
    CurationState,
    Due,
    Gold,
    Lease,
    Phase,
    Place,
    Project,
    Queue,
    Redaction,
    Share,
    Skill,
    Stage,
    TaskPage,
    TaskRow,
)
from curation.tasks import assignment_id, task_id
from ledger.tables import Table

R = TypeVar("R")
TABLES = (
    "projects",
    "pages",
    "tasks",
    "places",
    "annotators",
    "assignments",
    "skills",
    "shares",
    "due",
    "closings",
    "agreements",
    "golds",
    "redactions",
    "wishes",
)
QUEUES = ("leases", "openings", "enrolments")


class Rows(Generic[R]):
    """A table and what has changed in it since."""

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

    def drop(self, key: bytes) -> None:
        self.changes[key] = None


@dataclass
class Work:
    """The state while a transaction is applied. `finish` gives the state after it."""

    state: CurationState
    root: bytes  # a recent state root, which draws depend on
    looks_left: float = math.inf  # tasks that draws may still look at
    changed: dict[str, Any] = field(default_factory=dict)  # fields of the state that are no tables

    def __post_init__(self) -> None:
        state = self.state
        self.projects: Rows[Project] = Rows(state.projects)
        self.pages: Rows[TaskPage] = Rows(state.pages)
        self.tasks: Rows[TaskRow] = Rows(state.tasks)
        self.places: Rows[Place] = Rows(state.places)
        self.annotators: Rows[Annotator] = Rows(state.annotators)
        self.assignments: Rows[Assignment] = Rows(state.assignments)
        self.skills: Rows[Skill] = Rows(state.skills)
        self.shares: Rows[Share] = Rows(state.shares)
        self.due: Rows[Due] = Rows(state.due)
        self.closings: Rows[Closing] = Rows(state.closings)
        self.agreements: Rows[Agreed] = Rows(state.agreements)
        self.golds: Rows[Gold] = Rows(state.golds)
        self.redactions: Rows[Redaction] = Rows(state.redactions)
        self.wishes: Rows[Redaction] = Rows(state.wishes)

    def finish(self) -> CurationState:
        tables = {}
        for name in TABLES:
            rows: Rows[Any] = getattr(self, name)
            if rows.changes:
                tables[name] = getattr(self.state, name).with_rows(rows.changes)
        return replace(self.state, **tables, **self.changed)

    def count(self, name: str, more: int = 1) -> None:
        self.changed[name] = self.changed.get(name, getattr(self.state, name)) + more

    @property
    def open(self) -> tuple[bytes, ...]:
        found: tuple[bytes, ...] = self.changed.get("open", self.state.open)
        return found

    @property
    def closing(self) -> tuple[bytes, ...]:
        found: tuple[bytes, ...] = self.changed.get("closing", self.state.closing)
        return found

    # Queues ----------------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        found: Queue = self.changed.get(name, getattr(self.state, name))
        return found

    def wait(self, name: str, assignment: bytes, at_ms: int) -> None:
        queue = self.queue(name)
        self.due[_due_key(name, queue.last)] = Due(assignment, at_ms)
        self.changed[name] = replace(queue, last=queue.last + 1)

    def expired(self, name: str, now_ms: int, most: int) -> Iterator[bytes]:
        """Takes the assignments whose time has come out of the queue, at most so many."""
        for _ in range(most):
            queue = self.queue(name)
            if queue.first == queue.last:
                return
            key = _due_key(name, queue.first)
            entry = self.due[key]
            if entry.at_ms > now_ms:
                return
            self.due.drop(key)
            self.changed[name] = replace(queue, first=queue.first + 1)
            yield entry.assignment

    def waiting(self, name: str, first: int) -> Iterator[Due]:
        """The entries of a queue from this place on."""
        queue = self.queue(name)
        return (self.due[_due_key(name, place)] for place in range(max(first, queue.first), queue.last))

    def next_due(self, name: str) -> Due | None:
        """The first of a queue; None if it is empty."""
        queue = self.queue(name)
        return None if queue.first == queue.last else self.due[_due_key(name, queue.first)]

    def next_look_ms(self) -> int | None:
        """From what time on a batch has something to do by itself; None: there is nothing that could expire or be closed."""
        entries = [entry.at_ms for name in QUEUES if (entry := self.next_due(name)) is not None]
        return min([*entries, *(self.closings[project].at_ms for project in self.closing[:1])], default=None)

    # Lists of tasks --------------------------------------------------------------------------------------------------

    def _number_at(self, project: bytes, which: bytes, place: int) -> int:
        row = self.places.get_record(place_key(project, which, place))
        if row is None:
            assert which == FRESH, "the list of begun tasks has a row for each place"
            return place
        return row.number

    def _put_begun(self, project: bytes, number: int, place: int) -> None:
        self.places[place_key(project, BEGUN, place)] = Place(number)
        task = task_id(project, number)
        self.tasks[task] = replace(self.tasks[task], place=place)

    def listed(self, task: bytes) -> None:
        """The task is in the list of begun tasks exactly if it can be drawn; it is put there, or taken out."""
        row = self.tasks[task]
        is_full = len(row.annotators) >= ASSIGNED_MAX
        if row.stage is Stage.BEGUN and row.taken < row.asked and (is_full or row.skipped >= SKIPS_MAX):
            self.review(task)
            row = self.tasks[task]
        wanted = row.stage is Stage.BEGUN and row.taken < row.asked
        if wanted and row.place is None:
            project = self.projects[row.project]
            self._put_begun(row.project, row.number, project.begun)
            self.projects[row.project] = replace(project, begun=project.begun + 1)
        elif not wanted and row.place is not None:
            self._unlist(task)

    def _unlist(self, task: bytes) -> None:
        row = self.tasks[task]
        project = self.projects[row.project]
        assert row.place is not None
        last = project.begun - 1
        moved = self._number_at(row.project, BEGUN, last)
        self.places.drop(place_key(row.project, BEGUN, last))
        if row.place != last:
            self._put_begun(row.project, moved, row.place)
        self.tasks[task] = replace(self.tasks[task], place=None)
        self.projects[row.project] = replace(project, begun=last)

    def review(self, task: bytes) -> None:
        """The author decides. Votes that nobody can open any more are free for their annotators."""
        self.tasks[task] = replace(self.tasks[task], stage=Stage.REVIEW)
        row = self.tasks[task]
        for annotator in row.annotators:
            assignment = assignment_id(task, annotator)
            if self.assignments[assignment].state is Lease.COMMITTED:
                self.forfeit(assignment)
        project = self.projects[row.project]
        self.projects[row.project] = replace(project, review=project.review + 1)

    def redact(self, project: bytes, number: int) -> None:
        """Nobody gets the task any more. Whoever has it gives it back, and votes that are not settled are free."""
        task = task_id(project, number)
        row = self.tasks.get_record(task) or self.first_row(project, number)
        if row.stage is Stage.SETTLED:
            self.tasks[task] = replace(row, is_redacted=True)
            return
        if row.stage is Stage.REVIEW:
            self.projects[project] = replace(self.projects[project], review=self.projects[project].review - 1)
        self.tasks[task] = replace(row, stage=Stage.REDACTED, is_redacted=True)
        self.listed(task)
        for annotator in row.annotators:
            assignment = assignment_id(task, annotator)
            match self.assignments[assignment].state:
                case Lease.LEASED:
                    self.give_back(assignment, Lease.EXPIRED)
                case Lease.COMMITTED:
                    self.forfeit(assignment)

    # Draws -----------------------------------------------------------------------------------------------------------

    def draw(self, annotator: bytes, without: Sequence[bytes] = (), project: bytes | None = None) -> tuple[bytes, bytes] | None:
        """Draw a task that this annotator never had: (project, task), or None if there is none.

        `without` names projects to leave out. With `project`, the task is of this one.
        """
        keys = self._looked_at(annotator) if project is None else (project,) if project in self.open else ()
        rows = [(key, self.projects[key]) for key in keys if key not in without]
        rows = [(key, row) for key, row in rows if row.phase is Phase.OPEN]
        begun = [key for key, row in rows if row.begun]
        fresh = [key for key, row in rows if row.drawn < row.tasks]
        for draw, projects in ((self._draw_begun, begun), (self._draw_fresh, fresh)):
            for key in sorted(projects, key=lambda key: _hash(self.root, annotator, key)):
                task = draw(key, annotator)
                if task is not None:
                    return key, task
        return None

    def _looked_at(self, annotator: bytes) -> tuple[bytes, ...]:
        """Open projects from a place on that this annotator's draws begin at now."""
        keys = self.open
        if len(keys) <= DRAW_PROJECTS_MAX:
            return keys
        start = int.from_bytes(_hash(self.root, annotator)[:8], "big") % len(keys)
        return (*keys[start:], *keys[:start])[:DRAW_PROJECTS_MAX]

    def _draw_begun(self, project: bytes, annotator: bytes) -> bytes | None:
        count = self.projects[project].begun
        start = int.from_bytes(_hash(self.root, annotator, project)[:8], "big") % count if count else 0
        places = ((start + number) % count for number in range(min(count, CANDIDATES)))
        for place in places:
            if self.looks_left <= 0:
                return None
            self.looks_left -= 1
            task = task_id(project, self._number_at(project, BEGUN, place))
            if annotator not in self.tasks[task].annotators or self._is_released(task, annotator):
                return task
        return None

    def _is_released(self, task: bytes, annotator: bytes) -> bool:
        assignment = self.assignments.get_record(assignment_id(task, annotator))
        return assignment is not None and assignment.state is Lease.RELEASED

    def _draw_fresh(self, project: bytes, annotator: bytes) -> bytes | None:
        """Takes fresh tasks out of the list, up to the first that is not redacted, or CANDIDATES of them."""
        for _ in range(CANDIDATES):
            row = self.projects[project]
            if row.drawn == row.tasks:
                return None
            number = self._fresh(project, row, annotator)
            task = task_id(project, number)
            if self.tasks.get_record(task) is None:  # else it was redacted before anybody had it
                self.tasks[task] = self.first_row(project, number)
                return task
        return None

    def has_draw(self, annotator: bytes, without: Sequence[bytes] = (), project: bytes | None = None) -> bool:
        """Whether a wish of this annotator would do something: lease a task, or take redacted ones out of a list."""
        return self.draw(annotator, without, project) is not None or bool(self.projects.changes)

    def first_row(self, project: bytes, number: int) -> TaskRow:
        asked = 1 if self.projects[project].asked.votes == 1 else 2
        return TaskRow(project, number, Stage.BEGUN, asked, 0, 0, 0, 0, None, ())

    def _fresh(self, project: bytes, row: Project, annotator: bytes) -> int:
        """Takes a task out of the list of fresh ones; its number."""
        drawn = int.from_bytes(_hash(self.root, project, annotator, row.drawn.to_bytes(8, "big"))[:8], "big")
        place = row.drawn + drawn % (row.tasks - row.drawn)
        number, first = self._number_at(project, FRESH, place), self._number_at(project, FRESH, row.drawn)
        if place != row.drawn:
            self.places[place_key(project, FRESH, place)] = Place(first)
        self.places.drop(place_key(project, FRESH, row.drawn))
        self.projects[project] = replace(row, drawn=row.drawn + 1)
        return number

    # Places in a task ------------------------------------------------------------------------------------------------

    def lease(self, peer: bytes, until_ms: int, wish: LeaseWish) -> bool:
        """Whether there was a task."""
        annotator = wish.annotator
        drawn = self.draw(annotator, wish.without, wish.project)
        if drawn is None:
            return False
        project, task = drawn
        row, assignment = self.tasks[task], assignment_id(task, annotator)
        annotators = row.annotators if annotator in row.annotators else (*row.annotators, annotator)
        self.tasks[task] = replace(row, taken=row.taken + 1, annotators=annotators)
        self.listed(task)
        self.assignments[assignment] = Assignment(project, row.number, annotator, peer, until_ms, Lease.LEASED)
        self.wait("leases", assignment, until_ms)
        person = self.annotators[annotator]
        self.annotators[annotator] = replace(person, leases=(*person.leases, assignment))
        return True

    def give_back(self, assignment: bytes, state: Lease) -> None:
        """The assignment's place in its task is free again."""
        row = self.assignments[assignment]
        task = task_id(row.project, row.number)
        assert row.state in (Lease.LEASED, Lease.COMMITTED)
        self.assignments[assignment] = replace(row, state=state, seals=())
        now = self.tasks[task]
        self.tasks[task] = replace(now, taken=now.taken - 1)
        self.listed(task)
        self.no_longer_waits(row.annotator, assignment)

    def forfeit(self, assignment: bytes) -> None:
        """The vote was committed, and is not opened."""
        row = self.assignments[assignment]
        task = task_id(row.project, row.number)
        now = self.tasks[task]
        self.tasks[task] = replace(now, committed=now.committed - 1)
        self.give_back(assignment, Lease.FORFEITED)

    def no_longer_waits(self, annotator: bytes, assignment: bytes, committed: int = 0) -> None:
        person = self.annotators[annotator]
        leases = tuple(key for key in person.leases if key != assignment)
        self.annotators[annotator] = replace(person, leases=leases, annotations=person.annotations + committed)


def _due_key(queue: str, place: int) -> bytes:
    return queue.encode() + place.to_bytes(8, "big")


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/draw\x00" + b"".join(parts)).digest()
