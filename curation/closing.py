"""The close of a project, a slice with each batch: labels by the whole estimate, everybody's weight, and the points.

A minute after it was closed no vote can be opened any more, and all that a close depends on stands still. From then on each batch
reads some of its tasks; then batches make turns of the estimate; then they change labels; then they pay annotators. The state
says only how far that is. What was read and estimated stays in the memory of each peer. A peer that has it not, since it started
again or came later, makes it anew from the same rows: the results are the same, and only its first slice takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from curation import reputation, whole
from curation.answers import Answer, Kind
from curation.fixed import Ints
from curation.labels import SWITCH, answer_of, class_of, classes_of, switches
from curation.limits import CLOSING_CELLS_PER_ROW, CLOSING_ROWS_PER_BATCH, OPTIONS_MAX
from curation.reputation import WEIGHT_ONE, Reputation, divided, weight
from curation.state import Asked, Closing, Lease, Skill, Stage, Step, as_answer
from curation.tasks import assignment_id, task_id
from curation.whole import Whole
from curation.work import Work

ROWS_OF_TASK: Final = 4  # a task and its votes, on average
TURNS: Final = whole.TURNS + reputation.TURNS
BITS: Final = 4  # of an item's number in the code of a ranking, and of nothing else

Key = tuple[bytes, bytes]  # chain and project: a project is closed once, and stands still


class Closer:
    """Closes the projects of one ledger. It keeps the project at hand in memory; the result depends on the state alone."""

    def __init__(self) -> None:
        self._of: Key | None = None
        self._votes = Votes()
        self._estimate: Estimate | None = None

    def go_on(self, work: Work, chain: bytes, now_ms: int) -> None:
        """A slice of the close that is first in line, if its time has come."""
        if not work.closing:
            return
        project = work.closing[0]
        closing = work.closings[project]
        if closing.at_ms > now_ms:
            return
        if self._of != (chain, project):
            self._of, self._votes, self._estimate = (chain, project), Votes(), None
        left: int = CLOSING_ROWS_PER_BATCH
        after: Closing | None = closing
        while after is not None and left > 0:
            after, cost = self._slice(work, project, after, left)
            left -= cost
        if after is None:
            work.closings.drop(project)
            work.changed["closing"] = work.closing[1:]
        else:
            work.closings[project] = after

    def _slice(self, work: Work, project: bytes, closing: Closing, most: int) -> tuple[Closing | None, int]:
        """How far it is after so many rows at most, or None if it is done; and how many it took."""
        row = work.projects[project]
        if closing.step is Step.READING:
            upto = min(row.tasks, closing.next + -(-most // ROWS_OF_TASK))
            self._votes.read(work, project, upto)
            cost = (upto - closing.next) * ROWS_OF_TASK
            if upto < row.tasks:
                return replace(closing, next=upto), cost
            if not self._votes.people:
                return None, cost
            if not self._votes.tell:
                return Closing(closing.at_ms, Step.PAYING), cost
            return Closing(closing.at_ms, Step.TURNING), cost + self._votes.count * OPTIONS_MAX // CLOSING_CELLS_PER_ROW
        estimate = self._estimated(work, project)
        match closing.step:
            case Step.TURNING:
                each = 1 + estimate.cells // CLOSING_CELLS_PER_ROW
                upto = min(TURNS, closing.next + -(-most // each))
                estimate.turn(upto)
                return _after(closing, upto, TURNS, Step.LABELLING), each * (upto - closing.next)
            case Step.LABELLING:
                estimate.turn(TURNS)
                count = len(estimate.tasks)
                upto = min(count, closing.next + most)
                for place in range(closing.next, upto):
                    _relabel(work, task_id(project, estimate.tasks[place]), estimate.label(place), place in estimate.golds)
                return _after(closing, upto, count, Step.PAYING), upto - closing.next
            case _:
                estimate.turn(TURNS)
                return self._pay(work, project, closing, most, estimate)

    def _estimated(self, work: Work, project: bytes) -> Estimate:
        row = work.projects[project]
        if self._estimate is None:
            self._votes.read(work, project, row.tasks)
            self._estimate = Estimate(row.asked, self._votes)
        return self._estimate

    def _pay(self, work: Work, project: bytes, closing: Closing, most: int, estimate: Estimate) -> tuple[Closing | None, int]:
        row = work.projects[project]
        points, people = estimate.points(row.asked.price * row.settled), estimate.people
        upto = min(len(people), closing.next + most)
        paid = 0
        for key in people[closing.next : upto]:
            skill = work.skills.get_record(project + key) or Skill(())
            work.skills[project + key] = replace(skill, weight=estimate.weights[key])
            if points[key]:
                person = work.annotators[key]
                work.annotators[key] = replace(person, points=person.points + points[key])
                paid += points[key]
        work.projects[project] = replace(row, paid=row.paid + paid)
        return None if upto == len(people) else replace(closing, next=upto), upto - closing.next


def _after(closing: Closing, done: int, all_of_it: int, following: Step) -> Closing:
    return Closing(closing.at_ms, following) if done == all_of_it else replace(closing, next=done)


def _relabel(work: Work, task: bytes, label: Answer | None, is_gold: bool) -> None:
    """A settled task has this label, unless its author reviewed it and it is no gold; None: the one that it has."""
    row = work.tasks[task]
    if label is None or (row.is_reviewed and not is_gold) or row.label is None or as_answer(row.label) == label:
        return
    before = as_answer(row.label)
    work.tasks[task] = replace(row, label=label)
    for annotator in row.annotators:
        vote = work.assignments[assignment_id(task, annotator)]
        if vote.state is Lease.SETTLED and vote.answer is not None:
            said, person = as_answer(vote.answer), work.annotators[annotator]
            work.annotators[annotator] = replace(person, accepted=person.accepted + (said == label) - (said == before))


# Votes -------------------------------------------------------------------------------------------------------------------


class Votes:
    """The votes on a project's settled tasks, as far as they were read: four integers each, 32 bytes."""

    def __init__(self) -> None:
        self.tasks: list[int] = []  # numbers of settled tasks, ascending
        self.people: dict[bytes, int] = {}  # annotator → its place
        self.count = 0
        self.golds: dict[int, Answer] = {}  # place of a task → its right answer
        self.tell = False  # whether anybody's vote can be held against another's, or against gold
        self._read = 0
        self._parts: list[Ints] = []

    def read(self, work: Work, project: bytes, upto: int) -> None:
        """Tasks up to this number, unless they were."""
        asked, rows = work.projects[project].asked, list[tuple[int, int, int, int]]()
        has_gold = work.projects[project].golds > 0
        for number in range(self._read, upto):
            task = task_id(project, number)
            row = work.tasks.get_record(task)
            if row is None or row.stage is not Stage.SETTLED:
                continue
            before = len(rows)
            for annotator in row.annotators:
                vote = work.assignments[assignment_id(task, annotator)]
                if vote.state is Lease.SETTLED and vote.answer is not None:
                    place = self.people.setdefault(annotator, len(self.people))
                    rows.append((len(self.tasks), place, _code(asked, as_answer(vote.answer)), int(vote.is_blind)))
            gold = work.golds.get_record(task) if has_gold else None
            if gold is not None:
                self.golds[len(self.tasks)] = as_answer(gold.answer)
            self.tell = self.tell or len(rows) > before + (gold is None)
            self.tasks.append(number)
        if rows:
            self._parts.append(np.array(rows, dtype=np.int64))
            self.count += len(rows)
        self._read = max(self._read, upto)

    def gold_rows(self, asked: Asked) -> Ints:
        """As `rows`, of the tasks that are gold: whose answer it is stays 0."""
        return np.array([(task, 0, _code(asked, answer), 1) for task, answer in self.golds.items()], np.int64).reshape(-1, 4)

    @property
    def rows(self) -> Ints:
        """(votes, 4): place of the task, place of the annotator, code of the answer, and 1 if it was committed blind."""
        return np.concatenate(self._parts) if self._parts else np.zeros((0, 4), dtype=np.int64)


def _code(asked: Asked, answer: Answer) -> int:
    """One integer below 2⁶³: the class; a bit for each of many options; or four bits for each item of a ranking."""
    if asked.kind is Kind.RANKING:
        return sum(item << (BITS * place) for place, item in enumerate(answer))
    if asked.many:
        return sum(on << option for option, on in enumerate(switches(len(asked.options), answer)))
    return class_of(asked.kind, answer)


# Estimates ---------------------------------------------------------------------------------------------------------------


class Estimate:
    """The estimate of one project: a question for each that its kind asks, with labels and then everybody's confusions."""

    def __init__(self, asked: Asked, votes: Votes) -> None:
        self._asked, self.tasks, self._tell, self.golds = asked, votes.tasks, votes.tell, votes.golds
        self._places = votes.people
        self.people: Sequence[bytes] = sorted(votes.people)
        rows, tasks, people = votes.rows, len(votes.tasks), len(votes.people)
        self._answers = np.bincount(rows[:, 1], minlength=people)
        self._parts = asked.items if asked.kind is Kind.RANKING else 1  # of one question, that a task has
        asks = list(zip(_questions(asked, rows), _questions(asked, votes.gold_rows(asked)), strict=True))
        classes = SWITCH if asked.many or asked.kind is Kind.RANKING else classes_of(asked.kind, len(asked.options))
        self.cells = sum(classes * len(said) for said, _ in asks)
        self._questions = [_Question(classes, tasks * self._parts, people, *ask) for ask in asks]
        self._turned = 0
        self.weights: dict[bytes, int] = {}
        self._points: dict[bytes, int] = {}

    def turn(self, upto: int) -> None:
        """So many turns in all, unless they were made. Where no vote tells anything of another, no turn is made."""
        if not self._tell:
            return
        for turn in range(self._turned, upto):
            for question in self._questions:
                question.turn(turn)
        self._turned = max(self._turned, upto)

    def label(self, place: int) -> Answer | None:
        """The label of a settled task after all turns. None: one vote was asked for, or a ranking has no whole estimate."""
        if place in self.golds:
            return self.golds[place]
        if self._asked.votes == 1 or self._asked.kind is Kind.RANKING:
            return None
        found = [question.label(place) for question in self._questions]
        if self._asked.many:
            return tuple(option for option, on in enumerate(found) if on)
        return answer_of(self._asked.kind, found[0])

    def points(self, points: int) -> dict[bytes, int]:
        """Everybody's, after all turns. All answers are paid alike where nobody's weight is known: so little was asked."""
        if not self.weights:
            tables = [question.reputation.found() // self._parts for question in self._questions if question.reputation]
            for key, place in self._places.items():
                self.weights[key] = weight([_pairs(table[place]) for table in tables]) if self._tell else WEIGHT_ONE
            answers = {key: int(self._answers[place]) for key, place in self._places.items()}
            shares = {key: answers[key] * share for key, share in self.weights.items()}
            self._points = divided(points, shares if any(shares.values()) else answers)
        return self._points


class _Question:
    def __init__(self, classes: int, tasks: int, people: int, rows: Ints, gold: Ints) -> None:
        # `Whole` has its votes in this order, too.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        self._blind = rows[:, 3]
        self._whole = Whole(classes, tasks, people, rows[:, :3], gold[:, [0, 2]])
        self.reputation: Reputation | None = None
        self._labels: list[int] | None = None

    def turn(self, turn: int) -> None:
        if turn < whole.TURNS:
            self._whole.turn()
            return
        if self.reputation is None:
            self.reputation = Reputation(self._whole, self._blind)
        self.reputation.turn()

    def label(self, place: int) -> int:
        if self._labels is None:
            self._labels = whole.likeliest(self._whole.posterior()).tolist()
        return self._labels[place]


def _questions(asked: Asked, rows: Ints) -> list[Ints]:
    """The rows of each question that a kind asks, with the class of its own in the place of the code."""
    if asked.kind is Kind.RANKING:
        return [_neighbours(rows, asked.items)]
    if asked.many:
        return [_of_option(rows, option) for option in range(len(asked.options))]
    return [rows]


def _of_option(rows: Ints, option: int) -> Ints:
    return np.column_stack([rows[:, :2], (rows[:, 2] >> option) & 1, rows[:, 3]])


def _neighbours(rows: Ints, items: int) -> Ints:
    """For each ranking and item: whether the item stands before the next one by number. The first is next to the last."""
    places = np.zeros((len(rows), items), dtype=np.int64)
    for place in range(items):
        places[np.arange(len(rows)), (rows[:, 2] >> (BITS * place)) & ((1 << BITS) - 1)] = place
    before = (places < np.roll(places, -1, axis=1)).astype(np.int64)
    task = rows[:, :1] * items + np.arange(items)
    return np.column_stack([task.ravel(), np.repeat(rows[:, 1], items), before.ravel(), np.repeat(rows[:, 3], items)])


def _pairs(table: Ints) -> list[tuple[int, int]]:
    return [(int(seen), int(right)) for seen, right in table]
