"""From votes to a label: how likely each class is, by how often labels and these annotators' votes came together before.

Dawid and Skene (1979), section 2, with a Dirichlet prior on each row of an annotator's confusion table: as if it had answered
four tasks of the class before, three of them rightly. Every number is a fraction of integers, so that all peers find the same
label.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from curation.answers import PAIR_ANSWERS, Answer, Kind

PRIOR_RIGHT: Final = 3  # tasks answered rightly, as it were, before the first one
PRIOR_WRONG: Final = 1  # and wrongly, shared by all other classes
ENOUGH: Final = Fraction(9, 10)  # of a label: no further vote is asked for
BALANCED: Final = 1  # all classes are equally likely before anybody has voted

Counts = Sequence[int]


def classes_of(kind: Kind, options: int) -> int:
    """How many answers there are to choose one from; 0 where answers are no choice of one."""
    return {Kind.PAIR: len(PAIR_ANSWERS), Kind.RANKING: 0}.get(kind, options)


def class_of(kind: Kind, answer: Answer) -> int:
    return answer[0] - (kind is Kind.RATING)


def likelihood(counts: Counts, classes: int, label: int, vote: int) -> Fraction:
    """How likely this annotator votes so where the label is that one. `counts` may be empty: nothing was seen of it yet."""
    row = counts[label * classes : (label + 1) * classes] if counts else [0] * classes
    others = classes - 1
    seen, prior = row[vote] * others, PRIOR_RIGHT * others if vote == label else PRIOR_WRONG
    return Fraction(seen + prior, sum(row) * others + (PRIOR_RIGHT + PRIOR_WRONG) * others)


def posterior(classes: int, votes: Sequence[tuple[Counts, int]]) -> list[Fraction]:
    """Of each class, after these votes, each with its annotator's counts."""
    assert classes >= 2
    weights = [Fraction(BALANCED)] * classes
    for counts, vote in votes:
        weights = [weight * likelihood(counts, classes, label, vote) for label, weight in enumerate(weights)]
    total = sum(weights, Fraction(0))
    return [weight / total for weight in weights]


def likeliest(classes: int, votes: Sequence[tuple[Counts, int]]) -> tuple[int, Fraction]:
    """The class, the lowest of equally likely ones, and how likely it is."""
    chances = posterior(classes, votes)
    best = max(range(classes), key=lambda label: (chances[label], -label))
    return best, chances[best]


def learned(counts: Counts, classes: int, label: int, vote: int) -> tuple[int, ...]:
    """The counts after one more task."""
    after = list(counts) or [0] * (classes * classes)
    after[label * classes + vote] += 1
    return tuple(after)
