"""Labels from votes: the probability of each class, by how often the annotators' earlier votes coincided with the labels.

Dawid and Skene (1979), section 2, with a Dirichlet prior on each row of an annotator's confusion table: eight tasks of the class,
six of them answered rightly. Every number is a fraction of integers, so that all peers find the same label. This is the running
estimate: each task is decided once, from earlier tasks. `dawid_skene` estimates a whole project.

| kind | class | `counts` |
|---|---|---|
| label, rating, pair | an answer | classes × classes: tasks by label and vote |
| label, many | of each option: off or on | options × 2 × 2 |
| ranking | of each two items: the better one | none: all annotators count alike, see `rank_aggregation` |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Final

from curation.estimation.rank_aggregation import order_confidence, ranked_pairs_order
from curation.tasks.answers import PAIR_ANSWERS, Answer, QuestionKind

# Prior number of rightly answered tasks of a class, and of wrongly answered tasks, which its wrong classes share. Two unknown
# annotators who agree are just enough for a label. With half of these priors, luck in the first tasks costs one label in 150.
# With twice these priors, a third of liars among the annotators costs one label in 150.
PRIOR_RIGHT: Final = 6
PRIOR_WRONG: Final = 2
LABEL_CONFIDENCE_MIN: Final = Fraction(9, 10)  # lowest probability of a label at which its task needs no further vote
BINARY_CLASSES: Final = 2  # number of classes of one option in an answer with several options: off and on

Counts = Sequence[int]


def class_count(kind: QuestionKind, options: int) -> int:
    """Return the number of classes of a question: one for each possible answer. It is 0 for a ranking, which has no classes."""
    return {QuestionKind.PAIR: len(PAIR_ANSWERS), QuestionKind.RANKING: 0}.get(kind, options)


def class_of(kind: QuestionKind, answer: Answer) -> int:
    """Return the class of an answer that chooses one option."""
    return answer[0] - (kind is QuestionKind.RATING)


def answer_of(kind: QuestionKind, found: int) -> Answer:
    """Return the answer of a class."""
    return (found + (kind is QuestionKind.RATING),)


def option_flags(options: int, answer: Answer) -> Iterator[int]:
    """Yield for each option 1 if the answer contains it, else 0."""
    return (int(option in answer) for option in range(options))


# Estimate of a task -----------------------------------------------------------------------------------------------------


def estimate_label(
    kind: QuestionKind, options: int, many: bool, votes: Sequence[tuple[Counts, Answer]]
) -> tuple[Answer, Fraction]:
    """Return the most likely label of a task and its probability.

    `votes`: for each vote on the task, the annotator's counts from earlier tasks and its answer. With `many`, the probability is
    that of the least certain option. For a ranking, it is that of the two neighbours with the least certain order.
    """
    if kind is QuestionKind.RANKING:
        order = ranked_pairs_order([answer for _, answer in votes])
        return order, order_confidence([answer for _, answer in votes], order, Fraction(PRIOR_RIGHT, PRIOR_WRONG))
    if not many:
        best, chance = likeliest_class(class_count(kind, options), [(counts, class_of(kind, answer)) for counts, answer in votes])
        return answer_of(kind, best), chance
    found = [
        likeliest_class(BINARY_CLASSES, [(_of_option(counts, option), int(option in answer)) for counts, answer in votes])
        for option in range(options)
    ]
    return tuple(option for option, (on, _) in enumerate(found) if on), min(chance for _, chance in found)


def updated_counts(
    kind: QuestionKind, options: int, many: bool, counts: Counts, label: Answer, answer: Answer
) -> tuple[int, ...]:
    """Return an annotator's counts with one more task, of this label and answer. `counts` is empty before its first task."""
    if kind is QuestionKind.RANKING:
        return ()
    if not many:
        classes = class_count(kind, options)
        return _one_more(counts or [0] * classes**2, class_of(kind, label) * classes + class_of(kind, answer))
    after: Counts = counts or [0] * (options * BINARY_CLASSES**2)
    for option, (now, said) in enumerate(zip(option_flags(options, label), option_flags(options, answer), strict=True)):
        after = _one_more(after, (option * BINARY_CLASSES + now) * BINARY_CLASSES + said)
    return tuple(after)


def _one_more(counts: Counts, place: int) -> tuple[int, ...]:
    return *counts[:place], counts[place] + 1, *counts[place + 1 :]


def _of_option(counts: Counts, option: int) -> Counts:
    return counts[option * BINARY_CLASSES**2 : (option + 1) * BINARY_CLASSES**2]


def vote_likelihood(counts: Counts, classes: int, label: int, vote: int) -> tuple[int, int]:
    """Return the probability of this vote if the task has this label, as numerator and denominator.

    `counts`: the annotator's counts; empty before its first task.
    """
    row = counts[label * classes : (label + 1) * classes] if counts else [0] * classes
    others = classes - 1
    prior = PRIOR_RIGHT * others if vote == label else PRIOR_WRONG
    return row[vote] * others + prior, (sum(row) + PRIOR_RIGHT + PRIOR_WRONG) * others


def likeliest_class(classes: int, votes: Sequence[tuple[Counts, int]]) -> tuple[int, Fraction]:
    """Return the most likely class, the lowest of equally likely ones, and its probability."""
    weights = class_weights(classes, votes)
    best = max(range(classes), key=lambda label: (weights[label], -label))
    return best, Fraction(weights[best], sum(weights))


def class_weights(classes: int, votes: Sequence[tuple[Counts, int]]) -> list[int]:
    """Return the likelihoods of all classes over one denominator: exact, and several times as fast as sums of fractions."""
    assert classes >= 2
    told = [[vote_likelihood(counts, classes, label, vote) for counts, vote in votes] for label in range(classes)]
    over = [prod(below for _, below in of) for of in told]
    whole = prod(over)
    return [prod(above for above, _ in of) * (whole // below) for of, below in zip(told, over, strict=True)]
