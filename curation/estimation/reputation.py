"""The worth of an annotator's answers to a project, and how the project's points are divided.

What somebody said is held against the task's gold, or else against what the *others* said of it, by the whole estimate: its own
vote is left out. Only those of its votes count that were committed before the task's first opening: whoever can see an answer can
repeat it.

The others may be wrong. So an annotator's confusions are the likeliest ones, with the others' word as chances of each label:
Dawid and Skene's turns once more, of one annotator's table each. And a task counts as much as the others are sure of it, see
`certainty_of`: of two classes this is how much such a task tells of an accuracy. The weight is Wilson's (1927) lower bound of how
often it was right, the mean over classes, less what chance gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Final, cast

import numpy as np

from curation.estimation.dawid_skene import ConfusionTables, DawidSkene, pin_gold_classes
from curation.estimation.fixed_point import ONE, Ints, log2, normalize_scores
from curation.estimation.online_dawid_skene import PRIOR_WRONG

# z² of the bound, z = 1.645: luck is above it once in twenty. With 1.28, once in ten, somebody who guesses gets a third of an
# honest one's points in one of thirty projects of 40 answers each; with 1.96 hardly anybody earns there: benchmarks.labels.
Z2_ABOVE, Z2_BELOW = 27_060, 10_000
WEIGHT_ONE: Final = 1 << 20  # a weight of 1: nobody's
# Tasks of a class answered rightly, as it were, with PRIOR_WRONG wrongly: half of them. Whom nobody knows is no good one yet.
PRIOR_RIGHT: Final = PRIOR_WRONG
ITERATIONS: Final = 20  # then no table changes by a thousandth of a task


def certainty_of(chance: Ints) -> Ints:
    """How sure each row of chances is, in units of 1/ONE: 0 if all classes are equal, ONE if one is certain. Σ p², scaled."""
    classes = chance.shape[1]
    return cast(Ints, np.maximum((classes * (chance * chance).sum(axis=1) // ONE - ONE) // (classes - 1), 0))


class Reputation:
    """Everybody's confusions by what the others say. `run_iteration` improves them; `found` reads them.

    `blind`: for each row of `dawid_skene.votes` 1 if it was committed before the first opening of its task, else 0.
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
        """The annotator's confusions, and then which classes its tasks are of."""
        self._own.update_counts(self._tasks)
        self._tasks = (
            pin_gold_classes(normalize_scores(self._spoken + self._own.log_likelihoods()), self._gold) * self._counted // ONE
        )

    def confusion_counts(self) -> Ints:
        """(annotators, classes, 2), in units of 1/ONE: tasks that were of the class, and those of them that it answered so."""
        found = np.zeros((self._annotators, self._classes, 2), dtype=np.int64)
        np.add.at(found[:, :, 0], self._annotator, self._tasks)
        np.add.at(found[:, :, 1], (self._annotator, self._said), self._tasks[np.arange(len(self._said)), self._said])
        return found


def lower_bound(right: int, seen: int) -> int:
    """Wilson's lower bound of a chance, in units of 1/WEIGHT_ONE, after so many trials, in units of 1/ONE. 0 after none."""
    if seen == 0:
        return 0
    z2 = Z2_ABOVE * ONE // Z2_BELOW
    root = isqrt(z2 * z2 + 4 * z2 * right * (seen - right) // seen) + 1
    return max(0, (2 * right + z2 - root) * WEIGHT_ONE // (2 * (seen + z2)))


def annotator_weight(questions: Sequence[Sequence[tuple[int, int]]]) -> int:
    """An annotator's weight in units of 1/WEIGHT_ONE. `questions`: for each question and class, tasks seen and right.

    A project asks one question, or one of each option where an answer has many.
    """
    if not questions:
        return 0
    over_chance = 0
    for classes in questions:
        bounds = sum(lower_bound(right, seen) for seen, right in classes)
        over_chance += (bounds - WEIGHT_ONE) // len(classes)
    return max(0, over_chance // len(questions))


def divide_points(points: int, shares: Mapping[bytes, int]) -> dict[bytes, int]:
    """So many points among annotators by their shares, none lost or made. Nobody has any if all shares are 0.

    Everybody has the whole points of its share. Those left go to the largest remainders, of equal ones to the lowest key.
    """
    total = sum(shares.values())
    if not total:
        return dict.fromkeys(shares, 0)
    found = {key: points * share // total for key, share in shares.items()}
    left = points - sum(found.values())
    for key in sorted(shares, key=lambda key: (-(points * shares[key] % total), key))[:left]:
        found[key] += 1
    return found
