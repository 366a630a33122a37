"""Estimate of all labels of a project from all its votes: annotators' confusion tables and tasks' labels, in alternation.

Dawid and Skene (1979), section 3: expectation maximisation, here of the posterior, with a Dirichlet prior on each row of a
confusion table. Three changes prevent estimates that are worse than a plain majority:

- The prior of a class is the square root of its frequency. With the frequency itself, tasks of a rare class go to a common one.
  With equal priors, tasks of the common class go to the rare one.
- The first probabilities of a label are the classes' shares of the votes, without annotators that are mostly wrong on gold.
  Iterations find a maximum near their start. A start from gold alone would trust annotators that are right on gold and on nothing
  else.
- A solution and the solution with exchanged classes explain the votes equally well. Iteration `REVIEW_ITERATION` takes the
  solution with which most annotators agree.

The number of iterations is fixed. Probabilities, counts and logarithms are integers (`fixed_point`), so sums have one value in
any order.
"""

from __future__ import annotations

from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from curation.estimation.fixed_point import ONE, Ints, log2, normalize_scores
from curation.estimation.online_dawid_skene import PRIOR_WRONG

# Prior number of rightly answered tasks in a row of a confusion table, beside PRIOR_WRONG wrongly answered ones. With 6, tasks of
# a common class get the label of a rare class. With 12, tables of liars stay near those of unknown annotators (decision 110).
PRIOR_RIGHT: Final = 8
# iterations of the estimate: 60 more change one of 67,500 labels (five seeds of all crowds of `benchmarks.labels`)
ITERATIONS: Final = 30
REVIEW_ITERATION: Final = 20  # iteration that may exchange the classes: the ten later ones suffice to reach the other solution
NO_GOLD: Final[Ints] = np.zeros((0, 2), dtype=np.int64)
CLASS_PRIOR_TASKS: Final = 1  # prior number of tasks of each class


class ConfusionTables:
    """Confusion tables of all annotators, from votes in any order.

    `annotator`, `said`: annotator and class of each vote. `counts`: (cells, classes), tasks in units of 1/ONE. A cell
    is a pair of an annotator and a class that it voted for: one column of its confusion table. Cells without votes are not
    stored.
    """

    def __init__(self, classes: int, annotators: int, annotator: Ints, said: Ints, prior_right: int) -> None:
        cells, self._cell = np.unique(annotator * classes + said, return_inverse=True)
        whose, column = cells // classes, cells % classes
        self._others, self._whose = classes - 1, whose
        self._by_cell, self._by_annotator = GroupSums(self._cell, len(cells)), GroupSums(whose, annotators)
        diagonal = column[:, None] == np.arange(classes)
        self._prior_tasks = (prior_right + PRIOR_WRONG) * ONE
        self._prior = np.where(diagonal, prior_right * self._others * ONE, PRIOR_WRONG * ONE)
        self.counts = np.zeros((len(cells), classes), dtype=np.int64)

    def update_counts(self, label: Ints) -> None:
        """Set the counts from `label` (votes, classes): the class probabilities of each vote's task, in units of 1/ONE."""
        self.counts = self._by_cell.sum_rows(label)

    def log_likelihoods(self) -> Ints:
        """Return (votes, classes): log₂ of the probability of each vote if its task has the column's class, in units of 2⁻²⁴."""
        rows = self._by_annotator.sum_rows(self.counts)
        seen = log2(self.counts * self._others + self._prior)
        of = log2((rows + self._prior_tasks) * self._others)
        return cast(Ints, (seen - of[self._whose])[self._cell])


class DawidSkene:
    """Estimate of the labels for one question with `classes` answers.

    The first estimate is the shares of the votes. `run_iteration` improves the estimate.

    `votes` has a row for each vote: task, annotator, class. Tasks and annotators count from 0, and an annotator has at most one
    vote on a task. A task or an annotator may be without votes. `gold` has a row for each task whose class is known: task, class.
    16 classes and a million votes take 128 MB for each array of `run_iteration`.
    """

    def __init__(self, classes: int, tasks: int, annotators: int, votes: Ints, gold: Ints = NO_GOLD) -> None:
        assert classes >= 2 and tasks and annotators and votes.ndim == 2 and votes.shape[1] == 3
        self.classes, self.tasks, self.annotators = classes, tasks, annotators
        self.votes = votes[np.lexsort((votes[:, 1], votes[:, 0]))]  # sorted by task, then by annotator
        self._task, annotator, self._said = self.votes.T.copy()
        self._by_task, self._by_annotator = GroupSums(self._task, tasks), GroupSums(annotator, annotators)
        self._annotator, self._turned = annotator, 0
        self._confusions = ConfusionTables(classes, annotators, annotator, self._said, PRIOR_RIGHT)
        self._gold = np.full(tasks, -1)
        self._gold[gold[:, 0]] = gold[:, 1]
        told = self.gold_of_votes
        right = self._votes_by_annotator(told == self._said)
        # Annotators that are wrong on gold more often than right take no part in the first labels.
        self._trusted = 2 * right >= self._votes_by_annotator(told >= 0)
        self._learn(self._shares(self._trusted))

    def run_iteration(self) -> None:
        """Compute the class probabilities of all tasks from the confusion tables, then the tables from these probabilities."""
        label = self.posterior()
        self._turned += 1
        if self._turned == REVIEW_ITERATION:
            label = self._reviewed(label)
        self._learn(label)

    def _reviewed(self, label: Ints) -> Ints:
        """Return `label`, or the vote shares of contradicted annotators, if they cast most of the trusted annotators' votes.

        An annotator is contradicted if its votes equal `label` less often than a guess would. Gold tasks do not count: annotators
        may recognise them.
        """
        unknown = self.gold_of_votes < 0
        votes = self._votes_by_annotator(unknown)
        agreed = label[self._task, self._said] * unknown
        right = self._by_annotator.sum_rows(agreed[:, None])[:, 0]
        contradicted = (right * self.classes < votes * ONE) & self._trusted
        return self._shares(contradicted) if 2 * votes[contradicted].sum() > votes[self._trusted].sum() else label

    def _shares(self, chosen: NDArray[np.bool_]) -> Ints:
        """Return (tasks, classes): the shares of the chosen annotators' votes, in units of 1/ONE.

        A task without such votes has zeros.
        """
        rows = np.flatnonzero(chosen[self._annotator])
        cells = self._task[rows] * self.classes + self._said[rows]
        counts = np.bincount(cells, minlength=self.tasks * self.classes).reshape(self.tasks, self.classes)
        return pin_gold_classes(counts * ONE // np.maximum(counts.sum(axis=1, keepdims=True), 1), self._gold)

    def _votes_by_annotator(self, chosen: NDArray[np.bool_]) -> Ints:
        """Return for each annotator the number of its votes that are True in `chosen`."""
        return np.bincount(self._annotator[chosen], minlength=self.annotators)

    def _learn(self, label: Ints) -> None:
        self._confusions.update_counts(label[self._task])
        self._common = label[self._by_task.present].sum(axis=0)  # number of tasks with votes in each class, in units of 1/ONE

    def posterior(self) -> Ints:
        """Return (tasks, classes): the probability of each class, in units of 1/ONE.

        A task without votes gets the classes' priors.
        """
        return pin_gold_classes(normalize_scores(self._scores(self._confusions.log_likelihoods())), self._gold)

    def leave_one_out_posterior(self) -> Ints:
        """Return (votes, classes): for each row of `votes`, the posterior of its task without this vote."""
        evidence = self._confusions.log_likelihoods()
        return pin_gold_classes(normalize_scores(self._scores(evidence)[self._task] - evidence), self.gold_of_votes)

    @property
    def gold_of_votes(self) -> Ints:
        """Right class of the task of each row of `votes`; −1 if the task is not gold."""
        return cast(Ints, self._gold[self._task])

    @property
    def checkable_votes(self) -> NDArray[np.bool_]:
        """Mask of the rows of `votes` that can be checked: the task is gold, or has another vote."""
        return cast(
            NDArray[np.bool_], (np.bincount(self._task, minlength=self.tasks)[self._task] > 1) | (self.gold_of_votes >= 0)
        )

    def _scores(self, evidence: Ints) -> Ints:
        return (log2(self._common + CLASS_PRIOR_TASKS * ONE) >> 1) + self._by_task.sum_rows(evidence)


def pin_gold_classes(chance: Ints, gold: Ints) -> Ints:
    """Set the class in `gold` to probability ONE in each row of `chance`, in place, and return `chance`.

    Rows with −1 in `gold` do not change.
    """
    rows = np.flatnonzero(gold >= 0)
    chance[rows] = 0
    chance[rows, gold[rows]] = ONE
    return chance


def likeliest_classes(posterior: Ints) -> Ints:
    """Return the most likely class of each row, the lowest of equally likely ones."""
    return cast(Ints, posterior.argmax(axis=1))


class GroupSums:
    """Sums of rows by group. The rows' groups are sorted once, since sorting takes longer than summing."""

    def __init__(self, group: Ints, groups: int) -> None:
        self.groups = groups
        self._order = None if (np.diff(group) >= 0).all() else np.argsort(group, kind="stable")
        ordered = group if self._order is None else group[self._order]
        self._firsts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(group) else np.zeros(0, dtype=np.int64)
        self.present = ordered[self._firsts]

    def sum_rows(self, rows: Ints) -> Ints:
        """Return (groups, columns): the sum of each group's rows; zeros for a group without rows."""
        found = np.zeros((self.groups, rows.shape[1]), dtype=np.int64)
        if len(rows):
            found[self.present] = np.add.reduceat(rows if self._order is None else rows[self._order], self._firsts, axis=0)
        return found
