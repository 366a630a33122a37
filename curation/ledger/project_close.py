"""The closing of a project, in slices of one block each: final labels, annotators' weights, and points.

The first batch of each block executes one slice. A minute after its author or voters closed a project, no vote can be opened any
more, and the input is fixed. From then on, slices read the project's tasks, then iterate the estimate (`dawid_skene`), then
change labels, then pay annotators. The state has only the progress. Each peer keeps votes and estimates in memory. A peer that
has restarted or joined later computes them again from the same rows: the results are the same, and only its first slice takes
longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from curation.estimation import dawid_skene, reputation
from curation.estimation.dawid_skene import DawidSkene
from curation.estimation.fixed_point import Ints
from curation.estimation.online_dawid_skene import BINARY_CLASSES, answer_of, class_count, class_of, option_flags
from curation.estimation.reputation import WEIGHT_ONE, Reputation, annotator_weight, divide_points
from curation.ledger.curation_state import (
    AnnotatorSkill,
    AssignmentState,
    CloseStep,
    ProjectCloseProgress,
    ProjectSpec,
    TaskStage,
)
from curation.ledger.state_changes import CurationChanges
from curation.limits import CLOSING_CELLS_PER_ROW, CLOSING_ROWS_PER_BATCH, OPTIONS_MAX
from curation.tasks.answers import Answer, QuestionKind
from curation.tasks.task_pages import assignment_id, task_id

ROWS_OF_TASK: Final = 4  # average number of rows of a task and its votes
ITERATIONS: Final = dawid_skene.ITERATIONS + reputation.ITERATIONS
RANKING_ITEM_BITS: Final = 4  # bits of an item's number in the code of a ranking, see `_code`


class ProjectCloser:
    """Closing of projects in one ledger, one at a time.

    It caches the current project's votes; the result depends on the state alone.
    """

    def __init__(self) -> None:
        # chain and project of the cached votes, which do not change after the closing
        self._of: tuple[bytes, bytes] | None = None
        self._votes = ProjectVotes()
        self._estimate: ProjectEstimate | None = None

    def advance_close(self, work: CurationChanges, chain: bytes, now_ms: int) -> None:
        """Process one slice of the first project in the queue of closings, if its votes are final."""
        project = work.closing[0]
        closing = work.closings[project]
        if closing.start_ms > now_ms:
            return
        if self._of != (chain, project):
            self._of, self._votes, self._estimate = (chain, project), ProjectVotes(), None
        left: int = CLOSING_ROWS_PER_BATCH
        after: ProjectCloseProgress | None = closing
        while after is not None and left > 0:
            after, cost = self._slice(work, project, after, left)
            left -= cost
        if after is None:
            work.closings.delete_row(project)
            work.changed_fields["closing"] = work.closing[1:]
        else:
            work.closings[project] = after

    def _slice(
        self, work: CurationChanges, project: bytes, closing: ProjectCloseProgress, most: int
    ) -> tuple[ProjectCloseProgress | None, int]:
        """Process about `most` rows.

        Return the new progress, or None if the closing is complete, and the number of processed rows.
        """
        row = work.projects[project]
        if closing.step is CloseStep.READING:
            upto = min(row.tasks, closing.next_number + -(-most // ROWS_OF_TASK))
            self._votes.read_votes(work, project, upto)
            cost = (upto - closing.next_number) * ROWS_OF_TASK
            if upto < row.tasks:
                return replace(closing, next_number=upto), cost
            if not self._votes.people:
                return None, cost
            if not self._votes.tell:
                return ProjectCloseProgress(closing.start_ms, CloseStep.PAYING), cost
            return ProjectCloseProgress(
                closing.start_ms, CloseStep.TURNING
            ), cost + self._votes.count * OPTIONS_MAX // CLOSING_CELLS_PER_ROW
        estimate = self._estimated(work, project)
        match closing.step:
            case CloseStep.TURNING:
                each = 1 + estimate.cells // CLOSING_CELLS_PER_ROW
                upto = min(ITERATIONS, closing.next_number + -(-most // each))
                estimate.run_iterations(upto)
                return _after(closing, upto, ITERATIONS, CloseStep.LABELLING), each * (upto - closing.next_number)
            case CloseStep.LABELLING:
                estimate.run_iterations(ITERATIONS)
                count = len(estimate.tasks)
                upto = min(count, closing.next_number + most)
                for place in range(closing.next_number, upto):
                    _relabel(work, task_id(project, estimate.tasks[place]), estimate.task_label(place), place in estimate.golds)
                return _after(closing, upto, count, CloseStep.PAYING), upto - closing.next_number
            case _:
                estimate.run_iterations(ITERATIONS)
                return self._pay(work, project, closing, most, estimate)

    def _estimated(self, work: CurationChanges, project: bytes) -> ProjectEstimate:
        row = work.projects[project]
        if self._estimate is None:
            self._votes.read_votes(work, project, row.tasks)
            self._estimate = ProjectEstimate(row.spec, self._votes)
        return self._estimate

    def _pay(
        self, work: CurationChanges, project: bytes, closing: ProjectCloseProgress, most: int, estimate: ProjectEstimate
    ) -> tuple[ProjectCloseProgress | None, int]:
        row = work.projects[project]
        points, people = estimate.divide_points(row.spec.price * row.settled), estimate.people
        upto = min(len(people), closing.next_number + most)
        paid = 0
        for key in people[closing.next_number : upto]:
            skill = work.skills.get_record(project + key) or AnnotatorSkill(())
            work.skills[project + key] = replace(skill, weight=estimate.weights[key])
            if points[key]:
                person = work.annotators[key]
                work.annotators[key] = replace(person, points=person.points + points[key])
                paid += points[key]
        work.projects[project] = replace(row, paid=row.paid + paid)
        return None if upto == len(people) else replace(closing, next_number=upto), upto - closing.next_number


def _after(closing: ProjectCloseProgress, done: int, all_of_it: int, following: CloseStep) -> ProjectCloseProgress:
    return ProjectCloseProgress(closing.start_ms, following) if done == all_of_it else replace(closing, next_number=done)


def _relabel(work: CurationChanges, task: bytes, label: Answer | None, is_gold: bool) -> None:
    """Give a settled task the label `label`; None changes nothing. Only gold changes a label that the author has set."""
    row = work.tasks[task]
    if label is None or (row.is_reviewed and not is_gold) or row.label is None or row.label == label:
        return
    before = row.label
    work.tasks[task] = replace(row, label=label)
    for annotator in row.annotators:
        vote = work.assignments[assignment_id(task, annotator)]
        if vote.state is AssignmentState.SETTLED and vote.answer is not None:
            said, person = vote.answer, work.annotators[annotator]
            work.annotators[annotator] = replace(person, accepted=person.accepted + (said == label) - (said == before))


# Votes -------------------------------------------------------------------------------------------------------------------


class ProjectVotes:
    """Votes on a project's settled tasks, of which the first part is read.

    Each vote takes 32 bytes: four integers, see `rows`.
    """

    def __init__(self) -> None:
        self.tasks: list[int] = []  # numbers of settled tasks, ascending
        self.people: dict[bytes, int] = {}  # index of each annotator, by key
        self.count = 0
        self.golds: dict[int, Answer] = {}  # right answers of gold tasks, by index in `tasks`
        self.tell = False  # True if any vote can be compared with another annotator's vote, or with gold
        self._read = 0
        self._parts: list[Ints] = []

    def read_votes(self, work: CurationChanges, project: bytes, upto: int) -> None:
        """Read the unread tasks with numbers below `upto`."""
        asked, rows = work.projects[project].spec, list[tuple[int, int, int, int]]()
        has_gold = work.projects[project].golds > 0
        for number in range(self._read, upto):
            task = task_id(project, number)
            row = work.tasks.get_record(task)
            if row is None or row.stage is not TaskStage.SETTLED:
                continue
            before = len(rows)
            for annotator in row.annotators:
                vote = work.assignments[assignment_id(task, annotator)]
                if vote.state is AssignmentState.SETTLED and vote.answer is not None:
                    place = self.people.setdefault(annotator, len(self.people))
                    rows.append((len(self.tasks), place, _code(asked, vote.answer), int(vote.is_blind)))
            gold = work.golds.get_record(task) if has_gold else None
            if gold is not None:
                self.golds[len(self.tasks)] = gold.answer
            self.tell = self.tell or len(rows) > before + (gold is None)
            self.tasks.append(number)
        if rows:
            self._parts.append(np.array(rows, dtype=np.int64))
            self.count += len(rows)
        self._read = max(self._read, upto)

    def gold_rows(self, asked: ProjectSpec) -> Ints:
        """Return the right answers in the form of `rows`, with 0 as annotator."""
        return np.array([(task, 0, _code(asked, answer), 1) for task, answer in self.golds.items()], np.int64).reshape(-1, 4)

    @property
    def rows(self) -> Ints:
        """Array (votes, 4): index of the task, index of the annotator, code of the answer, `Assignment.is_blind` as 0 or 1."""
        return np.concatenate(self._parts) if self._parts else np.zeros((0, 4), dtype=np.int64)


def _code(asked: ProjectSpec, answer: Answer) -> int:
    """Return an answer as an integer below 2⁶³: its class, with `many` a bit per option, or for a ranking four bits per item."""
    if asked.kind is QuestionKind.RANKING:
        return sum(item << (RANKING_ITEM_BITS * place) for place, item in enumerate(answer))
    if asked.many:
        return sum(on << option for option, on in enumerate(option_flags(len(asked.options), answer)))
    return class_of(asked.kind, answer)


# Estimates ---------------------------------------------------------------------------------------------------------------


class ProjectEstimate:
    """Estimate of one project. The first iterations find the labels, the later ones the annotators' confusion tables.

    The estimate has one question, or with `many` one for each option.
    """

    def __init__(self, asked: ProjectSpec, votes: ProjectVotes) -> None:
        self._asked, self.tasks, self._tell, self.golds = asked, votes.tasks, votes.tell, votes.golds
        self._places = votes.people
        self.people: Sequence[bytes] = sorted(votes.people)
        rows, tasks, people = votes.rows, len(votes.tasks), len(votes.people)
        self._answers = np.bincount(rows[:, 1], minlength=people)
        # pairs of neighbours in a ranking; 1 for other kinds
        self._parts = asked.items if asked.kind is QuestionKind.RANKING else 1
        asks = list(zip(_questions(asked, rows), _questions(asked, votes.gold_rows(asked)), strict=True))
        classes = (
            BINARY_CLASSES if asked.many or asked.kind is QuestionKind.RANKING else class_count(asked.kind, len(asked.options))
        )
        self.cells = sum(classes * len(said) for said, _ in asks)
        self._questions = [_LabelQuestion(classes, tasks * self._parts, people, *ask) for ask in asks]
        self._turned = 0
        self.weights: dict[bytes, int] = {}
        self._points: dict[bytes, int] = {}

    def run_iterations(self, upto: int) -> None:
        """Run iterations until `upto` of them are done. If no vote can be compared with another one or with gold, run none."""
        if not self._tell:
            return
        for turn in range(self._turned, upto):
            for question in self._questions:
                question.turn(turn)
        self._turned = max(self._turned, upto)

    def task_label(self, place: int) -> Answer | None:
        """Return the label of a settled task after all iterations.

        None: its label stays, because the project asks for one vote per task or for rankings.
        """
        if place in self.golds:
            return self.golds[place]
        if self._asked.votes == 1 or self._asked.kind is QuestionKind.RANKING:
            return None
        found = [question.label(place) for question in self._questions]
        if self._asked.many:
            return tuple(option for option, on in enumerate(found) if on)
        return answer_of(self._asked.kind, found[0])

    def divide_points(self, points: int) -> dict[bytes, int]:
        """Divide the project's points by weights × answers, after all iterations.

        If all weights are 0, all answers are paid alike.
        """
        if not self.weights:
            tables = [
                question.reputation.confusion_counts() // self._parts for question in self._questions if question.reputation
            ]
            for key, place in self._places.items():
                self.weights[key] = annotator_weight([table[place].tolist() for table in tables]) if self._tell else WEIGHT_ONE
            answers = {key: int(self._answers[place]) for key, place in self._places.items()}
            shares = {key: answers[key] * share for key, share in self.weights.items()}
            self._points = divide_points(points, shares if any(shares.values()) else answers)
        return self._points


class _LabelQuestion:
    def __init__(self, classes: int, tasks: int, people: int, rows: Ints, gold: Ints) -> None:
        # By task, then annotator: `DawidSkene` sorts its votes alike, so `_blind` matches them.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        self._blind = rows[:, 3]
        self._whole = DawidSkene(classes, tasks, people, rows[:, :3], gold[:, [0, 2]])
        self.reputation: Reputation | None = None
        self._labels: list[int] | None = None

    def turn(self, turn: int) -> None:
        if turn < dawid_skene.ITERATIONS:
            self._whole.run_iteration()
            return
        if self.reputation is None:
            self.reputation = Reputation(self._whole, self._blind)
        self.reputation.run_iteration()

    def label(self, place: int) -> int:
        if self._labels is None:
            self._labels = dawid_skene.likeliest_classes(self._whole.posterior()).tolist()
        return self._labels[place]


def _questions(asked: ProjectSpec, rows: Ints) -> list[Ints]:
    """Return the rows of votes for each question of a project. A row has the class for its question in place of the code."""
    if asked.kind is QuestionKind.RANKING:
        return [_neighbours(rows, asked.items)]
    if asked.many:
        return [np.column_stack([rows[:, :2], (rows[:, 2] >> option) & 1, rows[:, 3]]) for option in range(len(asked.options))]
    return [rows]


def _neighbours(rows: Ints, items: int) -> Ints:
    """Return a row for each ranking and item i, with class 1 if the ranking has i before item i + 1, else 0.

    After the last item comes item 0.
    """
    places = np.zeros((len(rows), items), dtype=np.int64)
    for place in range(items):
        places[np.arange(len(rows)), (rows[:, 2] >> (RANKING_ITEM_BITS * place)) & ((1 << RANKING_ITEM_BITS) - 1)] = place
    before = (places < np.roll(places, -1, axis=1)).astype(np.int64)
    task = rows[:, :1] * items + np.arange(items)
    return np.column_stack([task.ravel(), np.repeat(rows[:, 1], items), before.ravel(), np.repeat(rows[:, 3], items)])
