"""Weights of annotators in a project, and the division of the project's points.

An annotator's votes are compared with gold, or else with the labels that the *others'* votes give in the whole estimate: its own
vote is left out. A vote counts only if it was committed before the first opening of its task, because a visible answer can be
copied. The others' labels can be wrong. So an annotator's confusion table is the most likely one, given the others' probabilities
of each label: Dawid and Skene's iterations, for the table of one annotator. A task counts in proportion to the certainty of the
others' label, see `certainty_of`. For two classes, this certainty is the information that the task gives about the annotator's
accuracy. The weight is Wilson's (1927) lower bound of the accuracy, as the mean over classes, less the accuracy of a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Final, cast

import numpy as np

from curation.estimation.dawid_skene import ConfusionTables, DawidSkene, pin_gold_classes
from curation.estimation.fixed_point import ONE, Ints, log2, normalize_scores
from curation.estimation.online_dawid_skene import PRIOR_WRONG

# z² of Wilson's lower bound as a fraction, with z = 1.645: the true accuracy is below the bound in one of twenty cases. With z =
# 1.28 (one of ten), an annotator that guesses gets a third of an honest annotator's points in one of thirty projects of 40
# answers each. With z = 1.96, hardly any annotator earns points in such projects (`benchmarks.labels`).
Z2_ABOVE, Z2_BELOW = 27_060, 10_000
WEIGHT_ONE: Final = 1 << 20  # unit of weights: a weight of 1, which no annotator reaches
# Prior number of right answers in each class, beside PRIOR_WRONG wrong ones: an unknown annotator is right half of the time.
PRIOR_RIGHT: Final = PRIOR_WRONG
ITERATIONS: Final = 20  # number of iterations, after which no confusion table changes by a thousandth of a task


def certainty_of(chance: Ints) -> Ints:
    """Return the certainty of each row of probabilities, in units of 1/ONE.

    It is Σ p², scaled to 0 if all classes are equally likely and to ONE if a class is certain.
    """
    classes = chance.shape[1]
    return cast(Ints, np.maximum((classes * (chance * chance).sum(axis=1) // ONE - ONE) // (classes - 1), 0))


class Reputation:
    """Confusion tables of all annotators, measured by gold and by the others' votes. `run_iteration` improves the tables.

    `blind`: 1 for each row of `whole.votes` that was committed before the first opening of its task, else 0.
    """

    def __init__(self, whole: DawidSkene, blind: Ints) -> None:
        self._chosen = np.flatnonzero((blind > 0) & whole.checkable_votes)
        self._annotators, self._classes = whole.annotators, whole.classes
        _, self._annotator, self._said = whole.votes[self._chosen].T
        self._gold = whole.gold_of_votes[self._chosen]
        others = whole.leave_one_out_posterior()[self._chosen]
        self._counted, self._spoken = certainty_of(others)[:, None], log2(np.maximum(others, 1))
        self._own = ConfusionTables(whole.classes, whole.annotators, self._annotator, self._said, PRIOR_RIGHT)
        self._tasks = others * self._counted // ONE

    def run_iteration(self) -> None:
        """Compute the confusion tables from the class probabilities of the tasks, then these probabilities from the tables."""
        self._own.update_counts(self._tasks)
        self._tasks = (
            pin_gold_classes(normalize_scores(self._spoken + self._own.log_likelihoods()), self._gold) * self._counted // ONE
        )

    def confusion_counts(self) -> Ints:
        """Return (annotators, classes, 2) in units of 1/ONE: tasks of the class, and among them the rightly answered ones."""
        found = np.zeros((self._annotators, self._classes, 2), dtype=np.int64)
        np.add.at(found[:, :, 0], self._annotator, self._tasks)
        np.add.at(found[:, :, 1], (self._annotator, self._said), self._tasks[np.arange(len(self._said)), self._said])
        return found


def lower_bound(right: int, seen: int) -> int:
    """Return Wilson's lower bound of a probability, in units of 1/WEIGHT_ONE.

    `right`, `seen`: successes and trials, in units of 1/ONE. Without trials it is 0.
    """
    if seen == 0:
        return 0
    z2 = Z2_ABOVE * ONE // Z2_BELOW
    root = isqrt(z2 * z2 + 4 * z2 * right * (seen - right) // seen) + 1
    return max(0, (2 * right + z2 - root) * WEIGHT_ONE // (2 * (seen + z2)))


def annotator_weight(questions: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Return an annotator's weight in units of 1/WEIGHT_ONE.

    `questions`: for each question and class, its tasks (seen, right) in units of 1/ONE. A project has one question, or one
    for each option if an answer has many.
    """
    if not questions:
        return 0
    over_chance = 0
    for classes in questions:
        bounds = sum(lower_bound(right, seen) for seen, right in classes)
        over_chance += (bounds - WEIGHT_ONE) // len(classes)
    return max(0, over_chance // len(questions))


def divide_points(points: int, shares: Mapping[bytes, int]) -> dict[bytes, int]:
    """Divide points among annotators in proportion to their shares, and return points by key.

    Their sum is `points`, or 0 if all shares are 0. Each annotator gets its part, rounded down. The points that remain go one by
    one to the largest fractional parts; among equal ones, to the lowest keys.
    """
    total = sum(shares.values())
    if not total:
        return dict.fromkeys(shares, 0)
    found = {key: points * share // total for key, share in shares.items()}
    left = points - sum(found.values())
    for key in sorted(shares, key=lambda key: (-(points * shares[key] % total), key))[:left]:
        found[key] += 1
    return found
