"""From votes to a label: how likely each class is, by how often labels and these annotators' votes came together before.

Dawid and Skene (1979), section 2, with a Dirichlet prior on each row of an annotator's confusion table: as if it had answered
eight tasks of the class before, six of them rightly. Every number is a fraction of integers, so that all peers find the same
label. This is the running estimate: a task is decided once, by what was decided before it. `dawid_skene` estimates a whole
project.

| kind | what a class is | what `counts` has |
|---|---|---|
| label, rating, pair | an answer | classes × classes: how often the label was this and the vote that |
| label, many | of each option by itself: off or on | options × 2 × 2 |
| ranking | of each two items: which of them is the better one | nothing: everybody is a stranger, see `rank_aggregation` |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Final

from curation.estimation.rank_aggregation import order_confidence, ranked_pairs_order
from curation.tasks.answers import PAIR_ANSWERS, Answer, QuestionKind

# Tasks answered rightly, as it were, before the first one; and wrongly, shared by all other classes. Two strangers who agree are
# just enough. With half as many, luck in the first tasks costs one label in 150; with twice as many, so does every third liar.
PRIOR_RIGHT: Final = 6
PRIOR_WRONG: Final = 2
LABEL_CONFIDENCE_MIN: Final = Fraction(9, 10)  # of a label: no further vote is asked for
BINARY_CLASSES: Final = 2  # classes of one option where an answer has many: off and on

Counts = Sequence[int]


def class_count(kind: QuestionKind, options: int) -> int:
    """How many answers there are to choose one from; 0 where answers are no choice of one."""
    return {QuestionKind.PAIR: len(PAIR_ANSWERS), QuestionKind.RANKING: 0}.get(kind, options)


def class_of(kind: QuestionKind, answer: Answer) -> int:
    """The class of an answer that chooses one option."""
    return answer[0] - (kind is QuestionKind.RATING)


def answer_of(kind: QuestionKind, found: int) -> Answer:
    """The answer of that class."""
    return (found + (kind is QuestionKind.RATING),)


def option_flags(options: int, answer: Answer) -> Iterator[int]:
    """For each option: whether an answer of many has it."""
    return (int(option in answer) for option in range(options))


# Running -----------------------------------------------------------------------------------------------------------------


def estimate_label(
    kind: QuestionKind, options: int, many: bool, votes: Sequence[tuple[Counts, Answer]]
) -> tuple[Answer, Fraction]:
    """The likeliest label of a task after these votes, and how likely it is; of many options, or a ranking, its weakest part.

    `votes`: of one task, each annotator's counts so far, and its answer.
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
    """An annotator's counts after one more task, which has this label. `counts` may be empty: it is the first."""
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
    """How likely this annotator votes so where the label is that one, as numerator and denominator. `counts` may be empty."""
    row = counts[label * classes : (label + 1) * classes] if counts else [0] * classes
    others = classes - 1
    prior = PRIOR_RIGHT * others if vote == label else PRIOR_WRONG
    return row[vote] * others + prior, (sum(row) + PRIOR_RIGHT + PRIOR_WRONG) * others


def likeliest_class(classes: int, votes: Sequence[tuple[Counts, int]]) -> tuple[int, Fraction]:
    """The class, the lowest of equally likely ones, and how likely it is."""
    weights = class_weights(classes, votes)
    best = max(range(classes), key=lambda label: (weights[label], -label))
    return best, Fraction(weights[best], sum(weights))


def class_weights(classes: int, votes: Sequence[tuple[Counts, int]]) -> list[int]:
    """Chances of all classes over one denominator: exact, and several times as fast as sums of fractions."""
    assert classes >= 2
    told = [[vote_likelihood(counts, classes, label, vote) for counts, vote in votes] for label in range(classes)]
    over = [prod(below for _, below in of) for of in told]
    whole = prod(over)
    return [prod(above for above, _ in of) * (whole // below) for of, below in zip(told, over, strict=True)]
