"""Krippendorff's α and Cohen's κ, on published examples and against their definitions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.estimation.annotator_agreement import (
    MeasurementLevel,
    agreement_units,
    cohen_kappa,
    krippendorff_alpha,
    measurement_level,
    pairwise_kappas,
)
from curation.tasks.answers import QuestionKind

# Krippendorff (2011), section D: four observers, twelve units; 0 is missing.
OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3),
    (0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0),
)
UNITS = [[value for value in unit if value] for unit in zip(*OBSERVERS, strict=True)]


@pytest.mark.parametrize(("metric", "value"), [("nominal", 0.7434), ("ordinal", 0.8154), ("interval", 0.8491)])
def test_krippendorffs_example(metric: str, value: float) -> None:
    found = krippendorff_alpha(UNITS, MeasurementLevel(metric))
    assert isinstance(found, Fraction) and round(float(found), 4) == value


def test_without_two_values_there_is_no_alpha() -> None:
    assert (
        krippendorff_alpha([]) is None and krippendorff_alpha([[1], [2]]) is None and krippendorff_alpha([[1, 1], [1, 1]]) is None
    )


units = st.lists(st.lists(st.integers(0, 4), max_size=7), max_size=12)


@given(units)
def test_alpha_is_what_its_definition_says(data: list[list[int]]) -> None:
    """Disagreement within units over that of all pairs of values: Krippendorff (2011), equation 1, without coincidences."""
    pairable = [unit for unit in data if len(unit) > 1]
    values = [value for unit in pairable for value in unit]
    within = sum((Fraction((a - b) ** 2, len(unit) - 1) for unit in pairable for a in unit for b in unit), Fraction(0))
    among = sum((a - b) ** 2 for a in values for b in values)
    expected = 1 - (len(values) - 1) * within / among if among else None
    assert krippendorff_alpha(data, MeasurementLevel.INTERVAL) == expected


@given(units, st.randoms(use_true_random=False), st.sampled_from(MeasurementLevel))
def test_alpha_does_not_depend_on_any_order(data: list[list[int]], draw: object, metric: MeasurementLevel) -> None:
    other = [draw.sample(unit, len(unit)) for unit in data]  # type: ignore[attr-defined]
    draw.shuffle(other)  # type: ignore[attr-defined]
    assert krippendorff_alpha(other, metric) == krippendorff_alpha(data, metric)


def test_of_two_values_all_metrics_are_the_same() -> None:
    data = [[0, 1, 0], [1, 1], [0, 0, 0, 1], [1, 1, 1]]
    assert len({krippendorff_alpha(data, metric) for metric in MeasurementLevel}) == 1


def test_cohens_kappa() -> None:
    assert cohen_kappa([(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15) == Fraction(2, 5)
    assert cohen_kappa([(0, 1), (1, 0)]) == -1 and cohen_kappa([(0, 0), (1, 1)]) == 1
    assert cohen_kappa([]) is None and cohen_kappa([(1, 1)] * 9) is None


def test_kappa_of_each_two() -> None:
    units = [{b"c": 0, b"a": 0}, {b"c": 1, b"a": 1}, {b"c": 1, b"b": 1}, {b"b": 1}, {b"b": 0, b"c": 1}, {b"c": 1, b"b": 1}]
    agreed, alike = (b"a", b"c", 2, Fraction(1)), (b"b", b"c", 3, Fraction(0))
    assert pairwise_kappas(units, 2, 9) == [alike, agreed], "the most common answers first"
    assert pairwise_kappas(units, 3, 9) == pairwise_kappas(units, 2, 1) == [alike]


def test_what_is_a_unit() -> None:
    assert (
        agreement_units(QuestionKind.RATING, 5, False, [(5,), (1,)]) == [[5, 1]]
        and measurement_level(QuestionKind.RATING) is MeasurementLevel.ORDINAL
    )
    assert agreement_units(QuestionKind.LABEL, 3, True, [(0, 2), (2,)]) == [[1, 0], [0, 0], [1, 1]]
    assert agreement_units(QuestionKind.RANKING, 0, False, [(0, 1, 2), (2, 0, 1)]) == [[1, 1], [1, 0], [1, 0]]
    assert agreement_units(QuestionKind.RANKING, 0, False, []) == []
