"""How far annotators agree beyond chance, as exact fractions.

Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section D: coincidences within units, whatever is missing.
Cohen (1960): κ of two annotators. Both are 1 where all agree, and 0 where they agree as by chance.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from math import lcm
from typing import Final

from curation.estimation.online_dawid_skene import BINARY_CLASSES, class_count, option_flags
from curation.limits import VOTES_MAX
from curation.tasks.answers import Answer, QuestionKind

COINCIDENCE_UNIT: Final = lcm(*range(1, VOTES_MAX))  # a pair of m votes counts 1/(m-1): of these units, a whole number


class MeasurementLevel(enum.StrEnum):
    NOMINAL = "nominal"
    ORDINAL = "ordinal"
    INTERVAL = "interval"


def measurement_level(kind: QuestionKind) -> MeasurementLevel:
    return MeasurementLevel.ORDINAL if kind is QuestionKind.RATING else MeasurementLevel.NOMINAL


def agreement_units(kind: QuestionKind, options: int, many: bool, answers: Sequence[Answer]) -> list[list[int]]:
    """The units of one task: one unit, or one for each of many options, or one for each two items of a ranking."""
    if many:
        return [list(said) for said in zip(*(tuple(option_flags(options, answer)) for answer in answers), strict=True)]
    if kind is not QuestionKind.RANKING:
        return [[answer[0] for answer in answers]]
    pairs = combinations(range(len(answers[0])), 2) if answers else ()
    return [[int(answer.index(a) < answer.index(b)) for answer in answers] for a, b in pairs]


def value_count(kind: QuestionKind, options: int, many: bool) -> int:
    """How many values a unit may have: 0 and up, or of a rating 1 and up."""
    return BINARY_CLASSES if many or kind is QuestionKind.RANKING else class_count(kind, options)


def add_coincidences(counts: Sequence[int], values: int, units: Sequence[Sequence[int]], lowest: int = 0) -> tuple[int, ...]:
    """A table of coincidences, row by row, with those of more units. `counts` may be empty: there are none yet."""
    after = list(counts) or [0] * values**2
    for (a, b), more in count_coincidences(units).items():
        after[(a - lowest) * values + b - lowest] += more
    return tuple(after)


def alpha_from_table(counts: Sequence[int], values: int, metric: MeasurementLevel) -> Fraction | None:
    """α of such a table. It is the same whatever number the lowest value has."""
    return alpha_from_coincidences({divmod(place, values): count for place, count in enumerate(counts) if count}, metric)


def count_coincidences(units: Sequence[Sequence[int]]) -> Counter[tuple[int, int]]:
    """Counts pairs of values in the same unit. A unit has at most VOTES_MAX values; a single value makes no pair."""
    found: Counter[tuple[int, int]] = Counter()
    for values in units:
        assert len(values) <= VOTES_MAX
        counts = Counter(values)
        for a, of_a in counts.items():
            for b, of_b in counts.items():
                pairs = of_a * (of_b - (a == b))
                if pairs:
                    found[a, b] += pairs * COINCIDENCE_UNIT // (len(values) - 1)
    return found


def alpha_from_coincidences(together: Mapping[tuple[int, int], int], metric: MeasurementLevel) -> Fraction | None:
    """α = 1 − (n − 1) Σ o δ² ∕ Σ n n δ². `together`: coincidences in units of 1/COINCIDENCE_UNIT, in both directions."""
    marginals: Counter[int] = Counter()
    for (value, _), count in together.items():
        marginals[value] += count
    values = sorted(marginals)
    differences = {(a, b): _difference(marginals, values, a, b, metric) for a, b in combinations(values, 2)}
    expected = sum(marginals[a] * marginals[b] * far for (a, b), far in differences.items())
    if not expected:
        return None
    observed = sum(together.get(pair, 0) * far for pair, far in differences.items())
    return 1 - Fraction((marginals.total() - COINCIDENCE_UNIT) * observed, expected)


def _difference(marginals: Counter[int], values: Sequence[int], a: int, b: int, metric: MeasurementLevel) -> int:
    """δ² of two values, a < b; of the ordinal metric times 4 UNIT², which both sums have."""
    match metric:
        case MeasurementLevel.NOMINAL:
            return 1
        case MeasurementLevel.INTERVAL:
            return (a - b) ** 2
        case MeasurementLevel.ORDINAL:
            between = sum(marginals[value] for value in values if a <= value <= b)
            return (2 * between - marginals[a] - marginals[b]) ** 2


def cohen_kappa(both: Sequence[tuple[int, int]]) -> Fraction | None:
    """Cohen's κ of two annotators, from what they said of the same tasks. None: of no task, or both always said one value."""
    count = len(both)
    first, second = Counter(a for a, _ in both), Counter(b for _, b in both)
    by_chance = sum(first[value] * second[value] for value in first)
    if by_chance == count**2:
        return None
    return Fraction(count * sum(a == b for a, b in both) - by_chance, count**2 - by_chance)


def pairwise_kappas(
    units: Iterable[Mapping[bytes, int]], least: int, most: int
) -> list[tuple[bytes, bytes, int, Fraction | None]]:
    """Of each two annotators, the lower key first: in how many units both said something, and κ.

    `units`: what each annotator said of one unit. Only those with at least `least` common units, and of these `most`, with the
    most common ones first.
    """
    both: dict[tuple[bytes, bytes], list[tuple[int, int]]] = {}
    for said in units:
        for a, b in combinations(sorted(said), 2):
            both.setdefault((a, b), []).append((said[a], said[b]))
    found = sorted((-len(values), pair) for pair, values in both.items() if len(values) >= least)
    return [(*pair, len(both[pair]), cohen_kappa(both[pair])) for _, pair in found[:most]]
