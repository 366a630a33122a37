"""Agreement of annotators beyond chance, as exact fractions.

Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section D: α from coincidences within units, which may lack
values. Cohen (1960): κ of two annotators. α and κ are 1 for full agreement, and 0 for agreement as by chance.
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

# denominator of coincidences: a pair in a unit of m votes counts 1/(m−1), which is an integer multiple of 1/COINCIDENCE_UNIT
COINCIDENCE_UNIT: Final = lcm(*range(1, VOTES_MAX))


class MeasurementLevel(enum.StrEnum):
    NOMINAL = "nominal"
    ORDINAL = "ordinal"
    INTERVAL = "interval"


def measurement_level(kind: QuestionKind) -> MeasurementLevel:
    return MeasurementLevel.ORDINAL if kind is QuestionKind.RATING else MeasurementLevel.NOMINAL


def agreement_units(kind: QuestionKind, options: int, many: bool, answers: Sequence[Answer]) -> list[list[int]]:
    """Return the units of a task, each with one value per answer.

    A task has one unit, with `many` one for each option, and as a ranking one for each two items.
    """
    if many:
        return [list(said) for said in zip(*(tuple(option_flags(options, answer)) for answer in answers), strict=True)]
    if kind is not QuestionKind.RANKING:
        return [[answer[0] for answer in answers]]
    pairs = combinations(range(len(answers[0])), 2) if answers else ()
    return [[int(answer.index(a) < answer.index(b)) for answer in answers] for a, b in pairs]


def value_count(kind: QuestionKind, options: int, many: bool) -> int:
    """Return the number of possible values in a unit of a project with this kind of question.

    The lowest value is 0, or 1 for a rating.
    """
    return BINARY_CLASSES if many or kind is QuestionKind.RANKING else class_count(kind, options)


def add_coincidences(counts: Sequence[int], values: int, units: Sequence[Sequence[int]], lowest: int = 0) -> tuple[int, ...]:
    """Return the table of coincidences `counts`, row by row, with the coincidences of `units` added.

    `counts` is empty before the first unit.
    """
    after = list(counts) or [0] * values**2
    for (a, b), more in count_coincidences(units).items():
        after[(a - lowest) * values + b - lowest] += more
    return tuple(after)


def alpha_from_table(counts: Sequence[int], values: int, metric: MeasurementLevel) -> Fraction | None:
    """Return α of a table of coincidences, or None if fewer than two values occur.

    The first row may stand for the value 0 or 1.
    """
    return alpha_from_coincidences({divmod(place, values): count for place, count in enumerate(counts) if count}, metric)


def count_coincidences(units: Sequence[Sequence[int]]) -> Counter[tuple[int, int]]:
    """Return the count of each pair of values within one unit, in 1/COINCIDENCE_UNIT. A unit has at most VOTES_MAX values.

    A single value forms no pair.
    """
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
    """Return α = 1 − (n − 1) Σ o δ² ∕ Σ n n δ², or None if fewer than two values occur.

    `together`: o by pair of values, in 1/COINCIDENCE_UNIT.
    """
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
    """Return δ² of two values a < b. The ordinal δ² has the factor 4 COINCIDENCE_UNIT², which cancels in α."""
    match metric:
        case MeasurementLevel.NOMINAL:
            return 1
        case MeasurementLevel.INTERVAL:
            return (a - b) ** 2
        case MeasurementLevel.ORDINAL:
            between = sum(marginals[value] for value in values if a <= value <= b)
            return (2 * between - marginals[a] - marginals[b]) ** 2


def cohen_kappa(both: Sequence[tuple[int, int]]) -> Fraction | None:
    """Return Cohen's κ of two annotators.

    `both`: their values in each common unit. None: there is no unit, or all values are equal.
    """
    count = len(both)
    first, second = Counter(a for a, _ in both), Counter(b for _, b in both)
    by_chance = sum(first[value] * second[value] for value in first)
    if by_chance == count**2:
        return None
    return Fraction(count * sum(a == b for a, b in both) - by_chance, count**2 - by_chance)


def pairwise_kappas(
    units: Iterable[Mapping[bytes, int]], least: int, most: int
) -> list[tuple[bytes, bytes, int, Fraction | None]]:
    """Return pairs of annotators, the lower key first, with their number of common units and κ.

    `units`: value by annotator, for each unit. The result has at most `most` pairs of annotators: those with the most common
    units. Pairs with fewer than `least` common units are left out.
    """
    both: dict[tuple[bytes, bytes], list[tuple[int, int]]] = {}
    for said in units:
        for a, b in combinations(sorted(said), 2):
            both.setdefault((a, b), []).append((said[a], said[b]))
    found = sorted((-len(values), pair) for pair, values in both.items() if len(values) >= least)
    return [(*pair, len(both[pair]), cohen_kappa(both[pair])) for _, pair in found[:most]]
