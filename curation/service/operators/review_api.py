"""HTTP calls for operators: lists of a project's tasks for review, decisions on them, and annotators' confusion tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final

import trio

from curation.estimation.annotator_agreement import value_count
from curation.ledger.curation_module import reviews_left
from curation.ledger.curation_state import (
    Annotator,
    Assignment,
    AssignmentState,
    CurationState,
    Project,
    TaskPageRow,
    TaskRow,
    TaskStage,
)
from curation.ledger.transaction_types import ReviewTask
from curation.service.access_control import Operators, wait_for_decision
from curation.service.project_tasks import project_pages, read_task_page, require_project, task_votes
from curation.tasks.answers import PAIR_ANSWERS, QuestionKind, answer_problem
from curation.tasks.task_pages import AnnotationTask, TaskPageBlob, task_id
from features.services import ServiceContext
from web.calls import HttpProblem, Json

SCANNED_TASKS_MAX: Final = 10_000  # tasks that one call scans, in about a second: the next call continues at the cursor
PAIR_WORDS: Final = ("A is better", "B is better", *PAIR_ANSWERS[2:])  # answers to a pair in the words of the pages
CONFUSIONS_MAX: Final = 50  # annotators whose confusion table a reply has: the annotators with most answers


class ReviewState(Enum):
    """State of a task in its author's list. States in which a task needs the author most come first."""

    WAITING = "waiting"  # The task waits for its author's decision.
    SKIPPED = "skipped"
    DISPUTED = "disputed"  # The annotators' answers differ.
    BEGUN = "begun"
    SETTLED = "settled"
    DECIDED = "decided"  # The author has decided the label.
    FRESH = "fresh"  # No annotator has leased the task.
    REDACTED = "redacted"


REVIEW_ORDER: Final = list(ReviewState)
Cursor = tuple[int, int]  # position in a list of tasks: index in REVIEW_ORDER, number of the next task


class ReviewApi:
    def __init__(self, desk: ServiceContext, operators: Operators) -> None:
        self._desk, self._operators = desk, operators

    @property
    def _state(self) -> CurationState:
        return self._desk.state.module_state(CurationState)

    async def list_review_tasks(
        self,
        operator: str,
        project: bytes,
        state: str,
        search: str,
        label: str,
        annotator: str,
        after: Cursor | tuple[()],
        limit: int,
    ) -> Json:
        look = _ReviewScan(self._state, project, require_project(self._state, project), self._desk)

        def fits(shown: Json) -> bool:
            return look.fits(shown, search.casefold(), int(label) if label else None, annotator.casefold())

        needs = [ReviewState(state)] if state else REVIEW_ORDER
        found, following = await trio.to_thread.run_sync(look.found, needs, fits, after or (0, 0), limit)
        return {"tasks": found, "next": following and f"{following[0]}:{following[1]}"}

    async def decide_task(self, operator: str, project: bytes, task: bytes, answer: tuple[int, ...]) -> Json:
        row = self._state.tasks.get_record(task)
        asked = require_project(self._state, project).spec
        if row is None or row.project != project:
            raise HttpProblem("not-found", "unknown task, or it was never assigned")
        if problem := answer_problem(asked.kind, len(asked.options), asked.many, asked.items, answer):
            raise HttpProblem("misfit", f"{list(answer)} is not a valid answer to this task: {problem}")
        async with self._operators.log_action(operator, "decide", f"task {row.number} of {asked.name!r}: {list(answer)}"):
            await wait_for_decision(self._desk.submit_transaction("curation/review-task", ReviewTask(task, answer)))
        return {"task": task.hex(), "label": list(answer)}

    async def confusion_matrices(self, operator: str, project: bytes) -> Json:
        return await trio.to_thread.run_sync(_confusions, self._state, project, require_project(self._state, project))


class _ReviewScan:
    """A scan of a project's tasks, for the list that `list_review_tasks` returns. The scan can run in a thread."""

    def __init__(self, state: CurationState, key: bytes, project: Project, desk: ServiceContext) -> None:
        self._state, self._key, self._project, self._desk = state, key, project, desk
        self._waiting = reviews_left(state, key, desk.time_ms)
        self._page: tuple[TaskPageRow, TaskPageBlob | None] | None = None

    def found(
        self, needs: Sequence[ReviewState], fits: Callable[[Json], bool], after: Cursor, limit: int
    ) -> tuple[list[Json], Cursor | None]:
        """Return at most `limit` tasks that fit, and the cursor at which to continue, or None after the last task."""
        found: list[Json] = []
        looked = 0
        place, first = after
        for place in range(place, len(REVIEW_ORDER)):  # noqa: B020 - the scan continues at the cursor
            if REVIEW_ORDER[place] in needs and (REVIEW_ORDER[place] is not ReviewState.WAITING or self._waiting):
                for page, number, row in self._rows(first):
                    if len(found) == limit or looked == SCANNED_TASKS_MAX:
                        return found, (place, number)
                    looked += 1
                    cast = [vote for vote in task_votes(self._state, task_id(self._key, number), row) if vote] if row else []
                    if self._need(row, cast) is REVIEW_ORDER[place]:
                        shown = self._shown(page, number, row, cast)
                        if fits(shown):
                            found.append(shown)
            first = 0
        return found, None

    def _rows(self, first: int) -> Iterator[tuple[TaskPageRow, int, TaskRow | None]]:
        for page in project_pages(self._state, self._key, self._project):
            for number in range(max(first, page.first), page.first + page.count):
                yield page, number, self._state.tasks.get_record(task_id(self._key, number))

    def _text(self, page: TaskPageRow, number: int) -> AnnotationTask | None:
        if self._page is None or self._page[0] != page:
            self._page = page, read_task_page(self._project, page, self._desk.read_blob)
        shown = self._page[1]
        return shown.entries[number - page.first].task if shown else None

    def _shown(self, page: TaskPageRow, number: int, row: TaskRow | None, cast: list[Assignment]) -> Json:
        text = self._text(page, number)
        return {
            "task": task_id(self._key, number).hex(),
            "number": number,
            "state": self._need(row, cast).value,
            "text": text.text if text else None,
            "items": list(text.items) if text else [],
            "suggestion": list(text.suggestion) if text and text.suggestion is not None else None,
            "label": list(row.label) if row and row.label is not None else None,
            "is_reviewed": row.is_reviewed if row else False,
            "height": row.height if row else 0,
            "skips": row.skipped if row else 0,
            "votes": [self._vote(vote) for vote in cast if vote.state not in (AssignmentState.EXPIRED, AssignmentState.RELEASED)],
        }

    def _need(self, row: TaskRow | None, cast: list[Assignment]) -> ReviewState:
        if row is None:
            return ReviewState.FRESH
        if row.is_redacted:
            return ReviewState.REDACTED
        if row.is_reviewed:
            return ReviewState.DECIDED
        if row.stage is TaskStage.REVIEW and self._waiting:
            return ReviewState.WAITING
        if row.stage is not TaskStage.SETTLED and row.skipped:
            return ReviewState.SKIPPED
        if len({tuple(vote.answer) for vote in cast if vote.answer is not None}) > 1:
            return ReviewState.DISPUTED
        return ReviewState.SETTLED if row.stage is TaskStage.SETTLED else ReviewState.BEGUN

    def _vote(self, vote: Assignment) -> Json:
        person: Annotator | None = self._state.annotators.get_record(vote.annotator)
        said = {
            "annotator": vote.annotator.hex(),
            "name": person.name if person else "",
            "state": vote.state.value,
            "answer": None if vote.answer is None else list(vote.answer),
        }
        return said | {"reason": vote.reason} if vote.state is AssignmentState.SKIPPED else said

    def fits(self, shown: Json, search: str, label: int | None, annotator: str) -> bool:
        """Return whether a task matches all filters.

        `search` and `annotator`, a name or the first digits of a key, are case-folded.
        """
        texts = (shown["text"] or "", *shown["items"])
        if search and not any(search in text.casefold() for text in texts):
            return False
        said = [shown["label"]] if shown["label"] is not None else [vote["answer"] or [] for vote in shown["votes"]]
        if label is not None and not any(label in answer for answer in said):
            return False
        people = ((vote["name"].casefold(), vote["annotator"]) for vote in shown["votes"])
        return not annotator or any(annotator == name or key.startswith(annotator) for name, key in people)


def _confusions(state: CurationState, key: bytes, project: Project) -> Json:
    """Return counts[label][answer] over settled tasks: of all annotators, and of each of the CONFUSIONS_MAX with most answers."""
    asked = project.spec
    kind, many = asked.kind, asked.many
    of = 0 if kind is QuestionKind.RANKING else value_count(kind, len(asked.options), many)
    names = ["left out", "chosen"] if many else list(PAIR_WORDS if kind is QuestionKind.PAIR else asked.options)
    found: list[dict[str, Any]] = []
    for annotator, person in state.annotators.items() if of else ():
        skill = state.skills.get_record(key + annotator)
        if skill is not None and skill.counts:
            # With `many`, `counts` has a table for each option. The sum of the tables is shown.
            table = [sum(skill.counts[place :: of * of]) for place in range(of * of)]
            found.append({"annotator": annotator.hex(), "name": person.name, "count": sum(table), "counts": table})
    together = [sum(row["counts"][place] for row in found) for place in range(of * of)]
    found.sort(key=lambda row: (-row["count"], row["annotator"]))
    shown = [row | {"counts": _square(row["counts"], of)} for row in found[:CONFUSIONS_MAX]]
    return {"values": names[:of], "counts": _square(together, of), "annotators": shown}


def _square(table: list[int], of: int) -> list[list[int]]:
    return [table[of * row : of * (row + 1)] for row in range(of)]
